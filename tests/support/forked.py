"""Runs of one function, each in a process of its own, which is forked by one that has imported what they all import.

Each line of its input is the arguments of a run, and the folder that it is in, as JSON; the answer is a line with the code, the
output and the errors of it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

Main = Callable[[list[str]], int]
Run = Callable[..., tuple[int, str, str]]


@contextmanager
def starter(command: list[str], environment: dict[str, str] | None = None) -> Iterator[Run]:
    """The process that `command` starts, which calls `serve`: give it the arguments of a run, and `folder`; the code, the output and
    the errors come back."""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def run(*arguments: str, folder: str = ".") -> tuple[int, str, str]:
            print(json.dumps({"arguments": arguments, "folder": folder}), file=asks, flush=True)
            answer = answers.readline()
            assert answer, "the starter has ended"
            told = json.loads(answer)
            return told["code"], told["output"], told["errors"]

        try:
            yield run
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def serve(main: Main) -> None:
    """In the process that forks: until its input ends."""
    threads = Path("/proc/self/task")
    assert not threads.exists() or len([*threads.iterdir()]) == 1, "only what is single can be forked"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_run(main, **json.loads(line))), flush=True)


def _run(main: Main, arguments: list[str], folder: str) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        forked = os.fork()
        if forked == 0:
            _become(main, arguments, folder, output, errors)
        code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        return {"code": code, "output": _text(output), "errors": _text(errors)}


def _become(main: Main, arguments: list[str], folder: str, output: BinaryIO, errors: BinaryIO) -> None:
    code = 70
    try:
        os.chdir(folder)
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        code = main(arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()
