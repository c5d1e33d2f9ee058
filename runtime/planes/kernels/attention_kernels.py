"""Attention of single positions to the caches of their sessions, in Triton: a row's bits depend on its own sequence alone.

Keys and values lie where each session has them; a table says where. A sequence is summed up in chunks of so many keys, and the
chunks in order, whatever the others' lengths are (flash decoding, with splits that are fixed).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 256  # keys that one program of a kernel sums up
_BLOCK = 64  # of them at once
_WIDEST = 128  # of a head, for so many at once
ENTRY = 3  # numbers of the table for a row: where its keys are, where its values are, and for how many positions there is room


def attend(
    query: torch.Tensor,  # (1, heads, rows, width)
    key: torch.Tensor,  # (1, key heads, rows, width)
    value: torch.Tensor,  # (1, key heads, rows, value width)
    table: torch.Tensor,  # (rows, ENTRY) int64
    positions: torch.Tensor,  # (rows,) int64; -1 for a row that is padding
    chunks: int,  # of CHUNK keys, in the longest sequence at most
    scale: float | None,
    window: int | None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,  # (heads,) float32: what a position further away adds to a score
    sinks: torch.Tensor | None = None,  # (heads,): scores of a key that each row sees and that has no value
) -> torch.Tensor:
    """Store each row's key and value at its position, and let it see all positions up to its own, or the last `window`:
    (1, heads, rows, value width). Rows of one sequence come in the order of their positions. Scores are float32."""
    _, heads, rows, width = query.shape
    held, broad = key.shape[1], value.shape[3]
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    sizes = {
        "WIDTH": width,
        "BROAD": broad,
        "WIDTHS": triton.next_power_of_2(width),
        "BROADS": triton.next_power_of_2(broad),
    }
    _store[rows, held](
        *(key, value, table, positions),
        *(key.stride(1), key.stride(2), value.stride(1), value.stride(2)),
        ENTRY=ENTRY,
        **sizes,
    )
    made = torch.empty(rows, heads, broad, dtype=query.dtype, device=query.device)
    seen = torch.empty(rows, heads, chunks, broad, dtype=torch.float32, device=query.device)
    weights = torch.empty(rows, heads, chunks, 2, dtype=torch.float32, device=query.device)
    _see[rows, heads, chunks](
        *(query, key, value, table, positions, seen, weights),
        *(query.stride(1), query.stride(2), width**-0.5 if scale is None else scale),
        *(softcap or 0.0, slopes),
        CAPPED=softcap is not None,
        GROUP=heads // held,
        CHUNK=CHUNK,
        BLOCK=_BLOCK if max(width, broad) <= _WIDEST else _BLOCK // 2,
        WINDOW=0 if window is None else window,
        ENTRY=ENTRY,
        **sizes,
    )
    _sum_up[rows, heads](
        *(positions, seen, weights, sinks, made, chunks),
        CHUNK=CHUNK,
        WINDOW=0 if window is None else window,
        BROAD=broad,
        BROADS=sizes["BROADS"],
    )
    return made.transpose(0, 1)[None]


@triton.jit
def _store(
    key, value, table, positions, key_head, key_row, value_head, value_row,
    WIDTH: tl.constexpr, BROAD: tl.constexpr, WIDTHS: tl.constexpr, BROADS: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(positions + row)
    if at >= 0:
        keys = tl.load(table + row * ENTRY).to(key.dtype)
        values = tl.load(table + row * ENTRY + 1).to(value.dtype)
        place = head * tl.load(table + row * ENTRY + 2) + at
        wide, broad = tl.arange(0, WIDTHS), tl.arange(0, BROADS)
        new = tl.load(key + head * key_head + row * key_row + wide, mask=wide < WIDTH)
        tl.store(keys + place * WIDTH + wide, new, mask=wide < WIDTH)
        new = tl.load(value + head * value_head + row * value_row + broad, mask=broad < BROAD)
        tl.store(values + place * BROAD + broad, new, mask=broad < BROAD)


@triton.jit
def _see(
    query, key, value, table, positions, seen, weights, query_head, query_row, scale, softcap, slopes,
    CAPPED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, ENTRY: tl.constexpr,
    WIDTH: tl.constexpr, BROAD: tl.constexpr, WIDTHS: tl.constexpr, BROADS: tl.constexpr,
):  # fmt: skip
    row, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.load(positions + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(at + 1 - WINDOW, 0)
    low, high = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, at + 1)
    if (low < high) & (first < high):
        if WINDOW > 0:
            low = tl.maximum(low, first - first % BLOCK)
        keys = tl.load(table + row * ENTRY).to(key.dtype)
        values = tl.load(table + row * ENTRY + 1).to(value.dtype)
        begin = (head // GROUP) * tl.load(table + row * ENTRY + 2)
        wide, broad = tl.arange(0, WIDTHS), tl.arange(0, BROADS)
        asked = tl.load(query + head * query_head + row * query_row + wide, mask=wide < WIDTH, other=0.0)
        asked = asked.to(tl.float32)
        top = float("-inf")
        total = 0.0
        found = tl.zeros([BROADS], dtype=tl.float32)
        for start in range(low, high, BLOCK):
            places = start + tl.arange(0, BLOCK)
            looks = (places < high) & (places >= first)
            lines = (begin + places)[:, None]
            known = tl.load(
                keys + lines * WIDTH + wide[None, :], mask=looks[:, None] & (wide < WIDTH)[None, :], other=0.0
            )
            scores = tl.sum(asked[None, :] * known.to(tl.float32), 1) * scale
            if CAPPED:
                ratio = scores / softcap  # tanh of it, from what Triton has everywhere
                scores = softcap * (2 / (1 + tl.exp(-2 * ratio)) - 1)
            if slopes is not None:
                scores += tl.load(slopes + head) * (places - at).to(tl.float32)
            scores = tl.where(looks, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            shares = tl.exp(scores - higher)
            kept = tl.exp(top - higher)
            told = tl.load(
                values + lines * BROAD + broad[None, :],
                mask=looks[:, None] & (broad < BROAD)[None, :],
                other=0.0,
            )
            found = found * kept + tl.sum(shares[:, None] * told.to(tl.float32), 0)
            total = total * kept + tl.sum(shares, 0)
            top = higher
        place = (row * tl.num_programs(1) + head) * tl.num_programs(2) + chunk
        tl.store(seen + place * BROAD + broad, found, mask=broad < BROAD)
        tl.store(weights + place * 2, top)
        tl.store(weights + place * 2 + 1, total)


@triton.jit
def _sum_up(
    positions, seen, weights, sinks, made, chunks,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, BROAD: tl.constexpr, BROADS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(positions + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(at + 1 - WINDOW, 0)
    broad = tl.arange(0, BROADS)
    line = row * tl.num_programs(1) + head
    found = tl.zeros([BROADS], dtype=tl.float32)
    total = 1.0  # of a row that is padding
    if at >= 0:
        top = float("-inf")
        total = 0.0
        for chunk in range(first // CHUNK, at // CHUNK + 1):
            place = line * chunks + chunk
            peak = tl.load(weights + place * 2)
            higher = tl.maximum(top, peak)
            kept, share = tl.exp(top - higher), tl.exp(peak - higher)
            part = tl.load(seen + place * BROAD + broad, mask=broad < BROAD, other=0.0)
            found = found * kept + part * share
            total = total * kept + tl.load(weights + place * 2 + 1) * share
            top = higher
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            higher = tl.maximum(top, sink)
            found = found * tl.exp(top - higher)
            total = total * tl.exp(top - higher) + tl.exp(sink - higher)
    tl.store(made + line * BROAD + broad, (found / total).to(made.dtype.element_ty), mask=broad < BROAD)
