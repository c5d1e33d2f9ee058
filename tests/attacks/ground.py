"""Where an attack is held: real peers on loopback, honest users of their directory, a stranger in a process of its own.

A peer withstands an attack when it lives on, at least 0.8 of what honest users do still works (and the attack's own
question is answered as it should be), its loop never computed for longer than 250 ms without letting others run, and its
memory stayed within 256 MiB of what it was before.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from support.directory_records import claim_record, digest
from support.leaks import nothing_left

from fusion.cli.local.fleet import Fleet, LocalPeer, open_fleet
from fusion.runtime.job.protocol import STATUS
from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PConfig, P2PTransport
from fusion.swarm.transport import PeerId, call

HERE = Path(__file__).parent
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
HONEST_SHARE = 0.8
BLOCK_SECONDS = 0.25
GROWTH_BYTES = 256 << 20
OPERATION_SECONDS = 0.4  # between the honest users' operations
ANSWER_SECONDS = 4.0  # for one of them: a lease lasts 6 s
HONEST_JOB = JobId(digest("an honest job"))


@dataclass(kw_only=True)
class Verdict:
    """What an attack did. `honest` of `operations` went through."""

    attack: str
    lived: bool = True
    operations: int = 0
    honest: int = 0
    slowest_seconds: float = 0.0  # of the honest operations
    block_seconds: float = 0.0  # the longest, of any peer's loop
    quiet_block_seconds: float = 0.0
    growth_bytes: int = 0
    attacker_share: float = 0.0  # of a core
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        found = [] if self.lived else ["a peer ended"]
        if self.honest < HONEST_SHARE * self.operations:
            found.append(f"only {self.honest} of {self.operations} honest operations went through")
        if self.block_seconds > BLOCK_SECONDS:
            found.append(f"a loop was held for {self.block_seconds:.2f} s")
        if self.growth_bytes > GROWTH_BYTES:
            found.append(f"a peer grew by {self.growth_bytes >> 20} MiB")
        return found + [f"{name}: {what}" for name, what in self.notes.items() if name.startswith("fault")]

    def __str__(self) -> str:
        return json.dumps({**asdict(self), "held": not self.faults, "faults": self.faults})


@dataclass
class Ground:
    """`count` peers that know each other, and two honest clients of theirs: one publishes, the other one reads."""

    fleet: Fleet
    peers: list[LocalPeer]
    author: HivemindDirectory
    author_identity: Identity
    reader: HivemindDirectory
    transport: P2PTransport  # the reader's

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(peer.address for peer in self.peers)

    def reports(self) -> list[list[dict[str, float]]]:
        return [_lines(self.fleet.root / f"{peer.name}.watch") for peer in self.peers]

    async def operation(self, step: int) -> bool:
        """A claim is renewed and read, all peers are listed, and each of them says what it does."""
        record = claim_record(self.author_identity, job=HONEST_JOB, step=step)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.author.publish(record)
                claims = await self.reader.claims(HONEST_JOB, 0)
                listed = {each.peer for each in await self.reader.peers()}
                for peer in self.peers:
                    await call(self.transport, PeerId(peer.peer_id), STATUS.name, "status")
        except (SwarmError, TimeoutError):
            return False
        return record in claims and {peer.peer_id for peer in self.peers} <= listed


@dataclass(frozen=True)
class Attack:
    run: Callable[[Any], Awaitable[dict[str, Any] | None]]  # of an `attacks.stranger.Stranger`
    seconds: float = 8.0  # it goes on for, once prepared
    check: Callable[[Ground, Verdict], Awaitable[None]] | None = None  # of what only this attack is about


@asynccontextmanager
async def open_ground(count: int = 3) -> AsyncIterator[Ground]:
    async with AsyncExitStack() as stack:
        traces = stack.enter_context(nothing_left())
        _environment(stack, traces.environment)
        fleet = await stack.enter_async_context(open_fleet("attack-"))
        peers: list[LocalPeer] = []
        for number in range(count):
            name = f"peer-{number}"
            command = (sys.executable, str(HERE / "watched.py"), str(fleet.root / f"{name}.watch"))
            bootstrap = (peers[0].address,) if peers else ()
            peers.append(await fleet.start_peer(name, bootstrap=bootstrap, command=command))
        honest = [await _client(stack, peers[0].address) for _ in range(2)]
        (author, identity, _), (reader, _, transport) = honest
        yield Ground(fleet, peers, author, identity, reader, transport)


async def _client(stack: AsyncExitStack, address: str) -> tuple[HivemindDirectory, Identity, P2PTransport]:
    identity = Identity.generate()
    config = P2PConfig(identity=identity, listen=LOOPBACK)
    transport = await stack.enter_async_context(P2PTransport.start(config))
    directory = await HivemindDirectory.start(transport.p2p, identity, DhtConfig(client=True))
    stack.push_async_callback(directory.aclose)
    await directory.join(await transport.connect(address))
    return directory, identity, transport


async def hold(
    ground: Ground,
    attack: str,
    *,
    quiet_seconds: float = 4.0,
    check: Callable[[Ground, Verdict], Awaitable[None]] | None = None,
) -> Verdict:
    """Run the attack of that name (`tests/attacks/__main__.py --attack`) against the ground while its honest users go
    on; `check` looks afterwards at what this attack is about."""
    verdict = Verdict(attack=attack)
    await _honest(ground, Verdict(attack="quiet"), asyncio.create_task(asyncio.sleep(quiet_seconds)))
    began = time.time()
    before = [lines[-1]["rss"] for lines in ground.reports()]
    verdict.quiet_block_seconds = _block(ground, began - quiet_seconds, began)
    attacker = asyncio.create_task(_attack(attack, ground.addresses))
    await _honest(ground, verdict, attacker)
    verdict.notes |= attacker.result()
    verdict.attacker_share = verdict.notes.pop("share")
    if check is not None:
        await check(ground, verdict)
    await asyncio.sleep(1.0)  # the last reports
    verdict.lived = all(peer.process.returncode is None for peer in ground.peers)
    verdict.block_seconds = _block(ground, began, time.time())
    after = [max(line["rss"] for line in lines if line["at"] > began - 1.0) for lines in ground.reports()]
    verdict.growth_bytes = int(max(late - early for early, late in zip(before, after, strict=True)))
    return verdict


async def _honest(ground: Ground, verdict: Verdict, until: asyncio.Task[Any]) -> None:
    while not until.done():
        began = time.monotonic()
        verdict.honest += await ground.operation(verdict.operations)
        verdict.operations += 1
        verdict.slowest_seconds = max(verdict.slowest_seconds, time.monotonic() - began)
        await asyncio.sleep(OPERATION_SECONDS)


async def _attack(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE), "--attack", name, *addresses),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
    assert process.returncode == 0, f"the attacker of {name} ended with {process.returncode}"
    notes: dict[str, Any] = json.loads(out.splitlines()[-1])
    return notes


def _block(ground: Ground, since: float, until: float) -> float:
    return max(
        (line["block"] for lines in ground.reports() for line in lines if since < line["at"] <= until),
        default=0.0,
    )


def _lines(report: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in report.read_text().splitlines() if line.endswith("}")]


def _environment(stack: AsyncExitStack, environment: dict[str, str]) -> None:
    before = {name: os.environ.get(name) for name in environment}
    folder = tempfile.tempdir

    def restore() -> None:
        tempfile.tempdir = folder
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    stack.callback(restore)
    os.environ.update(environment)
    tempfile.tempdir = environment["TMPDIR"]


def alive(peer: LocalPeer) -> bool:
    return peer.process.returncode is None and psutil.pid_exists(peer.process.pid)
