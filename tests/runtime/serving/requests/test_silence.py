"""Who asks for an answer does not wait for ever for a peer that is frozen, and waits for one that only takes its time."""

from __future__ import annotations

import asyncio

import pytest
from support.instant_loop import run

from fusion.runtime.job.protocol import GENERATE, STATUS
from fusion.runtime.serving.requests.client import PATIENCE_SECONDS, Another, complete
from fusion.runtime.serving.requests.header_fields import unpack_tokens
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.runtime.serving.requests.silence import PING_SECONDS, SILENT_SECONDS
from fusion.swarm.errors import StreamBroken, SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream

REQUEST = GenerateRequest(prompt_ids=(1, 2), max_tokens=3)


async def gateway(
    network: MemoryNetwork, *pauses: float, frozen_after: int = 99, asked: list[int] | None = None
) -> MemoryTransport:
    """One that gives 7, 8, 9, a token after each of these seconds, and after so many of them is frozen. `asked`: after how many
    tokens it is asked to go on."""
    transport = MemoryTransport(network, Identity.generate().peer_id)
    frozen = asyncio.Event()

    async def generate(stream: Stream) -> None:
        header = (await stream.receive()).header
        answered = len(unpack_tokens(memoryview(header.get("answered", b""))))
        if asked is not None:
            asked.append(answered)
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


def instead_of(gone: MemoryTransport, other: MemoryTransport) -> Another:
    """Whoever looks for another gateway than the one is given the other."""

    async def another(left: frozenset[PeerId]) -> PeerId:
        assert left == {gone.peer_id}
        return other.peer_id

    return another


@pytest.mark.parametrize("after", [0, 2])
def test_a_frozen_gateway_is_left_for_another(after: int) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        frozen = await gateway(network, 0.1, 0.1, 0.1, frozen_after=after)
        other = await gateway(network, 0.1, 0.1, 0.1)
        client = MemoryTransport(network, Identity.generate().peer_id)

        another = instead_of(frozen, other)
        clock = asyncio.get_running_loop().time
        began = clock()
        answer = await complete(client, frozen.peer_id, REQUEST, another)
        assert answer.tokens == (7, 8, 9)
        assert clock() - began < 2 * SILENT_SECONDS + PING_SECONDS + 1.0
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


@pytest.mark.parametrize("after", [0, 2])
def test_beside_a_gateway_that_is_there_and_sends_no_token_another_is_asked(after: int) -> None:
    """It need not be frozen to keep somebody waiting for ever: it may lie."""

    async def main() -> None:
        network, asked = MemoryNetwork(), list[int]()
        waits = await gateway(network, *[0.1] * after, 1e6)
        other = await gateway(network, 0.1, 0.1, 0.1, asked=asked)
        client = MemoryTransport(network, Identity.generate().peer_id)

        another = instead_of(waits, other)
        clock = asyncio.get_running_loop().time
        began = clock()
        assert (await complete(client, waits.peer_id, REQUEST, another)).tokens == (7, 8, 9)
        assert asked == [after] and clock() - began < PATIENCE_SECONDS + 1.0

    run(main())


@pytest.mark.parametrize(("first", "second", "rest"), [(1.5, 1.0, "first"), (3.0, 1.0, "second")])
def test_whoever_of_the_two_sends_the_next_token_goes_on(first: float, second: float, rest: str) -> None:
    """A long prompt takes its time at any gateway: who has begun is not left."""

    async def main() -> None:
        network, asked = MemoryNetwork(), list[int]()
        slow = await gateway(network, first * PATIENCE_SECONDS, *((0.1, 0.1) if rest == "first" else (1e6,)))
        other = await gateway(network, second * PATIENCE_SECONDS, 0.1, 0.1, asked=asked)
        client = MemoryTransport(network, Identity.generate().peer_id)
        given = iter([other.peer_id])

        async def another(gone: frozenset[PeerId]) -> PeerId | None:
            return next(given, None)

        assert (await complete(client, slow.peer_id, REQUEST, another)).tokens == (7, 8, 9)
        assert asked == [0]

    run(main())


def test_where_one_of_the_two_fails_the_other_is_waited_for() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        slow = await gateway(network, 4 * PATIENCE_SECONDS, 0.1, 0.1)
        vanished = MemoryTransport(network, Identity.generate().peer_id)  # speaks nothing of it
        client = MemoryTransport(network, Identity.generate().peer_id)

        tries = iter([StreamBroken("the directory is away"), vanished.peer_id])

        async def another(gone: frozenset[PeerId]) -> PeerId | None:
            match next(tries, None):
                case SwarmError() as error:
                    raise error
                case found:
                    return found

        assert (await complete(client, slow.peer_id, REQUEST, another)).tokens == (7, 8, 9)

    run(main())
