"""One world: real hosting, leases, election, training hosts and leads of several peers on one virtual-time loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from worlds import wiring
from worlds.arithmetic import STATE, ChainPlane, WorldWorker, final_ledger, history, unpack
from worlds.bulletin import Bulletin, WorldDirectory, signed
from worlds.disk import Disk, Holders, WorldBlobs, WorldPath, WorldStore, digest_of
from worlds.liars import ACTIVE_SECONDS, Liar, liar_names
from worlds.network import Network, WorldStream, WorldTransport
from worlds.oracle import Oracle
from worlds.process import STAGE_BYTES, Outcome, Process
from worlds.scenario import Fault, Scenario
from worlds.virtual_time import EPOCH_SECONDS, Lane, VirtualLoop, cpu_seconds

from fusion.dag.cutting.stage import Stage
from fusion.runtime.device.new_job_pace import NewJobPace
from fusion.runtime.hosting.hosting import Hosting
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import DataConfig, Manifest, OptimizerConfig, TrainConfig
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.job.watch import Watch
from fusion.runtime.planes.plane import DecodingStage, Tensors
from fusion.runtime.training.service import TrainingService
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.stage_loader import StageLoader
from fusion.swarm.authority.statements import seal_statement, statement_of
from fusion.swarm.claims.election import winner
from fusion.swarm.claims.leases import Leases
from fusion.swarm.claims.tenure import CONTEST_SECONDS
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.job_order import newest_jobs
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import Frame, PeerId

LAUNCHER = PeerId("launcher")
OWNER_SECONDS = 40.0  # every stage must have an owner this long after the last fault
END_SECONDS = 150.0  # the job must be done this long after the last fault
STALL_SECONDS = 5.0  # a minute in the product; some peers are frozen for longer than this
STRIKE_SECONDS = 15.0  # a fault whose trigger frame is not sent within this time does not happen
LOOK_SECONDS = 0.5
SETTLING_SECONDS = 2.0  # until a claim has reached all readers; others may contest it meanwhile
FORESEEN = (SwarmError, JobError, ValueError, TimeoutError, OSError)  # a handler may raise these

_TRAIN = Digest("d" * 64)
_AUTHOR = PeerId("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")


class Chance(random.Random):
    """The random generator that all peers of a world share. Keys are counted, so none is drawn twice."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._keys = itertools.count(seed << 20)

    def randbytes(self, n: int) -> bytes:
        return (next(self._keys) % (1 << 8 * n)).to_bytes(n, "big")


