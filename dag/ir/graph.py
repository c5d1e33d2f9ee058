"""The OP-DAG: a model as data (FusionLLM, arXiv 2410.12707, section 3).

Values are named by `Ref(name, index)`: result `index` of the input, variable or node called `name`. Names are
identifiers for people and for the wire; nothing ever turns one into source code. Ops are names from the op-set
(`fusion.dag.ir.opset`), arguments are positional in the order of that op's parameters, and the only constants are
None, booleans, numbers, dtypes, dimensions and lists of them: no strings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fusion.dag.ir.dims import Dim, Poly

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class DType:
    """A dtype as an argument, e.g. of `aten.to.dtype`. `name` is a key of DTYPE_BYTES."""

    name: str


@dataclass(frozen=True)
class TensorType:
    shape: tuple[Dim, ...]
    dtype: str  # a key of DTYPE_BYTES

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Ref:
    """Result `index` of the input, variable or node called `name`."""

    name: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.index}" if self.index else self.name


Arg = Ref | None | bool | int | float | DType | Poly | tuple["Arg", ...]


@dataclass(frozen=True)
class Input:
    """A placeholder: `input_ids`, `position_ids`, `targets`, ..., or, in a stage, a value from another stage."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class Variable:
    """A parameter or a buffer, under its original name; `aliases` are the other names of a tied tensor."""

    name: str
    type: TensorType
    kind: Literal["parameter", "buffer"] = "parameter"
    trainable: bool = True
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    name: str
    op: str
    args: tuple[Arg, ...]
    results: tuple[TensorType, ...]

    def refs(self) -> Iterator[Ref]:
        """Every value the node reads, in argument order, repeats included."""
        return _refs(self.args)


def _refs(args: tuple[Arg, ...]) -> Iterator[Ref]:
    for arg in args:
        if isinstance(arg, Ref):
            yield arg
        elif isinstance(arg, tuple):
            yield from _refs(arg)


@dataclass(frozen=True)
class Graph:
    """Inputs, variables, nodes in topological order, outputs. Build freely; `fusion.dag.ir.serialise.validate` checks."""

    inputs: tuple[Input, ...]
    variables: tuple[Variable, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
    symbols: tuple[str, ...] = ("batch", "sequence")

    @cached_property
    def types(self) -> dict[Ref, TensorType]:
        """The type of every value."""
        named: tuple[Input | Variable, ...] = (*self.inputs, *self.variables)
        types = {Ref(v.name): v.type for v in named}
        types.update({Ref(n.name, i): t for n in self.nodes for i, t in enumerate(n.results)})
        return types

    @cached_property
    def node_index(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def variable_names(self) -> frozenset[str]:
        return frozenset(v.name for v in self.variables)

    @property
    def parameter_count(self) -> int:
        """Elements of its parameters, tied ones once."""
        trained = (v.type.shape for v in self.variables if v.kind == "parameter")
        return sum(math.prod(d for d in shape if isinstance(d, int)) for shape in trained)

    @cached_property
    def input_names(self) -> frozenset[str]:
        return frozenset(i.name for i in self.inputs)

    @cached_property
    def uses(self) -> dict[Ref, tuple[int, ...]]:
        """For each value, the indices of the nodes that read it, ascending, once each."""
        readers: dict[Ref, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for ref in dict.fromkeys(node.refs()):
                readers.setdefault(ref, []).append(i)
        return {ref: tuple(nodes) for ref, nodes in readers.items()}
