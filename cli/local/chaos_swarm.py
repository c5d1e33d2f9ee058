"""The peers of a chaos run: started, killed, frozen, cut off and replaced, and what they say about the job.

A frozen peer is one whose processes, its libp2p daemon's too, are stopped (SIGSTOP), as a laptop's are that sleeps. A
partition stops the daemons of a group of peers: they compute on, and nobody hears them, nor they anybody, each other
included. What is sent to them meanwhile waits, as behind a link that is down. (It needs no privileges. Two halves that
go on by themselves take network namespaces.)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fusion.cli.local.chaos_plan import Fault
from fusion.cli.local.chaos_timeline import Timeline
from fusion.cli.local.fleet import Fleet, FleetError, LocalPeer, Record
from fusion.swarm.cancelling import cancel_all

REPLACE_SECONDS = 5.0  # from a kill to the start of the peer that takes the place in the swarm
STOP_SECONDS = 1.0  # at most, for the system to stop a process
BOOTSTRAPS = 3  # addresses that a new peer joins through


@dataclass
class Injected:
    """A fault as it was carried out."""

    fault: Fault
    at: float  # unix seconds
    peers: tuple[str, ...]  # names in the fleet
    stage: int | None  # what the first of them owned
    lead: bool
    last_lines: str = ""  # of the stderr of a peer that was killed

    def record(self) -> dict[str, Any]:
        return {**self.fault.record(), "peers": list(self.peers), "stage": self.stage, "lead": self.lead}


@dataclass
class Swarm:
    """`command` runs the peers in the place of `fusion-peer`; `arguments` are added to each start."""

    fleet: Fleet
    command: Sequence[str] | None = None
    arguments: Sequence[str] = ("--tell-steps",)
    replace_seconds: float = REPLACE_SECONDS
    timelines: dict[str, Timeline] = field(default_factory=dict)
    on_record: Callable[[str, Record], None] = lambda name, record: None
    starts_failed: list[str] = field(default_factory=list)
    holds: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # name -> (job, stage), as it says
    _count: int = 0
    _stopped: dict[int, psutil.Process] = field(default_factory=dict)
    _replacing: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def peers(self) -> list[LocalPeer]:
        """Those that live, in the order in which they were started."""
        living = [peer for peer in self.fleet.peers if peer.process.returncode is None]
        return sorted(living, key=lambda peer: (len(peer.name), peer.name))

    @property
    def homes(self) -> list[Path]:
        """Of every peer that ever was, those that live first."""
        living = [peer.home for peer in self.peers]
        return living + [home for home in sorted(self.fleet.root.glob("peer-*")) if home not in living
                         and home.is_dir()]  # fmt: skip

    async def start(self, count: int) -> None:
        """Start `count` more peers. Raises FleetError, with its last lines, for one that does not come up."""
        first = [] if self.peers else [await self.start_one()]
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count - len(first)):
                tasks.create_task(self.start_one())

    async def start_one(self, *arguments: str) -> LocalPeer:
        """Start a peer that joins through those that joined last."""
        self._count += 1
        known = [peer.address for peer in self.peers[-BOOTSTRAPS:]]
        name = f"peer-{self._count}"

        def observe(record: Record) -> None:
            timeline = self.timelines.get(str(record.get("job")))
            if timeline is not None and timeline.see(name, record):
                self._changed.set()
            if record.get("event") == "status":
                self.holds[name] = [tuple(place) for place in record["stages"]]
            self.on_record(name, record)

        return await self.fleet.start_peer(
            name, *self.arguments, *arguments, command=self.command, on_record=observe, bootstrap=known
        )

    # --- watching

    def follow(self, job: str) -> Timeline:
        """The history of a job from now on."""
        return self.timelines.setdefault(job, Timeline(job=job))

    async def until(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until `true`, looked at whenever a lead says something. FleetError after so many seconds."""
        deadline = time.monotonic() + seconds
        while not true():
            left = deadline - time.monotonic()
            if left <= 0:
                raise FleetError(f"{what}: not within {seconds:.0f} s")
            if not self.peers:
                raise FleetError(f"{what}: no peer is left")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.5)):
                    await self._changed.wait()

    def owner(self, timeline: Timeline, stage: int) -> LocalPeer | None:
        """The living peer that holds a stage, as far as the job's lead knows."""
        owners = timeline.owners
        wanted = owners[stage] if stage < len(owners) else None
        return next((peer for peer in self.peers if peer.peer_id == wanted), None)

    def stage_of(self, timeline: Timeline, peer: LocalPeer) -> int | None:
        owners = timeline.owners
        return owners.index(peer.peer_id) if peer.peer_id in owners else None

    def idle(self, timeline: Timeline) -> list[LocalPeer]:
        """The living peers that hold no stage."""
        return [peer for peer in self.peers if peer.peer_id not in timeline.owners]

    def target(self, timeline: Timeline, role: str) -> LocalPeer | None:
        """The peer in a role of `Fault`; another peer if none has the role now, None if none is alive."""
        kind, _, number = role.partition(" ")
        owner = self.owner(timeline, int(number)) if kind == "stage" else None
        if owner is not None:
            return owner
        found = self.idle(timeline) or self.peers
        return found[int(number) % len(found)] if found else None

    # --- faults

    async def inject(self, fault: Fault, timeline: Timeline) -> Injected | None:
        """Carry a fault out, and undo it in time. None where there was nobody to hit."""
        peer = self.target(timeline, fault.role)
        if peer is None:
            return None
        living = self.peers
        start = living.index(peer)
        group = [living[(start + i) % len(living)] for i in range(max(1, fault.group))]
        stage = self.stage_of(timeline, peer)
        done = Injected(
            fault, time.time(), tuple(dict.fromkeys(each.name for each in group)), stage,
            timeline.lead == peer.name,
        )  # fmt: skip
        if fault.kind == "kill":
            await self.kill(peer)
            done.last_lines = self.fleet.last_lines(peer.name)
        elif fault.kind == "stop":
            await self.freeze(processes(peer), fault.seconds)
        else:
            await self.freeze([p for each in group for p in daemons(each)], fault.seconds)
        return done

    async def kill(self, peer: LocalPeer, *, replace: bool = True) -> None:
        """SIGKILL; a new peer joins a little later."""
        await self.fleet.kill(peer)
        if replace:
            self.replace_soon()

    def replace_soon(self) -> None:
        task = asyncio.create_task(self._replace(), name="a new peer")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self) -> None:
        await asyncio.sleep(self.replace_seconds)
        try:
            await self.start_one()
        except FleetError as error:
            self.starts_failed.append(str(error))

    async def freeze(self, frozen: Iterable[psutil.Process], seconds: float) -> None:
        """Stop processes for so long, in the background: returns once they stand still."""
        found = list(frozen)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.suspend()
                self._stopped[process.pid] = process
        deadline = time.monotonic() + STOP_SECONDS
        while not all(map(_stands, found)) and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

        async def thaw() -> None:
            await asyncio.sleep(seconds)
            self._thaw(found)

        task = asyncio.create_task(thaw(), name="thaw")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    def _thaw(self, frozen: Iterable[psutil.Process]) -> None:
        for process in frozen:
            with contextlib.suppress(psutil.Error):
                if self._stopped.pop(process.pid, None) is not None:
                    process.resume()

    async def settle(self) -> None:
        """Wait until nothing is frozen and every replacement is up."""
        while self._replacing:
            await asyncio.wait(set(self._replacing))

    async def aclose(self) -> None:
        """No replacement starts any more, and nothing stays frozen."""
        await cancel_all(self._replacing)
        self._thaw(list(self._stopped.values()))


def _stands(process: psutil.Process) -> bool:
    """Whether it is stopped, or gone."""
    try:
        return bool(process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    except psutil.Error:
        return True


def processes(peer: LocalPeer) -> list[psutil.Process]:
    """A peer's process and those under it. Empty where it is gone."""
    try:
        root = psutil.Process(peer.process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def daemons(peer: LocalPeer) -> list[psutil.Process]:
    """The libp2p daemon of a peer."""
    found = []
    for process in processes(peer):
        with contextlib.suppress(psutil.Error):
            if "p2pd" in process.name():
                found.append(process)
    return found
