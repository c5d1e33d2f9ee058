"""Prints and writes the report of a sweep."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def say(text: str) -> None:
    """Print a line with the time of day while the sweep runs."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def tell(report: Mapping[str, Any], path: Path | None, *, left_out: str = "") -> int:
    """Write the whole report to `path`, if any, print it without the part `left_out`, and return the exit code."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != left_out}, indent=1))
    return 0 if report["ok"] else 1
