"""The release after this one, as a copy of the code that knows more: processes of both can be started side by side."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from fusion.dag.ir.opset import OPSET_VERSION

ROOT = Path(__file__).parents[2]
CODE = ("cli", "compression", "dag", "runtime", "swarm", "examples")

# Both numbers are raised by one; an operator of ours is made one that only the newer op-set has.
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
    """What to put before a command so that it runs the release after this one, which is made in `folder`."""
    made = folder / "fusion"
    for part in CODE:
        shutil.copytree(
            ROOT / part, made / part
        )  # what was compiled, too: it knows its source by size and time
    for name in ("bootstrap_peers.txt", "py.typed"):
        shutil.copy(ROOT / name, made / name)
    for file, pattern, change in CHANGES:
        path = made / file
        text, count = re.subn(pattern, change, path.read_text(), count=1, flags=re.MULTILINE)
        assert count == 1, f"{file} has no {pattern}"
        path.write_text(text)
    return ("env", f"PYTHONPATH={folder}")
