"""Importing what a command runs, for less: of the CPU time from `fusion-peer start` to a running peer most is imports.

hivemind's own `__init__` imports its averaging, experts and optimizers, and with them SciPy and pydantic, that of its DHT
a process around the node, its `utils` PyTorch for futures and descriptors of tensors: of all that we use nothing, and a
command that joins needs no PyTorch at all. And the garbage collector walks the growing heap of modules again and again, and finds nothing.
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
    """Imports in the block take about two thirds of the CPU time they would, a fifth where nothing else loads PyTorch. For
    processes of ours only: afterwards `hivemind` and `hivemind.dht` are packages without contents of their own, whose
    modules are imported by their full names."""
    _skip_contents("hivemind")
    _skip_contents("hivemind.dht")
    _leave_out("hivemind.utils.mpfuture", "MPFuture")
    _leave_out("hivemind.utils.tensor_descr", "TensorDescriptor")
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
        folder = os.path.join(place, *name.split("."))
        if os.path.isfile(os.path.join(folder, "__init__.py")):
            package = ModuleType(name)
            package.__path__ = [folder]
            sys.modules[name] = package
            return


def _leave_out(name: str, *contents: str) -> None:
    """Instead of the module, one whose contents can be imported and not be used."""
    if name not in sys.modules:
        sys.modules[name] = module = ModuleType(name)
        module.__dict__.update(dict.fromkeys(contents))
