"""Attention of queries to given keys and values: score modifications, selection and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from fusion.runtime.planes.products import half_products, single_queries

MAX_SCORES = 1 << 22  # at once, where they are materialised: 16 MB of float32


class ScoreMods(NamedTuple):
    """Modifications of the scores of `fusion.cached_attention_scored` and `fusion.cached_attention_relative`, except the bias of each
    key."""

    sinks: torch.Tensor | None = None
    softcap: float | None = None
    slopes: Sequence[float] | None = None
    # (distances, heads): bias by the distance from key to query; the last one also for greater distances
    relative: torch.Tensor | None = None

    def for_heads(self, heads: slice) -> ScoreMods:
        """The modifications for these heads."""
        sinks = None if self.sinks is None else self.sinks[heads]
        slopes = None if self.slopes is None else self.slopes[heads]
        relative = None if self.relative is None else self.relative[:, heads]
        return ScoreMods(sinks, self.softcap, slopes, relative)

    def by_distance(self, first: int, count: int, length: int) -> torch.Tensor | None:
        """(1, heads, count, length): the bias `relative` for queries whose first one is `first` positions after the first key."""
        if self.relative is None:
            return None
        device = self.relative.device
        queries = torch.arange(first, first + count, device=device)[:, None]
        distance = (queries - torch.arange(length, device=device)).clamp(0, len(self.relative) - 1)
        return self.relative[distance].permute(2, 0, 1)[None]


def supports_single(
    query: torch.Tensor, cached: Sequence[torch.Tensor], score_mods: ScoreMods | None
) -> bool:
    """Whether `single_attention` supports these."""
    return (score_mods is None or score_mods.relative is None) and single_queries.supports(query, cached)


def single_attention(
    query: torch.Tensor,  # (1, heads, positions, width)
    new: Sequence[torch.Tensor],  # keys and values of these positions
    caches: Sequence[Sequence[torch.Tensor]],  # of the sequence of each position
    positions: Sequence[int],  # the positions in these sequences
    scale: float | None,
    window: int | None,
    score_mods: ScoreMods | None,
) -> torch.Tensor:
    """Store the new keys and values, then attend from each position to all of its sequence up to itself, with the bits of a run by
    itself."""
    mods = score_mods or ScoreMods()
    return single_queries.attend(
        query, new, caches, positions, scale, window, mods.sinks, mods.softcap, mods.slopes
    )


def max_score_rows(length: int) -> int:
    """How many rows of scores, over all heads, to compute at once; at least 1."""
    return max(1, MAX_SCORES // length)


def score_mod_attention(
    query: torch.Tensor,  # (1, heads, count, width)
    keys: torch.Tensor,  # (1, key heads, length, width)
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,  # (count, length) booleans, True where a query sees a key
    bias: torch.Tensor | None,  # (1, heads or 1, 1, length)
    score_mods: ScoreMods,
    query_offset: int = 0,  # positions from the first key to the first query
) -> torch.Tensor:
    """Attention with materialised scores, step by step as models write it (eager attention), each step in the dtype of the scores. Computes
    as many rows at a time as `max_score_rows` allows."""
    heads, length = query.shape[1], keys.shape[2]
    groups = keys.shape[1]
    sinks = None if score_mods.sinks is None else score_mods.sinks.view(1, heads, 1, 1)
    keys_transposed = keys[0].transpose(1, 2)  # (key heads, width, length)
    outputs = []
    row = 0
    for rows in torch.split(query, max_score_rows(heads * length), 2):
        count = rows.shape[2]
        grouped = rows.reshape(groups, heads // groups * count, -1)
        scores = half_products.bmm(grouped, keys_transposed).view(1, heads, count, length)
        if scale != 1:
            scores = scores * scale
        if score_mods.softcap is not None:
            scores = torch.tanh(scores / score_mods.softcap) * score_mods.softcap
        if bias is not None:
            scores = scores + bias
        if (distance_bias := score_mods.by_distance(query_offset + row, count, length)) is not None:
            scores = scores + distance_bias
        if mask is not None:
            scores = scores.masked_fill(~mask[row : row + count], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.expand(1, heads, count, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :length].to(values.dtype)
        output = half_products.bmm(weights.reshape(groups, heads // groups * count, length), values[0])
        outputs.append(output.view(1, heads, count, -1))
        row += count
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def top_keys(
    query: torch.Tensor,  # (1, heads, count, width)
    keys: torch.Tensor,  # (1, 1, length, width)
    weights: torch.Tensor,  # (1, heads, count, 1)
    scale: float,
    most: int,
    start: int,
) -> torch.Tensor:
    """(1, 1, count, most): the positions selected for queries from position `start` on, as in `fusion.cached_selection`; -1: none."""
    heads, count, length = query.shape[1], query.shape[2], keys.shape[2]
    queries = torch.arange(start, start + count, device=query.device)[:, None]
    if length <= most:  # all are selected
        positions = torch.arange(length, device=query.device).expand(count, length)
    else:
        rows = zip(
            *(
                torch.split(each[0].transpose(0, 1), max_score_rows(heads * length))
                for each in (query, weights)
            ),
            strict=True,
        )
        keys_transposed = keys[0, 0].float().T
        parts, row_start = list[torch.Tensor](), start
        for part, each in rows:
            scores = torch.relu(part.reshape(-1, part.shape[2]).float() @ keys_transposed * scale)
            total = each.transpose(1, 2).float() @ scores.view(-1, heads, length)  # (rows, 1, length)
            row_positions = torch.arange(row_start, row_start + len(part), device=query.device)[:, None]
            future = torch.arange(length, device=query.device) > row_positions
            parts.append(total[:, 0].masked_fill(future, -torch.inf).topk(most, -1).indices)
            row_start += len(part)
        positions = torch.cat(parts)
    positions = positions.masked_fill(positions > queries, -1)
    return functional.pad(positions, (0, most - positions.shape[1]), value=-1)[None, None]


def selected_attention(
    query: torch.Tensor,  # (1, heads, count, width)
    keys: torch.Tensor,  # (1, key heads, length, width)
    values: torch.Tensor,
    selected: torch.Tensor,  # (1, 1, count, most) positions
    scale: float | None,
    start: int,
) -> torch.Tensor:
    """Attention of queries from position `start` on, as in `fusion.cached_attention_selected`. Selected positions are data of the graph and
    may be any numbers."""
    count, length = query.shape[2], keys.shape[2]
    positions = selected[0, 0]
    query_positions = torch.arange(start, start + count, device=query.device)[:, None]
    valid = (positions >= 0) & (positions <= query_positions)
    if count == 1 and length > positions.shape[1]:  # read the selected keys only
        gathered = positions[0].where(valid[0], 0)
        keys, values, mask = keys.index_select(2, gathered), values.index_select(2, gathered), valid
    else:
        mask = torch.zeros(count, length + 1, dtype=torch.bool, device=query.device)
        mask = mask.scatter(1, positions.where(valid, length), True)[:, :length]
    grouped = query.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
    )


def all_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    score_mods: ScoreMods | None = None,
) -> torch.Tensor:
    """Attention of every query to all keys; with `score_mods`, which need a scale, as in `score_mod_attention`."""
    if score_mods is not None:
        assert scale is not None
        rows = zip(*(torch.split(each, 1) for each in (query, key, value)), strict=True)
        return torch.cat([score_mod_attention(q, k, v, scale, None, None, score_mods) for q, k, v in rows])
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped)
