from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import SourceConfig
from fusion.runtime.serving.requests.header_fields import pack_tokens, unpack_tokens
from fusion.runtime.serving.requests.request import GenerateRequest, check_prompt
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.schedule import Work
from fusion.runtime.serving.ring.session import Chunk, Feed, Hop, Opening, SessionId
from fusion.runtime.serving.ring.stage_session import PART_BYTES, StageSession
from fusion.swarm.errors import FrameError
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


@given(prompt=ids, answer=ids, chunk=st.integers(1, 20), held=st.integers(0, 100))
def test_tokens_of_the_answer_that_are_read_again_come_in_chunks_of_their_own(
    prompt: list[int], answer: list[int], chunk: int, held: int
) -> None:
    start = min(held, len(prompt + answer) - 1)
    feed = Feed(prompt + answer, recompute=False, answered=len(answer), start=start)
    fed = start
    while (step := feed.next(chunk)) is not None:
        part, _ = step
        assert part.start == fed and part.length <= chunk
        assert part.end <= len(prompt) or part.start >= len(prompt)
        assert part.sample == (part.end == len(prompt + answer))
        fed = part.end
    assert fed == len(prompt + answer)


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
    sent = opening(logits=True, answered=2)
    assert Opening.from_header(sent.to_header(), stages=2, max_sequence=7) == sent
    with pytest.raises(JobError, match="max_tokens"):
        Opening.from_header(sent.to_header(), stages=2, max_sequence=6)


@pytest.mark.parametrize(("length", "channels"), [(0, 0), (6, 0), (-1, 0), (4, 2), (6, 2)])
def test_a_source_that_the_model_does_not_read_is_refused(length: int, channels: int) -> None:
    source = SourceConfig(start=(1,), length=5, channels=channels)
    header = opening(source=5).to_header()
    kwargs: Any = {"stages": 2, "max_sequence": 7, "source": source}
    assert Opening.from_header(header, **kwargs).source == 5
    with pytest.raises(JobError, match="source"):
        Opening.from_header({**header, "source": length}, **kwargs)
    with pytest.raises(JobError, match="source: this model reads none"):
        Opening.from_header(header, stages=2, max_sequence=7)
    with pytest.raises(JobError, match="prefix"):
        Opening.from_header({**header, "prefix": bytes(32), "prompt_length": 100}, **kwargs)


def test_the_source_is_a_chunk_before_the_first_position() -> None:
    sent = Chunk(-5, 5, sample=False)
    assert sent.end == sent.order == 0
    assert Chunk.from_header(sent.to_header(), 10, 9, source=5) == sent
    for start, length, source in ((-5, 5, 0), (-5, 4, 5), (-6, 6, 5), (4, 7, 5)):
        with pytest.raises(FrameError, match="not those of the model"):
            Chunk.from_header({"start": start, "length": length}, 10, 9, source=source)
    sent.check_in(opening(source=5))
    for chunk in (Chunk(-4, 4, sample=False), Chunk(6, 2, sample=True)):
        with pytest.raises(FrameError, match="not in the session"):
            chunk.check_in(opening(source=5))


def test_nothing_runs_before_the_source() -> None:
    session: Any = object.__new__(StageSession)
    session.opening, session.early, session.encoded = opening(source=5), [], False
    session.waiting_bytes = 0
    first, second, source = (
        Work(session, Chunk(start, length, sample=False), memoryview(b""))
        for start, length in ((0, 3), (3, 4), (-5, 5))
    )
    assert [session.in_order(each) for each in (first, second)] == [[], []]
    assert session.waiting_bytes == 2 * PART_BYTES
    assert session.in_order(source) == [source, first, second] and session.in_order(first) == [first]
    assert not session.waiting_bytes
    with pytest.raises(FrameError, match="comes once"):
        session.in_order(source)
    session.encoded = False
    with pytest.raises(FrameError, match="never comes"):
        for _ in range(8):
            session.in_order(first)


def test_parts_that_wait_for_others_are_bounded_by_their_positions() -> None:
    session: Any = object.__new__(StageSession)
    session.opening, session.parts, session.early = opening(), {}, []
    session.waiting_positions = session.waiting_bytes = 0
    capacity, large = session.opening.capacity, memoryview(bytes(1 << 20))

    def take(number: int, sender: int, length: int) -> Any:
        chunk = Chunk(0, length, sample=True, number=number)
        return session.take_part(chunk, sender, large[:length], 2)

    for number in range(1, 100):  # whoever sends both parts may go on
        assert take(number, 0, capacity) is None and set(take(number, 1, capacity)) == {0, 1}
    assert not session.parts and not session.waiting_positions and not session.waiting_bytes
    assert take(100, 1, 2) is None and session.waiting_bytes == PART_BYTES + 2
    assert bytes(session.parts[100][1].payload.obj) == bytes(2), "and no more of the frame"
    with pytest.raises(FrameError, match="never send their part"):
        for number in range(101, 106):
            take(number, 0, capacity)


def test_an_answer_ends_with_an_end_token_or_after_max_tokens() -> None:
    session = opening()
    assert [session.finish(5, position, (9,)) for position in range(3, 7)] == ["", "", "", "length"]
    assert session.finish(9, 3, (9,)) == session.finish(9, 6, (9,)) == "stop"


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)
headers = st.dictionaries(
    st.sampled_from(
        [
            "session",
            "route",
            "prompt_length",
            "max_tokens",
            "sampling",
            "logits",
            "model",
            "prompt",
            "seed",
            "source",
            "features",
        ]
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
    with pytest.raises(JobError, match=r"prompt: the model takes 2 positions .* begin a new conversation"):
        check_prompt([1, 2], 1, vocabulary=10, max_sequence=2)
