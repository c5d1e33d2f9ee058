"""What clients that ask too much, or do not read, cost the others of a gateway."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest
from support.served import PROMPTS, reference, swarm_of

from fusion.runtime.job.protocol import GENERATE
from fusion.runtime.serving.answers import clients, gateway
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.swarm.errors import RemoteError, StreamBroken
from fusion.swarm.streams import memory_stream
from fusion.swarm.transport import UNASKED_BYTES, Stream, Transport

PROMPT = PROMPTS[1]
ASKED = GenerateRequest(prompt_ids=tuple(PROMPT), max_tokens=8)


@pytest.fixture(autouse=True)
def four_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.served.GatewayConfig", partial(gateway.GatewayConfig, max_sessions=5))


def test_a_client_with_all_the_answers_gives_one_to_another_and_keeps_the_rest(tmp_path: Path) -> None:
    async def main() -> None:
        go = threading.Event()
        async with swarm_of(2, tmp_path) as swarm, swarm.client() as greedy, swarm.client() as other:
            await swarm.serve("llama", 1)
            peer = swarm.peers[1]
            blocked = asyncio.create_task(swarm.peers[0].context.compute.run(go.wait, 20))
            first = [asyncio.create_task(complete(greedy, peer.id, ASKED)) for _ in range(4)]
            async with asyncio.timeout(10):
                while len(peer.service.gateway._answers) < 4:
                    await asyncio.sleep(0.001)
                late = asyncio.create_task(complete(other, peer.id, ASKED))
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                with pytest.raises(RemoteError, match=r"as it can.*ask again later"):
                    await complete(greedy, peer.id, ASKED)
                go.set()
                answers = await asyncio.gather(*first, late, blocked, return_exceptions=True)
            assert sum(isinstance(answer, RemoteError) for answer in answers) == 1
            assert isinstance(answers[3], RemoteError), "the newest of whoever has most"
            for answer in (*answers[:3], answers[4]):
                assert list(answer.tokens) == reference("llama", PROMPT, 8)  # type: ignore[union-attr]
            await swarm.freed()
            async with asyncio.timeout(10):
                while peer.service.gateway._answers:
                    await asyncio.sleep(0.001)

    asyncio.run(main())


async def _send_only(transport: Transport, peer: object, request: GenerateRequest) -> Stream:
    stream = await transport.open(peer, GENERATE.name)  # type: ignore[arg-type]
    header, prompt = request.to_frame()
    await stream.send("generate", header, [prompt])
    return stream


def test_a_client_that_does_not_read_its_answer_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "UNREAD_SECONDS", 0.05)
    monkeypatch.setattr(clients, "SLOWEST_BYTES_PER_SECOND", 1 << 30)
    monkeypatch.setattr(memory_stream, "BUFFERED_BYTES", 2048)

    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm, swarm.client() as client:
            await swarm.serve("llama", 1)
            answers = swarm.peers[1].service.gateway._answers
            long = GenerateRequest(prompt_ids=tuple(PROMPT), max_tokens=80, logits=True)
            await _send_only(client, swarm.peers[1].id, long)
            async with asyncio.timeout(10):
                while not answers:
                    await asyncio.sleep(0)
                while answers:
                    await asyncio.sleep(0.001)
            await swarm.freed()
            assert list((await swarm.ask(prompt_ids=tuple(PROMPT), max_tokens=8)).tokens) == reference(
                "llama", PROMPT, 8
            )

    asyncio.run(main())


def test_while_many_large_prompts_arrive_small_ones_get_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "LARGE_PROMPTS", 2)

    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm, swarm.client() as stranger, swarm.client() as honest:
            await swarm.serve("llama", 1)
            peer = swarm.peers[1]
            silent = [await stranger.open(peer.id, GENERATE.name) for _ in range(2)]
            await asyncio.sleep(0)
            large = GenerateRequest(prompt_ids=(1,) * (UNASKED_BYTES // 8 + 1), max_tokens=1)
            with pytest.raises(
                RemoteError, match="positions"
            ):  # it was read: who says nothing takes no place
                await complete(honest, peer.id, large)
            arriving = peer.service.gateway._arriving
            monkeypatch.setattr(arriving, "_has_room", lambda _: False)
            with pytest.raises(StreamBroken):  # which sends a client to another peer
                await complete(stranger, peer.id, large)
            assert list((await complete(honest, peer.id, ASKED)).tokens) == reference("llama", PROMPT, 8)
            for stream in silent:
                stream.abort()

    asyncio.run(main())
