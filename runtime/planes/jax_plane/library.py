"""JAX, loaded for a peer: with the threads that it was given, 64-bit integers, and products of full float32 numbers."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

MISSING = 'plane: jax is not installed here: pip install "fusion-peer[jax]"'
# How many threads XLA takes on a CPU; read when its device is made, once for a process.
_THREADS = "PJRT_NPROC"
# JAX says so of every program that this process starts (p2pd): between the fork and the program's begin none of its code runs.
_NO_DEADLOCK = r"os\.fork\(\) was called\. os\.fork\(\) is incompatible with multithreaded code"


def load(device: str, threads: int) -> jax.Device:
    """The device "cpu", "cuda" or "cuda:<index>" of JAX. ValueError in one line where JAX or the device is not there."""
    os.environ.setdefault(_THREADS, str(threads))
    try:
        import jax
    except ImportError:
        raise ValueError(MISSING) from None
    warnings.filterwarnings("ignore", message=_NO_DEADLOCK, category=RuntimeWarning)
    # Token ids are int64 in graphs; what is computed has the dtypes that they say
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    kind, _, index = device.partition(":")
    try:
        found = jax.devices(kind)
    except RuntimeError:
        raise ValueError(f"device: this JAX has no {kind}") from None
    at = int(index or 0)
    if at >= len(found):
        raise ValueError(f"device: {device} of {len(found)}")
    return found[at]
