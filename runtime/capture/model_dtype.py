"""The dtype that a model runs in: what was asked for, what its config.json says, what its files hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fusion.dag.ir.graph import DTYPE_BYTES
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import check_fetched
from fusion.runtime.planes.weights_file import STORED_DTYPES
from fusion.swarm.printable import one_line

FLOAT32 = "float32"
MODEL_DTYPES = (FLOAT32, "bfloat16", "float16")


def model_dtype(asked: str | None, said: str | None, stored: Mapping[str, int], where: str) -> str:
    """One of MODEL_DTYPES. `asked`: None for that of the files; `said`: in the config, if it says so; `stored`: bytes of each
    dtype in the files. JobError, in one line, for a dtype in which no model runs here."""
    wanted = asked or said or (max(stored, key=lambda name: stored[name]) if stored else FLOAT32)
    if wanted in MODEL_DTYPES:
        return wanted
    if asked is not None:
        raise JobError(
            f"dtype: auto, {', '.join(MODEL_DTYPES[:-1])} or {MODEL_DTYPES[-1]}, not {asked!r:.40}"
        )
    raise JobError(f"{where}: a model of {wanted:.40} runs in another dtype only: --dtype {FLOAT32}, say")


def dtype_text(runs_in: str, stored: Mapping[str, int]) -> str:
    """For people: "bfloat16, as its files hold it", or what becomes of what they hold."""
    others = sorted(stored.keys() - {runs_in})
    if not stored or not others:
        return f"{runs_in}, as its files hold it" if stored else runs_in
    return f"{runs_in}: what its files hold in {' and '.join(others)} is converted"


def stored_dtypes(paths: Iterable[Path]) -> dict[str, int]:
    """How many bytes the floating-point tensors of these files take, by dtype; from their headers alone. JobError for a file
    that is no safetensors file."""
    found: Counter[str] = Counter()
    for path in dict.fromkeys(paths):
        for spelled, shape in _headers(path).values():
            dtype = STORED_DTYPES.get(spelled, "")
            if "float" in dtype:  # integers and booleans are no model's dtype
                found[dtype] += prod(shape) * DTYPE_BYTES[dtype]
    return dict(found)


def spelled_dtypes(path: Path) -> dict[str, str]:
    """The dtype of each tensor in a file, as the format spells it. JobError for a file that is no safetensors file."""
    return {name: spelled for name, (spelled, _) in _headers(path).items()}


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a file. JobError for a file that is no safetensors file."""
    return {name: tuple(shape) for name, (_, shape) in _headers(path).items()}


def _headers(path: Path) -> dict[str, tuple[str, list[int]]]:
    check_fetched(path)
    try:
        with safe_open(path, framework="pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    except SafetensorError as error:
        raise JobError(
            f"{path} is not a safetensors file, or not all of one: {one_line(str(error))}"
        ) from error
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error}") from error
