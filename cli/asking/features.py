"""Features of sound from a file, as a model that hears takes them: what its feature extractor made, saved with numpy."""

from __future__ import annotations

from pathlib import Path

from fusion.runtime.job.protocol import MAX_SOURCE_BYTES
from fusion.swarm.lean_imports import is_installed


def features_of(path: Path) -> bytes:
    """Float32 numbers, the frames of a channel one behind the other, of an .npy file (channels, frames) or (1, channels, frames).
    ValueError, in one line, for any other file, or without numpy."""
    if not is_installed("numpy"):
        raise ValueError("--features needs numpy: pip install 'fusion-peer[peer]'")
    import numpy as np

    try:
        # Looks into nothing but the header, and takes no objects
        found = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"--features: {path} is no .npy file of numbers: {error}") from None
    if found.dtype.kind != "f":
        raise ValueError(f"--features: {path} holds no array of floating-point numbers")
    shape = found.shape[1:] if found.ndim == 3 and found.shape[0] == 1 else found.shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"--features: {path} has shape {found.shape}, not (channels, frames)")
    if 4 * found.size > MAX_SOURCE_BYTES:
        raise ValueError(f"--features: {path} has {found.size} numbers; at most {MAX_SOURCE_BYTES // 4}")
    kept = np.ascontiguousarray(found, dtype="<f4")
    if not np.isfinite(kept).all():
        raise ValueError(f"--features: {path} has numbers that are not finite")
    return kept.tobytes()
