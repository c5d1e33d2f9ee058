"""One session's draft: what the model reads is the text, whatever was guessed and proved wrong meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.drafts.draft_length import FIRST_DRAFTED, MOST_HOPED
from fusion.runtime.serving.drafts.drafter import STEP_POSITIONS, DraftStep, ModelDrafter
from fusion.runtime.serving.ring.guesses import RepeatDrafter

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=80)


class Silent:
    """Nothing repeats."""

    def push(self, token: int) -> None: ...

    def propose(self, ahead: Sequence[int], most: int) -> list[int]:
        return []


def drafter_of(prompt: Sequence[int], capacity: int = 1000) -> ModelDrafter:
    return ModelDrafter("s", prompt, Silent(), capacity)


def step_of(drafter: ModelDrafter, most: int = 8, room: int = STEP_POSITIONS) -> DraftStep:
    step = drafter.next_step(most, room, None)
    assert step is not None
    return step


class Cache:
    """What the model holds, as a KV cache does: positions may come again, and never leave a gap."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def run(self, step: DraftStep) -> None:
        assert step.start <= len(self.held) and step.ids
        self.held[step.start :] = step.ids


@given(prompt=tokens, answer=tokens, seed=st.integers(0, 999), wrong=st.sampled_from([0.0, 0.3, 1.0]))
def test_a_guess_follows_what_the_model_has_read(
    prompt: list[int], answer: list[int], seed: int, wrong: float
) -> None:
    """Tokens come while the model runs; some guesses are wrong; repeats are guessed between."""
    chance, cache = random.Random(seed), Cache()
    drafter = ModelDrafter("s", prompt, RepeatDrafter(prompt, least=8), 10_000)
    known, ahead = list(prompt), list[int]()
    for token in answer:
        for _ in range(chance.randrange(4)):
            step = drafter.next_step(6, chance.randrange(1, 20), None)
            if step is None:
                break
            cache.run(step)
            text = [*known, *drafter._expected]
            assert cache.held == text[: step.end]
            assert step.last == (step.end == len(text))
            if chance.random() < 0.2:
                continue  # nobody hears of what it said
            rest = answer[len(known) - len(prompt) :]
            behind = max(0, step.end - len(known))
            right = rest[behind] if behind < len(rest) else 0
            drafter.drafted(step, right if chance.random() >= wrong else 9)
        ahead += drafter.propose(ahead, max(0, 5 - len(ahead)))
        assert drafter._expected[: len(ahead)] == ahead
        drafter.push(token)
        known.append(token)
        if ahead and ahead[0] == token:
            del ahead[0]
        else:
            ahead.clear()


def test_it_drafts_behind_what_is_under_way_until_enough_is_there() -> None:
    drafter, said = drafter_of([1, 2, 3]), []
    for token in (4, 5, 6):
        step = step_of(drafter, 3)
        said.append((step.start, step.ids))
        drafter.drafted(step, token)
    assert said == [(0, (1, 2, 3)), (3, (4,)), (4, (5,))]
    assert drafter.next_step(3, 9, None) is None
    assert drafter.propose([], 2) == [4, 5] and drafter.propose([4, 5], 9) == [6]


def test_what_was_drafted_for_a_text_that_is_none_is_dropped() -> None:
    drafter = drafter_of([1, 2, 3])
    drafter.drafted(step_of(drafter), 4)
    late = step_of(drafter)
    drafter.push(7)
    drafter.drafted(late, 5)
    assert drafter.propose([], 9) == []
    again = step_of(drafter)
    assert (again.start, again.ids) == (3, (7,))
    drafter.drafted(again, 8)
    assert drafter.propose([], 9) == [8]


def test_a_right_token_that_comes_meanwhile_drops_nothing() -> None:
    drafter = drafter_of([1, 2, 3])
    drafter.drafted(step_of(drafter), 4)
    under_way = step_of(drafter)
    drafter.push(4)
    drafter.drafted(under_way, 5)
    assert drafter.propose([], 9) == [5]


def test_what_was_drafted_is_no_guess_behind_a_repeat_that_was_guessed_meanwhile() -> None:
    class Repeats(Silent):
        found = (7, 8)

        def propose(self, ahead: Sequence[int], most: int) -> list[int]:
            found, self.found = list(self.found), ()
            return found

    drafter = ModelDrafter("s", [1, 2, 3], Repeats(), 1000)
    step = step_of(drafter)
    assert drafter.propose([], 9) == [7, 8]
    drafter.drafted(step, 4)  # for the place of the 7
    assert drafter.propose([7, 8], 9) == []


def test_a_long_prompt_is_read_in_steps_and_nothing_beyond_the_capacity() -> None:
    drafter = drafter_of([0] * 70, capacity=71)
    ends = []
    while (step := drafter.next_step(9, STEP_POSITIONS, None)) is not None:
        ends.append((step.end, step.last))
        drafter.drafted(step, 1)
    assert ends == [(32, False), (64, False), (70, True), (71, True)]
    assert drafter_of([0] * 70, capacity=70).next_step(9, 9, None) is None


def test_where_the_text_repeats_nothing_is_drafted() -> None:
    text = [*range(20), *range(10)]
    drafter = ModelDrafter("s", text, RepeatDrafter(text, least=8), 99)
    assert drafter.propose([], 4) == [10, 11, 12, 13]
    assert drafter.next_step(9, 9, None) is None
    drafter.push(99)
    assert drafter.propose([], 4) == []
    assert step_of(drafter, room=99).ids == (*text, 99)


@pytest.mark.parametrize("trip", [0.0001, 0.01])
def test_no_step_where_it_would_hold_up_more_than_it_saves(trip: float) -> None:
    drafter = drafter_of([1, 2, 3])
    drafter.trips.fed(3, 0.0)
    drafter.trips.returned(3, trip)
    assert (drafter.next_step(9, 9, 0.001) is not None) == (trip > 0.001)


def test_guesses_that_are_wrong_are_drafted_less_far() -> None:
    drafter = drafter_of([1])
    for position in range(60):
        drafter.drafted(step_of(drafter), 5)
        drafter.trips.fed(position + 1, 0.0)
        drafter.push(6)
        drafter.trips.returned(position + 1, 0.1)
    drafter.drafted(step_of(drafter), 5)
    assert drafter.next_step(9, 9, 0.001) is None


def test_where_a_fair_share_of_guesses_is_right_a_wrong_one_changes_nothing() -> None:
    drafter = drafter_of([1])
    assert drafter.least == FIRST_DRAFTED
    drafter.trips.fed(1, 0.0)
    drafter.trips.returned(1, 0.4)
    for right in (True, False) * 20:
        drafter.drafted(step_of(drafter), 5)
        drafter.next_step(0, 9, 0.001)
        drafter.push(5 if right else 6)
    assert 1 < drafter.least <= MOST_HOPED
    for _ in range(20):
        drafter.drafted(step_of(drafter), 5)
        drafter.push(6)
    assert drafter.least == 0


def test_one_that_was_stopped_drafts_no_more() -> None:
    drafter = drafter_of([1, 2, 3])
    step = step_of(drafter)
    drafter.stop()
    drafter.drafted(step, 4)
    assert drafter.propose([], 9) == [] and drafter.next_step(9, 9, None) is None and not drafter.least