class World:
    current: World

    def __init__(self, plan: Scenario, *, verbose: bool = False) -> None:
        World.current = self
        self.plan = plan
        self.log: list[tuple[float, str, str]] = []
        self.verbose = verbose
        # If verbose: the hash of every frame that was sent, with its time, sender and receiver.
        self.frames = hashlib.sha256()
        self.struck: list[str] = []
        self.processes: dict[PeerId, Process] = {}
        self.liars = frozenset(liar_names(plan.liars))
        self.disks: list[Disk] = []
        self.rng = random.Random(plan.seed ^ 0x5EED)
        self.loop = VirtualLoop(random.Random(plan.seed ^ 0x100B), self._unhandled)
        self.chance = Chance(plan.seed)
        self.network = Network(self.loop, random.Random(plan.seed ^ 0x2E7), plan.link_seconds)
        self.network.watch = self._watch
        self.bulletin = Bulletin(
            self.network, random.Random(plan.seed ^ 0xD17), plan.directory_seconds, plan.directory_lost,
            plan.directory_fails,
        )  # fmt: skip
        self.holders = Holders(self.network, self.rng, 0.02)
        self.manifest, self.job = self._launched()
        assert self.manifest.train is not None
        self.oracle = Oracle(
            history(self.manifest.train, plan.stages),
            final_ledger(self.manifest.train),
            plan.quiet and not plan.liars,
        )
        self._by_lane: dict[Lane, Process] = {}
        self._waiting: list[Fault] = []  # faults whose trigger frame was not sent yet
        self._busy_faults = 0  # faults that have struck and are not over
        self._joined = 0
        self._began: dict[tuple[Process, int], float] = {}  # when a process last began to host a stage
        self._known: set[tuple[int, PeerId, int]] = (
            set()
        )  # (stage, peer, term) of owners that another peer saw
        self._done = False
        self.captured = False

    def note(self, who: str, what: str) -> None:
        self.log.append((self.loop.now, who, what))

    def _launched(self) -> tuple[Manifest, JobId]:
        plan = self.plan
        manifest = Manifest(
            name="world", kind="train", graph=Digest("a" * 64), cuts=tuple(range(1, plan.stages)),
            weights=tuple(Digest(f"{stage:064x}") for stage in range(plan.stages)),
            proposed=tuple(_name(i) for i in range(plan.stages)),
            memory_bytes=(STAGE_BYTES,) * plan.stages,
            train=TrainConfig(
                steps=plan.steps, microbatches=plan.microbatches, microbatch_size=plan.microbatch_size, sequence=1,
                seed=plan.seed % 1000, optimizer=OptimizerConfig(), data=DataConfig(kind="tokens", train=_TRAIN),
                snapshot_every=plan.snapshot_every,
            ),
            salt=str(plan.seed), launched_at=int(EPOCH_SECONDS), author=_AUTHOR,
        )  # fmt: skip
        data = manifests.encode(manifest)
        job = JobId(digest_of(data))
        shelf = {Digest(job): data, _TRAIN: b"", manifest.graph: b""}
        shelf.update({digest: wiring.initial(i) for i, digest in enumerate(manifest.weights)})
        self.shelf: dict[Digest, bytes] = shelf
        return manifest, job

    # --- running

    def run(self) -> Outcome:
        began = cpu_seconds()
        try:
            self._spawn(self.loop.world, self._launch())
            for index, seats in enumerate(self.plan.seats):
                self.start(_name(index), Disk(), seats)
            for name in sorted(self.liars):
                liar = Liar(self, name)
                self._spawn(liar.lane, liar.run())
            self._spawn(self.loop.world, self._direct())
            ended = self.loop.run(lambda: self._done or bool(self.oracle.violations), 3600.0)
            if not ended:
                self.oracle.broken("alive: the world stands still")
        except Exception:
            self.oracle.broken("sound: " + traceback.format_exc())
        return Outcome(
            self.plan.seed, tuple(self.oracle.violations), self.loop.now, cpu_seconds() - began,
            self.oracle.updates, self.oracle.committed, tuple(self.struck),
            tuple(f"{at:9.4f} {who:>9} {what}" for at, who, what in self.log), self.frames.hexdigest(),
            self.captured,
        )  # fmt: skip

    def _spawn(self, lane: Lane, work: Any) -> asyncio.Task[Any]:
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self.loop)
        try:
            return self.loop.create_task(work, context=lane.context.copy())
        finally:
            asyncio._set_running_loop(before)

    def start(self, peer_id: PeerId, disk: Disk, seats: int) -> None:
        gone = frozenset(process for process in self._by_lane.values() if process.lane.dead)
        let_go = frozenset(
            (process, stage)
            for process in self._by_lane.values()
            for stage in range(self.plan.stages)
            if process.hosting is not None and (self.job, stage) not in process.hosting.hosted
        )
        process = Process(peer_id, Lane(peer_id), disk, seats, gone, let_go)
        if disk not in self.disks:
            self.disks.append(disk)
        self.processes[peer_id] = process
        self._by_lane[process.lane] = process
        self.network.joins_side(peer_id)
        task = self._spawn(process.lane, self._peer(process))
        task.add_done_callback(
            lambda task: self._ended_by_itself(process, task), context=process.lane.context
        )
        process.tasks.append(task)

    async def _peer(self, process: Process) -> None:
        """Do what `fusion.runtime.peer.peer` does, in the same order."""
        peer_id = process.peer_id
        await asyncio.sleep(0.3 * self.rng.random())
        transport = process.transport = WorldTransport(
            self.network, peer_id, process.lane, self._handler_failed
        )
        directory = WorldDirectory(self.bulletin, peer_id)
        blobs = WorldBlobs(peer_id, WorldStore(process.disk, self.shelf), self.holders)
        leases = process.leases = Leases(peer_id, directory)
        await leases.__aenter__()
        worker = WorldWorker(self.rng, self.plan.compute_seconds * (0.5 + self.rng.random()))
        context = wiring.context(
            peer_id=peer_id, transport=transport, directory=directory, blobs=blobs, leases=leases, worker=worker,
            memory=MemoryBudget(process.seats * STAGE_BYTES), home=WorldPath(process.disk, "home"), clock=self.loop.clock,
            stall_seconds=STALL_SECONDS, pace=NewJobPace(self.loop.clock.monotonic), random=self.chance, watch=OracleWatch(self.oracle, process),
        )  # fmt: skip
        process.memory = context.memory
        plane = WorldPlane(peer_id, self.plan.microbatches, self.oracle)
        service = process.service = WatchedTraining(
            context,
            StageLoader(context, plane, wiring.stage_source(context)),
            partial(self._hosts, process),
        )
        fitness = 0.1 + 0.8 * self.rng.random()
        hosting = process.hosting = Hosting(
            context,
            {"train": service},
            fitness,
            files=wiring.JobFiles(WorldPath(process.disk, "home/jobs")),  # type: ignore[arg-type]
        )
        await service.start()
        await hosting.start()
        leases.on_lost = partial(self._lost, process, leases.on_lost)
        process.work = asyncio.create_task(hosting.run())
        process.work.add_done_callback(lambda task: self._ended_by_itself(process, task))
        if self.liars:
            self._spawn(process.lane, self._observe_tenures(process, leases))
        while True:
            with contextlib.suppress(SwarmError):
                await directory.publish(process.announcement())
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _observe_tenures(self, process: Process, leases: Leases) -> None:
        while True:
            self._update_captured(process, leases)
            await asyncio.sleep(LOOK_SECONDS / 2)

    def _ended_by_itself(self, process: Process, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            trace = "" if error is None else "".join(traceback.format_exception(error))
            self.oracle.broken(f"sound: {process.peer_id} came to an end by itself\n{trace}")

    async def _launch(self) -> None:
        """Publish the job as its launcher does, until every stage has a ready owner."""
        directory = WorldDirectory(self.bulletin, LAUNCHER)
        record = JobRecord(
            job=self.job, name="world", kind="train", state="launching", term=0, step=0, lead=None,
            stages=self.plan.stages, snapshot=None, snapshot_step=-1, author=LAUNCHER,
        )  # fmt: skip
        if self.liars:  # without liars no reader needs a proof
            statement = statement_of(record, _AUTHOR, EPOCH_SECONDS)
            record = replace(record, proof=(seal_statement(statement, partial(signed, _AUTHOR)),))
        while True:
            with contextlib.suppress(SwarmError):
                records = [
                    record
                    for record in await directory.job_records(self.job)
                    if record.author not in self.liars
                ]
                known = next(iter(newest_jobs(records)), None)
                if known is None or known.term == 0:
                    await directory.publish(record)
                else:
                    owners = [winner(await directory.claims(self.job, s)) for s in range(self.plan.stages)]
                    if all(owner is not None and owner.ready for owner in owners):
                        return
            await asyncio.sleep(HEARTBEAT_SECONDS)

    # --- directing

    async def _direct(self) -> None:
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, fault.at - self.loop.now))
            if self.oracle.finished:
                break
            if fault.trigger:
                self._waiting.append(fault)
            else:
                self._strike(fault, self._victim(fault))
        while self.liars and self.loop.now < ACTIVE_SECONDS and not self._ended():
            await asyncio.sleep(LOOK_SECONDS)
        deadline = self.loop.now + STRIKE_SECONDS
        while (self._busy_faults or (self._waiting and self.loop.now < deadline)) and not self._ended():
            await asyncio.sleep(LOOK_SECONDS)
        self._waiting.clear()
        self.note("world", "no more faults")
        calm = self.loop.now
        owned = False
        while not self._ended():
            if self.loop.now > calm + END_SECONDS and (self.captured or not self.plan.lives):
                self._done = True  # with so many liars only safety is required, not progress
                return
            if self.loop.now > calm + END_SECONDS:
                self.oracle.broken(
                    f"alive: {END_SECONDS:.0f} s after the last fault the job is at step {self.oracle.committed} of "
                    f"{self.plan.steps}: {self._waits()}"
                )
                return
            if not owned and self.plan.lives and not self.captured and self.loop.now > calm + OWNER_SECONDS:
                owned = True
                for stage in range(self.plan.stages):
                    if not self._hosted(stage):
                        self.oracle.broken(
                            f"alive: {OWNER_SECONDS:.0f} s after the last fault nobody has stage {stage}"
                        )
            await asyncio.sleep(LOOK_SECONDS)
        if not self.oracle.violations and not self.captured:
            self._inspect()
        self._done = True

    def _inspect(self) -> None:
        """What the job has come to, from the disks of all peers that ever were."""
        record = next(r for r in self._records() if r.state == "done")
        blobs = {digest: data for disk in self.disks for digest, data in disk.blobs.items()}
        try:
            index = snapshot.decode_index(blobs[record.snapshot or ""], self.job, self.plan.stages)  # type: ignore[index]
            shards = {
                stage: unpack(blobs[digest])[STATE].tolist() for stage, digest in enumerate(index.shards)
            }
        except KeyError as error:
            self.oracle.broken(f"durable: blob {error} of the last snapshot is nowhere")
            return
        except JobError as error:
            self.oracle.broken(f"durable: the last snapshot: {error}")
            return
        self.oracle.ended(index, {stage: (step, chain) for stage, (step, chain) in shards.items()})

    def _records(self) -> list[JobRecord]:
        records = [r for r in self.bulletin.read(LAUNCHER, ("jobs",)) if isinstance(r, JobRecord)]
        return [record for record in records if record.author not in self.liars]

    def _update_captured(self, process: Process, leases: Leases) -> None:
        """Record the owners that `process` sees, and set `captured` if liars own at least half of the stages in its view.

        Liars claimed those stages while they were vacant. They count as owners until another peer claims the stages, even
        after their leases have expired.
        """
        tenures = [leases.tenure(self.job, stage) for stage in range(self.plan.stages)]
        self._known |= {
            (stage, tenure.claim.peer, tenure.claim.term)
            for stage, tenure in enumerate(tenures)
            if tenure is not None and tenure.claim.peer != process.peer_id
        }
        taken = sum(t is not None and t.claim.peer in self.liars for t in tenures)
        self.captured |= 2 * taken >= self.plan.stages

    def _hosts(self, process: Process, stage: int, term: int) -> None:
        self._began[process, stage] = self.loop.now
        self.oracle.hosts(process, stage, term)

    def _lost(self, process: Process, tell: Callable[[ClaimRecord], None] | None, held: ClaimRecord) -> None:
        """Check that an honest peer did not lose its stage to a liar.

        It may if it was away or possibly cut off, or if no other peer ever saw it as the owner.
        """
        assert process.leases is not None
        tenure = process.leases.tenure(held.job, held.stage)
        away = {"freeze", "partition", "vanish"} & set(self.struck) or self.plan.directory_fails > 0
        # If an owner followed an expired lease, the vote of either owner counts for that stage.
        outvoted = process.leases._cache.is_majority((held.job, held.stage), process.peer_id, set(self.liars))
        contested = (
            self.loop.now - self._began.get((process, held.stage), 0.0) < CONTEST_SECONDS + SETTLING_SECONDS
        )
        if (
            tenure is not None
            and tenure.claim.peer in self.liars
            and (held.stage, process.peer_id, held.term) in self._known
            and not (away or outvoted or contested or self.captured)
        ):
            self.oracle.broken(
                f"deposed: {process.peer_id} lost stage {held.stage} under term {held.term} to "
                f"{tenure.claim.peer} under {tenure.claim.term}"
            )
        if tell is not None:
            tell(held)

    def _ended(self) -> bool:
        return not self._busy_faults and any(record.state == "done" for record in self._records())

    def _hosted(self, stage: int) -> bool:
        return any(
            (self.job, stage) in process.hosting.hosted
            for process in self.processes.values()
            if process.hosting is not None and not process.lane.dead
        )

    def _waits(self) -> str:
        reasons = []
        for process in self.processes.values():
            if process.service is not None and not process.lane.dead:
                progress = process.service.progress(self.job)
                if progress is not None and progress.message:
                    reasons.append(f"{process.peer_id}: {progress.message}")
        return "; ".join(reasons) or "no peer gives a reason"

    def _victim(self, fault: Fault) -> Process | None:
        live = [
            p
            for p in self.processes.values()
            if not p.lane.dead and not p.lane.frozen and p.hosting is not None
        ]
        if fault.victim != "any":
            stage = 0 if fault.victim == "lead" else fault.stage
            holding = [p for p in live if p.hosting is not None and (self.job, stage) in p.hosting.hosted]
            spare = [p for p in live if p.hosting is not None and not p.hosting.hosted]
            live = (spare if fault.victim == "spare" else holding) or live
        return self.rng.choice(live) if live else None

    def _strike(self, fault: Fault, victim: Process | None) -> None:
        if fault.kind == "partition":
            self._partition(fault)
            return
        if fault.kind == "join":
            self._join(self.rng.choice((1, 2)))
            self.struck.append("join")
            return
        if victim is None or victim.lane.dead or victim.lane.frozen or victim.leaving:
            return
        self.struck.append(fault.kind)
        self.note(
            "world", f"{fault.kind} {victim.peer_id} for {fault.seconds:.2f} s{' (fresh)' * fault.fresh}"
        )
        if fault.kind == "freeze":
            self.loop.freeze(victim.lane)
            self._later(fault.seconds, self._thaw, victim)
        elif fault.kind == "cut":
            others = [p for p in self.processes if p != victim.peer_id]
            self.network.cut(victim.peer_id, self.rng.choice(others))
        elif fault.kind == "move":
            self._spawn(victim.lane, self._move(victim))
        elif fault.kind == "leave":
            self._busy_faults += 1
            victim.leaving = True
            self._spawn(victim.lane, self._leave(victim, fault))
        else:
            self._kill(victim, silently=fault.kind == "vanish")
            self._again(victim, fault)

    def _kill(self, victim: Process, *, silently: bool) -> None:
        self.loop.kill(victim.lane)
        self.network.remove(victim.peer_id, silently=silently)

    def _again(self, victim: Process, fault: Fault) -> None:
        capacity = sum(p.seats for p in self.processes.values() if not p.lane.dead)
        if fault.fresh:
            self._later(max(1.0, fault.seconds), self._join, victim.seats)
        elif fault.seconds or capacity < self.plan.stages:
            self._later(max(1.0, fault.seconds), self._restart, victim)

    def _later(self, seconds: float, act: Any, *args: Any) -> None:
        self._busy_faults += 1

        def now() -> None:
            self._busy_faults -= 1
            act(*args)

        self.loop.call_later(seconds, now, context=self.loop.world.context)

    def _thaw(self, victim: Process) -> None:
        self.note("world", f"{victim.peer_id} goes on")
        self.loop.thaw(victim.lane)

    def _restart(self, victim: Process) -> None:
        if self.processes[victim.peer_id] is victim:
            self.note("world", f"{victim.peer_id} starts again")
            self.start(victim.peer_id, victim.disk, victim.seats)

    def _join(self, seats: int) -> None:
        name = PeerId(f"new-{self._joined}")
        self._joined += 1
        self.note("world", f"{name} joins with {seats} seats")
        self.start(name, Disk(), seats)

    async def _move(self, victim: Process) -> None:
        """Do what a stage's host does when its lead moves the stage. The new peer may have no room here."""
        assert victim.hosting is not None
        others = [peer for peer in self.processes if peer != victim.peer_id]
        if victim.hosting.hosted and others:
            victim.hosting.give_away(*self.rng.choice(victim.hosting.hosted), self.rng.choice(others))

    async def _leave(self, victim: Process, fault: Fault) -> None:
        """Do what `fusion.runtime.peer.peer` does when it is told to stop."""
        assert victim.hosting is not None and victim.leases is not None and victim.transport is not None
        leave = getattr(victim.hosting, "leave", None)
        if leave is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(15.0):
                    await leave()
        if victim.work is not None:
            victim.work.cancel()
            await asyncio.wait([victim.work])
        with contextlib.suppress(SwarmError):
            await victim.leases.aclose()
        self.loop.call_soon(self._left, victim, fault, context=self.loop.world.context)

    def _left(self, victim: Process, fault: Fault) -> None:
        self._busy_faults -= 1
        self.note("world", f"{victim.peer_id} has left")
        self._kill(victim, silently=False)
        self._again(victim, fault)

    def _partition(self, fault: Fault) -> None:
        live = [p.peer_id for p in self.processes.values() if not p.lane.dead]
        self.rng.shuffle(live)
        at = self.rng.randint(1, max(1, len(live) - 1))
        one, two = set(live[:at]), set(live[at:])
        self.struck.append("partition")
        self.note("world", f"partition of {sorted(one)} from {sorted(two)} for {fault.seconds:.2f} s")
        self.network.partition(one, two, 10.0 * self.rng.random())
        self._later(fault.seconds, self._heal)

    def _heal(self) -> None:
        self.note("world", "the partition heals")
        self.network.heal()

    # --- watching

    def _watch(
        self, stream: WorldStream, kind: str, header: Mapping[str, Any], head: bytes, payload: bytes
    ) -> None:
        if self.verbose:
            route = f"{self.loop.now!r} {stream.local} {stream.remote} {stream.protocol} "
            self.frames.update(route.encode() + head + payload)
            shown = {k: v for k, v in header.items() if k not in ("job", "dtype", "shape", "codec", "claim")}
            self.note(stream.local, f"-> {stream.remote} {kind} {shown}")
        if stream.protocol == STAGE.name and stream.local not in self.liars:
            if kind == "hello":
                stream.said["source"] = header["source"]
            elif "source" in stream.said:
                self.oracle.said(stream.local, stream.said["source"], kind, header)
                if kind == "restore":
                    self.oracle.restores(
                        stream.local, header["term"], header["checkpoint"]["step"], self._available
                    )
        for fault in self._waiting:
            if fault.trigger == kind and self._counted(fault):
                self._waiting.remove(fault)
                victim = self.processes.get(stream.local if fault.side == "sender" else stream.remote)
                if fault.count % 2:
                    self._strike(fault, victim)  # before the frame is sent
                else:
                    self.loop.call_soon(self._strike, fault, victim, context=self.loop.world.context)
                break

    def _available(self, digest: Digest) -> bool:
        """Whether every part of a snapshot is on the disk of a peer that is up, and no fault can have hidden it."""
        live = [p for p in self.processes.values() if not p.lane.dead and not p.lane.frozen and not p.leaving]
        blobs = {d: data for process in live for d, data in process.disk.blobs.items()}
        # After several faults it may have been unreachable for a while, and the lead may have given it up.
        return digest in blobs and len(self.struck) < 2 and self._whole(blobs, digest)

    def _whole(self, blobs: Mapping[Digest, bytes], digest: Digest) -> bool:
        index = snapshot.decode_index(blobs[digest], self.job, self.plan.stages)
        return all(shard in blobs for shard in index.shards)

    def _counted(self, fault: Fault) -> bool:
        key = id(fault)
        self._counts = getattr(self, "_counts", {})
        self._counts[key] = self._counts.get(key, 0) + 1
        return bool(self._counts[key] >= fault.count)

    def _unhandled(self, lane: Lane | None, text: str) -> None:
        if lane is None or not lane.dead:
            self.oracle.broken(f"sound: {lane.name if lane else 'somebody'}: {text}")

    def _handler_failed(self, lane: Lane, error: Exception) -> None:
        if not isinstance(error, FORESEEN):
            self.oracle.broken(f"sound: a handler of {lane.name} failed: {error!r}")


