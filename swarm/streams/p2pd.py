"""The p2pd process: started through the guard in a private directory, watched, and ended with us."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from fusion.swarm.errors import TransportError
from fusion.swarm.identity import Identity
from fusion.swarm.idle_connections import Connections
from fusion.swarm.machine import usable_cores
from fusion.swarm.streams import p2pd_guard

logger = logging.getLogger(__name__)

PREFIX = "fusion-peer-"  # of every private directory
# All files that one may hold: a folder with any other file is not ours, whatever its name.
CONTENTS = frozenset({p2pd_guard.LOCK, "identity.key", "d.sock", "h.sock", "s.sock", "control.sock"})
_SOCKET_PATH_BYTES = 100  # sockaddr_un holds 104 on macOS, 108 on Linux
_LONGEST_SOCKET_NAME = len("/control.sock")
_SHORTEST_FOLDER = Path("/tmp")  # exists on all systems with UNIX sockets
_STALE_SECONDS = 60.0
_STILL_STARTING_SECONDS = 10.0
_STOP_SECONDS = 3.0
MOST_CORES = 4  # used by p2pd
_LISTEN = re.compile(
    r"/ip(?P<version>4|6)/(?P<host>[^/\s]+)/(?:tcp/(?P<tcp>\d{1,5})(?:/ws)?|udp/(?P<udp>\d{1,5})/quic-v1)/?",
    re.ASCII,
)


class Daemon:
    """A running p2pd. `await Daemon.start(...)`, then `aclose()`; `ended` resolves to the reason, in one line, when it dies by itself."""

    def __init__(
        self, directory: Path, process: asyncio.subprocess.Process, pid: int, lock: int | None
    ) -> None:
        self.directory = directory  # private, removed with the daemon
        self.control_path = directory / "d.sock"
        self.pid = pid  # p2pd's own
        self.connections = Connections()  # updated by all that use one
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = process
        self._lock = lock
        self._output: deque[str] = deque(maxlen=20)
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        program: Path,
        arguments: Sequence[str],
        *,
        identity: Identity,
        listen: Sequence[str],
        runtime_dir: Path | None,
        start_seconds: float,
    ) -> Daemon:
        """Start `program` (p2pd) and wait at most `start_seconds` until it listens.

        Raises TransportError, in one line, for an unusable directory, a taken port, an identity that another
        running peer uses, or an error of p2pd.
        """
        check_ports(listen)
        lock = _lock_identity(identity)
        directory: Path | None = None
        process: asyncio.subprocess.Process | None = None
        try:
            directory = make_private_directory(runtime_dir)
            key = identity.path or _write_key(identity, directory)
            process = await _spawn(
                directory,
                program,
                f"-id={key.absolute()}",
                f"-listen=/unix{directory / 'd.sock'}",
                f"-hostAddrs={','.join(listen)}",
                *arguments,
            )
            daemon = cls(directory, process, 0, lock)
            await daemon._wait_ready(start_seconds)
            daemon._reader = asyncio.create_task(daemon._watch(), name="p2pd output")
        except BaseException as error:
            if process is not None:
                _close_lifeline(process)
                await asyncio.shield(_reap(process))
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            if lock is not None:
                os.close(lock)
            if isinstance(error, OSError):
                raise TransportError(f"cannot start p2pd: {error.strerror or error}") from error
            raise
        return daemon

    async def aclose(self) -> None:
        """End p2pd and its guard and remove their directory. Idempotent."""
        _close_lifeline(self._process)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        await _reap(self._process)
        shutil.rmtree(self.directory, ignore_errors=True)  # in case the guard was killed
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _wait_ready(self, start_seconds: float) -> None:
        started = time.monotonic()
        noted = False
        while True:
            remaining = started + start_seconds - time.monotonic()
            if remaining <= 0:
                raise TransportError(
                    f"p2pd did not start within {start_seconds:.0f} seconds; is the machine overloaded?"
                )
            try:
                async with asyncio.timeout(min(remaining, _STILL_STARTING_SECONDS)):
                    line = await self._line()
            except TimeoutError:
                if not noted:
                    logger.warning("p2pd is still starting; this machine seems busy")
                    noted = True
                continue
            if line is None:
                raise TransportError(f"p2pd did not start: {self._reason()}")
            if line.startswith("guard: "):
                self.pid = int(line.removeprefix("guard: "))
            elif line.startswith("Peer ID:"):
                return

    async def _watch(self) -> None:
        while await self._line() is not None:
            pass
        if not self.ended.done():
            self.ended.set_result(f"p2pd (pid {self.pid}) ended: {self._reason()}")

    async def _line(self) -> str | None:
        """The next line of p2pd's output, None at its end."""
        assert self._process.stdout is not None
        try:
            data = await self._process.stdout.readline()
        except ValueError:  # longer than the reader's limit: ignored
            return ""
        if not data:
            return None
        line = data.decode(errors="replace").strip()
        if line:
            self._output.append(line)
            logger.debug("p2pd: %s", line)
        return line

    def _reason(self) -> str:
        if not self._output:
            return "it said nothing"
        errors = [
            line
            for line in self._output
            if not line.startswith(("guard: ", "Control socket", "Peer ", "/ip"))
        ]
        return (errors[-1] if errors else "it was killed")[-300:]


