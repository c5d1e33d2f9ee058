"""Runs through any peer outlive the peer that was asked."""

from __future__ import annotations

import asyncio

import pytest
from support.instant_loop import run

from fusion.runtime.job.protocol import RUN, STATUS
from fusion.runtime.serving.graphs.arrays import Array, described
from fusion.runtime.serving.graphs.client import ModelRuns
from fusion.runtime.serving.requests.client import GATEWAY_TRIES
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import PeerUnreachable, RemoteError, StreamBroken
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream

Y = Array("y", "int8", (1,), b"1")


async def gateway(network: MemoryNetwork, name: str, does: str) -> PeerId:
    transport = MemoryTransport(network, PeerId(name))

    async def answer(stream: Stream) -> None:
        frame = await stream.receive()
        match does:
            case "answers":
                await asyncio.sleep(300.0)
                await stream.send("done", {**described([Y]), "route": [name]}, [Y.data])
            case "vanishes":
                stream.abort()
            case "is busy":
                await stream.send("busy")
            case "refuses":
                await stream.send("error", {"message": "input: too large"})
            case "wants grants" if frame.header["grants"]:
                await stream.send("done", {**described([Y]), "route": [name]}, [Y.data])
            case "wants grants":
                await stream.send("error", {"message": "not for everybody", "closed": "b" * 64})
            case _:
                await asyncio.sleep(3000.0)

    async def status(stream: Stream) -> None:
        await stream.receive()
        await asyncio.sleep(3000.0 if does == "freezes" else 0.0)
        await stream.send("status")

    if does != "speaks no such thing":
        await transport.serve(RUN.name, answer)
    await transport.serve(STATUS.name, status)
    return transport.peer_id


@pytest.mark.parametrize("does", ["vanishes", "is busy", "freezes", "speaks no such thing", "is not there"])
def test_another_peer_is_asked_and_stays_the_one(does: str) -> None:
    async def main() -> None:
        network, told = MemoryNetwork(), list[frozenset[PeerId]]()
        first = PeerId("first") if does == "is not there" else await gateway(network, "first", does)
        other = await gateway(network, "other", "answers")

        async def another(gone: frozenset[PeerId]) -> PeerId | None:
            told.append(gone)
            return other

        asking = ModelRuns(MemoryTransport(network, PeerId("client")), first, another)
        for _ in range(2):
            assert (await asking.run("m", [])).route == ("other",)
        assert told == [{first}]

    run(main())


def test_so_many_are_asked_and_no_more_and_a_refusal_is_final() -> None:
    async def main() -> None:
        network, told = MemoryNetwork(), list[frozenset[PeerId]]()

        async def another(gone: frozenset[PeerId]) -> PeerId | None:
            told.append(gone)
            return await gateway(network, f"peer {len(told)}", "vanishes")

        client = MemoryTransport(network, PeerId("client"))
        with pytest.raises(StreamBroken):
            await ModelRuns(client, await gateway(network, "first", "vanishes"), another).run("m", [])
        assert len(told) == GATEWAY_TRIES - 1
        with pytest.raises(RemoteError, match="too large"):
            await ModelRuns(client, await gateway(network, "no", "refuses"), another).run("m", [])
        with pytest.raises(PeerUnreachable):
            await ModelRuns(client, PeerId("nobody")).run("m", [])
        assert len(told) == GATEWAY_TRIES - 1

    run(main())


def test_grants_are_shown_once_they_are_asked_for_and_then_at_once() -> None:
    async def main() -> None:
        network, asked = MemoryNetwork(), list[JobId]()

        async def grants(job: JobId) -> tuple[bytes, ...]:
            asked.append(job)
            return (b"grant",)

        peer = await gateway(network, "peer", "wants grants")
        asking = ModelRuns(MemoryTransport(network, PeerId("client")), peer, None, grants)
        for _ in range(2):
            assert (await asking.run("m", [])).route == ("peer",)
        assert asked == ["b" * 64]

    run(main())
