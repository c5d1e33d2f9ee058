"""Who asks for an answer does not wait for ever for a peer that is frozen, and waits for one that only takes its time."""

from __future__ import annotations

import asyncio

import pytest
from support.instant_loop import run

from fusion.runtime.job.protocol import GENERATE, STATUS
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import GenerateRequest, unpack_tokens
from fusion.runtime.serving.requests.silence import SILENT_SECONDS, THERE_SECONDS
from fusion.swarm.errors import StreamBroken
from fusion.swarm.identity import Identity
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream

REQUEST = GenerateRequest(prompt_ids=(1, 2), max_tokens=3)


async def gateway(network: MemoryNetwork, *pauses: float, frozen_after: int = 99) -> MemoryTransport:
    """One that gives 7, 8, 9, a token after each of these seconds, and after so many of them is frozen."""
    transport = MemoryTransport(network, Identity.generate().peer_id)
    frozen = asyncio.Event()

    async def generate(stream: Stream) -> None:
        asked = (await stream.receive()).header
        answered = len(unpack_tokens(memoryview(asked.get("answered", b""))))
        for index, pause in enumerate(pauses[answered:], answered):
            if index == frozen_after:
                frozen.set()
                await asyncio.sleep(3000.0)
            await asyncio.sleep(pause)
            await stream.send("token", {"id": 7 + index, "text": ""})
        await stream.send("done", {"text": "", "finish": "length"})

    async def status(stream: Stream) -> None:
        await stream.receive()
        if frozen.is_set():
            await asyncio.sleep(3000.0)
        await stream.send("status")

    await transport.serve(GENERATE.name, generate)
    await transport.serve(STATUS.name, status)
    return transport


@pytest.mark.parametrize("after", [0, 2])
def test_a_frozen_gateway_is_left_for_another(after: int) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        frozen = await gateway(network, 0.1, 0.1, 0.1, frozen_after=after)
        other = await gateway(network, 0.1, 0.1, 0.1)
        client = MemoryTransport(network, Identity.generate().peer_id)

        async def another(gone: frozenset[PeerId]) -> PeerId:
            assert gone == {frozen.peer_id}
            return other.peer_id

        clock = asyncio.get_running_loop().time
        began = clock()
        answer = await complete(client, frozen.peer_id, REQUEST, another)
        assert answer.tokens == (7, 8, 9)
        assert clock() - began < 2 * SILENT_SECONDS + THERE_SECONDS + 1.0
        with pytest.raises(StreamBroken, match="is silent, and does not say whether it is there"):
            await complete(client, frozen.peer_id, REQUEST)

    run(main())


def test_a_gateway_that_takes_its_time_is_waited_for() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        slow = await gateway(network, 6 * SILENT_SECONDS, 0.1, 3 * SILENT_SECONDS)
        client = MemoryTransport(network, Identity.generate().peer_id)
        assert (await complete(client, slow.peer_id, REQUEST)).tokens == (7, 8, 9)

    run(main())
