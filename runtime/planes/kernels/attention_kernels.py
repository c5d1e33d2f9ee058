"""Decode attention in Triton: single positions to the KV caches of their sessions. Batch-invariant.

Each session has its own cache; a table holds their addresses. A sequence is reduced in chunks of CHUNK keys, and then the chunks in
order, whatever the lengths of the others (flash decoding with a fixed split size).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 256  # keys of one program
_BLOCK = 64  # keys at once
_MAX_BLOCK_WIDTH = 128  # of a head, for blocks of this size
ENTRY = (
    3  # integers of the table for a row: addresses of its keys and values, and positions allocated for them
)


def attend(
    query: torch.Tensor,  # (1, heads, rows, width)
    key: torch.Tensor,  # (1, key heads, rows, width)
    value: torch.Tensor,  # (1, key heads, rows, value width)
    table: torch.Tensor,  # (rows, ENTRY) int64
    positions: torch.Tensor,  # (rows,) int64; -1 for a row that is padding
    chunks: int,  # of CHUNK keys, at least as many as the longest sequence has
    scale: float | None,
    window: int | None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,  # (heads,) float32, as in ALiBi
    sinks: torch.Tensor | None = None,  # (heads,): scores of a virtual key without a value
) -> torch.Tensor:
    """Store each row's key and value at its position, and attend to all positions up to it, or to the last `window`. Rows of one sequence
    come in the order of their positions. Scores are float32. Returns (1, heads, rows, value width)."""
    _, heads, rows, width = query.shape
    key_heads, value_width = key.shape[1], value.shape[3]
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    sizes = {
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "PADDED_WIDTH": triton.next_power_of_2(width),
        "PADDED_VALUE_WIDTH": triton.next_power_of_2(value_width),
    }
    _append[rows, key_heads](
        *(key, value, table, positions),
        *(key.stride(1), key.stride(2), value.stride(1), value.stride(2)),
        ENTRY=ENTRY,
        **sizes,
    )
    out = torch.empty(rows, heads, value_width, dtype=query.dtype, device=query.device)
    partial_sums = torch.empty(rows, heads, chunks, value_width, dtype=torch.float32, device=query.device)
    partial_stats = torch.empty(rows, heads, chunks, 2, dtype=torch.float32, device=query.device)
    _attend_chunk[rows, heads, chunks](
        *(query, key, value, table, positions, partial_sums, partial_stats),
        *(query.stride(1), query.stride(2), width**-0.5 if scale is None else scale),
        *(softcap or 0.0, slopes),
        CAPPED=softcap is not None,
        GROUP=heads // key_heads,
        CHUNK=CHUNK,
        BLOCK=_BLOCK if max(width, value_width) <= _MAX_BLOCK_WIDTH else _BLOCK // 2,
        WINDOW=0 if window is None else window,
        ENTRY=ENTRY,
        **sizes,
    )
    _reduce_chunks[rows, heads](
        *(positions, partial_sums, partial_stats, sinks, out, chunks),
        CHUNK=CHUNK,
        WINDOW=0 if window is None else window,
        VALUE_WIDTH=value_width,
        PADDED_VALUE_WIDTH=sizes["PADDED_VALUE_WIDTH"],
    )
    return out.transpose(0, 1)[None]


@triton.jit
def _append(
    key, value, table, positions, key_head, key_row, value_head, value_row,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PADDED_VALUE_WIDTH: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if position >= 0:
        keys = tl.load(table + row * ENTRY).to(key.dtype)
        values = tl.load(table + row * ENTRY + 1).to(value.dtype)
        cache_row = head * tl.load(table + row * ENTRY + 2) + position
        columns, value_columns = tl.arange(0, PADDED_WIDTH), tl.arange(0, PADDED_VALUE_WIDTH)
        new = tl.load(key + head * key_head + row * key_row + columns, mask=columns < WIDTH)
        tl.store(keys + cache_row * WIDTH + columns, new, mask=columns < WIDTH)
        new = tl.load(
            value + head * value_head + row * value_row + value_columns, mask=value_columns < VALUE_WIDTH
        )
        tl.store(values + cache_row * VALUE_WIDTH + value_columns, new, mask=value_columns < VALUE_WIDTH)


@triton.jit
def _attend_chunk(
    query, key, value, table, positions, partial_sums, partial_stats, query_head, query_row, scale, softcap, slopes,
    CAPPED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, ENTRY: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PADDED_VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    row, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    low, high = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, position + 1)
    if (low < high) & (first < high):
        if WINDOW > 0:
            low = tl.maximum(low, first - first % BLOCK)
        keys = tl.load(table + row * ENTRY).to(key.dtype)
        values = tl.load(table + row * ENTRY + 1).to(value.dtype)
        cache_row = (head // GROUP) * tl.load(table + row * ENTRY + 2)
        columns, value_columns = tl.arange(0, PADDED_WIDTH), tl.arange(0, PADDED_VALUE_WIDTH)
        q = tl.load(query + head * query_head + row * query_row + columns, mask=columns < WIDTH, other=0.0)
        q = q.to(tl.float32)
        running_max = float("-inf")
        running_sum = 0.0
        acc = tl.zeros([PADDED_VALUE_WIDTH], dtype=tl.float32)
        for start in range(low, high, BLOCK):
            key_positions = start + tl.arange(0, BLOCK)
            visible = (key_positions < high) & (key_positions >= first)
            offsets = (cache_row + key_positions)[:, None]
            k_block = tl.load(
                keys + offsets * WIDTH + columns[None, :],
                mask=visible[:, None] & (columns < WIDTH)[None, :],
                other=0.0,
            )
            scores = tl.sum(q[None, :] * k_block.to(tl.float32), 1) * scale
            if CAPPED:
                ratio = scores / softcap  # tanh from exp, which every version of Triton has
                scores = softcap * (2 / (1 + tl.exp(-2 * ratio)) - 1)
            if slopes is not None:
                scores += tl.load(slopes + head) * (key_positions - position).to(tl.float32)
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 0))
            p = tl.exp(scores - new_max)
            rescale = tl.exp(running_max - new_max)
            v_block = tl.load(
                values + offsets * VALUE_WIDTH + value_columns[None, :],
                mask=visible[:, None] & (value_columns < VALUE_WIDTH)[None, :],
                other=0.0,
            )
            acc = acc * rescale + tl.sum(p[:, None] * v_block.to(tl.float32), 0)
            running_sum = running_sum * rescale + tl.sum(p, 0)
            running_max = new_max
        partial = (row * tl.num_programs(1) + head) * tl.num_programs(2) + chunk
        tl.store(partial_sums + partial * VALUE_WIDTH + value_columns, acc, mask=value_columns < VALUE_WIDTH)
        tl.store(partial_stats + partial * 2, running_max)
        tl.store(partial_stats + partial * 2 + 1, running_sum)


@triton.jit
def _reduce_chunks(
    positions, partial_sums, partial_stats, sinks, out, chunks,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, VALUE_WIDTH: tl.constexpr, PADDED_VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    value_columns = tl.arange(0, PADDED_VALUE_WIDTH)
    output_row = row * tl.num_programs(1) + head
    acc = tl.zeros([PADDED_VALUE_WIDTH], dtype=tl.float32)
    running_sum = 1.0  # for padding rows
    if position >= 0:
        running_max = float("-inf")
        running_sum = 0.0
        for chunk in range(first // CHUNK, position // CHUNK + 1):
            partial = output_row * chunks + chunk
            chunk_max = tl.load(partial_stats + partial * 2)
            new_max = tl.maximum(running_max, chunk_max)
            rescale, chunk_rescale = tl.exp(running_max - new_max), tl.exp(chunk_max - new_max)
            chunk_sum = tl.load(
                partial_sums + partial * VALUE_WIDTH + value_columns,
                mask=value_columns < VALUE_WIDTH,
                other=0.0,
            )
            acc = acc * rescale + chunk_sum * chunk_rescale
            running_sum = running_sum * rescale + tl.load(partial_stats + partial * 2 + 1) * chunk_rescale
            running_max = new_max
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            new_max = tl.maximum(running_max, sink)
            acc = acc * tl.exp(running_max - new_max)
            running_sum = running_sum * tl.exp(running_max - new_max) + tl.exp(sink - new_max)
    tl.store(
        out + output_row * VALUE_WIDTH + value_columns,
        (acc / running_sum).to(out.dtype.element_ty),
        mask=value_columns < VALUE_WIDTH,
    )
