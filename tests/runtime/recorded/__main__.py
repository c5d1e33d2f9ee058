"""What peers send each other, to the byte: a small job trained on three stages and an answer round a ring of three.

    python tests/runtime/recorded            print every frame
    python tests/runtime/recorded --write    and write it to frames.txt: when the protocol is changed on purpose

`test_recorded.py` compares frames.txt with what is sent now. Real hosts, partners, gateways and ring stages run over
the in-memory transport on a loop of virtual time: keys, ids and clocks are the same in every run, and arithmetic
has few digits, so that every machine computes alike. A stream is one line with its protocol and its ends, each of its
frames another, those with tensors after the others (which of them goes first is not always told):

    way  kind  SHA-256 of head and header, first 16 digits  length and SHA-256 of the payload  header

Who fetches which blob from whom is not told either: of those streams each one stands here once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":  # sets of text are walked in the same order in every run
    os.environ.update(PYTHONHASHSEED="0", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, *sys.argv])
sys.path.insert(0, str(Path(__file__).parents[2]))

import worlds.virtual_time  # noqa: F401  first: it replaces the clocks

# isort: split
from course import record

GOLDEN = Path(__file__).parent / "frames.txt"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/runtime/recorded", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help=f"write it to {GOLDEN.name}")
    given = parser.parse_args()
    text = record()
    if given.write:
        GOLDEN.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
