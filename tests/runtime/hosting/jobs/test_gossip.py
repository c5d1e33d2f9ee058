"""What outlives a lead, a leave and the death of everybody: the last record of a job."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hosting import SNAPSHOT, Peer, Swarm, lead_figures, over, published_by, swarm, until

from fusion.runtime.hosting.jobs.files import JobFiles
from fusion.runtime.hosting.jobs.gossip import NOTIFIED_PEERS, REPUBLISH_SECONDS, JobGossip
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import JOB
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.snapshots.snapshot import Index, encode_index
from fusion.swarm.authority.law import Admission
from fusion.swarm.authority.revocation import MARK_BYTES, MAX_REVOKED, lists_in, mark, seal_revocation
from fusion.swarm.authority.statements import CARRIED, seal_statement, statement_of
from fusion.swarm.blobs.index import digest_of
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.job_order import JOB_TTL_SECONDS
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, Record
from fusion.swarm.errors import RemoteError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, call


def gossip(peer: Peer) -> JobGossip:
    return peer.hosting._gossip


def files_of(peer: Peer) -> JobFiles:
    return JobFiles(peer.blobs.store.root / "jobs")


async def standing_by(made: Swarm) -> tuple[JobId, Peer, Peer]:
    """A job of one stage with its lead and a standby."""
    lead = await made.join(persistent=True)
    job = await made.launch(made.manifest(lead))
    await lead.look()
    await until(lambda: (job, 0) in lead.service.running)
    await lead.context.leases.beat()
    standby = await made.join(persistent=True)
    standby.blobs.store.put(lead.blobs.store.path(Digest(job)))
    await standby.look()
    await standby.look()
    assert (job, 0) in standby.hosting._pool.places
    await until(lambda: len(standby.service.prepared) == 1)
    await standby.context.leases.beat()
    await lead.context.leases.beat()  # and reads the claims of its stage
    return job, lead, standby


def test_a_new_snapshot_is_published_at_once_and_straight_to_the_standbys(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, standby = await standing_by(made)
            await gossip(lead).publish_changes()
            lead.service.figures[job] = lead_figures(job)
            await gossip(lead).publish_changes()
            assert (await made.record(job)).snapshot == SNAPSHOT
            await until(lambda: len(standby.service.prepared) == 2)  # nobody has had a heartbeat
            await gossip(standby).publish_changes()
            assert [(each.snapshot, each.step) for each in files_of(standby).load()] == [(SNAPSHOT, 20)]
            assert [(each.snapshot, each.step) for each in files_of(lead).load()] == [(SNAPSHOT, 20)]
            before = made.client().traffic()
            await gossip(lead).publish_changes()
            await gossip(lead).publish_changes()
            assert len(standby.service.prepared) == 2 and made.client().traffic() == before

    asyncio.run(main())


def test_a_new_snapshot_is_not_sent_to_all_that_claim_to_stand_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of claims has room for two thousand of them: each was dialled for each snapshot."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, _ = await standing_by(made)
            (own,) = [c for c in lead.context.leases.recent(job, 0) if c.role == "standby"]
            strangers = [replace(own, peer=PeerId(f"stranger {i}")) for i in range(2 * NOTIFIED_PEERS)]
            lead.context.leases._cache.read((job, 0), (own, *strangers))
            dialled, reach = list[PeerId](), lead.context.transport.open

            async def noted(peer: PeerId, protocol: str, **options: Any) -> Any:
                dialled.append(peer)
                return await reach(peer, protocol, **options)

            monkeypatch.setattr(lead.context.transport, "open", noted)
            lead.service.figures[job] = lead_figures(job)
            await gossip(lead).publish_changes()
            assert len(dialled) == len(set(dialled)) == NOTIFIED_PEERS

    asyncio.run(main())


def test_an_unchanged_record_is_not_published_at_every_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps a record checks its signature each time, and a stranger has peers look five times a second."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            await until(lambda: (job, 0) in lead.service.running)
            await lead.hosting.beat()
            published = published_by(lead, monkeypatch)

            def job_records() -> list[JobRecord]:
                return [record for record in published if isinstance(record, JobRecord)]

            for _ in range(5):
                made.clock.advance(0.2)
                await lead.hosting.beat()
            assert not job_records()
            made.clock.advance(REPUBLISH_SECONDS)
            await lead.hosting.beat()
            made.clock.advance(REPUBLISH_SECONDS)
            await lead.hosting.beat()
            first, again = job_records()
            assert first == again  # with the same statement: it is checked once
            lead.service.figures[job] = lead_figures(job)
            await lead.hosting.beat()
            assert [record.step for record in job_records()] == [0, 0, 30]
            assert REPUBLISH_SECONDS + HEARTBEAT_SECONDS < JOB_TTL_SECONDS / 2

    asyncio.run(main())


def test_a_service_that_fails_to_say_how_a_job_stands_loses_that_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            bad, good = [await made.launch(made.manifest(lead, name=name)) for name in ("bad", "good")]
            await lead.look()
            await until(lambda: {(bad, 0), (good, 0)} <= lead.service.running.keys())
            known = lead.service.progress

            def progress(job: JobId) -> Progress | None:
                if job == bad:
                    raise TypeError("a fault of ours")
                return known(job)

            monkeypatch.setattr(lead.service, "progress", progress)
            lead.service.figures[good] = lead_figures(good)
            await gossip(lead).publish_changes()
            assert (await made.record(good)).snapshot == SNAPSHOT
            await until(lambda: (bad, 0) not in lead.service.running)
            await lead.look()
            assert list(lead.service.running) == [(good, 0)]

    asyncio.run(main())


def test_nobody_but_the_lead_speaks_of_new_snapshots(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, standby = await standing_by(made)
            real = await made.record(job)
            hostile = Identity.generate()
            client = MemoryTransport(made.network, hostile.peer_id)
            directory = MemoryDirectory(made.network, hostile, made.clock)
            forged = replace(real, author=hostile.peer_id, term=9, snapshot=SNAPSHOT, snapshot_step=99)
            for sealed in (
                directory.sealed(forged),
                directory.sealed(replace(forged, lead=hostile.peer_id, term=real.term)),
            ):
                assert (await call(client, standby.id, JOB.name, "snapshot", {"record": sealed})).kind == "ok"
            own = lead.context.directory.sealed(replace(real, snapshot=SNAPSHOT, snapshot_step=99))
            for bad in (own, b"nonsense", None, "text", directory.sealed(forged)[:-1]):
                with pytest.raises(RemoteError):
                    await call(client, standby.id, JOB.name, "snapshot", {"record": bad})
            assert len(standby.service.prepared) == 1
            await gossip(standby).publish_changes()
            assert [each.snapshot for each in files_of(standby).load()] == [None]

    asyncio.run(main())


def test_a_lead_that_leaves_has_published_what_it_knows_before_its_stage_is_free(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead = await made.join()
            job = await made.launch(made.manifest(lead))
            await lead.look()
            await until(lambda: (job, 0) in lead.service.running)
            lead.service.figures[job] = lead_figures(job)
            directory = lead.context.directory
            published: list[tuple[str, Any]] = []
            publish = directory.publish

            async def noted(record: Record, **options: Any) -> None:
                if isinstance(record, JobRecord):
                    published.append(("job", (record.snapshot, record.lead)))
                if isinstance(record, ClaimRecord):
                    published.append((record.role, record.stage))
                await publish(record, **options)

            directory.publish = noted  # type: ignore[method-assign]
            await lead.leave()
            assert published[0] == ("job", (SNAPSHOT, None))
            assert ("released", 0) in published
            made.clock.advance(11.0)  # it outlives every claim
            assert (await made.record(job)).snapshot == SNAPSHOT

    asyncio.run(main())


def test_a_job_whose_only_host_failed_is_not_forgotten_while_that_cools_down(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            own = await made.join(cool_down_seconds=60.0)
            job = await made.launch(made.manifest(own))
            await own.look()
            await until(lambda: (job, 0) in own.service.running)
            own.service.figures[job] = lead_figures(job)
            own.service.end(job, 0, RuntimeError("out of luck"))
            await over(own, (job, 0))
            for _ in range(20):
                made.clock.advance(5.0)
                await own.look()
                assert (await made.record(job)).snapshot == SNAPSHOT
            await until(lambda: len(own.service.begun) == 2)

    asyncio.run(main())


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_job_outlives_the_death_of_everybody_at_once(tmp_path: Path, first: int) -> None:
    """Three peers hold a job of two stages, one of them stands by. All are killed; they start again on an empty
    directory, in any order, each with the disk that it had."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            peers = [await made.join(persistent=True) for _ in range(3)]
            job = await made.launch(made.manifest(peers[0], peers[1]), stages=2)
            for _ in range(3):
                for peer in peers:
                    await peer.look()
                    await peer.context.leases.beat()
            assert peers[2].hosting._pool.jobs == {job}
            for owner in peers[:2]:  # the first stage leads, the second one has received the snapshot from it
                owner.service.figures[job] = lead_figures(job)
            for peer in peers:
                await gossip(peer).publish_changes()
            for peer in peers:
                made.network.kill(peer.id)
            for peer in peers:
                await peer.leave()

            made.network, made.peers = MemoryNetwork(), []
            made.clock.advance(1000.0)
            identities = [peer.identity for peer in peers]
            again = []
            for identity in identities[first:] + identities[:first]:
                again.append(await made.join(identity=identity, persistent=True))
                await again[-1].look()
                record = await made.record(job)
                assert (record.snapshot, record.snapshot_step, record.step) == (SNAPSHOT, 20, 20)
            for _ in range(8):
                made.clock.advance(2.0)
                for peer in again:
                    await peer.look()
                    await peer.context.leases.beat()
            running = {place for peer in again for place in peer.service.running}
            assert running == {(job, 0), (job, 1)}
            record = await made.record(job)
            assert (record.state, record.snapshot, record.snapshot_step) == ("running", SNAPSHOT, 20)
            assert record.lead in [peer.id for peer in again] and record.term == 2

    asyncio.run(main())


