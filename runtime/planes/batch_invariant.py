"""Batch-invariant forms of operators that round by the number of elements on a CPU, for decoding.

Elementwise functions run in vectors, and the remainder in scalar code that rounds differently: seen for VECTORISED, by one or two ULP.
So their inputs are padded to full vectors. Reductions over the last dimension gave the same bits for any number of contiguous rows.
Rows that are not contiguous have another reduction order; a single row always is contiguous. So inputs are made contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional

VECTORISED = frozenset({
    "aten.sigmoid", "aten.silu", "aten.mish", "aten.gelu", "fusion.gelu_tanh", "aten.softplus", "aten.elu", "aten.celu", "aten.selu",
    "aten.rsqrt", "aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar", "aten.atan2",
})  # fmt: skip
_VECTOR_ELEMENTS = 64  # two registers of AVX-512 in half precision
_THREADED_ELEMENTS = 32_768  # from so many on the library uses threads


@cache
def with_contiguous_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reduction `function`, with contiguous inputs."""

    def contiguous(*args: Any, **named: Any) -> Any:
        return function(
            *(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args), **named
        )

    return contiguous


@cache
def in_full_vectors(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The elementwise `function`, with inputs padded to full vectors on each thread."""

    def padded(*args: Any, **named: Any) -> torch.Tensor:
        tensors: tuple[torch.Tensor, ...] = tuple(arg for arg in args if isinstance(arg, torch.Tensor))
        if len(tensors) > 1:  # broadcast_shapes loads SymPy, and takes longer
            dtype = torch.result_type(*tensors)  # before a 0-dimensional one gets dimensions
            tensors = torch.broadcast_tensors(*(t.to(dtype) for t in tensors))  # type: ignore[no-untyped-call]
        shape, count = tensors[0].shape, tensors[0].numel()
        multiple = _VECTOR_ELEMENTS * (torch.get_num_threads() if count >= _THREADED_ELEMENTS else 1)
        padded_inputs = iter(
            [functional.pad(tensor.reshape(-1), (0, -count % multiple)) for tensor in tensors]
        )
        output = function(
            *(next(padded_inputs) if isinstance(arg, torch.Tensor) else arg for arg in args), **named
        )
        return output[:count].view(shape)

    return padded
