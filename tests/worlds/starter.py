"""Runs of `python tests/worlds`, each in a process of its own, which is forked by one that has imported what they all import.

    PYTHONHASHSEED=0 python tests/worlds/starter.py

Each line of its input is the arguments of a run, as JSON; the answer is a line with the code, the output and the errors of it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).parents[1]))

from worlds.__main__ import main


def run(arguments: list[str]) -> dict[str, object]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        forked = os.fork()
        if forked == 0:
            become(arguments, output, errors)
        code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        return {"code": code, "output": text(output), "errors": text(errors)}


def become(arguments: list[str], output: BinaryIO, errors: BinaryIO) -> None:
    code = 70
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.argv = ["tests/worlds", *arguments]
        code = main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()


if __name__ == "__main__":
    assert len(os.listdir("/proc/self/task")) == 1, "only what is single can be forked"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
