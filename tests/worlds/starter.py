"""Runs of `python tests/worlds`, each in a process of its own (`support.forked`).

PYTHONHASHSEED=0 python tests/worlds/starter.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forked import serve
from worlds.__main__ import main


def run(arguments: list[str]) -> int:
    sys.argv = ["tests/worlds", *arguments]
    return main()


if __name__ == "__main__":
    serve(run)
