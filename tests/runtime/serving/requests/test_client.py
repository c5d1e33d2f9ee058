"""An answer goes on through another gateway where the first has vanished."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import cast

import pytest
from support.served import reference, seeded_reference, swarm_of

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.protocol import GENERATE, GENERATE_MORE
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.requests import client
from fusion.runtime.serving.requests.client import another_peer, complete, generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.errors import FrameError, StreamBroken, UnknownProtocol
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream, Transport

PROMPT = (1, 2, 3, 4, 5, 6, 7)
SEEDED = Sampling(temperature=1.1, top_k=30, top_p=0.95, seed=7)
PENALISED = Sampling(repetition_penalty=1.4, frequency_penalty=0.9, presence_penalty=0.4)
PATIENT = FailoverConfig(recover_seconds=20)


@pytest.mark.parametrize("sampling", [SEEDED, PENALISED], ids=["seeded", "penalised"])
def test_another_gateway_goes_on_where_the_first_vanished(sampling: Sampling, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(5, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 2)
            first, second, third = swarm.peers[2:5]
            asked: list[frozenset[PeerId]] = []

            async def another(gone: frozenset[PeerId]) -> PeerId | None:
                asked.append(gone)
                return (second if len(gone) == 1 else third).id

            request = GenerateRequest(prompt_ids=PROMPT, max_tokens=40, sampling=sampling)
            async with swarm.client() as transport:
                pieces = generate(transport, first.id, request, another)
                found: list[Piece | Answer] = []
                async for piece in pieces:
                    found.append(piece)
                    if len(found) == 11:
                        swarm.network.kill(first.id)
                    if len(found) == 30:
                        swarm.network.kill(second.id)
            answer = found[-1]
            assert isinstance(answer, Answer)
            assert list(answer.tokens) == seeded_reference("llama", PROMPT, 40, sampling)
            assert asked == [frozenset({first.id}), frozenset({first.id, second.id})]

    asyncio.run(main())


def test_any_working_peer_may_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            directory = swarm.peers[0].context.directory
            another = another_peer(directory)
            assert await another(frozenset()) is None
            ids = {peer.id for peer in swarm.peers}
            for peer in swarm.peers:
                record = PeerRecord(
                    peer=peer.id, name="", addresses=(), role="peer", device="cpu", flops_per_second=1.0,
                    memory_bytes=1, free_memory_bytes=1, software="", opset=1, started_at=0.0,
                )  # fmt: skip
                await peer.context.directory.publish(record)
            assert await another(frozenset({swarm.peers[0].id})) in ids - {swarm.peers[0].id}
            assert await another(frozenset(ids)) is None

    asyncio.run(main())


def test_an_answer_that_was_complete_already_needs_no_stage(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            tokens = tuple(reference("llama", PROMPT, 6))
            async with swarm.client() as transport:
                request = GenerateRequest(prompt_ids=PROMPT, max_tokens=6, answered=tokens)
                answer = await complete(transport, swarm.peers[1].id, request)
            assert answer.tokens == tokens and answer.finish == "length"
            assert answer.text == bytes(tokens).decode(errors="replace")

    asyncio.run(main())


def test_a_request_with_newer_settings_goes_to_a_gateway_that_knows_them(tmp_path: Path) -> None:
    """The gateways of the release before speak the first version alone, and would pass the settings over."""

    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            await swarm.serve("llama", 1)
            older, newer = swarm.peers[1:]
            older.context.transport.handlers._handlers.pop(GENERATE_MORE.name)  # type: ignore[attr-defined]

            async def another(gone: frozenset[PeerId]) -> PeerId | None:
                assert gone == {older.id}
                return newer.id

            plain = GenerateRequest(prompt_ids=PROMPT, max_tokens=9)
            request = GenerateRequest(prompt_ids=PROMPT, max_tokens=9, sampling=PENALISED)
            async with swarm.client() as transport:
                assert list((await complete(transport, older.id, plain)).tokens) == reference(
                    "llama", PROMPT, 9
                )
                answer = await complete(transport, older.id, request, another)
                assert list(answer.tokens) == seeded_reference("llama", PROMPT, 9, PENALISED)
                assert list(answer.tokens) != reference("llama", PROMPT, 9)
                with pytest.raises(UnknownProtocol):
                    await complete(transport, older.id, request)

    asyncio.run(main())


@asynccontextmanager
async def gateway_that(
    answers: Callable[[Stream], Awaitable[None]],
) -> AsyncIterator[tuple[MemoryTransport, PeerId]]:
    """A client's transport, and a peer that answers so."""
    network = MemoryNetwork()
    async with (
        MemoryTransport(network, PeerId("gateway")) as there,
        MemoryTransport(network, PeerId("client")) as here,
    ):
        await there.serve(GENERATE.name, answers)
        yield here, there.peer_id


def test_a_gateway_that_never_ends_its_answer_is_left_after_as_many_tokens_as_were_asked_for() -> None:
    async def endless(stream: Stream) -> None:
        await stream.receive()
        for i in count():
            await stream.send("token", {"index": i, "id": 1, "text": "a"})

    async def main() -> None:
        async with asyncio.timeout(20), gateway_that(endless) as (here, there):
            found: list[Piece | Answer] = []
            with pytest.raises(FrameError, match="sends more than 5 tokens"):
                async for piece in generate(here, there, GenerateRequest(prompt="a", max_tokens=5)):
                    found.append(piece)
                    assert len(found) < 100
            assert len(found) == 5

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_seconds_that_are_no_number_are_refused(seconds: float) -> None:
    """They were printed as NaN, which no reader of JSON takes."""

    async def hostile(stream: Stream) -> None:
        await stream.receive()
        await stream.send("done", {"text": "", "seconds": seconds})
        await stream.receive()

    async def main() -> None:
        async with asyncio.timeout(20), gateway_that(hostile) as (here, there):
            with pytest.raises(JobError, match="seconds: a finite number"):
                await complete(here, there, GenerateRequest(prompt="a"))

    asyncio.run(main())


class _Unread:
    """A transport, and a stream of it to a peer that is frozen, when nothing more fits between the two."""

    remote, aborted = PeerId("gateway"), False

    async def open(self, *_: object) -> _Unread:
        return self

    async def send(self, *_: object) -> None:
        await asyncio.Event().wait()

    def abort(self) -> None:
        self.aborted = True


def test_a_gateway_that_does_not_read_the_prompt_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENT_SECONDS", 0.05, raising=False)

    async def main() -> None:
        stream, asked = _Unread(), list[frozenset[PeerId]]()

        async def another(gone: frozenset[PeerId]) -> None:
            asked.append(gone)

        async with asyncio.timeout(20):
            with pytest.raises(StreamBroken, match="does not read"):
                await complete(
                    cast(Transport, stream), stream.remote, GenerateRequest(prompt="a" * 99), another
                )
        assert asked == [{stream.remote}] and stream.aborted

    asyncio.run(main())