class OracleWatch(Watch):
    """Reports to the oracle what a process's stages receive and commit."""

    def __init__(self, oracle: Oracle, process: Process) -> None:
        self._oracle = oracle
        self._process = process

    def takes(self, stage: int, term: int, incarnation: int, source: int, frame: Frame) -> None:
        self._oracle.took(self._process.peer_id, stage, term, incarnation, source, frame)

    def commits(self, stage: int, attempt: tuple[int, int], step: int) -> None:
        self._oracle.commits(self._process, stage, attempt, step)


class WatchedTraining(TrainingService):
    """Reports to the oracle which stages it hosts."""

    def __init__(self, context: Context, loader: StageLoader, hosts: Callable[[int, int], None]) -> None:
        super().__init__(context, loader)
        self._on_host = hosts

    async def host(
        self, job: JobId, manifest: Manifest, stage: int, term: int, *rest: Any, **more: Any
    ) -> None:
        self._on_host(stage, term)
        await super().host(job, manifest, stage, term, *rest, **more)


class WorldPlane:
    """Implements `fusion.runtime.planes.plane.Plane` for a peer, and reports its updates to the oracle."""

    def __init__(self, peer: PeerId, microbatches: int, oracle: Oracle) -> None:
        self._peer = peer
        self._microbatches = microbatches
        self._oracle = oracle

    def training(self, stage: Stage, variables: Tensors, optimizer: OptimizerConfig) -> ChainPlane:
        peer, oracle = self._peer, self._oracle
        return ChainPlane(
            stage, variables, self._microbatches,
            lambda plane, before, after: oracle.applied(peer, plane, before, after),
            lambda text: oracle.broken(f"history: stage {stage.index} at {peer} {text}"),
        )  # fmt: skip

    def decoding(self, stage: Stage, variables: Tensors) -> DecodingStage:
        raise NotImplementedError("nothing is served in a world")


def _name(index: int) -> PeerId:
    return PeerId("abcdefghijklmnop"[index] * 2)
