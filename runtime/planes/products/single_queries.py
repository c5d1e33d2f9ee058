"""Decode attention: single positions, each to the cached keys and values of its sequence, all in one call.

Batch-invariant: a position has the bits of a run by itself, on any number of threads.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch.nn import functional

from fusion.runtime.planes.products.attention_code import attention
from fusion.runtime.planes.products.machine_code import LANES, Function, float_bits, run_blocks

KEYS_AND_VALUES = 2  # tensors of a cache
CachedKeysAndValues = Sequence[torch.Tensor]  # each (1, its heads, capacity, its width)


def supports(query: torch.Tensor, cached: Sequence[torch.Tensor]) -> bool:
    """Whether `attend` supports these: float32 on a supported CPU, and a cache of keys and values only."""
    return (
        len(cached) == KEYS_AND_VALUES
        and query.device.type == "cpu"
        and all(tensor.dtype == torch.float32 for tensor in (query, *cached))
        and _code() is not None
    )


def attend(
    query: torch.Tensor,  # (1, heads, positions, width)
    # Keys and values of these positions, each (1, its heads, positions, its width)
    new: Sequence[torch.Tensor],
    caches: Sequence[CachedKeysAndValues],  # of the sequence of each position
    positions: Sequence[int],  # in these sequences; ascending where several are of one sequence
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,  # (heads,)
    softcap: float | None = None,
    slopes: Sequence[float] | None = None,  # one a head
) -> torch.Tensor:
    """Store the new keys and values, then attend from each position to all up to itself, or to the last `window`, with scores as in
    `fusion.cached_attention_scored`. Returns (1, heads, positions, value width). ValueError where shapes or dtypes do not match: the
    code would read beyond the tensors."""
    code = _code()
    assert code is not None
    return _attend(code, query, new, caches, positions, scale, window, sinks, softcap, slopes)


def _attend(
    code: Function,
    query: torch.Tensor,
    new: Sequence[torch.Tensor],
    caches: Sequence[CachedKeysAndValues],
    positions: Sequence[int],
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    slopes: Sequence[float] | None,
) -> torch.Tensor:
    key, value = (_contiguous_rows(tensor) for tensor in new)
    query = _contiguous_rows(query)
    _, heads, count, width = query.shape
    key_heads, value_width = key.shape[1], value.shape[3]
    table = array("q")
    for (keys, values), position in zip(caches, positions, strict=True):
        capacity = keys.shape[2]
        if (
            keys.shape != (1, key_heads, capacity, width)
            or values.shape != (1, key_heads, capacity, value_width)
            or not (keys.is_contiguous() and values.is_contiguous())
            or not 0 <= position < capacity
        ):
            raise ValueError(f"position {position} of a cache of {tuple(keys.shape)}, {tuple(values.shape)}")
        table.extend((keys.data_ptr(), values.data_ptr(), capacity, position))
    if (
        len(positions) != count
        or heads % key_heads
        or key.shape != (1, key_heads, count, width)
        or value.shape[:3] != key.shape[:3]
        or not query.dtype == key.dtype == value.dtype == torch.float32
    ):
        raise ValueError(
            f"{len(positions)} positions of {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    longest = max(positions) + 1 if window is None else min(window, max(positions) + 1)
    score_width = -(-longest // LANES) * LANES + LANES
    scores, output = torch.empty(heads, score_width), torch.empty(1, count, heads, value_width)
    slope_numbers = None if slopes is None else _floats(slopes)
    sink_numbers = None if sinks is None else sinks.float().contiguous()
    if not all(each is None or each.shape == (heads,) for each in (slope_numbers, sink_numbers)):
        raise ValueError(f"slopes or sinks that are not one for each of {heads} heads")
    run_blocks(
        code,
        (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            table.buffer_info()[0],
            *(0 if each is None else each.data_ptr() for each in (slope_numbers, sink_numbers)),
            scores.data_ptr(),
            output.data_ptr(),
        ),
        key_heads,
        (
            *(key_heads, heads // key_heads, count, width, value_width),
            *(stride for each in (query, key, value) for stride in each.stride()[1:3]),
            *(score_width, window or 0),
            float_bits(1 / math.sqrt(width) if scale is None else scale),
            float_bits(softcap or 0.0),
        ),
        multiply_adds=heads * (width + value_width) * (sum(positions) + count),
        threads=torch.get_num_threads(),
    )
    return output.transpose(1, 2)


def _contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with contiguous rows."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


@lru_cache(64)
def _floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@cache
def _code() -> Function | None:
    """The machine code, where this machine is supported and the code passes a test."""
    code = attention()
    return code if code is not None and _is_correct(code) else None


def _is_correct(code: Function) -> bool:
    """Whether it agrees with the library to rounding."""
    generator = torch.Generator().manual_seed(0)
    count, heads, key_heads, width, capacity = 3, 4, 2, 24, 40
    caches = [
        [torch.randn(1, key_heads, capacity, width, generator=generator) for _ in range(2)]
        for _ in range(count)
    ]
    query = torch.randn(1, heads, count, width, generator=generator)
    new = [torch.randn(1, key_heads, count, width, generator=generator) for _ in range(2)]
    positions = (capacity - 1, 0, 17)
    output = _attend(code, query, new, caches, positions, None, None, None, None, None)
    expected = []
    for row, end in enumerate(positions):
        keys, values = (each[:, :, : end + 1] for each in caches[row])
        row_output = functional.scaled_dot_product_attention(
            query[:, :, row : row + 1], keys, values, enable_gqa=True
        )
        expected.append(row_output)
    return torch.allclose(output, torch.cat(expected, 2), atol=1e-5, rtol=1e-5)
