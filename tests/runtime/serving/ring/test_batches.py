"""Several frames of a turn in one."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy_ring import HIDDEN, SHAPES, VOCABULARY, reference, ring_of

from fusion.dag.cutting.stage import Edge
from fusion.dag.ir.graph import Ref
from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.ring import batches
from fusion.runtime.serving.ring.batches import BATCHES, BY_ITSELF, TurnFrames, frames_of
from fusion.runtime.serving.ring.frames import Parcel
from fusion.swarm.delay_window import DelayWindow
from fusion.swarm.errors import FrameError
from fusion.swarm.streams.frames import HEAD_BYTES, decode_header, encode
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.transport import Buffer, Frame

PARCEL = Parcel(0, 1, (Edge("h/0", Ref("h"), HIDDEN, 0, (1,), False),), ids=True)


class Link:
    """The end that sends."""

    def __init__(self) -> None:
        self.sent: list[Frame] = []

    def post(self, kind: str, header: Any, payload: Sequence[Buffer] = ()) -> None:
        self.sent.append(Frame(kind, header, memoryview(b"".join(payload))))


def made(put: Sequence[tuple[int, int]], taking: Sequence[bool]) -> list[list[Frame]]:
    """What goes out over each link, of payloads of so many bytes for link so-and-so."""
    links: Any = [Link() for _ in taking]
    knows: Any = WeakSet(link for link, takes in zip(links, taking, strict=True) if takes)
    frames = TurnFrames("chunk", knows)
    for number, (to, size) in enumerate(put):
        frames.put(links[to], {"number": number, "size": size}, [bytes([number % 256]) * size], size)
    frames.post()
    return [link.sent for link in links]


def opened(frame: Frame) -> list[Frame]:
    return list(frames_of(frame, lambda header: int(header["size"]))) if frame.kind == "chunks" else [frame]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20 << 10)), max_size=40))
def test_what_arrives_is_what_was_put_in_and_in_order(put: list[tuple[int, int]]) -> None:
    for to, sent in enumerate(made(put, [True, False])):
        arrived = [each for frame in sent for each in opened(frame)]
        assert [each.header["number"] for each in arrived] == [n for n, (of, _) in enumerate(put) if of == to]
        for each in arrived:
            assert each.kind == "chunk"
            assert each.payload == bytes([each.header["number"] % 256]) * each.header["size"]
        assert all(len(opened(frame)) == 1 or len(frame.payload) <= batches.MAX_BYTES for frame in sent)
        if to == 1:
            assert all(frame.kind == "chunk" for frame in sent), "an older peer is sent one at a time"


def test_rows_of_many_sessions_are_one_frame_and_a_prompts_chunk_is_one_by_itself() -> None:
    [sent] = made([(0, 100)] * 8 + [(0, BY_ITSELF)] + [(0, 100)] * 3, [True])
    assert [(frame.kind, len(opened(frame))) for frame in sent] == [
        ("chunks", 8),
        ("chunk", 1),
        ("chunks", 3),
    ]


def test_log_probabilities_of_many_sessions_are_no_more_than_a_header_may_have() -> None:
    probable = {"logprob": -1.0, "top_logprobs": [[token, -1.0] for token in range(20)]}
    link: Any = Link()
    frames = TurnFrames("token", WeakSet([link]))
    for number in range(500):
        frames.put(link, {"session": "s" * 16, "id": 1, "position": number, "finish": "", **probable})
    frames.post()
    assert 1 < len(link.sent) < 10
    for frame in link.sent:
        message, _, _ = encode(frame.kind, frame.header, ())
        assert decode_header(message[HEAD_BYTES:]) == (frame.kind, frame.header)
    arrived = [each.header["position"] for frame in link.sent for each in frames_of(frame)]
    assert arrived == list(range(500))


NONSENSE: list[tuple[object, int, str]] = [
    (None, 0, "1 to 1024 in one frame"),
    ([], 0, "1 to 1024"),
    ([{"length": 1}] * 1025, 20 * 1025, "1 to 1024"),
    ("chunk", 0, "1 to 1024"),
    ([{"length": 1}, 7], 20, "a table for each"),
    ([{"length": 1}], 19, "19 bytes; 20 were to come"),
    ([{"length": 1 << 60}], 20, "were to come"),
    ([{"length": 3}, {"length": -1}], 40, "a chunk of -1 positions"),
    ([{"length": 1}, {}], 20, "a chunk of 0 positions"),
    ([{"length": "1"}], 20, "length: a whole number"),
    ([{"length": 1}, {"length": 2000}], 20 * 2001, "chunks: at most 32768 bytes in one frame"),
]


@pytest.mark.parametrize(("of", "size", "message"), NONSENSE)
def test_nonsense_is_refused(of: object, size: int, message: str) -> None:
    frame = Frame("chunks", {"of": of}, memoryview(bytes(size)))
    with pytest.raises((FrameError, JobError), match=message):
        list(frames_of(frame, PARCEL.size_of))


def test_tokens_have_no_payload() -> None:
    tokens = [{"id": 1}, {"id": 2}]
    assert [f.header for f in frames_of(Frame("tokens", {"of": tokens}))] == tokens
    with pytest.raises(FrameError, match="1 bytes; 0 were to come"):
        list(frames_of(Frame("tokens", {"of": tokens}, memoryview(b"x"))))


@pytest.mark.parametrize("shape", ["two", "skip"])
@pytest.mark.parametrize("older", [(), (1,), (0,)])
def test_sessions_of_one_turn_share_a_frame_where_both_ends_know_of_it(
    shape: str, older: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, kinds, go = SHAPES[shape], Counter[str](), threading.Event()
    post = QueuedStream.post

    def counted(self: QueuedStream, kind: str, header: Any, payload: Sequence[Buffer] = ()) -> None:
        kinds[kind] += 1
        post(self, kind, header, payload)

    monkeypatch.setattr(QueuedStream, "post", counted)
    prompts = [[(i * 7 + j) % VOCABULARY for j in range(1 + i)] for i in range(8)]

    async def main() -> None:
        async with ring_of(stages, older=older, on_run=lambda *_: go.wait(10)) as ring:
            asked = [asyncio.create_task(ring.generate(prompt, 12)) for prompt in prompts]
            await asyncio.sleep(0.05)  # until all are there
            go.set()
            assert await asyncio.gather(*asked) == [reference(stages, prompt, 12) for prompt in prompts]
            await ring.freed()

    asyncio.run(main())
    # Stage 0 takes tokens from the last one, every other stage chunks.
    assert bool(kinds["tokens"]) == (0 not in older)
    assert bool(kinds["chunks"]) == (1 not in older or len(stages) > 2)


def test_a_gateway_that_knows_of_it_hears_of_all_its_sessions_at_once() -> None:
    go = threading.Event()
    prompts = [[i, 3] for i in range(4)]

    async def main() -> None:
        async with ring_of(SHAPES["one"], on_run=lambda *_: go.wait(10)) as ring:
            [stream] = await ring.connect(said={BATCHES: True})
            openings = [ring.opening(prompt, 6) for prompt in prompts]
            for opening in openings:
                await ring.open([stream], opening)
            for opening, prompt in zip(openings, prompts, strict=True):
                await ring.prompt([stream], opening, prompt)
            await asyncio.sleep(0.05)  # until all are there
            go.set()
            found: dict[str, list[int]] = {opening.session: [] for opening in openings}
            kinds = Counter[str]()
            while any(len(tokens) < 6 for tokens in found.values()):
                frame = await stream.receive()
                kinds[frame.kind] += 1
                for each in frames_of(frame) if frame.kind == "tokens" else [frame]:
                    found[each.header["session"]].append(each.header["id"])
            assert list(found.values()) == [reference(SHAPES["one"], prompt, 6) for prompt in prompts]
            assert kinds["tokens"] >= 5

    asyncio.run(main())


@pytest.mark.parametrize("older", [(), (1,)])
def test_of_a_prompt_little_is_under_way_while_others_decode(
    older: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a stage that says what has come; one of the release before gets all of it at once, as before."""
    monkeypatch.setattr("fusion.swarm.delay_window.LEAST_BYTES", 1)
    monkeypatch.setattr("fusion.swarm.delay_window.MOST_BYTES", 1)
    under_way: list[int] = []
    send = DelayWindow.send

    def sent(self: DelayWindow, size_bytes: int, now: float) -> None:
        assert size_bytes > 0
        under_way.append(0 if self.open else size_bytes)
        send(self, size_bytes, now)

    monkeypatch.setattr(DelayWindow, "send", sent)
    prompt = [(7 * i) % VOCABULARY for i in range(48)]

    async def main() -> None:
        async with ring_of(SHAPES["two"], older=older, max_sequence=256) as ring:
            decoding = asyncio.create_task(ring.generate([1, 2], 200))
            while ring.rings[0].tokens < 4:
                await asyncio.sleep(0.001)
            assert await ring.generate(prompt, 3) == reference(SHAPES["two"], prompt, 3)
            assert not decoding.done()
            assert await decoding == reference(SHAPES["two"], [1, 2], 200)
            await ring.freed()

    asyncio.run(main())
    assert under_way and any(under_way) == bool(older)
