"""Peers as processes of this machine, for the demo and the end-to-end tests: real `fusion-peer` commands, homes in
one temporary folder, ports that the system picks, loopback only. Nothing of it outlives us (see `janitor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from fusion.cli.local import janitor
from fusion.cli.terminal.loop import wait_until_orphaned

COMMAND = (sys.executable, "-m", janitor.MODULE)
TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
LISTEN = "/ip4/127.0.0.1/tcp/0"
READY_SECONDS = 300.0
STOP_SECONDS = 6.0
LINE_BYTES = 1 << 24

Record = dict[str, Any]
OnRecord = Callable[[Record], None]
Result = TypeVar("Result")


def _ignore(record: Record) -> None:
    pass


class FleetError(RuntimeError):
    """A process of the fleet did not do what it was started for; one line."""


@dataclass
class LocalPeer:
    """A running `fusion-peer start`. `ready` is the object it printed when it was up."""

    name: str  # of its folder: "bootstrap", "peer-1"
    home: Path
    process: asyncio.subprocess.Process
    ready: Record

    @property
    def address(self) -> str:
        return str(self.ready["addresses"][0])

    @property
    def peer_id(self) -> str:
        return str(self.ready["peer_id"])


class Fleet:
    """Use `async with open_fleet() as fleet`."""

    def __init__(self, root: Path, lifeline: asyncio.StreamWriter) -> None:
        self.root = root
        self.peers: list[LocalPeer] = []
        self._lifeline = lifeline
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._in_threads: list[asyncio.Future[Any]] = []

    async def start_peer(
        self,
        name: str,
        *arguments: str,
        bootstrap: Sequence[str] = (),
        listen: str = LISTEN,
        prefix: Sequence[str] = (),
        command: Sequence[str] | None = None,
        on_record: OnRecord = _ignore,
    ) -> LocalPeer:
        """Start a peer and wait until it is up. Raises FleetError, with its last lines, if it is not.

        `prefix` stands before the command (`ip netns exec NAME`), `command` in the place of `fusion-peer`;
        `on_record` gets every object that the peer prints, for as long as it lives."""
        home = self.root / name
        joins = [part for address in bootstrap or (os.devnull,) for part in ("--bootstrap", address)]
        process = await self._spawn(
            name,
            *("start", "--home", str(home), "--listen", listen, "--threads", "1", "--json"),
            *("--stop-with", str(os.getpid()), *joins, *arguments),
            prefix=prefix,
            command=command,
        )
        ready: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._readers.append(asyncio.create_task(_drain(process, ready, on_record), name=f"output of {name}"))
        try:
            async with asyncio.timeout(READY_SECONDS):
                record = await ready
        except (TimeoutError, FleetError) as error:
            raise FleetError(
                f"{name} did not start: {self.last_lines(name) or error or 'timed out'}"
            ) from None
        peer = LocalPeer(name, home, process, record)
        self.peers.append(peer)
        return peer

    async def run(
        self, name: str, *arguments: str, prefix: Sequence[str] = (), on_record: OnRecord = _ignore
    ) -> list[Record]:
        """Run `fusion-peer ARGUMENTS --json` to its end; every object it printed. Raises FleetError, with its last lines, if
        it fails."""
        process = await self._spawn(name, *arguments, "--json", prefix=prefix)
        assert process.stdout is not None
        records: list[Record] = []
        async for line in process.stdout:
            record = json.loads(line)
            records.append(record)
            on_record(record)
        if await process.wait() != 0:
            raise FleetError(
                f"fusion-peer {arguments[0]}: {self.last_lines(name) or 'failed without a word'}"
            )
        return records

    async def in_thread(self, function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """As `asyncio.to_thread`, for what writes into the fleet's folder: that stays until the function has ended, also
        where nobody waits for it any longer."""
        work = asyncio.get_running_loop().run_in_executor(None, partial(function, *arguments, **options))
        self._in_threads.append(work)
        return await asyncio.shield(work)

    async def kill(self, peer: LocalPeer) -> None:
        """SIGKILL, and the peer is no longer one of the fleet's; its home stays."""
        with contextlib.suppress(ProcessLookupError):
            peer.process.kill()
        self.forget(peer)
        await peer.process.wait()

    def forget(self, peer: LocalPeer) -> None:
        """The peer has ended, or will without us."""
        self.peers = [other for other in self.peers if other is not peer]

    def last_lines(self, name: str, lines: int = 1) -> str:
        """The last lines that a process of the fleet wrote to stderr, empty ones left out."""
        log = self.root / f"{name}.log"
        written = log.read_text("utf-8", "replace").split("\n") if log.exists() else []
        return "\n".join([line.strip() for line in written if line.strip()][-lines:])

    async def aclose(self) -> None:
        """Stop every process in order: ask, wait, kill."""
        running = [process for process in self._processes if process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*(process.wait() for process in running))
        except TimeoutError:
            for process in running:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, *self._in_threads, return_exceptions=True)

    async def _spawn(
        self, name: str, *arguments: str, prefix: Sequence[str] = (), command: Sequence[str] | None = None
    ) -> asyncio.subprocess.Process:
        with open(self.root / f"{name}.log", "ab") as log:
            process = await asyncio.create_subprocess_exec(
                *prefix,
                *(COMMAND if command is None else command),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                # A terminal's Ctrl-C is for us alone: we stop the others in order.
                start_new_session=True,
                limit=LINE_BYTES,
            )
        self._processes.append(process)
        with contextlib.suppress(psutil.Error):  # it may have ended already
            created = psutil.Process(process.pid).create_time()
            self._lifeline.write(f"{process.pid} {created}\n".encode())
        return process


