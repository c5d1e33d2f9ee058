"""Importing what a command runs, for less: of the CPU time from `fusion-peer start` to a running peer most is imports.

hivemind's own `__init__` imports its averaging, experts and optimizers, and with them SciPy and pydantic, of which we
use nothing; and the garbage collector walks the growing heap of modules again and again, and finds nothing.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def lean_imports() -> Iterator[None]:
    """Imports in the block take about two thirds of the CPU time they would. For processes of ours only: afterwards
    `hivemind` is a package without contents of its own, whose modules are imported by their full names."""
    _skip_contents("hivemind")
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _skip_contents(name: str) -> None:
    if name in sys.modules:
        return
    for place in sys.path:
        folder = os.path.join(place, name)
        if os.path.isfile(os.path.join(folder, "__init__.py")):
            package = ModuleType(name)
            package.__path__ = [folder]
            sys.modules[name] = package
            return
