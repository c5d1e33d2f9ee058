"""Arrays of indices into the model's classes or the rows of an embedding, checked against the number of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.ir.opset import OPSET
from fusion.runtime.datasets.dataset import Array, Dataset
from fusion.runtime.job.errors import JobError

# What gives every value of its first argument, and no other.
_PASS_ON = frozenset({
    "aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze",
    "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze", "aten.transpose.int", "aten.permute", "aten.t",
    "aten.expand", "aten.detach",
})  # fmt: skip
_NUMBERS = ("int32", "int64")  # a cast to a smaller one makes others of them
_LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd")


@dataclass(frozen=True)
class _Limit:
    """`size` things that are indexed. `ignored`: the index that a loss ignores."""

    what: str
    size: int
    ignored: int | None = None

    def broken(self, array: Array) -> str | None:
        """The range of the indices, if one of them is out of range."""
        low, high = _whole(array.min()), _whole(array.max())
        if self.ignored is not None and not 0 <= low <= high < self.size:  # only then: it takes a copy
            rest = array[(np.trunc(array) if array.dtype.kind == "f" else array) != self.ignored]
            if not rest.size:
                return None
            low, high = _whole(rest.min()), _whole(rest.max())
        return None if 0 <= low <= high < self.size else f"from {low} to {high}"

    def __str__(self) -> str:
        besides = "" if self.ignored is None else f", or {self.ignored}, which is ignored"
        return f"{self.what} {self.size}, 0 to {self.size - 1}{besides}"


def check_numbered(graph: Graph, data: Dataset) -> None:
    """JobError where an input of `graph` is the index of a loss over classes or of an embedding, and its array in `data` is out of
    range: on the peers such an index would fail the step."""
    limits = _limits(graph)
    parts: Mapping[str, Mapping[str, Array]] = {"data": data.train, "data, held out": data.held_out or {}}
    for where, arrays in parts.items():
        for name, limit in limits:
            if name in arrays and arrays[name].size and (found := limit.broken(arrays[name])) is not None:
                raise JobError(f"{where}: {name} is {found}; {limit}")


def _limits(graph: Graph) -> list[tuple[str, _Limit]]:
    """By input, the things that it indexes."""
    types = graph.types
    source = {Ref(each.name): each.name for each in graph.inputs}
    found: list[tuple[str, _Limit]] = []
    for node in graph.nodes:
        given: dict[str, Any] = {
            p.name: arg for p, arg in zip(OPSET[node.op].parameters, node.args, strict=True)
        }
        first = given.get("self")
        if node.op in _PASS_ON or (node.op == "aten.to.dtype" and given["dtype"].name in _NUMBERS):
            if first in source:
                source[Ref(node.name)] = source[first]
        elif node.op in _LOSSES and "int" in types[given["target"]].dtype:  # or probabilities
            shape = types[given["self"]].shape
            size = shape[1 if len(shape) > 1 else 0]
            if given["target"] in source and isinstance(size, int):
                limit = _Limit("the classes of the loss are", size, given["ignore_index"])
                found.append((source[given["target"]], limit))
        elif node.op == "aten.embedding":
            size = types[given["weight"]].shape[0]
            if given["indices"] in source and isinstance(size, int):
                found.append((source[given["indices"]], _Limit("the rows of an embedding are", size)))
    return found


def _whole(value: Any) -> float | int:
    """As a cast to an integer gives it."""
    number: float | int = value.item()
    return math.trunc(number) if math.isfinite(number) else number
