"""Months of a peer in an hour: small jobs that begin and end, clients that connect once, a neighbour that restarts again and
again.

    python tests/sweeps/soak.py [--jobs 2000] [--clients 5000] [--restarts 200] [--at-once 8] [--json FILE]

Two real peers train each job to its end and serve one model; a third one is stopped and killed in turn, and starts again. Each
client has a new peer id and a connection of its own (`endurance.light_peer`); it requests the status, and one in ten an answer.
A day of the peers' disks lasts 24 s (`endurance.hurried`).

The first twentieth of the work is the warm-up. After it, and at the end, the peers rest, and the sweep reads the bytes under
their homes, and the memory and open files of their processes, with p2pd's apart. Exit 0 if all jobs were done, all clients
answered, all starts succeeded, and no figure rose by more than a tenth; 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from attacks.honest_answers import served_model
from attacks.honest_training import Made, made, training_job
from support.leaks import nothing_left, surround
from sweeps.endurance.light_peer import LightPeer
from sweeps.reports import say, tell

from fusion.cli.local.fleet import Fleet, FleetError, LocalPeer, open_fleet
from fusion.runtime.job.context import Context
from fusion.runtime.job.protocol import GENERATE, STATUS
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.streams.frames import encode
from fusion.swarm.transport import PeerId

HERE = Path(__file__).parent
STAY = 2  # peers
WARM = 0.05  # of all work
LEAST_WARM = {"jobs": 10, "clients": 50, "restarts": 1}
ALLOWED = 1.1  # of what was held after the warm-up
KINDS = ("home_bytes", "memory", "p2pd_memory", "files", "p2pd_files")
STEPS = 2
CLIENTS_AT_ONCE = 4
ASKS = 10  # one client of so many asks for an answer
NEW_TOKENS = 4
LAUNCH_SECONDS = 10.0  # after which a job that nobody has finished is launched again
JOB_SECONDS = 300.0
READY_SECONDS = 120.0
REST_SECONDS = 50.0  # for leases, records and a day of the disk to run out
SAMPLES, SAMPLE_SECONDS = 6, 1.0

Row = dict[str, float]


@dataclass
class Soak:
    fleet: Fleet
    peers: list[LocalPeer]
    user: Context
    author: Identity
    model: str
    graph: Made
    ends: dict[str, str] = field(default_factory=dict)  # how jobs ended, as the peers said
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    done: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def hear(self, record: dict[str, Any]) -> None:
        if record.get("event") == "step" and record.get("state") in ("done", "stopped", "failed"):
            self.ends[record["job"]] = record["state"]
            self.ended.set()

    # --- the three kinds of work, one piece each

    async def job(self, number: int) -> None:
        owners = [PeerId(self.peers[(number + stage) % STAY].peer_id) for stage in range(STAY)]
        store = self.user.blobs.store
        assert isinstance(store, BlobStore)
        prepared = await self.fleet.in_thread(
            lambda: training_job(store, self.author, owners, name=f"job-{number}", steps=STEPS, of=self.graph)
        )
        deadline = time.monotonic() + JOB_SECONDS
        while prepared.job not in self.ends and time.monotonic() < deadline:
            await launch(self.user, prepared)
            await self._wait_for(prepared, LAUNCH_SECONDS)
        store.delete(prepared.blobs[0])  # the manifest: all the rest is that of every job
        end = self.ends.pop(prepared.job, "never ended")
        if end != "done":
            self.faults[f"a job {end}"] += 1

    async def _wait_for(self, prepared: Prepared, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while prepared.job not in self.ends:
                    self.ended.clear()
                    await self.ended.wait()

    async def client(self, number: int, threads: ThreadPoolExecutor) -> None:
        address = self.peers[number % STAY].address
        loop = asyncio.get_running_loop()
        try:
            kinds = await loop.run_in_executor(threads, self._visit, address, number % ASKS == 0)
        except (OSError, SwarmError) as error:
            self.faults[f"a client: {type(error).__name__} {error}"[:120]] += 1
            return
        if "error" in kinds or not kinds:
            self.faults[f"a client was answered {kinds}"] += 1

    def _visit(self, address: str, asks: bool) -> list[str]:
        with LightPeer(Identity.generate(), address) as peer:
            kinds = peer.ask(STATUS.name, [frame("status")])
            if asks:
                request = GenerateRequest(model=self.model, prompt_ids=(1, 2, 3), max_tokens=NEW_TOKENS)
                header, prompt = request.to_frame()
                kinds += peer.ask(GENERATE.name, [frame("generate", header, prompt)], answers=NEW_TOKENS + 1)
            return kinds

    async def restart(self, number: int) -> None:
        """Start a peer and end it, in turn as its user stops it and as a crash does."""
        try:
            peer = await start(self.fleet, "restless", self.peers[0].address)
        except FleetError as error:
            self.faults[f"a start: {error}"[:120]] += 1
            return
        if number % 2:
            await self.fleet.kill(peer)
            return
        self.fleet.forget(peer)
        peer.process.terminate()
        await peer.process.wait()
        if peer.process.returncode != 0:
            self.faults[f"a stop ended with {peer.process.returncode}"] += 1

    # --- all of it

    async def work(self, begin: dict[str, int], end: dict[str, int], at_once: int) -> None:
        """Run the pieces of work from `begin` to `end`, of each kind."""
        with ThreadPoolExecutor(CLIENTS_AT_ONCE) as threads:
            ways: tuple[tuple[str, Callable[[int], Awaitable[None]], int], ...] = (
                ("jobs", self.job, at_once),
                ("clients", lambda number: self.client(number, threads), CLIENTS_AT_ONCE),
                ("restarts", self.restart, 1),
            )
            telling = asyncio.create_task(self._tell())
            try:
                await asyncio.gather(
                    *(self._all(name, way, most, begin[name], end[name]) for name, way, most in ways)
                )
            finally:
                telling.cancel()

    async def _all(
        self, name: str, way: Callable[[int], Awaitable[None]], most: int, begin: int, end: int
    ) -> None:
        numbers = iter(range(begin, end))

        async def one_after_the_other() -> None:
            for number in numbers:
                await way(number)
                self.done[name] += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(most)))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(30.0)
            say(f"{dict(self.done)} faults {dict(self.faults)} {[held(peer) for peer in self.peers]}")

    async def rest(self) -> list[Row]:
        """The resources of each peer at rest: the least of some samples."""
        await asyncio.sleep(REST_SECONDS)
        seen: list[list[Row]] = []
        for _ in range(SAMPLES):
            seen.append([held(peer) for peer in self.peers])
            await asyncio.sleep(SAMPLE_SECONDS)
        return [{kind: min(row[kind] for row in rows) for kind in KINDS} for rows in zip(*seen, strict=True)]


def frame(kind: str, header: dict[str, Any] | None = None, payload: bytes = b"") -> bytes:
    head, parts, _ = encode(kind, header, [payload])
    return b"".join((head, *parts))


def held(peer: LocalPeer) -> Row:
    """A peer's resources now."""
    process = psutil.Process(peer.process.pid)
    found = {
        "memory": process.memory_info().rss,
        "files": process.num_fds(),
        "p2pd_memory": 0,
        "p2pd_files": 0,
    }
    for each in process.children(recursive=True):
        with suppress(psutil.Error):
            found["p2pd_memory"] += each.memory_info().rss
            found["p2pd_files"] += each.num_fds()
    size = 0
    for path in peer.home.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return {"home_bytes": size, **found}


