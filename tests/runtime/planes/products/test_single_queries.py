"""Attention of single positions: that of torch, and each position's the same bits in any company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from fusion.runtime.planes.attention import ScoreMods, score_mod_attention, single_attention, supports_single
from fusion.runtime.planes.kv_cache import CacheShape, SessionCache
from fusion.runtime.planes.products import machine_code
from fusion.runtime.planes.products.single_queries import attend, supports
from fusion.runtime.planes.sequences import Sequences


class Case(NamedTuple):
    query: torch.Tensor
    new: list[torch.Tensor]
    kept: list[list[torch.Tensor]]
    at: Sequence[int]

    def copied(self) -> list[list[torch.Tensor]]:
        return [[tensor.clone() for tensor in each] for each in self.kept]

    def row(self, row: int) -> Case:
        part = slice(row, row + 1)
        new = [each[:, :, part] for each in self.new]
        return Case(self.query[:, :, part], new, self.kept[part], self.at[part])


def case(
    groups: int, each: int, width: int, value_width: int, at: Sequence[int], spread: float = 1.0
) -> Case:
    made = torch.Generator().manual_seed(width)
    count = len(at)

    def rows(heads: int, wide: int) -> torch.Tensor:  # laid out as the rows of a matrix product are
        return (spread * torch.randn(1, count, heads, wide, generator=made)).transpose(1, 2)

    kept = [
        [torch.randn(1, groups, end + 1 + end % 5, wide, generator=made) for wide in (width, value_width)]
        for end in at
    ]
    return Case(rows(groups * each, width), [rows(groups, width), rows(groups, value_width)], kept, at)


def expected(given: Case, row: int, scale: float | None, window: int | None) -> torch.Tensor:
    """In float64, from what is kept once the new position is there."""
    end = given.at[row] + 1
    first = 0 if window is None else max(0, end - window)
    held = []
    for tensor, new in zip(given.kept[row], given.new, strict=True):
        whole = tensor.clone()
        whole[:, :, end - 1] = new[:, :, row]
        held.append(whole[:, :, first:end].double())
    query = given.query[:, :, row : row + 1].double()
    return functional.scaled_dot_product_attention(query, *held, scale=scale, enable_gqa=True)


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 140),
    st.integers(1, 140),
    st.lists(st.integers(0, 130), min_size=1, max_size=5),
    st.none() | st.floats(0.01, 2.0),
    st.none() | st.integers(1, 140),
)
def test_it_is_that_of_torch(
    groups: int,
    each: int,
    width: int,
    value_width: int,
    at: list[int],
    scale: float | None,
    window: int | None,
) -> None:
    made = case(groups, each, width, value_width, at)
    kept = made.copied()
    found = attend(made.query, made.new, kept, at, scale, window)
    assert found.shape == (1, groups * each, len(at), value_width)
    for row, end in enumerate(at):
        torch.testing.assert_close(
            found[:, :, row : row + 1].double(), expected(made, row, scale, window), atol=2e-5, rtol=1e-5
        )
        for was, now, new in zip(made.kept[row], kept[row], made.new, strict=True):
            assert torch.equal(now[:, :, end], new[:, :, row])
            now[:, :, end] = was[:, :, end]
            assert torch.equal(now, was)  # nothing else is written


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 70),
    st.lists(st.integers(0, 90), min_size=1, max_size=4),
    st.none() | st.floats(0.5, 60.0),
    st.sampled_from(("slopes", "sinks", "neither")),
    st.none() | st.integers(1, 100),
)
def test_scores_are_capped_sloped_and_drained_as_step_by_step(
    groups: int, each: int, width: int, at: list[int], cap: float | None, more: str, window: int | None
) -> None:
    made, kept = (case(groups, each, width, width, at, 2.0) for _ in range(2))
    heads, scale = groups * each, 0.7
    slopes = tuple(2.0 ** -(head + 1) for head in range(heads)) if more == "slopes" else None
    sinks = torch.linspace(-2, 3, heads) if more == "sinks" else None
    found = single_attention(
        made.query, made.new, kept.kept, at, scale, window, ScoreMods(sinks, cap, slopes)
    )
    for row, end in enumerate(at):
        first = 0 if window is None else max(0, end + 1 - window)
        held = [each[:, :, first : end + 1].double() for each in kept.kept[row]]  # with what is new
        far = None
        if slopes is not None:
            distance = torch.arange(first - end, 1, dtype=torch.float64)
            far = (torch.tensor(slopes, dtype=torch.float64)[:, None] * distance)[None, :, None]
        scored = ScoreMods(None if sinks is None else sinks.double(), cap)
        one = score_mod_attention(
            made.query[:, :, row : row + 1].double(), held[0], held[1], scale, None, far, scored
        )
        torch.testing.assert_close(found[:, :, row : row + 1].double(), one, atol=1e-4, rtol=1e-4)


def test_a_position_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(3, 2, 40, 72, (5, 0, 300, 64, 63))
    whole = attend(made.query, made.new, made.copied(), made.at, None, None)
    for row in range(len(made.at)):
        alone = made.row(row)
        assert torch.equal(
            attend(alone.query, alone.new, alone.copied(), alone.at, None, None), whole[:, :, row : row + 1]
        )
    dense = [each.contiguous() for each in (made.query, *made.new)]
    assert torch.equal(attend(dense[0], dense[1:], made.copied(), made.at, None, None), whole)
    crossed = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (made.query, *made.new)]
    assert torch.equal(attend(crossed[0], crossed[1:], made.copied(), made.at, None, None), whole)
    monkeypatch.setattr(machine_code, "_THREAD_MULTIPLY_ADDS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(attend(made.query, made.new, made.copied(), made.at, None, None), whole)
    finally:
        torch.set_num_threads(before)


def test_several_positions_of_one_sequence_see_those_before_them() -> None:
    made = case(2, 2, 16, 16, (9,))
    (kept,), count = made.copied(), 4
    new = [torch.randn(1, 2, count, 16) for _ in range(2)]
    query = torch.randn(1, 4, count, 16)
    found = attend(query, new, [kept] * count, range(5, 9), None, None)
    (one,) = made.copied()
    for row in range(count):
        part = slice(row, row + 1)
        alone = attend(query[:, :, part], [each[:, :, part] for each in new], [one], [5 + row], None, None)
        assert torch.equal(alone, found[:, :, part])
    assert all(torch.equal(*each) for each in zip(kept, one, strict=True))


@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4])
def test_scores_far_apart_weigh_as_they_should(spread: float) -> None:
    made = case(2, 1, 32, 48, (200, 70), spread)
    found = attend(made.query, made.new, made.copied(), made.at, None, None)
    for row in range(2):
        torch.testing.assert_close(
            found[:, :, row : row + 1].double(), expected(made, row, None, None), atol=1e-3, rtol=1e-3
        )
    assert found.isfinite().all()


def test_what_is_no_number_stays_none() -> None:
    made = case(1, 1, 16, 16, (40, 20))
    kept = made.copied()
    kept[0][0][0, 0, 7, 3] = math.nan
    found = attend(made.query, made.new, kept, made.at, None, None)
    assert found[:, :, 0].isnan().all()
    assert found[:, :, 1].isfinite().all()


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    made = case(2, 2, 16, 24, (5, 9))
    keys, values = made.new
    room = made.kept[1][0].shape[2]
    for query, new, kept, at in (
        (made.query, [keys[:, :1], values], made.kept, made.at),
        (made.query, [keys, values[:, :, :1]], made.kept, made.at),
        (made.query, [values, keys], made.kept, made.at),
        (made.query[:, :3], made.new, made.kept, made.at),
        (made.query[..., :8], made.new, made.kept, made.at),
        (made.query[:, :, :1], made.new, made.kept, made.at),
        (made.query, made.new, made.kept, (5, room)),
        (made.query, made.new, made.kept, (5, -1)),
        (made.query, made.new, [made.kept[0][::-1], made.kept[1]], made.at),
        (made.query, [keys.double(), values], made.kept, made.at),
    ):
        with pytest.raises(ValueError, match="position"):
            attend(query, new, kept, at, None, None)
    for sinks, slopes in ((torch.zeros(3), None), (None, (0.5,))):
        with pytest.raises(ValueError, match="not one for each of 4 heads"):
            attend(made.query, made.new, made.kept, made.at, None, None, sinks, None, slopes)


def test_it_is_for_float32_with_keys_and_values_alone() -> None:
    made = case(1, 1, 16, 16, (3,))
    keys, values = made.kept[0]
    assert supports(made.query, (keys, values))
    assert not supports(made.query, (keys, values, values))
    assert not supports(made.query, (keys,))
    assert not supports(made.query.bfloat16(), (keys.bfloat16(), values.bfloat16()))
    assert not supports(made.query.to("meta"), (keys, values))
    assert supports_single(made.query, (keys, values), ScoreMods(softcap=5.0))
    assert not supports_single(made.query, (keys, values), ScoreMods(relative=torch.zeros(3, 1)))


@pytest.mark.parametrize("scored", [None, ScoreMods(softcap=3.0)])
def test_tokens_beside_a_prompt_have_the_bits_that_they_have_among_tokens(scored: ScoreMods | None) -> None:
    shapes = {0: (CacheShape(2, 16, torch.float32), CacheShape(2, 24, torch.float32))}
    lengths, starts = (1, 1, 3, 1), (4, 0, 2, 9)
    made = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, sum(lengths), 16, generator=made)
    new = [torch.randn(1, 2, sum(lengths), width, generator=made) for width in (16, 24)]

    def seen(pieces: Sequence[int], singly: bool) -> list[torch.Tensor]:
        caches, rows = list[SessionCache](), list[int]()
        for piece in pieces:
            cache = SessionCache(shapes, 20, torch.device("cpu"))
            before = torch.Generator().manual_seed(piece)
            cache.begin(0, starts[piece])
            for tensor in cache.memory(0):
                tensor.copy_(torch.randn(tensor.shape, generator=before))
            cache.commit()
            cache.begin(starts[piece], lengths[piece], singly=singly)
            caches.append(cache)
            first = sum(lengths[:piece])
            rows += range(first, first + lengths[piece])
        padded = [*rows, rows[-1]]
        state = Sequences(caches, [lengths[piece] for piece in pieces], len(padded), torch.tensor([0]))
        found = state.attend(query[:, :, padded], [each[:, :, padded] for each in new], 0, 0.3, None, scored)
        assert found.shape == (1, 4, len(padded), 24)
        return list(torch.split(found, [*(lengths[piece] for piece in pieces), 1], 2))[:-1]

    tokens, mixed, all_singly = seen((0, 1, 3), False), seen((0, 1, 2, 3), False), seen((0, 1, 2, 3), True)
    for one, other, third in zip(tokens, mixed[:2] + mixed[3:], all_singly[:2] + all_singly[3:], strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    torch.testing.assert_close(mixed[2], all_singly[2])


def test_a_scale_that_no_float_holds_is_infinite_as_it_is_to_torch() -> None:
    made = case(1, 1, 16, 16, (0,))
    assert torch.equal(attend(made.query, made.new, made.copied(), (0,), 1e-300, None), made.new[1])
    assert attend(made.query, made.new, made.copied(), (0,), 1e300, None).isnan().all()
