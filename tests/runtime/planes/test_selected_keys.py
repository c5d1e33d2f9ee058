"""Keys that are selected for each query: which they are, and attention to them, in pieces of any lengths."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion.runtime.planes import attention
from fusion.runtime.planes.kv_cache import CacheShape, SessionCache
from fusion.runtime.planes.sequences import Sequences

LENGTH, HEADS, WIDTH, MOST = 20, 16, 8, 6
SLOTS = {
    3: (CacheShape(heads=1, width=WIDTH, dtype=torch.float32),),
    7: (CacheShape(heads=2, width=WIDTH, dtype=torch.float32),) * 2,
}
PIECES = [[20], [1] * 20, [7, 1, 1, 11], [3, 17], [19, 1]]


def indexer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, LENGTH, WIDTH), (1, 1, LENGTH, WIDTH), (1, HEADS, LENGTH, 1))
    query, key, weights = (torch.randn(*shape, generator=draw) for shape in shapes)
    return query, key, weights


def visible(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(length, length) booleans, as DeepSeek-V3.2 makes them of the scores of all pairs."""
    scores = (torch.relu(query @ key.mT * 0.5) * weights).sum(1)[0]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    chosen = scores.masked_fill(~causal, -torch.inf).topk(MOST).indices
    return torch.zeros_like(causal).scatter(1, chosen, True) & causal


def new_cache() -> SessionCache:
    return SessionCache(SLOTS, LENGTH, torch.device("cpu"))


@pytest.mark.parametrize("singly", [False, True])
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_see_the_keys_that_the_whole_selects(
    pieces: list[int], singly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", 3 * HEADS * LENGTH)  # three rows at once
    given = indexer()
    q, k, v = (torch.randn(1, heads, LENGTH, WIDTH) for heads in (4, 2, 2))
    shown = visible(*given)
    cache, at, found = new_cache(), 0, []
    for count in pieces:
        part = slice(at, at + count)
        cache.begin(at, count, singly=singly)
        query, key, weights = (t[:, :, part] for t in given)
        chosen = cache.select(query, key, weights, 3, 0.5, MOST)
        assert chosen.shape == (1, 1, count, MOST) and chosen.dtype == torch.int64
        for row, places in enumerate(chosen[0, 0], at):
            assert set(places.tolist()) - {-1} == set(shown[row].nonzero()[:, 0].tolist())
        new = (k[:, :, part], v[:, :, part])
        found.append(cache.attend_selected(q[:, :, part], new, chosen, 7, 0.3))
        cache.commit()
        at += count
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    wanted = functional.scaled_dot_product_attention(q, k, v, attn_mask=shown, scale=0.3)
    torch.testing.assert_close(torch.cat(found, 2), wanted)


@pytest.mark.parametrize("count", [1, 5])
def test_what_is_no_position_that_a_query_sees_is_not_read(count: int) -> None:
    """A graph comes from a stranger: it may select any numbers."""
    q, k, v = (torch.randn(1, 2, LENGTH, WIDTH) for _ in range(3))
    cache, start = new_cache(), LENGTH - count
    cache.begin(0, start)
    cache.attend_selected(q[:, :, :start], (k[:, :, :start], v[:, :, :start]), torch.zeros(1, 1, start, 1, dtype=torch.int64), 7, None)  # fmt: skip
    cache.commit()
    cache.begin(start, count)
    wild = torch.tensor([2, 4, -1, -(1 << 62), 1 << 62, LENGTH]).expand(1, 1, count, -1)
    new = (k[:, :, start:], v[:, :, start:])
    found = cache.attend_selected(q[:, :, start:], new, wild, 7, None)
    wanted = functional.scaled_dot_product_attention(q[:, :, start:], k[:, :, [2, 4]], v[:, :, [2, 4]])
    torch.testing.assert_close(found, wanted)


def test_sequences_that_run_together_select_as_each_alone() -> None:
    several, alone = [indexer(1), indexer(2)], []
    for query, key, weights in several:
        cache = new_cache()
        cache.begin(0, LENGTH)
        alone.append(cache.select(query, key, weights, 3, 0.5, MOST))
    caches = [new_cache() for _ in several]
    for cache in caches:
        cache.begin(0, LENGTH)
    rows = 2 * LENGTH + 3  # three are padding
    joined = [functional.pad(torch.cat(each, 2), (0, 0, 0, 3)) for each in zip(*several, strict=True)]
    run = Sequences(caches, [LENGTH, LENGTH], rows, torch.tensor([LENGTH - 1, 2 * LENGTH - 1]))
    found = run.select(*joined, slot=3, scale=0.5, most=MOST)
    assert torch.equal(found[:, :, : 2 * LENGTH], torch.cat(alone, 2)) and found.shape[2] == rows


def test_half_precision_is_scored_in_float32() -> None:
    query, key, weights = indexer(3)
    halves = (query.bfloat16(), key.bfloat16())
    slots = {3: (CacheShape(heads=1, width=WIDTH, dtype=torch.bfloat16),)}
    cache = SessionCache(slots, LENGTH, torch.device("cpu"))
    cache.begin(0, LENGTH)
    found = cache.select(*halves, weights, 3, 0.5, MOST)
    cache = new_cache()
    cache.begin(0, LENGTH)
    wanted = cache.select(*(half.float() for half in halves), weights, 3, 0.5, MOST)
    assert torch.equal(found, wanted)
