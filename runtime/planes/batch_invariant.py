"""Batch-invariant forms of what a CPU rounds in one way or another by how many numbers it gets, so that whoever decodes has the same
bits in any batch.

Functions of single numbers are computed for several at once, and in another way for those that are left over: seen here for those
below, by a bit in the last place or two. So they are run with nothing left over. Sums along the last dimension, and what is
made of them, gave the same bits for any number of rows that lie one behind the other; rows that do not are summed up in
another order, and one alone always does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional

UNEVEN = frozenset({
    "aten.sigmoid", "aten.silu", "aten.mish", "aten.gelu", "fusion.gelu_tanh", "aten.softplus", "aten.elu", "aten.celu", "aten.selu",
    "aten.rsqrt", "aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar", "aten.atan2",
})  # fmt: skip
_AT_ONCE = 64  # two registers of AVX-512 in half precision
_THREADED = 32_768  # numbers from which the library shares them out among threads


@cache
def in_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction, of tensors whose rows lie one behind the other."""

    def of_rows(*args: Any, **named: Any) -> Any:
        return function(
            *(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args), **named
        )

    return of_rows


@cache
def even(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function, for so many numbers that nothing is left over, on any number of threads."""

    def evenly(*args: Any, **named: Any) -> torch.Tensor:
        tensors: tuple[torch.Tensor, ...] = tuple(arg for arg in args if isinstance(arg, torch.Tensor))
        if len(tensors) > 1:  # broadcast_shapes loads SymPy, and takes longer
            dtype = torch.result_type(*tensors)  # before a 0-dimensional one gets dimensions
            tensors = torch.broadcast_tensors(*(t.to(dtype) for t in tensors))  # type: ignore[no-untyped-call]
        shape, count = tensors[0].shape, tensors[0].numel()
        each = _AT_ONCE * (torch.get_num_threads() if count >= _THREADED else 1)
        flat = iter([functional.pad(tensor.reshape(-1), (0, -count % each)) for tensor in tensors])
        made = function(*(next(flat) if isinstance(arg, torch.Tensor) else arg for arg in args), **named)
        return made[:count].view(shape)

    return evenly
