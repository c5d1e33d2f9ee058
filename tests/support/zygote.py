"""A process that has imported what our commands import, and forks one of them at each request (the name is Android's).

    python tests/support/zygote.py SOCKET NETWORK ROOM [MODULE...]

`support/warm_start.py` starts it, as a child of the process that wants the commands; it stays in the network namespace of the
descriptor NETWORK, and ROOM is space for the arguments of others. It imports LOADED, or these modules instead. Each request is a line of JSON, with the three standard files
beside it; the answer is the number of the new process, a child of whoever asked: the zygote forks twice, and who asks adopts the
orphan (prctl(2), PR_SET_CHILD_SUBREAPER). From there on it is `python` with these arguments: the same `__main__`, environment,
folder, files and way to end. It ends when SOCKET is closed. Linux only.

It imports nothing that starts a thread or opens a loop, since a process with several threads cannot be forked.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# What peers and commands import, and what takes longest of what those import that capture a model.
LOADED = (
    *("fusion.runtime.peer.peer", "fusion.runtime.peer.client", "fusion.runtime.serving.http.port.server"),
    *(
        "fusion.runtime.launch.training_job",
        "fusion.runtime.launch.launch",
        "fusion.runtime.launch.prepare",
        "fusion.runtime.launch.prepare_serving",
        "fusion.cli.local.chaos_trace",
    ),
    *(
        f"fusion.cli.{name}"
        for name in ("start", "train", "serve", "jobs", "status", "models", "generate", "chat")
    ),
    *("fusion.runtime.capture.huggingface", "transformers.models.llama.modeling_llama"),
    "torch.export._trace",  # and what only an export imports
)
STANDARD_FILES = 3
REQUEST_BYTES = 1 << 20
CLONE_NEWNET = 0x40000000  # of <linux/sched.h>


def load(names: Sequence[str] = LOADED) -> None:
    from fusion.cli.terminal.fast_imports import lean_imports

    with lean_imports():
        for name in names:
            importlib.import_module(name)


def wait_for_request(channel: socket.socket) -> dict[str, Any] | None:
    """In the process that was asked for: what it is to be. None where nobody asks any more."""
    while True:
        line, files, _, _ = socket.recv_fds(channel, REQUEST_BYTES, STANDARD_FILES)
        if not line:
            return None
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() > 0:
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return dict(json.loads(line))
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def become(request: dict[str, Any]) -> None:
    """This process is as one that was started for the request, and does what it is for."""
    if request["session"]:
        os.setsid()
    if request["network"]:
        enter(request["network"])
    os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    show(request["arguments"], request["environment"])  # now that nothing points at what is there any more
    tempfile.tempdir = None  # an import may have asked for ours
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = standard(0, "rb", "strict")
    sys.stdout = sys.__stdout__ = standard(
        1, "wb", "strict", line_buffering=os.isatty(1), write_through=unbuffered
    )
    sys.stderr = sys.__stderr__ = standard(
        2, "wb", "backslashreplace", line_buffering=True, write_through=unbuffered
    )
    _, *words = request["arguments"]
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path[0] = request["folder"]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def enter(namespace: str) -> None:
    """As nsenter(1) does."""
    there = os.open(namespace, os.O_RDONLY)
    switch(there)
    os.close(there)


def stay_in(network: int) -> None:
    """In that network namespace, wherever we were started."""
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        switch(network)
    os.close(network)


def switch(network: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def standard(number: int, mode: str, errors: str, **buffering: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(number, mode, closefd=False), "utf-8", errors, **buffering)


def show(arguments: list[str], environment: dict[str, str]) -> None:
    """Let others see them in /proc, where tests look for what is left: in place of ours, which had room enough."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments_at, arguments_end, environment_at, environment_end = map(int, fields[45:49])
    for at, end, texts in (
        (arguments_at, arguments_end, arguments),
        (environment_at, environment_end, [f"{name}={value}" for name, value in environment.items()]),
    ):
        block = b"".join(os.fsencode(text) + b"\0" for text in texts)
        assert len(block) < end - at, "the zygote was started with too little room"
        ctypes.memset(at, 0, end - at)
        ctypes.memmove(at, block, len(block))


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    stay_in(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C ends who asks, and that ends us
    load(sys.argv[4:] or LOADED)
    assert len(os.listdir("/proc/self/task")) == 1, (
        "an import has begun a thread: its locks would not survive a fork"
    )
    gc.collect()
    gc.freeze()  # else the first collection of every process copies all of these pages
    channel.send(b"ready")
    request = wait_for_request(channel)
    if request is None:
        return
    channel.send(str(os.getpid()).encode())
    channel.close()
    code = 0
    try:
        become(request)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    end(code)


def end(code: int) -> None:
    """As the interpreter does, but for taking every module apart, which would copy all pages in order to forget them."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            file.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
