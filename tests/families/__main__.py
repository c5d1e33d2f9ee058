"""`make models`: how every text family of the installed transformers is served; writes docs/models.md.

    python tests/families [--only llama,bloom] [--again] [--limit-seconds 180] [--limit-gib 8]

For each family a tiny model with random weights is saved, opened by our code as a user's directory is, cut into three
stages, decoded, and compared with transformers (tests/families/trial.py). A process a family, with a limit on its time
and memory; what is known already, in models.json, is not tried again unless --again or --only asks for it.
Exit 1 where a family is served wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

if "OMP_NUM_THREADS" not in os.environ:  # before torch reads it
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch._dynamo
import transformers
import transformers.generation.utils
import transformers.modeling_utils
from families import encoder_decoders, page, trial

RESULTS = Path("models.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make models", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="families, a comma between them")
    parser.add_argument("--again", action="store_true", help="try those too whose outcome is known")
    parser.add_argument("--limit-seconds", type=int, default=180, help="of processor time, a family")
    parser.add_argument("--limit-gib", type=int, default=8, help="of address space, a family")
    given = parser.parse_args()
    families = [*trial.of_text(), *encoder_decoders.families(), *trial.that_see()]
    only = [name for name in given.only.split(",") if name]
    if unknown := sorted(set(only) - set(families)):
        parser.error(f"--only: transformers {transformers.__version__} has no family {unknown[0]}")
    known = _known()
    for family in only or families:
        if given.again or only or family not in known:
            known[family] = tried(family, given.limit_seconds, given.limit_gib << 30)
            print(page.short(known[family]), flush=True)
            RESULTS.write_text(json.dumps({"versions": _versions(), "families": known}, indent=1) + "\n")
    outcomes = [trial.Outcome(**known[name]) for name in families if name in known]
    untried = [name for name in families if name not in known]
    PAGE.write_text(page.text(outcomes, transformers.__version__, untried))
    print(page.counts(outcomes), flush=True)
    return int(any(outcome.served == "wrong" for outcome in outcomes))


def tried(family: str, seconds: int, memory_bytes: int) -> dict[str, Any]:
    """The outcome of a family, from a child process, so that a crash does not affect the others."""
    directory = Path(tempfile.mkdtemp(prefix="fusion-family-"))
    answer = directory / "outcome.json"
    started = time.monotonic()
    try:
        child = os.fork()
        if child == 0:
            _child(family, directory, answer, seconds, memory_bytes)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() - started > 10 * seconds:  # a machine with other work to do
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        if answer.is_file():
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
        why = f"took more than {seconds} s or {memory_bytes >> 30} GiB"
        return trial.Outcome(family=family, served="not tried", why=why).plain()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _child(family: str, directory: Path, answer: Path, seconds: int, memory_bytes: int) -> None:
    """Never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        if not os.environ.get("FAMILIES_LOUD"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.dup2(2, 1)
        way = encoder_decoders if family.endswith(encoder_decoders.READS) else trial
        found = way.outcome(family, directory / "model")
        whole = answer.with_suffix(".part")
        whole.write_text(json.dumps(found.plain()))
        whole.rename(answer)
    finally:
        os._exit(0)


def _known() -> dict[str, dict[str, Any]]:
    if not RESULTS.is_file():
        return {}
    found = json.loads(RESULTS.read_text())
    return dict(found["families"]) if found["versions"] == _versions() else {}


def _versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    sys.exit(main())
