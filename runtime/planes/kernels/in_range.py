"""Clamps indices to their tables, for torch's operators on CUDA.

Indices are untrusted data. On a CPU, one out of range raises IndexError; on CUDA it fails an assertion on the device, after which the
process can compute nothing more there. So indices are clamped first, and results of those out of range are NaN (of integers the
minimum), for which a generation or a training step fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fusion.dag.ir.opset_index import INDEXED, IndexKind

Tensor = torch.Tensor
Args = tuple[Any, ...]
# The arguments with clamped indices, and which were out of range: one boolean, or one for each element of the result.
Clamped = tuple[Args, Tensor]


@cache
def in_range(op: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, which computes `op`, with its indices clamped."""
    if op not in INDEXED:
        return function
    clamp_indices = _CLAMPS[INDEXED[op]]

    def checked(*args: Any, **named: Any) -> Tensor:
        clamped_args, out_of_range = clamp_indices(args)
        output = function(*clamped_args, **named)
        if output.dtype == torch.bool:
            return output
        floats = output.dtype.is_floating_point
        return output.masked_fill(out_of_range, float("nan") if floats else torch.iinfo(output.dtype).min)

    return checked


def _clamp(index: Tensor, size: int, low: int = 0) -> tuple[Tensor, Tensor]:
    """The index clamped to [low, size), and where it was out of range. IndexError for an empty table."""
    if size == 0 and index.numel():
        raise IndexError("an index into a table without rows")
    clamped = index.clamp(low, max(0, size - 1))
    return clamped, clamped != index


def _clamp_rows(args: Args) -> Clamped:
    """weight, indices, ...: each row has one index."""
    clamped, out_of_range = _clamp(args[1], args[0].shape[0])
    return (args[0], clamped, *args[2:]), out_of_range[..., None]


def _clamp_quantised_rows(args: Args) -> Clamped:
    """weight, scales, minimums, indices, dtype."""
    clamped, out_of_range = _clamp(args[3], args[0].shape[0])
    return (*args[:3], clamped, args[4]), out_of_range[..., None]


def _clamp_along(args: Args) -> Clamped:
    """self, dim, index, ..."""
    clamped, out_of_range = _clamp(args[2], args[0].shape[args[1]] if args[0].dim() else 1)
    return (*args[:2], clamped, *args[3:]), out_of_range.any()


def _clamp_listed(args: Args) -> Clamped:
    """self, indices, ...: for each dimension an index, which may be negative, or None; or a mask over several dimensions."""
    indices: Sequence[Tensor | None] = args[1]
    clamped, out_of_range = list[Tensor | None](), torch.zeros((), dtype=torch.bool, device=args[0].device)
    dim = 0
    for index in indices:
        mask = index is not None and index.dtype == torch.bool
        if index is not None and not mask:
            size = args[0].shape[dim]
            index, index_out_of_range = _clamp(index, size, -size)
            out_of_range = out_of_range | index_out_of_range.any()
        clamped.append(index)
        dim += index.dim() if index is not None and mask else 1
    return (args[0], clamped, *args[2:]), out_of_range


def _clamp_classes(args: Args) -> Clamped:
    """self, num_classes."""
    clamped, out_of_range = _clamp(args[0], args[1])
    return (clamped, *args[1:]), out_of_range.any()


def _clamp_targets(args: Args) -> Clamped:
    """self, target, weight, reduction, ignore_index, ...: classes, or a probability for each."""
    scores, target, ignored = args[0], args[1], args[4]
    if target.is_floating_point():
        return args, torch.zeros((), dtype=torch.bool, device=target.device)
    clamped, out_of_range = _clamp(target, scores.shape[min(1, scores.dim() - 1)])
    counted = target != ignored
    return (scores, torch.where(counted, clamped, target), *args[2:]), (out_of_range & counted).any()


def _clamp_probabilities(args: Args) -> Clamped:
    """self, target, ..."""
    clamped, out_of_range = list[Tensor](), []
    for values in args[:2]:
        inside = (values >= 0) & (values <= 1)  # False for NaN
        clamped.append(torch.where(inside, values, 0.5))
        out_of_range.append(~inside.all())
    return (*clamped, *args[2:]), out_of_range[0] | out_of_range[1]


_CLAMPS: Mapping[IndexKind, Callable[[Args], Clamped]] = {
    "rows": _clamp_rows,
    "stored rows": _clamp_quantised_rows,
    "along": _clamp_along,
    "listed": _clamp_listed,
    "classes": _clamp_classes,
    "targets": _clamp_targets,
    "probabilities": _clamp_probabilities,
}