async def start(
    fleet: Fleet, name: str, bootstrap: str = "", hear: Callable[[dict[str, Any]], None] = lambda record: None
) -> LocalPeer:
    return await fleet.start_peer(
        name,
        "--tell-steps",
        bootstrap=(bootstrap,) if bootstrap else (),
        command=(sys.executable, str(HERE / "endurance" / "hurried.py")),
        on_record=hear,
    )


@asynccontextmanager
async def open_soak() -> AsyncIterator[Soak]:
    async with AsyncExitStack() as stack:
        traces = stack.enter_context(nothing_left())
        surround(stack, traces.environment)
        fleet = await stack.enter_async_context(open_fleet("soak-"))
        peers: list[LocalPeer] = []
        hearers: list[Callable[[dict[str, Any]], None]] = []

        def hear(record: dict[str, Any]) -> None:
            for hearer in hearers:
                hearer(record)

        for number in range(STAY):
            bootstrap = peers[0].address if peers else ""
            peers.append(await start(fleet, f"peer-{number}", bootstrap, hear))
        config = ClientConfig(home=fleet.root / "user", peer=peers[0].address)
        user = await stack.enter_async_context(open_client(config))
        author, store = Identity.generate(), user.blobs.store
        assert isinstance(store, BlobStore)
        ids = [PeerId(peer.peer_id) for peer in peers]
        serving = await fleet.in_thread(served_model, store, author, ids)
        graph = await fleet.in_thread(made)
        soak = Soak(fleet, peers, user, author, serving.manifest.name, graph)
        hearers.append(soak.hear)
        async with asyncio.timeout(READY_SECONDS):
            await launch(user, serving)
            await wait_until_held(user, serving)
        yield soak


async def run(options: argparse.Namespace) -> dict[str, Any]:
    whole = {kind: getattr(options, kind) for kind in LEAST_WARM}
    warm = {kind: min(most, max(round(WARM * most), LEAST_WARM[kind])) for kind, most in whole.items()}
    none = dict.fromkeys(whole, 0)
    began = time.monotonic()
    async with open_soak() as soak:
        await soak.work(none, warm, options.at_once)
        say(f"warm: {dict(soak.done)}")
        first = await soak.rest()
        say(f"at rest: {first}")
        await soak.work(warm, whole, options.at_once)
        last = await soak.rest()
        say(f"at rest: {last}")
        faults = [f"{count} times: {what}" for what, count in soak.faults.items()]
        faults += [f"{peer.name} logged a traceback" for peer in soak.peers if _failed(soak.fleet, peer)]
    for number, (before, after) in enumerate(zip(first, last, strict=True)):
        for kind in KINDS:
            if after[kind] > ALLOWED * before[kind]:
                faults.append(f"peer-{number}: {kind} {before[kind]:.0f} and then {after[kind]:.0f}")
    return {
        "ok": not faults,
        "done": dict(soak.done),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "faults": faults,
        "ratios": [
            {kind: round(after[kind] / before[kind], 3) for kind in KINDS}
            for before, after in zip(first, last, strict=True)
        ],
        "first": first,
        "last": last,
    }


def _failed(fleet: Fleet, peer: LocalPeer) -> bool:
    return "Traceback" in (fleet.root / f"{peer.name}.log").read_text("utf-8", "replace")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=5000)
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8, help="jobs")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    if min(options.jobs, options.clients, options.restarts, options.at_once) < 1:
        parser.error("--jobs, --clients, --restarts and --at-once: at least 1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return tell(asyncio.run(run(options)), options.json)


if __name__ == "__main__":
    sys.exit(main())
