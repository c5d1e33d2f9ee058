"""A small process that clears up after the processes of a fleet, whatever happened to the one that started them.

    python janitor.py DIRECTORY

Its standard input carries a line "PID CREATED" for each process to look after, and ends when its holder closes it
or is killed. Then the processes that are left are asked to end, killed if they do not, and DIRECTORY is removed. A holder that is
killed between starting a process and its line is no reason to leave that one: our commands that were given a path in
DIRECTORY are looked for as well.
Run by path and imported by nothing; psutil is all it needs.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterable

import psutil

GRACE_SECONDS = 6.0  # a peer hands over within 5
MODULE = "fusion.cli.main"  # what runs our commands


def main(directory: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end(_read_processes(sys.stdin))
    # A process that dies late may still write into the directory, and one that was just forked becomes a command: once more, then.
    for _ in range(3):
        end(_commands(directory))
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _commands(directory: str) -> list[psutil.Process]:
    """Our processes that work in the directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []  # None for another user's process
        if MODULE in arguments and any(each.startswith(directory) for each in arguments):
            found.append(process)
    return found


def _read_processes(lines: Iterable[str]) -> list[psutil.Process]:
    found = []
    for line in lines:
        pid, created = line.split()
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(pid))
            # Else the number is another process's by now
            if abs(process.create_time() - float(created)) < 1.0:
                found.append(process)
    return found


def end(processes: list[psutil.Process]) -> None:
    """Ask, wait, kill. psutil checks that a process is still the one it was before it signals."""
    for process in processes:
        _thaw(process)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=GRACE_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE_SECONDS)


def _thaw(process: psutil.Process) -> None:
    """Continue stopped processes: they, and their children, cannot clean up while stopped."""
    with contextlib.suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if each.status() == psutil.STATUS_STOPPED:
                    each.resume()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
