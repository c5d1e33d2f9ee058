"""When a launcher may leave: what counts as held by the swarm."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.runtime.job.progress import StageFailure
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.launch import launch
from fusion.runtime.launch.handed_over import Held, look_held
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, ProviderRecord
from fusion.swarm.errors import DaemonDied, PeerUnreachable
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import Stream

JOB = JobId("a" * 64)
BLOBS = (Digest("b" * 64), Digest("c" * 64))


class Somebody:
    def __init__(self, network: MemoryNetwork, clock: ManualClock) -> None:
        identity = Identity.generate()
        self.peer = identity.peer_id
        self.directory = MemoryDirectory(network, identity, clock)
        self.leases = Leases(self.peer, self.directory, LeaseConfig(confirm_seconds=0.0))

    async def claim(self, term: int = 1) -> None:
        claim = ClaimRecord(
            job=JOB, stage=0, peer=self.peer, role="owner", term=term, score=1.0, step=0, load=0.0, ready=True
        )  # fmt: skip
        await self.directory.publish(claim, ttl_seconds=6.0)

    async def offer(self) -> None:
        for digest in BLOBS:
            await self.directory.publish(ProviderRecord(digest=digest, peer=self.peer, size_bytes=1))


def test_what_a_stranger_says_that_he_holds_lets_no_launcher_leave() -> None:
    async def main() -> None:
        network, clock = MemoryNetwork(), ManualClock()
        launcher, owner, stranger = (Somebody(network, clock) for _ in range(3))
        launched = int(launcher.directory.now())
        law = JobLaw(job=JOB, author=launcher.peer, stages=1, proposed=(owner.peer,), launched_at=launched)
        launcher.leases.know(law)
        manifest = SimpleNamespace(stages=1, serve=None, proposed=(owner.peer,))
        prepared: Any = SimpleNamespace(job=JOB, manifest=manifest, blobs=BLOBS)
        context: Any = SimpleNamespace(
            peer_id=launcher.peer, leases=launcher.leases, directory=launcher.directory, transport=None
        )
        await launcher.offer()
        await owner.claim()
        await stranger.offer()
        await stranger.claim(term=5)
        held = await look_held(context, prepared)
        assert (held.claimed, held.copied) == (1, 0) and not held.complete
        await owner.offer()
        assert (await look_held(context, prepared)).complete

    run(main())


def test_whoever_could_not_run_a_stage_says_why_to_a_launcher_that_waits_for_it() -> None:
    """A peer whose disk has no room for the data gives the stage up again: nobody has it, and a launcher would wait for minutes."""

    async def main() -> None:
        network, clock = MemoryNetwork(), ManualClock()
        launcher, tried = Somebody(network, clock), Somebody(network, clock)
        ours, theirs = (MemoryTransport(network, each.peer) for each in (launcher, tried))
        failure = StageFailure(job=JOB, stage=0, reason="no room for 5 MB on the disk")
        failures: list[list[Any]] = [["x", 0, "of another job"], failure.to_list()]

        async def answer(stream: Stream) -> None:
            await stream.receive()
            await stream.send("status", {"failed": failures})

        await theirs.serve(STATUS.name, answer)
        manifest = SimpleNamespace(stages=1, serve=None, proposed=(tried.peer,))
        prepared: Any = SimpleNamespace(job=JOB, manifest=manifest, blobs=())
        context: Any = SimpleNamespace(
            peer_id=launcher.peer, leases=launcher.leases, directory=launcher.directory, transport=ours
        )
        (waiting,) = (await look_held(context, prepared)).waiting
        assert waiting.line(lambda peer: "otter") == (
            "stage 0: nobody has it yet (otter: no room for 5 MB on the disk)"
        )
        failures.clear()
        (waiting,) = (await look_held(context, prepared)).waiting
        assert waiting.line(str) == "stage 0: nobody has it yet"

    run(main())


@pytest.mark.parametrize("error", [PeerUnreachable("no peer took the record"), DaemonDied("p2pd has ended")])
def test_a_launcher_that_reaches_nobody_for_a_while_stays(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blobs lie nowhere else."""
    none = Held(claimed=0, ready=0, stages=1, copied=0, blobs=2)
    looks: list[Held | Exception] = [none, error, replace(none, claimed=1, ready=1, copied=2)]
    seen: list[Held] = []

    async def looked(*_: object) -> Held:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def no_belief(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(launch, "look_held", looked)
    monkeypatch.setattr(launch, "read_belief", no_belief)
    context: Any = None
    prepared: Any = SimpleNamespace(job=JOB, manifest=None)
    waits = launch.wait_until_held(context, prepared, on_change=seen.append)
    if isinstance(error, DaemonDied):
        with pytest.raises(DaemonDied):
            run(waits)
        return
    run(waits)
    assert len(seen) == 2 and not looks
