"""Starts our commands without the imports that take most of a short one's processor time: a zygote forks them.

Within `warm_start()`, code that starts our command or a script of these tests with `python` (by subprocess or asyncio) gets a
process that `support/zygote.py` forked. The fork is a child of the test, with the same exit code, signals, files, folder and
environment. A command that a fork cannot replace (options of the interpreter, `preexec_fn`, other limits) starts as usual.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ZYGOTE = Path(__file__).with_name("zygote.py")
TESTS = Path(__file__).parents[1]
COMMAND = ("-m", "fusion.cli.main")
SCRIPTS = (
    "attacks",
    "attacks/watched.py",
    "attacks/liar.py",
    "sweeps/armed.py",
    "sweeps/launcher.py",
    "support/lying_peer.py",
    "support/thin_peer.py",
)
NETWORK = "/proc/thread-self/ns/net"
ROOM_BYTES = 1 << 16  # for the arguments and for the environment of a command
ADOPT = 36  # PR_SET_CHILD_SUBREAPER, of <linux/prctl.h>
# What differs from run to run and is not read by an import. Whoever changes more of the environment has the real command.
FREE = ("FUSION_", "PYTEST_", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
DEFAULTS = {
    "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False, "restore_signals": True,
    "gid": None, "gids": None, "uid": None, "umask": -1, "process_group": -1,
}  # fmt: skip

_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_start)
_scripts = [[str(TESTS / script)] for script in SCRIPTS]


class Zygote:
    """One of this process, begun when it is asked first; it ends with us. It has imported `modules`, or what our commands import."""

    def __init__(self, *modules: str) -> None:
        self.forked = 0
        self._modules = modules
        self._environment = os.environ.copy() | {"OMP_NUM_THREADS": "1"}
        # A test may ask first from within a box: what is in one does not outlive it.
        self._home = os.open(NETWORK, os.O_RDONLY) if sys.platform == "linux" else -1
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def can_give(self, environment: dict[str, str]) -> bool:
        ours = self._environment
        return all(
            name.startswith(FREE) or ours.get(name) == environment.get(name)
            for name in ours.keys() | environment.keys()
        )

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """The number of a new child of ours."""
        if not request["network"] and os.stat(NETWORK).st_ino != os.fstat(self._home).st_ino:
            thread = threading.get_native_id()
            request = {**request, "network": f"/proc/{os.getpid()}/task/{thread}/ns/net"}
        with self._lock:
            channel = self._opened()
            libc = ctypes.CDLL(None)
            libc.prctl(ADOPT, 1, 0, 0, 0)
            try:
                socket.send_fds(channel, [json.dumps(request).encode()], files)
                answer = channel.recv(64)
            finally:
                libc.prctl(ADOPT, 0, 0, 0, 0)
        if not answer:
            raise OSError("the zygote of the tests has ended")
        self.forked += 1
        return int(answer)

    def _opened(self) -> socket.socket:
        if self._channel is None:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                number = theirs.fileno()
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        str(ZYGOTE),
                        str(number),
                        str(self._home),
                        "." * ROOM_BYTES,
                        *self._modules,
                    ],
                    env=self._environment | {"ROOM": "." * ROOM_BYTES},
                    pass_fds=[number, self._home],
                    stdin=subprocess.DEVNULL,
                )
            if self._channel.recv(64) != b"ready":
                raise OSError("the zygote of the tests does not start")
        return self._channel

    def close(self) -> None:
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.wait()
        if self._home >= 0:
            os.close(self._home)
            self._home = -1


@contextmanager
def warm_start(zygote: Zygote) -> Iterator[None]:
    """On Linux; elsewhere nothing is otherwise."""
    if sys.platform != "linux":
        yield
        return

    def start(process: subprocess.Popen[Any], *arguments: Any, **named: Any) -> None:
        asked = _signature.bind(process, *arguments, **named).arguments
        request = asked_for(asked)
        if request is None or not zygote.can_give(request["environment"]):
            _start(process, *arguments, **named)
            return
        sys.audit("subprocess.Popen", sys.executable, asked["args"], asked["cwd"], asked["env"])
        pipes = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        files = [number if given == -1 else given for number, given in enumerate(pipes)]
        process.pid = zygote.fork(request, files)
        process._child_created = True  # type: ignore[attr-defined]
        process._close_pipe_fds(  # type: ignore[attr-defined]
            *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]


def asked_for(asked: dict[str, Any]) -> dict[str, Any] | None:
    """What the zygote is to be told; None where this is no command of ours, or one that a fork could not be like."""
    arguments = asked["args"]
    if isinstance(arguments, str | bytes | os.PathLike) or any(asked[n] != v for n, v in DEFAULTS.items()):
        return None
    arguments = [os.fspath(word) for word in arguments]
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    if arguments[0] == "env":
        while "=" in arguments[1]:
            name, _, value = arguments.pop(1).partition("=")
            environment[name] = value
        del arguments[0]
    namespace = ""
    if arguments[:1] == ["nsenter"] and arguments[1].startswith("--net=") and arguments[2] == "--":
        namespace = arguments[1].removeprefix("--net=")
        del arguments[:3]
    if arguments[:1] != [sys.executable] or not (
        tuple(arguments[1:3]) == COMMAND or arguments[1:2] in _scripts
    ):
        return None
    return {
        "arguments": arguments,
        "environment": environment,
        "folder": os.path.abspath(asked["cwd"] or "."),
        "session": bool(asked["start_new_session"]),
        "network": namespace,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }
