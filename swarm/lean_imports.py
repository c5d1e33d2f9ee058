"""Imports libraries without their unused parts: packages whose `__init__` loads everything, modules that are named but never used.

Only for our own processes: such a package is empty afterwards, and its modules are imported by their full names.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


def is_installed(name: str) -> bool:
    """Whether a package of this name could be imported; loads nothing of it."""
    return name in sys.modules or _folder_of(name) is not None


def skip_contents(name: str) -> None:
    """Put an empty package into `sys.modules`, without running its `__init__`. No-op where it is loaded, or not installed."""
    folder = None if name in sys.modules else _folder_of(name)
    if folder is not None:
        package = ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package


def leave_out(name: str, contents: dict[str, object]) -> None:
    """Put a module with only these contents into `sys.modules`. No-op where it is loaded."""
    if name not in sys.modules:
        sys.modules[name] = module = ModuleType(name)
        module.__dict__.update(contents)


def forget(name: str) -> None:
    """Remove a package and its modules from `sys.modules`, as if it had never been imported."""
    for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[loaded]


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable the garbage collector in the block: while modules load it walks a growing heap and finds nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _folder_of(name: str) -> str | None:
    for place in sys.path:
        folder = os.path.join(place, *name.split("."))
        if os.path.isfile(os.path.join(folder, "__init__.py")):
            return folder
    return None
