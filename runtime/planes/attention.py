"""Attention of queries to keys and values that are given: what the scores are made of, and what is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from fusion.runtime.planes.products import single_queries

MOST_SCORES = 1 << 22  # at once, where they are computed one by one: 16 MB of float32


class Scored(NamedTuple):
    """What makes the scores of `fusion.cached_attention_scored` and `fusion.cached_attention_relative` other than plain ones,
    but for the bias of each key."""

    sinks: torch.Tensor | None = None
    softcap: float | None = None
    slopes: Sequence[float] | None = None
    # (distances, heads): what is added where the key is so many positions before the query, the last for all that are further
    relative: torch.Tensor | None = None

    def of(self, heads: slice) -> Scored:
        """Of these heads alone."""
        sinks = None if self.sinks is None else self.sinks[heads]
        slopes = None if self.slopes is None else self.slopes[heads]
        relative = None if self.relative is None else self.relative[:, heads]
        return Scored(sinks, self.softcap, slopes, relative)

    def by_distance(self, first: int, count: int, length: int) -> torch.Tensor | None:
        """(1, heads, count, length): `relative` for queries of which the first is `first` positions behind the first key."""
        if self.relative is None:
            return None
        device = self.relative.device
        queries = torch.arange(first, first + count, device=device)[:, None]
        distance = (queries - torch.arange(length, device=device)).clamp(0, len(self.relative) - 1)
        return self.relative[distance].permute(2, 0, 1)[None]


def supports_single(query: torch.Tensor, held: Sequence[torch.Tensor], scored: Scored | None) -> bool:
    """Whether `single_attention` is for these."""
    return (scored is None or scored.relative is None) and single_queries.supports(query, held)


def single_attention(
    query: torch.Tensor,  # (1, heads, positions, width)
    new: Sequence[torch.Tensor],  # keys and values of these positions
    kept: Sequence[Sequence[torch.Tensor]],  # of each position's sequence
    at: Sequence[int],  # the positions there
    scale: float | None,
    window: int | None,
    scored: Scored | None,
) -> torch.Tensor:
    """What is new is stored; then each position sees all of its sequence up to itself, with the bits of a run of its own."""
    of = scored or Scored()
    return single_queries.attend(query, new, kept, at, scale, window, of.sinks, of.softcap, of.slopes)


def most_scored(length: int) -> int:
    """Rows of so many scores each, over all heads, that are computed at once: one at least."""
    return max(1, MOST_SCORES // length)


def scored_attention(
    query: torch.Tensor,  # (1, heads, count, width)
    keys: torch.Tensor,  # (1, key heads, length, width)
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,  # (count, length) booleans, True where a query may look
    bias: torch.Tensor | None,  # (1, heads or 1, 1, length)
    scored: Scored,
    ahead: int = 0,  # of the first key, the first query
) -> torch.Tensor:
    """Step by step as models write it out, each step in the dtype of the scores; so many rows at a time that the scores
    of a long sequence take little memory."""
    heads, length = query.shape[1], keys.shape[2]
    groups = keys.shape[1]
    sinks = None if scored.sinks is None else scored.sinks.view(1, heads, 1, 1)
    across = keys[0].transpose(1, 2)  # (key heads, width, length)
    found = []
    at = 0
    for rows in torch.split(query, most_scored(heads * length), 2):
        count = rows.shape[2]
        together = rows.reshape(groups, heads // groups * count, -1)
        scores = torch.bmm(together, across).view(1, heads, count, length)
        if scale != 1:
            scores = scores * scale
        if scored.softcap is not None:
            scores = torch.tanh(scores / scored.softcap) * scored.softcap
        if bias is not None:
            scores = scores + bias
        if (far := scored.by_distance(ahead + at, count, length)) is not None:
            scores = scores + far
        if mask is not None:
            scores = scores.masked_fill(~mask[at : at + count], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.expand(1, heads, count, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :length].to(values.dtype)
        seen = torch.bmm(weights.reshape(groups, heads // groups * count, length), values[0])
        found.append(seen.view(1, heads, count, -1))
        at += count
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def best_keys(
    query: torch.Tensor,  # (1, heads, count, width)
    keys: torch.Tensor,  # (1, 1, length, width)
    weights: torch.Tensor,  # (1, heads, count, 1)
    scale: float,
    most: int,
    start: int,
) -> torch.Tensor:
    """Of queries at positions `start` and on, as of `fusion.cached_selection`: (1, 1, count, most)."""
    heads, count, length = query.shape[1], query.shape[2], keys.shape[2]
    queries = torch.arange(start, start + count, device=query.device)[:, None]
    if length <= most:  # whatever their scores are
        found = torch.arange(length, device=query.device).expand(count, length)
    else:
        rows = zip(
            *(torch.split(each[0].transpose(0, 1), most_scored(heads * length)) for each in (query, weights)),
            strict=True,
        )
        across = keys[0, 0].float().T
        parts, at = list[torch.Tensor](), start
        for part, each in rows:
            scores = torch.relu(part.reshape(-1, part.shape[2]).float() @ across * scale)
            total = each.transpose(1, 2).float() @ scores.view(-1, heads, length)  # (rows, 1, length)
            own = torch.arange(at, at + len(part), device=query.device)[:, None]
            later = torch.arange(length, device=query.device) > own
            parts.append(total[:, 0].masked_fill(later, -torch.inf).topk(most, -1).indices)
            at += len(part)
        found = torch.cat(parts)
    found = found.masked_fill(found > queries, -1)
    return functional.pad(found, (0, most - found.shape[1]), value=-1)[None, None]


def selected_attention(
    query: torch.Tensor,  # (1, heads, count, width)
    keys: torch.Tensor,  # (1, key heads, length, width)
    values: torch.Tensor,
    selected: torch.Tensor,  # (1, 1, count, most) positions
    scale: float | None,
    start: int,
) -> torch.Tensor:
    """Of queries at positions `start` and on, as of `fusion.cached_attention_selected`. What a graph selects may be any numbers."""
    count, length = query.shape[2], keys.shape[2]
    places = selected[0, 0]
    own = torch.arange(start, start + count, device=query.device)[:, None]
    known = (places >= 0) & (places <= own)
    if count == 1 and length > places.shape[1]:  # the others need not be read
        at = places[0].where(known[0], 0)
        keys, values, mask = keys.index_select(2, at), values.index_select(2, at), known
    else:
        mask = torch.zeros(count, length + 1, dtype=torch.bool, device=query.device)
        mask = mask.scatter(1, places.where(known, length), True)[:, :length]
    grouped = query.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
    )


def all_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    scored: Scored | None = None,
) -> torch.Tensor:
    """Every query to all keys; step by step, as models write it out, where `scored` is given, which goes with a scale."""
    if scored is not None:
        assert scale is not None
        rows = zip(*(torch.split(each, 1) for each in (query, key, value)), strict=True)
        return torch.cat([scored_attention(q, k, v, scale, None, None, scored) for q, k, v in rows])
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped)
