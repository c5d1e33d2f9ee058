"""Guesses: the first stage's, the last stage's verdicts, and the tokens of an answer, which are the same with any."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.toy_ring import GREEDY, SHAPES, VOCABULARY, Refused, reference, ring_of

from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.constraint import TokenConstraint
from fusion.runtime.serving.ring.guesses import (
    FIRST_GUESSES,
    LEAST_MATCH,
    LONGEST_MATCH,
    LONGEST_PAUSE,
    MOST_GUESSES,
    RepeatDrafter,
    SampledTokens,
    SpeculationWindow,
)
from fusion.runtime.serving.ring.session import Chunk, Feed, Hop, Opening, SessionId
from fusion.runtime.serving.ring.stage_session import StageSession, _choose
from fusion.swarm.transport import PeerId

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


class Oracle:
    """Knows the answer, and says something else now and then."""

    least = 0

    def __init__(
        self, prompt: Sequence[int], answer: Sequence[int], chance: random.Random, wrong: float
    ) -> None:
        self._at, self._text = len(prompt), [*prompt, *answer]
        self._chance, self._wrong = chance, wrong

    def push(self, token: int) -> None:
        self._at += 1

    def propose(self, ahead: Sequence[int], most: int) -> list[int]:
        begin = self._at + len(ahead)
        right = self._text[begin : begin + self._chance.randrange(most + 1)]
        return [t if self._chance.random() >= self._wrong else t + 1 for t in right]


def answer_of(
    prompt: Sequence[int],
    count: int,
    feed: Feed,
    choose: Callable[[Sequence[int]], int],
    chance: random.Random,
) -> tuple[list[int], int]:
    """The tokens that a ring gives whose stages take their time, and how many turns the last one had. What a stage was fed
    stands for its cache."""
    under_way: deque[tuple[Chunk, Sequence[int]]] = deque()
    coming: deque[tuple[int, list[int]]] = deque()
    sampled, cache, answer, turns = SampledTokens(len(prompt)), list[int](), list[int](), 0

    def put_in() -> None:
        while (step := feed.next(7, 64)) is not None:
            under_way.append(step)

    put_in()
    while len(answer) < count:
        if coming and (not under_way or chance.random() < 0.5):
            position, chosen = coming.popleft()
            for place, token in enumerate(chosen, position):
                feed.push(place, token)
            put_in()
            continue
        chunk, ids = under_way.popleft()
        stale = chunk.sample and (
            chunk.start >= sampled.next
            or any(
                not sampled.holds(p, t)
                for p, t in zip(
                    range(chunk.end - len(chunk.guesses), sampled.next), chunk.guesses, strict=False
                )
            )
        )
        if stale:
            continue
        assert chunk.start <= len(cache) and chunk.length == len(ids)
        cache[chunk.start :] = ids
        turns += 1
        if not chunk.sample:
            continue
        first = max(chunk.start, sampled.next - 1) if chunk.guesses else chunk.end - 1
        chosen = []
        for place in range(first, chunk.end):
            token = choose(cache[: place + 1])
            sampled.push(token)
            chosen.append(token)
            if place + 1 < chunk.end and cache[place + 1] != token:
                break
        answer += chosen
        coming.append((len(prompt) + len(answer) - len(chosen), chosen))
    return answer[:count], turns


def hashed(text: Sequence[int]) -> int:
    return hashlib.blake2b(bytes(text)).digest()[0] % 3


@given(
    prompt=tokens,
    count=st.integers(1, 60),
    wrong=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_guesses_change_no_token(prompt: list[int], count: int, wrong: float, seed: int) -> None:
    plain = list(prompt)
    for _ in range(count):
        plain.append(hashed(plain))
    chance = random.Random(seed)
    drafter = Oracle(prompt, plain[len(prompt) :], chance, wrong)
    feed = Feed(prompt, recompute=False, drafter=drafter, capacity=len(prompt) + count)
    found, turns = answer_of(prompt, count, feed, hashed, chance)
    assert found == plain[len(prompt) :]
    assert turns <= -(-len(prompt) // 7) + 2 * count


@given(prompt=tokens, count=st.integers(1, 60), seed=st.integers(0, 99))
def test_repeats_are_guessed_and_change_no_token(prompt: list[int], count: int, seed: int) -> None:
    def choose(text: Sequence[int]) -> int:
        return text[-len(prompt)]

    feed = Feed(prompt, recompute=False, drafter=RepeatDrafter(prompt), capacity=len(prompt) + count)
    found, _ = answer_of(prompt, count, feed, choose, random.Random(seed))
    assert found == (prompt * (count // len(prompt) + 1))[:count]


def test_a_copy_takes_few_turns() -> None:
    prompt = random.Random(3).sample(range(1000), 200)
    feed = Feed(
        [*prompt, *prompt[:5]], recompute=False, drafter=RepeatDrafter([*prompt, *prompt[:5]]), capacity=400
    )
    found, turns = answer_of([*prompt, *prompt[:5]], 190, feed, lambda text: text[-200], random.Random(1))
    assert found == prompt[5:195]
    assert turns < 30 + 60  # of the prompt and of the answer


def test_nothing_is_fed_beyond_the_last_but_one_position() -> None:
    drafter = RepeatDrafter([1, 2, 3] * 5)
    feed = Feed([1, 2, 3] * 5, recompute=False, drafter=drafter, capacity=18)
    feed.next(99)
    feed.push(15, 1)
    step = feed.next(99, 64)
    assert step is not None and step[0].end == 17 and step[1] == [1, 2]
    assert feed.next(99, 64) is None


def test_where_others_decode_fewer_guesses_are_under_way() -> None:
    text = [1, 2, 3, 4] * 8
    feed = Feed(text, recompute=False, drafter=RepeatDrafter(text), capacity=200)
    feed.next(99)
    feed.push(32, 1)
    step = feed.next(99, 2)
    assert step is not None and step[1] == [1, 2, 3]


@given(text=tokens, most=st.integers(0, 20))
def test_what_is_proposed_followed_the_longest_match(text: list[int], most: int) -> None:
    proposed = RepeatDrafter(text).propose([], most)
    ends = [
        end for end in range(LEAST_MATCH, len(text)) if text[end - LEAST_MATCH : end] == text[-LEAST_MATCH:]
    ]
    if len(text) <= LEAST_MATCH or not ends:
        assert proposed == []
        return

    def length(end: int) -> int:
        return max(n for n in range(end + 1) if text[end - n : end] == text[len(text) - n :])

    best = max(length(end) for end in ends[-8:])
    assert len(proposed) <= most
    if most:
        whole = list(text)
        found = []
        for end in ends[-8:]:
            if length(end) == best:
                copied = list(whole)
                for _ in proposed:
                    copied.append(copied[len(copied) - (len(whole) - end)])
                found.append(copied[len(whole) :])
        assert proposed and proposed in found


def test_the_longer_the_match_the_more_is_proposed() -> None:
    text = random.Random(0).sample(range(1000), 200)
    lengths = [len(RepeatDrafter([*text, 1001, *text[:n]]).propose([], 99)) for n in (2, 3, 10, 40, 150)]
    assert lengths == [0, 3, 10, 40, LONGEST_MATCH]


def test_the_allowance_follows_what_becomes_of_guesses() -> None:
    window = SpeculationWindow()
    assert window.most == FIRST_GUESSES
    for _ in range(100):
        window.right()
    assert window.most == MOST_GUESSES
    pauses = []
    for _ in range(14):
        window.wrong()
        pause = 0
        while not window.most:
            window.token()
            pause += 1
        pauses.append(pause)
    assert pauses[0] == 0 and pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE
    window.right()
    assert window.most == 2


# --- in the ring


PENALISED = Sampling(temperature=0.5, repetition_penalty=0.7, presence_penalty=-0.5, seed=2)


@pytest.mark.parametrize(
    ("sampling", "shape"),
    [
        *((GREEDY, shape) for shape in SHAPES),
        *((PENALISED, shape) for shape in ("two", "skip")),
        *(
            pytest.param(sampling, shape, marks=pytest.mark.slow)
            for sampling in (PENALISED, Sampling(temperature=0.6, top_k=3, seed=5))
            for shape in SHAPES
            if sampling != PENALISED or shape not in ("two", "skip")
        ),
    ],
)
def test_a_ring_gives_the_same_tokens_with_guesses(shape: str, sampling: Sampling) -> None:
    stages = SHAPES[shape]
    chunks: list[int] = []

    async def main() -> None:
        async with ring_of(
            stages,
            max_sequence=400,
            on_run=lambda i, _, start, length: chunks.append(length) if i == 0 else None,
        ) as ring:
            for prompt in ([3, 1, 2] * 6, list(range(17))):
                plain = await ring.generate(prompt, 120, sampling=sampling)
                before = len(chunks)
                assert await ring.generate(prompt, 120, guesses=True, sampling=sampling) == plain
                if not sampling.penalises:
                    assert plain == reference(stages, prompt, 120, sampling)
                assert any(length > 1 for length in chunks[before + 5 :]) or len(set(plain)) > 20
            await ring.freed()

    asyncio.run(main())


def test_guesses_behind_the_last_token_of_an_answer_are_nobody_s_fault() -> None:
    """A text of 97 tokens again and again, whose end token is guessed like all others, wherever in a chunk it comes."""

    async def main() -> None:
        stages = SHAPES["one"]
        text = [12, 24, 28, 13, 1, 8, 30]
        text += reference(stages, text, 330)
        assert text[-97:] == text[-194:-97]
        end = next(token for token in text[-97:] if text[-97:].count(token) == 1)
        last = len(text) - 97 + text[-97:].index(end)
        async with ring_of(stages, max_sequence=600, end_tokens=(end,)) as ring:
            for length in range(28, 44):
                prompt = text[: last + 1 - length]
                streams, opening = await ring.connect(), ring.opening(prompt, 90)
                await ring.open(streams, opening)
                await ring.prompt(streams, opening, prompt, guesses=True)
                assert await ring.tokens(streams[-1]) == text[last + 1 - length : last + 1]
                assert await ring.generate([3], 5) == reference(stages, [3], 5)
                await streams[0].send("close", {"session": opening.session})
            await ring.freed()

    asyncio.run(main())


def test_sessions_with_guesses_and_without_share_a_ring() -> None:
    async def main() -> None:
        stages = SHAPES["skip"]
        async with ring_of(stages, max_sequence=200) as ring:
            prompts = [[(i * 7 + j % 4) % VOCABULARY for j in range(4 + i * 2)] for i in range(8)]
            answers = await asyncio.gather(
                *(ring.generate(p, 60, guesses=i % 3 > 0) for i, p in enumerate(prompts))
            )
            assert answers == [reference(stages, p, 60) for p in prompts]
            await ring.freed()

    asyncio.run(main())


@pytest.mark.parametrize(
    "header",
    [
        {"guesses": [1] * 16, "length": 16},
        {"guesses": [VOCABULARY], "length": 2},
        {"guesses": [True], "length": 2},
        {"guesses": [1], "length": 3},
        {"guesses": "12", "length": 3},
    ],
)
def test_guesses_that_are_none_end_the_link(header: dict[str, object]) -> None:
    """A stage that sends them is one that lies: the session fails in one line and the ring goes on."""

    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            streams = await ring.connect()
            opening = ring.opening([1, 2], 9)
            await ring.open(streams, opening)
            first = ring.rings[0]._sessions.schedule.sessions[opening.session]
            _, link = first.hops[0]
            link.post(
                "chunk",
                {"session": opening.session, "start": 0, "sample": True, **header},
                [bytes(12 * int(header["length"]))],
            )  # type: ignore[call-overload]
            with pytest.raises(Refused, match="vanished"):
                await ring.tokens(streams[0])
            for stream in streams:
                await stream.send("close", {"session": opening.session})
            assert await ring.generate([3], 5) == reference(SHAPES["two"], [3], 5)

    asyncio.run(main())


class Masks:
    """A grammar after which an answer may end or go on, that says what it allows once after each token."""

    accepts, complete = True, False

    def __init__(self) -> None:
        self.told = False

    def mask(self) -> bytes:
        assert not self.told, "whoever asks again waits until the grammar is given up"
        self.told = True
        return b"\xff" * 8

    def push(self, token: int) -> None:
        self.told = False


def test_a_guess_behind_the_end_of_a_constrained_answer_is_not_looked_at() -> None:
    end, grammar = 3, Masks()
    gateway: Any = SimpleNamespace(stream=SimpleNamespace(remote="gateway"))
    route = (Hop(PeerId("p0"), 1),)
    opening = Opening(
        session=SessionId("s"), route=route, prompt_length=2, max_tokens=9, sampling=GREEDY, schema_bytes=2
    )
    session = StageSession(opening, gateway, constraint=TokenConstraint(grammar, VOCABULARY, (end,)))  # type: ignore[arg-type]
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 4] = logits[1, end] = logits[2, 5] = 1.0
    chosen = list(_choose(session, Chunk(1, 3, sample=True, guesses=(4, end), number=1), logits))
    assert [(token.id, token.complete) for token in chosen] == [(4, False), (end, True)]
