"""Real peers in a network in a box, and the jobs that are timed on them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.network_cases import CODECS, Bench, Case, placed, text_files
from bench.network_machine import cpu_seconds, idle_cores
from box.network import Box

from fusion.cli.local.fleet import Fleet, FleetError, LocalPeer, Record, open_fleet
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.training.data.batches import pack_text
from fusion.swarm.transport import PeerId

BEGIN_SECONDS = 120.0  # from launching a job to its first step
STALL_SECONDS = 120.0  # without a step
NO_SNAPSHOTS = 10**6  # steps between them: one, at the end
TEXT_BYTES = 1 << 20
OPTIMIZER = OptimizerConfig(learning_rate=2e-3, warmup_steps=10)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed job. Times are seconds since its first step began; entry i of a tuple is that of step i + 1."""

    ended_at: tuple[float, ...]
    losses: tuple[float, ...]
    sent_bytes: tuple[int, ...]  # payload between stages since the job began
    stage_seconds: tuple[tuple[float, ...], ...]  # computing, by stage
    cpu_seconds: float  # a step after the warm-up, of all peers and the box's router together
    validation: tuple[tuple[int, float, float], ...]  # step, seconds, loss
    warm_up: int  # steps that do not count


@dataclass(eq=False)
class Watch:
    """What the lead of one job reports."""

    job: str
    warm_up: int
    cpu: Any  # () -> seconds of all processes so far
    began: float | None = None
    at: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    busy: list[tuple[float, ...]] = field(default_factory=list)
    validation: list[tuple[int, float, float]] = field(default_factory=list)
    cpu_at: list[tuple[int, float]] = field(default_factory=list)  # step, seconds
    ended: Record | None = None
    attempts: int = 0
    said: float = field(default_factory=time.monotonic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def see(self, record: Record) -> None:
        if record.get("event") != "step" or record.get("job") != self.job:
            return
        self.said = time.monotonic()
        at, step = float(record["at"]), int(record["step"])
        self.attempts = max(self.attempts, int(record["attempts"]))
        if self.began is None and self.attempts:
            self.began = at
        if step == len(self.at) + 1 and self.began is not None:
            self.at.append(at - self.began)
            self.losses.append(float(record["loss"]))
            self.sent.append(int(record["sent_bytes"]))
            self.busy.append(tuple(record["busy"]))
            if step == self.warm_up or step == int(record["steps"]):
                self.cpu_at.append((step, self.cpu()))
        measured = record.get("validation_loss")
        if measured is not None and self.began is not None:
            held = int(record["validation_step"])
            if not self.validation or self.validation[-1][0] != held:
                self.validation.append((held, at - self.began, float(measured)))
        if record.get("state") in ("done", "stopped", "failed"):
            self.ended = record
        self.changed.set()

    def sample(self) -> Sample:
        lengths = [b - a for a, b in zip([0.0, *self.at], self.at, strict=False)]
        (first, before), (last, after) = self.cpu_at[0], self.cpu_at[-1]
        return Sample(
            ended_at=tuple(self.at),
            losses=tuple(self.losses),
            sent_bytes=tuple(self.sent),
            stage_seconds=tuple(
                tuple(share * seconds for share in shares)
                for shares, seconds in zip(self.busy, lengths, strict=True)
            ),
            cpu_seconds=(after - before) / max(1, last - first),
            validation=tuple(self.validation),
            warm_up=self.warm_up,
        )


class Testbed:
    """The running peers of one network, and a client that launches jobs on them. Use `open_testbed`."""

    def __init__(self, bench: Bench, box: Box, fleet: Fleet, client: Context) -> None:
        self.peers: dict[str, LocalPeer] = {}
        self._bench = bench
        self._box = box
        self._fleet = fleet
        self._client = client
        self._watch: Watch | None = None
        training, held_out = text_files()
        rows = [pack_text(files, None, limit, 256).tobytes() for files, limit in (
            (training, TEXT_BYTES), (held_out, TEXT_BYTES // 8))]  # fmt: skip
        put = client.blobs.store.put
        self._data = DataConfig(kind="tokens", train=put(rows[0]), held_out=put(rows[1]))

    def hear(self, record: Record) -> None:
        if self._watch is not None:
            self._watch.see(record)

    async def run(
        self, case: Case, warm_up: int, steps: int, *, evaluate: bool = False, alone: bool = False
    ) -> Sample:
        """Run one job of `steps`, warm-up included, to its end. `alone`: without its codec and with one microbatch at a time, so
        that no two stages compute at once. FleetError if it stalls, is disturbed or fails."""
        prepared = await asyncio.to_thread(self._prepare, case, steps, evaluate, alone)
        watch = self._watch = Watch(prepared.job, warm_up, self._cpu_seconds)
        await launch(self._client, prepared)
        holding = asyncio.create_task(wait_until_held(self._client, prepared), name="handing over")
        try:
            while watch.ended is None:
                watch.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await watch.changed.wait()
                patience = STALL_SECONDS if watch.at else BEGIN_SECONDS
                if time.monotonic() - watch.said > patience:
                    raise FleetError(f"{case.name}: no step for {patience:.0f} s: {self._words()}")
        finally:
            self._watch = None
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        if watch.ended["state"] != "done":
            raise FleetError(f"{case.name}: {watch.ended['state']}: {watch.ended.get('error')}")
        if watch.attempts > 1:
            raise FleetError(
                f"{case.name}: a step was begun again, {watch.attempts - 1} times: {self._words()}"
            )
        return watch.sample()

    def _prepare(self, case: Case, steps: int, evaluate: bool, alone: bool) -> Prepared:
        bench, found = self._bench, placed(self._bench, case)
        config = TrainConfig(
            steps=steps,
            microbatches=1 if alone else bench.microbatches,
            microbatch_size=bench.microbatch_size,
            sequence=bench.model.sequence,
            seed=bench.seed,
            optimizer=OPTIMIZER,
            data=self._data if evaluate else DataConfig(kind="tokens", train=self._data.train),
            schedule=found.placement.schedule,
            depth=found.placement.depth,
            snapshot_every=NO_SNAPSHOTS,
            evaluate_every=bench.evaluate_every if evaluate else 0,
            evaluate_batches=bench.evaluate_batches,
            compression=CODECS["dense" if alone else case.codec],
            codecs=() if alone else found.codecs,
        )
        proposed = [PeerId(self.peers[owner].peer_id) for owner in found.placement.owners]
        job = GraphJob(
            name="bench-network",
            graph=bench.graph,
            variables=bench.language_model.read,
            byte_level=True,
        )
        stages = as_requested(bench.graph, config, found.placement.cuts, proposed)
        return prepare_graph(job, stages, self._client.blobs.store)

    def _cpu_seconds(self) -> float:
        return cpu_seconds(self._pids())

    def _words(self) -> str:
        said = {name: self._fleet.last_lines(name) for name in self.peers}
        return "; ".join(f"{name}: {words}" for name, words in said.items() if words)

    def idle_cores(self) -> float:
        return idle_cores(self._pids())

    def _pids(self) -> list[int]:
        return [self._box.router_pid, *(peer.process.pid for peer in self.peers.values())]


@asynccontextmanager
async def open_testbed(bench: Bench, box: Box, hosts: Sequence[str]) -> AsyncIterator[Testbed]:
    """A peer on each of these hosts. The calling thread is on the first one."""
    async with open_fleet("fusion-network-") as fleet:

        async def start(host: str, known: Sequence[str]) -> LocalPeer:
            return await fleet.start_peer(
                host, "--tell-steps", bootstrap=known, listen=box.listen(host), prefix=box.prefix(host),
                on_record=lambda record: hear(record),
            )  # fmt: skip

        def hear(record: Record) -> None:
            if testbed is not None:
                testbed.hear(record)

        testbed: Testbed | None = None
        first = await start(hosts[0], ())
        others = await asyncio.gather(*(start(host, [first.address]) for host in hosts[1:]))
        config = ClientConfig(home=fleet.root / "launcher", peer=first.address)
        async with open_client(config) as client:
            testbed = Testbed(bench, box, fleet, client)
            testbed.peers = dict(zip(hosts, (first, *others), strict=True))
            yield testbed
