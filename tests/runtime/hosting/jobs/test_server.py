from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hosting import SNAPSHOT, Peer, Swarm, lead_figures, over, published_by, reads_of, swarm, until

from fusion.runtime.hosting.jobs import server
from fusion.runtime.hosting.jobs.board import STOPPED
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import JOB
from fusion.swarm.authority.grants import ROLES, Grant, seal_grant
from fusion.swarm.authority.law import Admission
from fusion.swarm.authority.statements import seal_statement, stop_statement
from fusion.swarm.authority.wallet import Wallet
from fusion.swarm.claims.election import HEAD_START_SECONDS
from fusion.swarm.directory.job_order import JOB_TTL_SECONDS
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import RemoteError
from fusion.swarm.identity import Identity
from fusion.swarm.transport import call, checked

# --- who speaks for a job


def test_the_lead_publishes_what_its_service_knows(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours))
            await ours.look()
            record = await made.record(job)
            assert (record.state, record.lead, record.term, record.snapshot) == ("running", ours.id, 1, None)
            ours.service.figures[job] = lead_figures(job, message="waiting for\nstage 1\x07")
            await ours.look()
            record = await made.record(job)
            assert (record.step, record.snapshot, record.snapshot_step) == (30, SNAPSHOT, 20)
            assert record.message == "waiting for stage 1"  # made fit for a record

    asyncio.run(main())


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_outlives_its_lead_and_keeps_its_snapshot(tmp_path: Path, killed: bool) -> None:
    """Nobody but the lead publishes the job, and the idle peer may only claim it after a head start that is longer
    than a record lives: whoever holds another stage has to republish the last record."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other, idle = [await made.join(memory_bytes=1000) for _ in range(3)]
            job = await made.launch(made.manifest(lead, other, memory_bytes=(600, 600)), stages=2)
            await asyncio.gather(lead.look(), other.look(), idle.look())
            lead.service.figures[job] = lead_figures(job)
            await lead.look()
            await other.look()
            if killed:
                made.network.kill(lead.id)
            await lead.leave()
            for _ in range(200):  # well after everything that the lead and the launcher published has run out
                if (job, 0) in idle.service.running:
                    break
                made.clock.advance(1.0)
                for claimed in (other, idle):
                    await claimed.context.leases.beat()
                await other.look()
                repeated = await made.record(job)
                assert repeated.snapshot == SNAPSHOT and repeated.state == "running"
                await idle.look()
                await asyncio.sleep(0)
            assert (job, 0) in idle.service.running and idle.service.terms[job, 0] == 2
            record = await made.record(job)
            assert (record.lead, record.author, record.term) == (idle.id, idle.id, 2)
            assert (record.snapshot, record.snapshot_step) == (SNAPSHOT, 20)
            await other.look()
            made.clock.advance(5.0)
            await asyncio.gather(idle.look(), other.look())
            assert (await made.record(job)).author == idle.id

    asyncio.run(main())


def test_a_peer_that_repeats_a_record_adds_the_snapshot_that_it_knows_of(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(lead, other), stages=2)
            await asyncio.gather(lead.look(), other.look())
            lead.service.figures[job] = lead_figures(job)
            await lead.look()
            newer = Digest("6" * 64)
            other.service.figures[job] = replace(lead_figures(job), step=35, snapshot=newer, snapshot_step=34)
            made.network.kill(lead.id)
            await lead.leave()
            made.clock.advance(100.0)
            await other.context.leases.beat()
            await other.look()
            record = await made.record(job)
            assert (record.step, record.snapshot, record.snapshot_step) == (35, newer, 34)

    asyncio.run(main())


def test_a_lead_that_leaves_says_last_what_it_knows(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            await until(lambda: (job, 0) in lead.service.running)
            lead.service.figures[job] = lead_figures(job)
            await lead.leave()
            assert (await made.record(job)).snapshot == SNAPSHOT

    asyncio.run(main())


def test_the_end_of_a_job_is_known_after_its_lead_has_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(lead, other), stages=2)
            await lead.look()
            await other.look()  # sees who leads: of nobody else it takes an end on trust
            lead.service.figures[job] = replace(lead_figures(job), state="done")
            lead.service.end(job, 0)
            await over(lead, (job, 0))
            await lead.look()
            await other.look()
            await lead.leave()
            for _ in range(60):
                made.clock.advance(5.0)
                await other.look()
            await over(other, (job, 1))
            record = await made.record(job)
            assert (record.state, record.snapshot, record.lead) == ("done", SNAPSHOT, None)
            assert other.hosting.hosted == () and other.service.begun == [(job, 1)]

    asyncio.run(main())


def test_a_new_lead_goes_above_the_term_of_the_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            before = Identity.generate()  # its claims have run out, its record not yet
            job = await made.launch(
                made.manifest(ours), before, term=6, lead=before.peer_id, state="running",
                snapshot=SNAPSHOT, snapshot_step=20,
            )  # fmt: skip
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)
            assert ours.service.terms[job, 0] == 7
            record = await made.record(job)
            assert (record.lead, record.snapshot, record.snapshot_step) == (ours.id, SNAPSHOT, 20)

    asyncio.run(main())


def test_nobody_can_use_the_terms_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            hostile = Identity.generate()
            job = await made.launch(made.manifest(ours), hostile, term=2**31, state="running")
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)

    asyncio.run(main())


# --- watch


def test_a_watcher_is_sent_on_to_the_lead(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            reply = await call(made.client(), other.id, JOB.name, "watch", {"job": job})
            assert (reply.kind, reply.header["lead"]) == ("redirect", lead.id)
            reply = await call(made.client(), other.id, JOB.name, "watch", {"job": "x" * 1000})
            assert (reply.kind, reply.header["lead"]) == ("redirect", None)

    asyncio.run(main())


def test_who_asks_who_leads_a_job_again_and_again_has_that_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 60.0)

    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            await until(lambda: (job, 0) in lead.service.running)
            read = reads_of(other, monkeypatch)
            stranger = made.client()
            for _ in range(10):
                reply = await call(stranger, other.id, JOB.name, "watch", {"job": job})
                assert (reply.kind, reply.header["lead"]) == ("redirect", lead.id)
            assert read == [(job, 0)]

    asyncio.run(main())


def test_a_watcher_hears_every_change_and_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            await until(lambda: (job, 0) in lead.service.running)
            lead.service.figures[job] = lead_figures(job)
            stream = await made.client().open(lead.id, JOB.name)
            await stream.send("watch", {"job": job})
            first = Progress.from_header(checked(await stream.receive()).header)
            lead.service.figures[job] = replace(first, step=31)
            second = Progress.from_header(checked(await stream.receive()).header)
            lead.service.figures[job] = replace(first, step=90, state="done", snapshot_step=90)
            last = Progress.from_header(checked(await stream.receive()).header)
            # It asks the directory next: the end must be there already.
            assert (await made.record(job)).state == "done" and (await made.record(job)).snapshot_step == 90
            assert (first.step, second.step, last.step, last.state) == (30, 31, 90, "done")

    asyncio.run(main())


def test_a_watcher_of_a_job_that_never_loaded_hears_why_it_failed(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            await until(lambda: (job, 0) in lead.service.running)
            stream = await made.client().open(lead.id, JOB.name)
            await stream.send("watch", {"job": job})
            lead.service.end(job, 0, JobFailed("the graph makes no sense"))
            last = Progress.from_header(checked(await stream.receive()).header)
            assert (last.state, last.error) == ("failed", "the graph makes no sense")

    asyncio.run(main())


def test_the_end_is_published_once_for_all_that_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may, as often as it likes: each time it was stored in the directory."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            await until(lambda: (job, 0) in lead.service.running)
            published = published_by(lead, monkeypatch)
            lead.service.end(job, 0, JobFailed("the graph makes no sense"))
            await over(lead, (job, 0))
            published.clear()

            async def watch() -> None:
                reply = await call(made.client(), lead.id, JOB.name, "watch", {"job": job})
                assert reply.header["state"] == "failed" and (await made.record(job)).state == "failed"

            for _ in range(20):
                await watch()
            assert len(published) <= 1  # or at the release of the stage
            publish = lead.context.directory.publish

            async def slow(*record: Any, **options: Any) -> None:
                await publish(*record, **options)
                await asyncio.sleep(0.1)

            monkeypatch.setattr(lead.context.directory, "publish", slow)
            published.clear()
            made.clock.advance(JOB_TTL_SECONDS + 1)
            await asyncio.gather(*(watch() for _ in range(20)))
            assert len(published) == 1

    asyncio.run(main())


def test_a_watcher_that_goes_leaves_no_handler_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            lead.service.figures[job] = lead_figures(job)  # and it never changes

            def watched() -> list[asyncio.Task[Any]]:
                return [task for task in asyncio.all_tasks() if task.get_name().startswith(JOB.name)]

            stream = await made.client().open(lead.id, JOB.name)
            await stream.send("watch", {"job": job})
            checked(await stream.receive())
            assert len(watched()) == 1
            stream.abort()
            await until(lambda: not watched())

    asyncio.run(main())


# --- stop


def signed(identity: Identity, job: JobId, **changes: Any) -> dict[str, Any]:
    statement = replace(stop_statement(job, identity.peer_id, 1_000_000), **changes)
    return {"job": job, "statement": seal_statement(statement, identity.sign)}


async def two_owners(made: Swarm) -> tuple[Peer, Peer, JobId]:
    """Of a job of two stages, both of which run; the first one leads."""
    lead, other = await made.join(), await made.join()
    job = await made.launch(made.manifest(lead, other), stages=2)
    await asyncio.gather(lead.look(), other.look())
    await until(lambda: bool(lead.service.running and other.service.running))
    lead.service.figures[job] = lead_figures(job)
    return lead, other, job


def test_whoever_launched_a_job_stops_it_on_every_peer(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other, job = await two_owners(made)
            request = signed(made.trainer, job)
            assert (await call(made.client(), lead.id, JOB.name, "stop", request)).kind == "ok"
            await over(lead, (job, 0))
            await over(other, (job, 1))  # it was notified; nobody has had a heartbeat
            record = await made.record(job)
            assert (record.state, record.snapshot, record.step) == ("stopped", SNAPSHOT, 30)
            stream = await made.client().open(lead.id, JOB.name)
            await stream.send("watch", {"job": job})
            assert Progress.from_header(checked(await stream.receive()).header).state == "stopped"
            made.clock.advance(HEAD_START_SECONDS)
            await made.announce(job, stages=2)
            for peer in (lead, other):
                await peer.look()
            assert (len(lead.service.begun), len(other.service.begun)) == (1, 1)
            with pytest.raises(RemoteError, match="is stopped already"):
                await call(made.client(), lead.id, JOB.name, "stop", request)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["saved", "not in time", "nobody waits"])
def test_a_job_that_is_to_stop_comes_to_its_last_snapshot_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(server, "SAVE_SECONDS", 2.0)
    saved = how != "not in time"

    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other, job = await two_owners(made)
            last = Digest("6" * 64)
            ending = replace(lead_figures(job), state="stopped", step=33, snapshot=last, snapshot_step=33)
            lead.service.last_snapshots[job] = ending if saved else lead_figures(job)
            if not saved:
                monkeypatch.setattr(lead.service, "_stopped", lambda *_: made.clock.advance(2.5))
            request = {**signed(made.trainer, job), "save": True}
            stream = await made.client().open(lead.id, JOB.name)
            await stream.send("stop", request)
            assert checked(await stream.receive()).kind == "saving"
            await lead.look()
            assert (await made.record(job)).state == "running", (
                "nothing is published before it has come to its end"
            )
            step, snapshot = (33, last) if saved else (30, SNAPSHOT)
            if how == "nobody waits":
                stream.abort()
            else:
                answer = checked(await stream.receive())
                wanted = {"state": "stopped", "step": step, "snapshot_step": 33 if saved else 20}
                assert (answer.kind, answer.header) == ("ok", wanted)
            await over(lead, (job, 0))
            await over(other, (job, 1))  # the record carries the author's statement
            record = await made.record(job)
            assert (record.state, record.snapshot, record.step) == ("stopped", snapshot, step)
            assert record.message == STOPPED

    asyncio.run(main())


def test_nobody_else_stops_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(lead))
            twin = await made.launch(made.manifest(lead, name="twin"))
            await lead.look()
            await until(lambda: len(lead.service.running) == 2)
            trainer = made.trainer
            good = signed(trainer, job)
            for request, reason in (
                (signed(Identity.generate(), job), "only whoever launched"),
                ({**signed(trainer, twin), "job": job}, "signed statement"),
                (signed(trainer, job, state="done"), "signed statement"),
                (signed(Identity.generate(), job, signer=trainer.peer_id), "signed statement"),
                ({**good, "statement": b""}, "signed statement"),
                ({**good, "statement": "x"}, "signed statement"),
                ({}, "does not lead"),
                ({**good, "job": 7}, "does not lead"),
            ):
                with pytest.raises(RemoteError, match=reason):
                    await call(made.client(), lead.id, JOB.name, "stop", request)
            with pytest.raises(RemoteError, match="ask its lead"):
                await call(made.client(), other.id, JOB.name, "stop", good)
            await lead.look()
            assert len(lead.service.running) == 2

    asyncio.run(main())


def test_other_frames_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            with pytest.raises(RemoteError, match="knows launch, watch, stop, revoke and snapshot"):
                await call(made.client(), lead.id, JOB.name, "crash" * 10)

    asyncio.run(main())


def test_an_invite_of_a_stranger_to_a_job_that_is_known_is_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours, stranger = await made.join(), Identity.generate()
            admission = Admission(kind="granted", roots=(ours.id,))
            job = await made.launch(made.manifest(ours, admission=admission))
            await ours.look()
            folder = tmp_path / "invites"
            ours.context.access.wallet = Wallet(ours.id, folder, (), made.clock)
            for issuer, kept in ((stranger, 0), (made.trainer, 1)):
                made.clock.advance(1.0)
                grant = Grant(
                    job=job, issuer=issuer.peer_id, subject=ours.id, roles=ROLES, valid_from=0,
                    valid_until=int(made.clock()) + 1000,
                )  # fmt: skip
                header = {"job": job, "grants": [seal_grant(grant, issuer)]}
                with nullcontext() if kept else pytest.raises(RemoteError, match="may give none"):
                    await call(made.client(), ours.id, JOB.name, "launch", header)
                assert len(list(folder.glob("*"))) == kept

    asyncio.run(main())
