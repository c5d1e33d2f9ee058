"""A small process between us and p2pd that ends p2pd when we end. Run as a script by its path.

    python p2pd_guard.py DIRECTORY PROGRAM ARGUMENT...

It starts the program in its own session (a terminal's Ctrl-C reaches neither), writes "guard: PROGRAM's pid" to its standard
output, and waits for the end of its standard input. We hold the other end of that pipe, so it ends when we close it and also
when we are killed. Then, or when the program ends by itself, the guard ends the program and removes DIRECTORY with the
sockets in it. Standard library only: it has to start in milliseconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from types import FrameType

GRACE_SECONDS = 0.6  # for the program to close its connections
POLL_SECONDS = 1.0
LOCK = "lock"  # held for as long as the directory is in use; see `fusion.swarm.streams.p2pd`
_PR_SET_PDEATHSIG = 1


def main(directory: str, command: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    parent = os.getppid()
    program = None
    try:
        lock = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ended, held_by_program = os.pipe()  # readable once the program is gone
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(held_by_program,),
            preexec_fn=_die_with_guard if sys.platform == "linux" else None,
        )
        os.close(held_by_program)
        os.write(1, f"guard: {program.pid}\n".encode())
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)  # from here on our caller reads only the program's output, and its end
        os.dup2(null, 2)
        # Also check the parent: a process that it forked may hold a copy of the pipe.
        while os.getppid() == parent:
            ready, _, _ = select.select([0, ended], [], [], POLL_SECONDS)
            if ended in ready or (0 in ready and not os.read(0, 64)):
                break
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if program is not None:
            _end(program)
        shutil.rmtree(directory, ignore_errors=True)


def _end(program: subprocess.Popen[bytes]) -> None:
    program.terminate()
    try:
        program.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def _die_with_guard() -> None:
    """Linux: the program is killed even when the guard dies by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
