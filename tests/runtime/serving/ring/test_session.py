from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.request import (
    GenerateRequest,
    Sampling,
    check_prompt,
    pack_tokens,
    unpack_tokens,
)
from fusion.runtime.serving.ring.session import Chunk, Feed, Hop, Opening, SessionId
from fusion.swarm.transport import PeerId

ids = st.lists(st.integers(0, 2**40), min_size=1, max_size=60)


@given(prompt=ids, answer=ids, chunk=st.integers(1, 20))
def test_every_position_is_fed_once_in_order_and_only_the_newest_is_sampled_after(
    prompt: list[int], answer: list[int], chunk: int
) -> None:
    feed = Feed(prompt, recompute=False)
    fed: list[int] = []
    sampled = []
    for token in answer:
        while (step := feed.next(chunk)) is not None:
            part, tokens = step
            assert part.start == len(fed) and part.length == len(tokens) <= chunk
            fed += tokens
            if part.sample:
                sampled.append(part.end)
        feed.push(len(fed), token)
    assert fed == (prompt + answer)[:-1]
    assert sampled == list(range(len(prompt), len(prompt) + len(answer)))


def test_without_a_cache_every_chunk_is_the_whole_sequence() -> None:
    feed = Feed([1, 2, 3], recompute=True)
    assert feed.next(2) == (Chunk(0, 3, True), [1, 2, 3])
    assert feed.next(2) is None
    feed.push(3, 9)
    assert feed.next(2) == (Chunk(0, 4, True), [1, 2, 3, 9])


@pytest.mark.parametrize("position", [0, 2, 4])
def test_a_token_for_another_position_than_the_next_is_refused(position: int) -> None:
    feed = Feed([1, 2, 3], recompute=False)
    feed.next(2)
    with pytest.raises(JobError, match="3 positions are known"):
        feed.push(position, 5)


def test_a_token_before_the_prompt_is_fed_is_refused() -> None:
    with pytest.raises(JobError):
        Feed([1, 2, 3], recompute=False).push(3, 5)


def opening(**fields: Any) -> Opening:
    given: dict[str, Any] = {
        "session": SessionId("s"),
        "route": (Hop(PeerId("a"), 1), Hop(PeerId("b"), 2)),
        "prompt_length": 3,
        "max_tokens": 4,
        "sampling": Sampling(temperature=0.5, seed=3),
    }
    return Opening(**{**given, **fields})


def test_an_opening_comes_back_from_its_header() -> None:
    sent = opening(logits=True)
    assert Opening.from_header(sent.to_header(), stages=2, max_sequence=7) == sent
    with pytest.raises(JobError, match="max_tokens"):
        Opening.from_header(sent.to_header(), stages=2, max_sequence=6)


def test_an_answer_ends_with_an_end_token_or_after_max_tokens() -> None:
    session = opening()
    assert [session.finish(5, position, (9,)) for position in range(3, 7)] == ["", "", "", "length"]
    assert session.finish(9, 3, (9,)) == session.finish(9, 6, (9,)) == "stop"


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)
headers = st.dictionaries(
    st.sampled_from(
        ["session", "route", "prompt_length", "max_tokens", "sampling", "logits", "model", "prompt", "seed"]
    ),
    scalars
    | st.lists(st.lists(scalars, max_size=3), max_size=3)
    | st.dictionaries(st.just("top_k"), scalars),
)


@given(header=headers, payload=st.binary(max_size=20))
def test_any_header_is_a_value_or_a_job_error(header: Mapping[str, Any], payload: bytes) -> None:
    for read in (
        lambda: Opening.from_header(header, stages=2, max_sequence=10),
        lambda: GenerateRequest.from_frame(header, memoryview(payload)),
    ):
        try:
            read()
        except JobError as error:
            assert "\n" not in str(error)


@given(ids)
def test_ids_come_back_from_their_bytes(tokens: list[int]) -> None:
    assert unpack_tokens(memoryview(pack_tokens(tokens))) == tokens


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(
            prompt="héllo", model="m", max_tokens=7, sampling=Sampling(temperature=0.3, top_k=4, seed=8)
        ),
        GenerateRequest(prompt_ids=(1, 2, 2**40), logits=True),
        GenerateRequest(prompt="", seeded=False, sampling=Sampling(temperature=1.0)),
    ],
)
def test_a_request_comes_back_from_its_frame(request_: GenerateRequest) -> None:
    header, payload = request_.to_frame()
    assert GenerateRequest.from_frame(header, memoryview(payload)) == request_


def test_the_longest_answer_that_fits_is_allowed() -> None:
    check_prompt([1, 2], 8, vocabulary=10, max_sequence=10)
    with pytest.raises(JobError, match="at most 8 tokens can follow, not 9"):
        check_prompt([1, 2], 9, vocabulary=10, max_sequence=10)