def test_what_a_disk_has_of_a_job_is_kept_until_somebody_speaks_of_it(tmp_path: Path) -> None:
    """Everybody was off for two days: whoever starts first has no part in the job yet, and the others want its copies."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            peer = await made.join(persistent=True)
            store = peer.blobs.store
            weights, shards = store.put(b"weights"), (store.put(b"shard 0"), store.put(b"shard 1"))
            manifest = replace(made.manifest(None, None), weights=(weights, weights))
            job = JobId(store.put(manifests.encode(manifest)))
            index = store.put(encode_index(Index(job=job, step=0, shards=shards, ledger=Ledger())))
            record = JobRecord(
                job=job, name="work", kind="serve", state="running", term=1, step=0, lead=None, stages=2,
                snapshot=index, snapshot_step=0, author=peer.id,
            )  # fmt: skip
            files_of(peer).save(record)
            made.network.kill(peer.id)
            await peer.leave()
            made.network = MemoryNetwork()
            again = await made.join(identity=peer.identity, persistent=True)
            needs = again.blobs.store.needs
            assert needs is not None and {Digest(job), weights, index, *shards} <= needs.all()
            gossip(again)._board.end(job, 1, replace(record, state="stopped"))
            gossip(again)._board.remember(replace(record, state="stopped"))
            await gossip(again).publish_changes()
            assert not {weights, *shards} & needs.all()

    asyncio.run(main())


def test_the_newest_snapshot_that_any_disk_knows_of_wins_after_a_cold_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            old, new = Identity.generate(), Identity.generate()
            newer = Digest("6" * 64)
            data = manifests.encode(made.manifest(None, None))
            job = JobId(digest_of(data))
            for identity, step, snapshot, seen in ((old, 20, SNAPSHOT, 60), (new, 40, newer, 45)):
                JobFiles(tmp_path / identity.peer_id / "jobs").save(
                    JobRecord(
                        job=job, name="work", kind="serve", state="running", term=1, step=seen, lead=old.peer_id,
                        stages=2, snapshot=snapshot, snapshot_step=step, author=old.peer_id,
                    )
                )  # fmt: skip
            peers = [await made.join(identity=identity, persistent=True) for identity in (old, new)]
            for peer in peers:
                peer.blobs.store.put(data)
            for peer in peers * 2:
                await peer.look()
            record = await made.record(job)
            assert (record.snapshot, record.snapshot_step) == (newer, 40)

    asyncio.run(main())


def test_the_file_of_a_job_goes_when_the_job_has_ended_or_others_run_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(persistent=True), await made.join(persistent=True)
            job = await made.launch(made.manifest(lead, other), stages=2)
            await asyncio.gather(lead.look(), other.look())
            await until(lambda: bool(lead.service.running and other.service.running))
            await asyncio.gather(lead.look(), other.look())
            assert [len(files_of(peer).load()) for peer in (lead, other)] == [1, 1]
            other.service.end(job, 1, RuntimeError("out of luck"))
            await over(other, (job, 1))
            await other.look()
            assert [len(files_of(peer).load()) for peer in (lead, other)] == [1, 0]
            lead.service.figures[job] = replace(lead_figures(job), state="done")
            await gossip(lead).publish_changes()
            assert (await made.record(job)).state == "done"
            assert files_of(lead).load() == ()

    asyncio.run(main())


# --- grants taken back


def revoked(made: Swarm, job: JobId) -> bytes:
    """Some guest, by whoever launched the job."""
    return seal_revocation(job, [mark(Identity.generate().peer_id)], made.clock(), made.trainer)


def test_a_revocation_is_published_while_nobody_leads(tmp_path: Path) -> None:
    """The lead alone carried it: while its machine slept, whoever revoked somebody else made it void."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(), await made.join()
            admission = Admission(kind="granted", roots=(lead.id, other.id))
            job = await made.launch(made.manifest(lead, other, admission=admission), stages=2)
            for _ in range(2):
                for peer in (lead, other):
                    await peer.look()
                    await peer.context.leases.beat()
            await until(lambda: (job, 0) in lead.service.running and (job, 1) in other.service.running)
            made.network.kill(lead.id)
            gone = revoked(made, job)
            assert other.context.access.revoke(job, gone)
            await gossip(other).publish_job(job)
            reader = MemoryDirectory(made.network, made.trainer, made.clock)

            async def is_published() -> bool:
                records = await reader.job_records(job)
                return any(gone in record.proof for record in records if record.author == other.id)

            assert await is_published()
            for _ in range(5):
                made.clock.advance(JOB_TTL_SECONDS / 2)
                await other.context.leases.beat()
                await other.look()
                assert await is_published()
            (record,) = [record for record in await reader.job_records(job) if record.author == other.id]
            assert len(lists_in(record.proof)) == 1

    asyncio.run(main())


