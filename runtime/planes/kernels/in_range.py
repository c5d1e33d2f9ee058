"""Indices that stay within their tables, for what torch computes on CUDA.

Indices are data, perhaps a stranger's. On a CPU one beyond its table is an IndexError; on CUDA it ends, some time after the call, all
that the process could still compute there. So it is moved into the table first, and what is made with it is not a number (of
whole numbers the least), for which an answer or a step of training fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fusion.dag.ir.opset_index import INDEXED, IndexKind

Tensor = torch.Tensor
Args = tuple[Any, ...]
# The arguments to call an operator with, and whether one of them had to be moved: a single truth, or one for each number made.
Moved = tuple[Args, Tensor]


@cache
def in_range(op: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What computes `op` in place of `function`, which is all of it but for the indices."""
    if op not in INDEXED:
        return function
    moved_into = _MOVED[INDEXED[op]]

    def within(*args: Any, **named: Any) -> Tensor:
        given, moved = moved_into(args)
        made = function(*given, **named)
        if made.dtype == torch.bool:
            return made
        floats = made.dtype.is_floating_point
        return made.masked_fill(moved, float("nan") if floats else torch.iinfo(made.dtype).min)

    return within


def _into(index: Tensor, size: int, least: int = 0) -> tuple[Tensor, Tensor]:
    """The index within [least, size), and where that is another. IndexError if nothing is."""
    if size == 0 and index.numel():
        raise IndexError("an index into a table without rows")
    found = index.clamp(least, max(0, size - 1))
    return found, found != index


def _rows_of(args: Args) -> Moved:
    """weight, indices, ...: each row is by itself."""
    found, moved = _into(args[1], args[0].shape[0])
    return (args[0], found, *args[2:]), moved[..., None]


def _stored_rows_of(args: Args) -> Moved:
    """weight, scales, minimums, indices, dtype."""
    found, moved = _into(args[3], args[0].shape[0])
    return (*args[:3], found, args[4]), moved[..., None]


def _along(args: Args) -> Moved:
    """self, dim, index, ..."""
    found, moved = _into(args[2], args[0].shape[args[1]] if args[0].dim() else 1)
    return (*args[:2], found, *args[3:]), moved.any()


def _listed(args: Args) -> Moved:
    """self, indices, ...: for each dimension one, which may count from the end, or none; or for several a mask."""
    indices: Sequence[Tensor | None] = args[1]
    found, moved = list[Tensor | None](), torch.zeros((), dtype=torch.bool, device=args[0].device)
    dim = 0
    for index in indices:
        mask = index is not None and index.dtype == torch.bool
        if index is not None and not mask:
            size = args[0].shape[dim]
            index, beyond = _into(index, size, -size)
            moved = moved | beyond.any()
        found.append(index)
        dim += index.dim() if index is not None and mask else 1
    return (args[0], found, *args[2:]), moved


def _classes(args: Args) -> Moved:
    """self, num_classes."""
    found, moved = _into(args[0], args[1])
    return (found, *args[1:]), moved.any()


def _targets(args: Args) -> Moved:
    """self, target, weight, reduction, ignore_index, ...: classes, or a probability for each."""
    scores, target, ignored = args[0], args[1], args[4]
    if target.is_floating_point():
        return args, torch.zeros((), dtype=torch.bool, device=target.device)
    found, moved = _into(target, scores.shape[min(1, scores.dim() - 1)])
    counted = target != ignored
    return (scores, torch.where(counted, found, target), *args[2:]), (moved & counted).any()


def _probabilities(args: Args) -> Moved:
    """self, target, ..."""
    found, moved = list[Tensor](), []
    for given in args[:2]:
        inside = (given >= 0) & (given <= 1)  # not a number is not
        found.append(torch.where(inside, given, 0.5))
        moved.append(~inside.all())
    return (*found, *args[2:]), moved[0] | moved[1]


_MOVED: Mapping[IndexKind, Callable[[Args], Moved]] = {
    "rows": _rows_of,
    "stored rows": _stored_rows_of,
    "along": _along,
    "listed": _listed,
    "classes": _classes,
    "targets": _targets,
    "probabilities": _probabilities,
}
