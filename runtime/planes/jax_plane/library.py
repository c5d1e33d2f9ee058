"""Loads JAX for a peer: with its number of threads, 64-bit integers and full float32 products."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

MISSING = 'plane: jax is not installed here: pip install "fusion-peer[jax]"'
# Threads of XLA on a CPU; read once a process, when its device is created.
_THREADS = "PJRT_NPROC"
# JAX warns at every program that this process starts (p2pd), though none of its code runs between fork and exec.
_NO_DEADLOCK = r"os\.fork\(\) was called\. os\.fork\(\) is incompatible with multithreaded code"


def load(device: str, threads: int) -> jax.Device:
    """The device "cpu", "cuda" or "cuda:<index>" of JAX. ValueError in one line where JAX or the device is not there."""
    os.environ.setdefault(_THREADS, str(threads))
    try:
        import jax
    except ImportError:
        raise ValueError(MISSING) from None
    warnings.filterwarnings("ignore", message=_NO_DEADLOCK, category=RuntimeWarning)
    # Token ids are int64 in graphs, which give every value its dtype
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    kind, _, index = device.partition(":")
    try:
        devices = jax.devices(kind)
    except RuntimeError:
        raise ValueError(f"device: this JAX has no {kind}") from None
    number = int(index or 0)
    if number >= len(devices):
        raise ValueError(f"device: {device} of {len(devices)}")
    return devices[number]