def _write_key(identity: Identity, directory: Path) -> Path:
    """Write the key of an identity that is in memory only, for p2pd; returns the file."""
    key = directory / "identity.key"
    with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(identity.private_bytes())
    return key


async def _spawn(directory: Path, program: Path, *arguments: str) -> asyncio.subprocess.Process:
    """Start the guard, which runs `program`, and ends it and removes `directory` once our end of its stdin is closed."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", p2pd_guard.__file__, str(directory), str(program), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
        env={
            **os.environ,
            "GOLOG_LOG_LEVEL": "error",
            "GOLOG_LOG_FMT": "nocolor",
            "GOMAXPROCS": str(daemon_cores(usable_cores())),
        },
    )


def daemon_cores(cores: int) -> int:
    """GOMAXPROCS for p2pd. By default its Go runtime wakes a thread on each core for every few KiB that arrive: on two cores a message
    of 256 KiB then takes twice as much processor time as on one, which the stages need."""
    return min(MOST_CORES, max(1, cores // 2))


def _close_lifeline(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()


async def _reap(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def check_not_running(identity: Identity) -> None:
    """Raises TransportError where a peer of this identity runs on this machine."""
    lock = _lock_identity(identity)
    if lock is not None:
        os.close(lock)


def _lock_identity(identity: Identity) -> int | None:
    """Lock the identity file while p2pd runs: two peers of one id would receive each other's streams."""
    if identity.path is None:
        return None
    try:
        descriptor = _opened_to_lock(identity.path)
    except OSError as error:
        raise TransportError(f"cannot open identity file {identity.path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TransportError(
            f"a peer with the identity {identity.path} is running already; stop it or choose another --home"
        ) from None
    except OSError as error:  # the file system has no locks
        os.close(descriptor)
        raise TransportError(
            f"cannot lock identity file {identity.path}: {error.strerror}; choose another --home"
        ) from error
    return descriptor


def _opened_to_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)  # NFS locks only files open for writing
    except OSError:  # such as on a read-only disk
        return os.open(path, os.O_RDONLY)


def make_private_directory(parent: Path | None) -> Path:
    """A new directory with access for this user only and a path short enough for UNIX sockets: in `parent`; in the system's temporary
    directory where that is None or its path too long; in /tmp where that is too long as well. Also removes those left behind
    by crashes."""
    places = [Path(tempfile.gettempdir()), _SHORTEST_FOLDER]
    if parent is not None:
        places.insert(0, parent.absolute())
    parent = next(filter(_has_room, places), places[-1])
    if parent != places[0]:
        logger.debug("%s is too long a path for UNIX sockets; using %s", places[0], parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise TransportError(f"cannot make a runtime directory in {parent}: {error.strerror}") from error


def _has_room(parent: Path) -> bool:
    """Whether a private directory there leaves sockets a short enough path."""
    return len(os.fsencode(parent)) + 1 + len(PREFIX) + 8 + _LONGEST_SOCKET_NAME <= _SOCKET_PATH_BYTES


def sweep(parent: Path) -> None:
    """Remove our private directories in `parent` that no guard has locked; never another folder of such a name."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if time.time() - status.st_mtime < _STALE_SECONDS:
                continue  # its guard may be about to start
            names = {each.name for each in path.iterdir()}
            if not names or not names <= CONTENTS:
                continue
            descriptor = os.open(path / p2pd_guard.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Cleaners of temporary folders may have removed the lock.
                if not _has_listener(path / "d.sock"):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
        except OSError:  # held by a living guard, or removed beside us
            continue


def _has_listener(control: Path) -> bool:
    """Whether a process listens at the socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(control))
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
    return True


def parse_listen(address: str) -> tuple[socket.AddressFamily, socket.SocketKind, str, int]:
    """Family, kind, host and port of a multiaddr that p2pd can listen on: TCP, WebSocket over it, QUIC. ValueError for any
    other."""
    with contextlib.suppress(ValueError):
        if (parts := _LISTEN.fullmatch(address)) is not None:
            host, port = ipaddress.ip_address(parts["host"]), int(parts["tcp"] or parts["udp"])
            if str(host.version) == parts["version"] and port < 1 << 16:
                family = socket.AF_INET if host.version == 4 else socket.AF_INET6
                return family, socket.SOCK_STREAM if parts["tcp"] else socket.SOCK_DGRAM, str(host), port
    raise ValueError(f"{address[:100]!r} is not a listen address such as /ip4/0.0.0.0/tcp/31337")


def check_ports(listen: Sequence[str]) -> None:
    """Raises TransportError that names the port if one of the multiaddrs cannot be bound, ValueError as `parse_listen`.

    p2pd itself does not report that: it binds with SO_REUSEPORT, so that two peers would silently share a port, and it
    goes on when only some of its addresses fail.
    """
    for address in listen:
        family, kind, host, port = parse_listen(address)
        try:
            with socket.socket(family, kind) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if kind == socket.SOCK_STREAM:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TransportError(
                    f"port {port} of {address} is taken by another program; choose another with --listen"
                ) from error
            raise TransportError(f"cannot listen on {address}: {error.strerror or error}") from error
