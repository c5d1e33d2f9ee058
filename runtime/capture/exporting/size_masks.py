"""Boolean masks that depend on sizes alone, such as `~torch.eye(n).bool()`: indexing with one has a static shape, and becomes
`index_select`.

The mask is evaluated for a few sizes of the batch. It qualifies if every row selects the same number of elements, a constant or all
but a constant; a mask of constant sizes always does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.capture.exporting.state import node_of

_BATCH_SIZES = (3, 4, 5, 8)  # of the batch, for which a mask is evaluated
_MAX_ELEMENTS = 1 << 16  # elements of a mask of constant sizes


@dataclass(frozen=True)
class _Selected:
    """How many elements a mask selects: `number` in all, or in each row; with `less`, all of a row but `number`."""

    number: int
    each_row: bool
    less: bool = False


class _DataDependentError(Exception):
    """The mask depends on the values of a tensor, or is random."""


# The line of the model's code, and how many masks it has made before in the same run.
_MaskKey = tuple[str, int]
_counts_by_key: dict[_MaskKey, _Selected | None] = {}
_masks_per_line: Counter[str] = Counter()  # in this run


@contextmanager
def reuse_masks() -> Iterator[None]:
    """While open, later runs reuse the result of the export for the mask at the same line: masks can be traced only during an export."""
    _counts_by_key.clear()
    try:
        yield
    finally:
        _counts_by_key.clear()


def begin_run() -> None:
    """Start counting masks anew: to be called at the start of each run of the model."""
    _masks_per_line.clear()


def selected_indices(mask: Tensor) -> Tensor | None:
    """The flat indices that the mask selects, in order; None where they depend on data."""
    count = _count_at_line(mask)
    if count is None:
        return None
    if not count.each_row:
        flat = mask.flatten()
        positions = torch.arange(flat.shape[0])
        return torch.where(flat, positions, positions + flat.shape[0]).sort(0).values[: count.number]
    rows, columns = mask.shape
    per_row = columns - count.number if count.less else count.number
    positions = torch.arange(columns)
    columns_of_row = torch.where(mask, positions, positions + columns).sort(1).values[:, :per_row]
    return (columns_of_row + torch.arange(rows).unsqueeze(1) * columns).flatten()


def _count_at_line(mask: Tensor) -> _Selected | None:
    mode, line = get_proxy_mode(), line_of_caller()
    key = line, _masks_per_line[line]
    _masks_per_line[line] += 1
    if mode is not None:
        _counts_by_key[key] = _evaluated_count(node_of(mask, mode.tracer), tuple(mask.shape))
    return _counts_by_key.get(key)


def _evaluated_count(node: fx.Node | None, shape: tuple[Any, ...]) -> _Selected | None:
    fixed = all(isinstance(size, int) for size in shape)
    if node is None or not (fixed or len(shape) == 2):
        return None
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            masks = [_value(node, size, {}) for size in _BATCH_SIZES]
            return _whole_count(masks[0]) if fixed else _row_count(masks)
    except _DataDependentError:
        return None


def _whole_count(mask: Tensor) -> _Selected | None:
    return _Selected(int(mask.sum()), each_row=False) if mask.numel() <= _MAX_ELEMENTS else None


def _row_count(masks: Sequence[Tensor]) -> _Selected | None:
    counts = [set(mask.sum(1).tolist()) for mask in masks]
    if any(len(each) != 1 for each in counts):
        return None
    taken = {number for each in counts for number in each}
    left = {mask.shape[1] - number for mask, each in zip(masks, counts, strict=True) for number in each}
    if len(taken) == 1:
        return _Selected(taken.pop(), each_row=True)
    return _Selected(left.pop(), each_row=True, less=True) if len(left) == 1 else None


def _value(node: fx.Node, batch: int, cache: dict[fx.Node, Any]) -> Any:
    """The value of the node where the one symbolic size is `batch`."""
    if node not in cache:
        recorded = node.meta.get("val")
        cache[node] = _size(recorded, batch) if _is_size(recorded) else _call_result(node, batch, cache)
    return cache[node]


def _call_result(node: fx.Node, batch: int, cache: dict[fx.Node, Any]) -> Any:
    target: Any = node.target
    operator = isinstance(target, torch._ops.OpOverload)
    if not operator and target is not getitem:  # one of several results of an operator
        raise _DataDependentError
    if operator and (target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags):
        raise _DataDependentError
    args, named = fx.map_arg((node.args, node.kwargs), lambda each: _value(each, batch, cache))
    return target(*args, **named)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt))


def _size(value: Any, batch: int) -> int:
    if isinstance(value, int):
        return value
    expression = value.node.expr
    if len(expression.free_symbols) > 1:
        raise _DataDependentError
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))
