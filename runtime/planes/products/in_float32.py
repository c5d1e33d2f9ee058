"""Half precision on a CPU without instructions for it, in training: products, convolutions and attention compute in float32.

There the library's own kernels for bfloat16 and float16 take 10 to 30 times as long as those for float32 (AVX2, forward and backward
pass). Operands are cast to float32, sums are in float32 as they are anyway, and the result is rounded to half precision, as is
every gradient. Only the order of a sum differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.dag.ir.opset import spec
from fusion.dag.rewrites.experts import EXPERT_LINEAR
from fusion.runtime.planes.products.experts import expert_linear_in_float32
from fusion.runtime.planes.products.half import HALF, computes_half

_SLOW_FAMILIES = frozenset({"contraction", "convolution", "attention"})  # of the op-set

# An operand in half precision, and the size, strides and offset of what autograd saves of its cast
_View = tuple[torch.Tensor, torch.Size, tuple[int, ...], int | torch.SymInt]
_Saved = _View | torch.Tensor


def is_slow(dtype: torch.dtype) -> bool:
    """Whether it is a half precision that this machine's CPU has no instructions for."""
    return dtype in HALF and not computes_half(dtype)


def in_supported_dtype(op: str, function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`function`, which computes the op with a result of `dtype`, or one that computes it in float32 if that is faster here."""
    if spec(op).family not in _SLOW_FAMILIES or not is_slow(dtype):
        return function
    return expert_linear_in_float32 if op == EXPERT_LINEAR else in_float32(function, dtype)


def in_float32(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`function`, which returns one tensor of `dtype`, computed in float32 from operands in half precision.

    Its backward pass casts the operands again: what autograd would keep of them in float32 takes twice their memory."""

    def computed(*args: Any, **keywords: Any) -> Any:
        casts = {
            id(each): each.float() for each in args if isinstance(each, torch.Tensor) and each.dtype in HALF
        }
        originals = {
            cast.untyped_storage().data_ptr(): each
            for each in args
            if (cast := casts.get(id(each))) is not None
        }

        def pack(saved: torch.Tensor) -> _Saved:
            original = originals.get(saved.untyped_storage().data_ptr())
            if original is None:
                return saved
            return original.detach(), saved.size(), saved.stride(), saved.storage_offset()

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            result = function(*(casts.get(id(each), each) for each in args), **keywords)
        return result.to(dtype)

    return computed


def _unpack(saved: _Saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    original, size, stride, offset = saved
    return original.float().as_strided(size, stride, offset)
