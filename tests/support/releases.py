"""The next release: a changed copy of the code, so that a test can run processes of both releases side by side."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from fusion.dag.ir.opset import OPSET_VERSION

ROOT = Path(__file__).parents[2]
CODE = ("cli", "compression", "dag", "runtime", "swarm", "examples")

# The next release has both versions raised by one, and an operator that only its op-set has.
CHANGES = (
    ("dag/ir/opset.py", r"^OPSET_VERSION = (\d+)", lambda found: f"OPSET_VERSION = {int(found[1]) + 1}"),
    (
        "swarm/directory/sealing.py",
        r"^RECORD_VERSION = (\d+)",
        lambda found: f"RECORD_VERSION = {int(found[1]) + 1}",
    ),
    (
        "dag/ir/opset_contract.py",
        r'(op\("fusion.dropout_attention",[^@]*?backward=_ATTENTION_BACKWARD)',
        lambda found: f"{found[1]}, since={OPSET_VERSION + 1}",
    ),
)


def next_release(folder: Path) -> Sequence[str]:
    """Create the next release in `folder`, and return the prefix with which a command runs it."""
    copy = folder / "fusion"
    for part in CODE:
        shutil.copytree(
            ROOT / part, copy / part
        )  # what was compiled, too: it knows its source by size and time
    for name in ("bootstrap_peers.txt", "py.typed"):
        shutil.copy(ROOT / name, copy / name)
    for file, pattern, change in CHANGES:
        path = copy / file
        text, count = re.subn(pattern, change, path.read_text(), count=1, flags=re.MULTILINE)
        assert count == 1, f"{file} has no {pattern}"
        path.write_text(text)
    return ("env", f"PYTHONPATH={folder}")
