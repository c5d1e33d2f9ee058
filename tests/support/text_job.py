"""Job files on real text that train in seconds."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path


def write_job(
    path: Path,
    name: str,
    *,
    steps: int,
    stages: int = 2,
    peers: tuple[str, ...] = (),
    live: bool = True,
    **train: int,
) -> Path:
    """The file of a job that trains a byte-level GPT of two blocks on modules of the standard library. `peers` pins its
    stages, and without `live` they stay there."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [str(library / f"{module}.py") for module in ("argparse", "datetime", "textwrap")]
    settings = {"sequence": 32, "microbatches": 2, "microbatch_size": 2, "snapshot_every": 50, **train}
    path.write_text(
        f"""
name = "{name}"
[model]
kind = "gpt"
blocks = 2
width = 32
heads = 2
[data]
files = {json.dumps(files[:2])}
held_out = {json.dumps(files[2:])}
[train]
steps = {steps}
{"".join(f"{key} = {value}{chr(10)}" for key, value in settings.items())}
[optimizer]
learning_rate = 3e-3
[placement]
stages = {stages}
{f"peers = {json.dumps(peers)}" if peers else ""}
[compression]
live = {json.dumps(live)}
"""
    )
    return path