def test_a_record_of_many_statements_has_room_for_the_lists(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            own, root = await made.join(), Identity.generate()
            admission = Admission(kind="granted", roots=(own.id, root.peer_id))
            job = await made.launch(made.manifest(own, admission=admission))
            await own.look()
            record = await made.record(job)
            signers = [Identity.generate() for _ in range(CARRIED)]
            statements = [
                seal_statement(statement_of(record, signer.peer_id, 1), signer.sign) for signer in signers
            ]
            marks = [bytes([i]) * MARK_BYTES for i in range(MAX_REVOKED)]
            lists = [seal_revocation(job, marks, 1, issuer) for issuer in (made.trainer, root)]
            for each in lists:
                assert own.context.access.revoke(job, each)
            old = seal_revocation(job, [], 0, root)
            full = replace(record, message="x" * 200, proof=(*statements, old))
            found = gossip(own)._proofs._with_lists(full).proof
            assert set(lists) <= set(found) and old not in found and set(statements) & set(found)
            launch = b"author:" + statements[0]
            await own.context.directory.publish(replace(full, author=own.id, proof=(*found, launch)))

    asyncio.run(main())


def test_a_revocation_outlives_the_death_of_everybody(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            identity = Identity.generate()
            own = await made.join(identity=identity, persistent=True)
            admission = Admission(kind="granted", roots=(own.id,))
            job = await made.launch(made.manifest(own, admission=admission))
            await own.look()
            await until(lambda: (job, 0) in own.service.running)
            await gossip(own).publish_changes()
            gone = revoked(made, job)
            assert own.context.access.revoke(job, gone)
            await gossip(own).publish_changes()
            assert [gone in each.proof for each in files_of(own).load()] == [True]
            made.network.kill(own.id)
            await own.leave()

            made.network, made.peers = MemoryNetwork(), []
            made.clock.advance(1000.0)
            again = await made.join(identity=identity, persistent=True)
            for _ in range(4):
                await again.look()
                await again.context.leases.beat()
                made.clock.advance(2.0)
            assert again.context.access.revocations(job) == (gone,)
            await until(lambda: (job, 0) in again.service.running)
            await again.look()
            assert gone in (await made.record(job)).proof
            assert [gone in each.proof for each in files_of(again).load()] == [True]

    asyncio.run(main())
