"""Who is told of a revocation, and which stages an invite can be for."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.cli import client, grants, invites, main
from fusion.cli.client import JoinOptions
from fusion.cli.terminal.output import Output
from fusion.runtime.job.protocol import JOB
from fusion.swarm.authority.access import Access
from fusion.swarm.authority.grants import refusal
from fusion.swarm.authority.invites import from_text
from fusion.swarm.authority.law import Admission, JobLaw
from fusion.swarm.authority.revocation import Revocation, newer, open_revocation, seal_revocation
from fusion.swarm.directory.records import MAX_STAGES, JobId
from fusion.swarm.identity import Identity
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import Handler, PeerId, Stream

AUTHOR = Identity.generate()
LAW = JobLaw(job=JobId("ab" * 32), author=AUTHOR.peer_id, stages=2, admission=Admission(kind="granted"))
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


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Revocation]:
    """What owners are told by `jobs revoke`, each time of a process that finds no list in the records of the job."""
    told = list[Revocation]()

    @asynccontextmanager
    async def connect(way: client.JoinOptions) -> AsyncIterator[Any]:
        access = Access()
        access.know(LAW)
        yield SimpleNamespace(access=access, leases=SimpleNamespace(owner=owner))

    async def owner(job: JobId, stage: int) -> Any:
        return SimpleNamespace(peer=OWNERS[stage])

    async def law_of(context: Any, wanted: str) -> JobLaw:
        return LAW

    async def send(context: Any, owners: set[PeerId], job: JobId, data: bytes) -> int:
        told.append(open_revocation(data))
        return len(owners)

    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(grants, "law_of", law_of)
    monkeypatch.setattr(grants, "issuer_in", lambda home, law: AUTHOR)
    monkeypatch.setattr(invites, "send_revocation", send)
    return told


def test_whoever_was_revoked_stays_so_when_another_is_and_the_clock_is_set_back(
    lists: list[Revocation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whom = [Identity.generate().peer_id for _ in range(3)]
    for who, now in zip(whom, (5000.0, 1400.0, 9000.0), strict=True):
        monkeypatch.setattr(invites, "time", SimpleNamespace(time=lambda now=now: now))
        run(invites._revoke("work", who, JoinOptions(home=tmp_path), Output(as_json=True)))
    assert [[each.covers(who) for who in whom] for each in lists] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert [each.at for each in lists] == [5000, 5001, 9000]
    assert newer(lists[1], lists[0]) and newer(lists[2], lists[1])


def test_a_home_that_remembers_nothing_revokes_all_the_same(lists: list[Revocation], tmp_path: Path) -> None:
    who = Identity.generate().peer_id
    (tmp_path / grants.REVOKED_FOLDER).write_text("no folder")
    run(invites._revoke("work", who, JoinOptions(home=tmp_path), Output(as_json=True)))
    assert [each.covers(who) for each in lists] == [True]


def test_a_list_that_is_another_s_or_damaged_is_none(tmp_path: Path) -> None:
    other = Identity.generate()
    data = seal_revocation(LAW.job, [], 5, AUTHOR)
    assert grants.last_list(tmp_path, LAW.job, AUTHOR) is None
    for wrong in (data[:-1], b"", seal_revocation(LAW.job, [], 5, other)):
        grants.keep_list(tmp_path, LAW.job, AUTHOR, wrong)
        assert grants.last_list(tmp_path, LAW.job, AUTHOR) is None
    grants.keep_list(tmp_path, LAW.job, AUTHOR, data)
    assert grants.last_list(tmp_path, LAW.job, AUTHOR) == open_revocation(data)


def test_the_disk_has_a_list_before_it_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a power cut an empty one would be left, and the next list would make members again of all that were on it."""
    done, replace = list[str](), os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("written"))
    monkeypatch.setattr(Path, "replace", lambda path, to: (done.append("replaced"), replace(path, to)))
    grants.keep_list(tmp_path, LAW.job, AUTHOR, b"list")
    assert done == ["written", "replaced"]


def test_hours_of_an_invite_are_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    who = Identity.generate().peer_id
    assert main.main(["jobs", "invite", "job", who, "--hours", "nan"]) == 2
    assert capsys.readouterr().err == "fusion-peer: --hours: a number of hours, not nan\n"


def test_stages_of_an_invite() -> None:
    assert invites.checked_stages("2-5") == (2, 5) and invites.checked_stages("3") == (3, 3)
    for text in ("", "-", "5-2", "a-b", "1-2-3", f"0-{MAX_STAGES + 1}", "9" * 5000):
        with pytest.raises(ValueError, match="--stages"):
            invites.checked_stages(text)


def test_an_invite_is_valid_now_by_the_swarm_s_clock_however_wrong_ours_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of an hour ahead made invites that let nobody in for an hour; of an hour behind, short ones that were over at once."""

    @asynccontextmanager
    async def connect(way: client.JoinOptions) -> AsyncIterator[Any]:
        yield SimpleNamespace(directory=SimpleNamespace(now=lambda: 1e9))

    async def law_of(context: Any, wanted: str) -> JobLaw:
        return LAW

    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(grants, "law_of", law_of)
    monkeypatch.setattr(grants, "issuer_in", lambda home, law: AUTHOR)
    for ahead in (-3600.0, 3600.0):
        clock = SimpleNamespace(time=lambda ahead=ahead: 1e9 + ahead)
        monkeypatch.setattr(invites, "time", clock)
        monkeypatch.setattr(client, "time", clock)
        who = Identity.generate().peer_id
        way, output = JoinOptions(home=tmp_path), Output(as_json=True)
        run(invites._invite("work", who, ("ask",), None, 0.5, False, way, output))
        chain = from_text(json.loads(capsys.readouterr().out)["invite"])
        assert refusal(LAW, chain, who, "ask", None, 1e9) is None
    # The word of one peer makes no invite that lasts for years.
    told: Any = SimpleNamespace(directory=SimpleNamespace(now=lambda: 9e9))
    assert client.swarm_clock(told)() == clock.time() + client.MOST_WRONG_SECONDS
