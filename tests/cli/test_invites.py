"""Who is told of a revocation, and which stages an invite can be for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.cli import invites, main
from fusion.runtime.job.protocol import JOB
from fusion.swarm.directory.records import MAX_STAGES, JobId
from fusion.swarm.identity import Identity
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import Handler, PeerId, Stream

OWNERS = tuple(map(PeerId, ("silent", "gone", "one", "two")))


def test_an_owner_that_says_nothing_keeps_no_other_from_hearing_of_a_revocation() -> None:
    told: list[PeerId] = []

    def owner(peer: PeerId) -> Handler:
        async def answer(stream: Stream) -> None:
            frame = await stream.receive()
            assert (frame.kind, frame.header["revocation"]) == ("revoke", b"list")
            if peer == "silent":
                await asyncio.Event().wait()
            told.append(peer)
            await stream.send("done")

        return answer

    async def main() -> int:
        network = MemoryNetwork()
        for peer in OWNERS:
            if peer != "gone":
                await MemoryTransport(network, peer).serve(JOB.name, owner(peer))
        context: Any = SimpleNamespace(transport=MemoryTransport(network, PeerId("user")))
        return await invites.send_revocation(context, OWNERS, JobId("ab" * 32), b"list")

    assert run(main()) == 2 and told == ["one", "two"]


def test_hours_of_an_invite_are_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    who = Identity.generate().peer_id
    assert main.main(["jobs", "invite", "job", who, "--hours", "nan"]) == 2
    assert capsys.readouterr().err == "fusion-peer: --hours: a number of hours, not nan\n"


def test_stages_of_an_invite() -> None:
    assert invites.checked_stages("2-5") == (2, 5) and invites.checked_stages("3") == (3, 3)
    for text in ("", "-", "5-2", "a-b", "1-2-3", f"0-{MAX_STAGES + 1}", "9" * 5000):
        with pytest.raises(ValueError, match="--stages"):
            invites.checked_stages(text)