async def _drain(
    process: asyncio.subprocess.Process, ready: asyncio.Future[Record], on_record: OnRecord
) -> None:
    """Read a peer's output for as long as it lives (a full pipe would stop it); its first object is for `ready`."""
    assert process.stdout is not None
    async for line in process.stdout:
        if ready.done() and on_record is _ignore:
            continue
        try:
            record = json.loads(line)
        except ValueError:  # one that is killed leaves half a line
            continue
        if not ready.done():
            ready.set_result(record)
        on_record(record)
    if not ready.done():
        ready.set_exception(FleetError("it ended"))


@contextlib.contextmanager
def _torch_cache(folder: Path) -> Iterator[None]:
    """Torch, in this process and in those it starts, makes a folder for its caches, used or not: this one, unless the
    user has named another."""
    if TORCH_CACHE in os.environ:
        yield
        return
    os.environ[TORCH_CACHE] = str(folder)
    try:
        yield
    finally:
        del os.environ[TORCH_CACHE]


@asynccontextmanager
async def open_fleet(prefix: str = "fusion-demo-") -> AsyncIterator[Fleet]:
    """A fleet with no process in it yet. Afterwards, whatever happened, its processes and its folder are gone."""
    root = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        keeper = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-P",
                janitor.__file__,
                str(root),
            ),  # not -I: it needs the packages that we have
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    assert keeper.stdin is not None
    fleet = Fleet(root, keeper.stdin)
    with _torch_cache(root / "torch"):
        try:
            yield fleet
        finally:
            await asyncio.shield(_close(fleet, keeper))


async def _close(fleet: Fleet, keeper: asyncio.subprocess.Process) -> None:
    await fleet.aclose()
    assert keeper.stdin is not None
    keeper.stdin.close()
    await keeper.wait()


async def while_parent_lives(parent: int | None, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; once the process `parent`, which started us, is gone, cancel it (so that it clears up) and raise
    FleetError."""
    task = asyncio.ensure_future(work)
    tasks: set[asyncio.Future[Any]] = {task}
    if parent is not None:
        tasks.add(asyncio.ensure_future(wait_until_orphaned(parent)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise FleetError("stopped: the process that started it is gone")
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
