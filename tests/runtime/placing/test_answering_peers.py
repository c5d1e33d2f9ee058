from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from support.directory_records import peer_record
from support.instant_loop import run

from fusion.runtime.job.protocol import STATUS
from fusion.runtime.placing.answering_peers import answering_peers
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream


def test_a_job_is_placed_on_peers_that_answer() -> None:
    """Anybody may list peers that there are not, by the thousand."""
    network, real = MemoryNetwork(), [Identity.generate() for _ in range(3)]
    ghosts = [
        replace(peer_record(real[0]), peer=PeerId(f"ghost-{n}"), name=f"ghost-{n}") for n in range(2000)
    ]
    listed = (*ghosts, *map(peer_record, real))

    class Directory(MemoryDirectory):
        async def join(self, peer: PeerId) -> bool:
            return True

        async def refresh(self) -> int:
            return len(self.neighbours())

        def neighbours(self) -> tuple[PeerId, ...]:
            return tuple(each.peer_id for each in real)

    async def answer(stream: Stream) -> None:
        await stream.receive()
        await stream.send("status")

    async def hang(stream: Stream) -> None:
        await stream.receive()
        await stream.receive()

    async def scenario() -> None:
        user = Identity.generate()
        transport = MemoryTransport(network, user.peer_id)
        context: Any = SimpleNamespace(transport=transport, directory=Directory(network, user, ManualClock()))
        assert await answering_peers(context, listed) == listed  # where nobody answers
        assert await answering_peers(context, ()) == ()
        for identity, handler in zip(real, (answer, hang, answer), strict=True):
            await MemoryTransport(network, identity.peer_id).serve(STATUS.name, handler)
        found = await answering_peers(context, listed)
        assert [each.peer for each in found] == [real[0].peer_id, real[2].peer_id]
        found = await answering_peers(context, listed, [ghosts[7].name])
        assert [each.peer for each in found] == ["ghost-7", real[0].peer_id, real[2].peer_id]

    run(scenario())
