"""A short convolution behind a sequence in pieces: the bits of the whole, also where positions are run again."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion.runtime.planes.kv_cache import CacheShape, SessionCache
from fusion.runtime.planes.sequences import Sequences

CHANNELS, WINDOW, LENGTH = 6, 4, 20
SLOTS = {3: (CacheShape(heads=1, width=CHANNELS, dtype=torch.float32),)}


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 1, LENGTH, CHANNELS), torch.randn(CHANNELS, 1, WINDOW), torch.randn(CHANNELS)


def run(cache: SessionCache, rows: torch.Tensor, at: int, *more: torch.Tensor) -> torch.Tensor:
    cache.begin(at, rows.shape[2])
    found = cache.convolve(rows, *more, 3)
    cache.commit()
    return found


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 1, 1, 11], [2, 18]])
def test_pieces_are_as_the_whole(pieces: list[int]) -> None:
    x, weight, bias = case()
    cache = SessionCache(SLOTS, LENGTH, torch.device("cpu"))
    found, at = [], 0
    for count in pieces:
        found.append(run(cache, x[:, :, at : at + count], at, weight, bias))
        at += count
    whole = run(SessionCache(SLOTS, LENGTH, torch.device("cpu")), x, 0, weight, bias)
    assert torch.equal(torch.cat(found, 2), whole)
    padded = functional.conv1d(x[:, 0].mT, weight, bias, padding=WINDOW - 1, groups=CHANNELS)
    torch.testing.assert_close(whole[0, 0].mT, padded[0, :, :LENGTH])


def test_positions_that_are_run_again_forget_what_was_there() -> None:
    x, weight, bias = case()
    cache = SessionCache(SLOTS, LENGTH, torch.device("cpu"))
    whole = run(cache, x, 0, weight, bias)
    run(cache, torch.full_like(x[:, :, 9:15], torch.nan), 9, weight, bias)  # guesses that were wrong
    assert torch.equal(run(cache, x[:, :, 9:], 9, weight, bias), whole[:, :, 9:])


def test_sequences_of_one_run_do_not_see_each_other() -> None:
    x, weight, bias = case()
    caches = [SessionCache(SLOTS, LENGTH, torch.device("cpu")) for _ in range(2)]
    alone = run(SessionCache(SLOTS, LENGTH, torch.device("cpu")), x[:, :, :5], 0, weight, bias)
    run(caches[1], x[:, :, 5:9], 0, weight, bias)
    for cache, start, count in ((caches[0], 0, 5), (caches[1], 4, 2)):
        cache.begin(start, count)
    rows = torch.cat([x[:, :, :5], x[:, :, 9:11], x[:, :, 10:11]], 2)  # the last is padding
    found = Sequences(caches, [5, 2], 8, torch.tensor([4, 6])).convolve(rows, weight, bias, 3)
    assert found.shape == rows.shape
    assert torch.equal(found[:, :, :5], alone)
    behind = run(SessionCache(SLOTS, LENGTH, torch.device("cpu")), x[:, :, 5:11], 0, weight, bias)
    assert torch.equal(found[:, :, 5:7], behind[:, :, 4:])
