"""Leaving out of a library what is not used of it: packages whose `__init__` loads everything, modules that others name and
never call.

For processes of ours only: afterwards such a package has no contents of its own, and its modules are imported by their
full names.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


def is_installed(name: str) -> bool:
    """Whether a package of this name could be imported; nothing of it is loaded."""
    return name in sys.modules or _folder_of(name) is not None


def skip_contents(name: str) -> None:
    """The package is there from now on, without what its `__init__` would have loaded. Nothing where it is loaded, or not
    installed."""
    folder = None if name in sys.modules else _folder_of(name)
    if folder is not None:
        package = ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package


def leave_out(name: str, contents: dict[str, object]) -> None:
    """Instead of the module, one with these contents. Nothing where it is loaded."""
    if name not in sys.modules:
        sys.modules[name] = module = ModuleType(name)
        module.__dict__.update(contents)


def forget(name: str) -> None:
    """A package, and what was loaded or left out of it, as if it had never been imported."""
    for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[loaded]


@contextmanager
def without_collections() -> Iterator[None]:
    """The garbage collector walks the growing heap of modules again and again while they load, and finds nothing."""
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
