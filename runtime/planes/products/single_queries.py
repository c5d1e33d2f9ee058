"""Attention of single positions (decode attention), each to the keys and values of its own sequence: all of them in one call.

A position has the same bits whatever others there are, on any number of threads: those of a run of its own.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch.nn import functional

from fusion.runtime.planes.products.attention_code import attention
from fusion.runtime.planes.products.machine_code import LANES, Function, float_bits, over_blocks

KEYS_AND_VALUES = 2  # tensors that are kept
Kept = Sequence[torch.Tensor]  # keys and values, each (1, its heads, room, its width)


def runs(query: torch.Tensor, held: Sequence[torch.Tensor]) -> bool:
    """Whether `attend` is for these: float32 on a CPU that there is such code for, and nothing is kept but keys and values."""
    return (
        len(held) == KEYS_AND_VALUES
        and query.device.type == "cpu"
        and all(tensor.dtype == torch.float32 for tensor in (query, *held))
        and _code() is not None
    )


def attend(
    query: torch.Tensor,  # (1, heads, positions, width)
    # Keys and values of these positions, each (1, its heads, positions, its width)
    new: Sequence[torch.Tensor],
    kept: Sequence[Kept],  # of each position's sequence
    at: Sequence[int],  # the positions there, ascending where several are of one sequence
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,  # (heads,)
    softcap: float | None = None,
    slopes: Sequence[float] | None = None,  # one a head
) -> torch.Tensor:
    """(1, heads, positions, width of a value). What is new is stored where it belongs; then each position sees all up to itself,
    or the last `window`, with scores as of `fusion.cached_attention_scored`. ValueError for tensors that do not belong together: the code would read beyond them."""
    code = _code()
    assert code is not None
    return _attend(code, query, new, kept, at, scale, window, sinks, softcap, slopes)


def _attend(
    code: Function,
    query: torch.Tensor,
    new: Sequence[torch.Tensor],
    kept: Sequence[Kept],
    at: Sequence[int],
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    slopes: Sequence[float] | None,
) -> torch.Tensor:
    key, value = (_in_rows(tensor) for tensor in new)
    query = _in_rows(query)
    _, heads, count, width = query.shape
    groups, value_width = key.shape[1], value.shape[3]
    table = array("q")
    for (keys, values), position in zip(kept, at, strict=True):
        room = keys.shape[2]
        if (
            keys.shape != (1, groups, room, width)
            or values.shape != (1, groups, room, value_width)
            or not (keys.is_contiguous() and values.is_contiguous())
            or not 0 <= position < room
        ):
            raise ValueError(f"position {position} of a cache of {tuple(keys.shape)}, {tuple(values.shape)}")
        table.extend((keys.data_ptr(), values.data_ptr(), room, position))
    if (
        len(at) != count
        or heads % groups
        or key.shape != (1, groups, count, width)
        or value.shape[:3] != key.shape[:3]
        or not query.dtype == key.dtype == value.dtype == torch.float32
    ):
        raise ValueError(
            f"{len(at)} positions of {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    longest = max(at) + 1 if window is None else min(window, max(at) + 1)
    room = -(-longest // LANES) * LANES + LANES
    scores, made = torch.empty(heads, room), torch.empty(1, count, heads, value_width)
    of_slopes = None if slopes is None else _floats(slopes)
    of_sinks = None if sinks is None else sinks.float().contiguous()
    if not all(each is None or each.shape == (heads,) for each in (of_slopes, of_sinks)):
        raise ValueError(f"slopes or sinks that are not one for each of {heads} heads")
    over_blocks(
        code,
        (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            table.buffer_info()[0],
            *(0 if each is None else each.data_ptr() for each in (of_slopes, of_sinks)),
            scores.data_ptr(),
            made.data_ptr(),
        ),
        groups,
        (
            *(groups, heads // groups, count, width, value_width),
            *(stride for each in (query, key, value) for stride in each.stride()[1:3]),
            *(room, window or 0),
            float_bits(1 / math.sqrt(width) if scale is None else scale),
            float_bits(softcap or 0.0),
        ),
        products=heads * (width + value_width) * (sum(at) + count),
        threads=torch.get_num_threads(),
    )
    return made.transpose(1, 2)


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Each position of each head contiguous."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


@lru_cache(64)
def _floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@cache
def _code() -> Function | None:
    """The machine code, where there is some and it does what it should."""
    code = attention()
    return code if code is not None and _agrees(code) else None


def _agrees(code: Function) -> bool:
    """Whether it gives about what a library gives."""
    made = torch.Generator().manual_seed(0)
    count, heads, groups, width, room = 3, 4, 2, 24, 40
    kept = [[torch.randn(1, groups, room, width, generator=made) for _ in range(2)] for _ in range(count)]
    query = torch.randn(1, heads, count, width, generator=made)
    new = [torch.randn(1, groups, count, width, generator=made) for _ in range(2)]
    at = (room - 1, 0, 17)
    found = _attend(code, query, new, kept, at, None, None, None, None, None)
    expected = []
    for row, end in enumerate(at):
        keys, values = (each[:, :, : end + 1] for each in kept[row])
        one = functional.scaled_dot_product_attention(
            query[:, :, row : row + 1], keys, values, enable_gqa=True
        )
        expected.append(one)
    return torch.allclose(found, torch.cat(expected, 2), atol=1e-5, rtol=1e-5)
