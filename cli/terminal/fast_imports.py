"""Importing what a command runs, for less: of the CPU time from `fusion-peer start` to a running peer most is imports.

hivemind's own `__init__` imports its averaging, experts and optimizers, and with them SciPy and pydantic, that of its DHT
a process around the node, its `utils` PyTorch for futures and descriptors of tensors: of all that we use nothing, and a
command that joins needs no PyTorch at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusion.swarm.lean_imports import leave_out, skip_contents, without_collections


@contextmanager
def lean_imports() -> Iterator[None]:
    """Imports in the block take about two thirds of the CPU time they would, a fifth where nothing else loads PyTorch. For
    processes of ours only: afterwards `hivemind` and `hivemind.dht` are packages without contents of their own, whose
    modules are imported by their full names."""
    skip_contents("hivemind")
    skip_contents("hivemind.dht")
    leave_out("hivemind.utils.mpfuture", {"MPFuture": None})
    leave_out("hivemind.utils.tensor_descr", {"TensorDescriptor": None})
    with without_collections():
        yield
