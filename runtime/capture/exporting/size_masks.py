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

_SIZES = (3, 4, 5, 8)  # of the batch, for which a mask is evaluated
_MOST = 1 << 16  # elements of a mask of constant sizes


@dataclass(frozen=True)
class _Count:
    """How many elements a mask selects: `number` in all, or in each row; with `less`, all of a row but `number`."""

    number: int
    each_row: bool
    less: bool = False


class _OfDataError(Exception):
    """The mask depends on the values of a tensor, or is random."""


_Place = tuple[
    str, int
]  # the line of the model's code, and the number of masks it had before in the same run
_known: dict[_Place, _Count | None] = {}
_lines: Counter[str] = Counter()  # of this run


@contextmanager
def same_masks_again() -> Iterator[None]:
    """While open, later runs reuse what the export found of the mask at the same line: outside of an export masks cannot be traced."""
    _known.clear()
    try:
        yield
    finally:
        _known.clear()


def begin_run() -> None:
    """A run of the model begins."""
    _lines.clear()


def places(mask: Tensor) -> Tensor | None:
    """The flat indices that the mask selects, in order; None where they depend on data."""
    count = _count(mask)
    if count is None:
        return None
    if not count.each_row:
        flat = mask.flatten()
        every = torch.arange(flat.shape[0])
        return torch.where(flat, every, every + flat.shape[0]).sort(0).values[: count.number]
    rows, columns = mask.shape
    taken = columns - count.number if count.less else count.number
    every = torch.arange(columns)
    within = torch.where(mask, every, every + columns).sort(1).values[:, :taken]
    return (within + torch.arange(rows).unsqueeze(1) * columns).flatten()


def _count(mask: Tensor) -> _Count | None:
    mode, line = get_proxy_mode(), line_of_caller()
    at = line, _lines[line]
    _lines[line] += 1
    if mode is not None:
        _known[at] = _counted(node_of(mask, mode.tracer), tuple(mask.shape))
    return _known.get(at)


def _counted(node: fx.Node | None, shape: tuple[Any, ...]) -> _Count | None:
    fixed = all(isinstance(size, int) for size in shape)
    if node is None or not (fixed or len(shape) == 2):
        return None
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            made = [_value(node, size, {}) for size in _SIZES]
            return _of_all(made[0]) if fixed else _of_rows(made)
    except _OfDataError:
        return None


def _of_all(mask: Tensor) -> _Count | None:
    return _Count(int(mask.sum()), each_row=False) if mask.numel() <= _MOST else None


def _of_rows(masks: Sequence[Tensor]) -> _Count | None:
    counts = [set(mask.sum(1).tolist()) for mask in masks]
    if any(len(each) != 1 for each in counts):
        return None
    taken = {number for each in counts for number in each}
    left = {mask.shape[1] - number for mask, each in zip(masks, counts, strict=True) for number in each}
    if len(taken) == 1:
        return _Count(taken.pop(), each_row=True)
    return _Count(left.pop(), each_row=True, less=True) if len(left) == 1 else None


def _value(node: fx.Node, batch: int, known: dict[fx.Node, Any]) -> Any:
    """The value of the node where the one symbolic size is `batch`."""
    if node not in known:
        held = node.meta.get("val")
        known[node] = _size(held, batch) if _is_size(held) else _called(node, batch, known)
    return known[node]


def _called(node: fx.Node, batch: int, known: dict[fx.Node, Any]) -> Any:
    target: Any = node.target
    operator = isinstance(target, torch._ops.OpOverload)
    if not operator and target is not getitem:  # takes one of an operator's several results
        raise _OfDataError
    if operator and (target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags):
        raise _OfDataError
    args, named = fx.map_arg((node.args, node.kwargs), lambda each: _value(each, batch, known))
    return target(*args, **named)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt))


def _size(value: Any, batch: int) -> int:
    if isinstance(value, int):
        return value
    found = value.node.expr
    if len(found.free_symbols) > 1:
        raise _OfDataError
    return int(found.subs(dict.fromkeys(found.free_symbols, batch)))
