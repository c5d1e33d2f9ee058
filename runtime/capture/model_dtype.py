"""The dtype that a model runs in: the requested one, else that of its config.json, else that of its files."""

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


def model_dtype(requested: str | None, configured: str | None, stored: Mapping[str, int], where: str) -> str:
    """One of MODEL_DTYPES. `requested`: None for the model's own; `configured`: that of config.json, if any; `stored`: bytes of each dtype
    in the files. JobError for an unsupported dtype."""
    dtype = requested or configured or (max(stored, key=lambda name: stored[name]) if stored else FLOAT32)
    if dtype in MODEL_DTYPES:
        return dtype
    if requested is not None:
        raise JobError(
            f"dtype: auto, {', '.join(MODEL_DTYPES[:-1])} or {MODEL_DTYPES[-1]}, not {requested!r:.40}"
        )
    raise JobError(f"{where}: a model of {dtype:.40} runs in another dtype only: --dtype {FLOAT32}, say")


def dtype_text(runs_in: str, stored: Mapping[str, int]) -> str:
    """E.g. "bfloat16, as its files hold it", or which dtypes are converted."""
    others = sorted(stored.keys() - {runs_in})
    if not stored or not others:
        return f"{runs_in}, as its files hold it" if stored else runs_in
    return f"{runs_in}: what its files hold in {' and '.join(others)} is converted"


def stored_dtypes(paths: Iterable[Path]) -> dict[str, int]:
    """Bytes of the floating-point tensors in these files, by dtype, read from the headers alone. Raises JobError for a file that is
    not safetensors."""
    sizes: Counter[str] = Counter()
    for path in dict.fromkeys(paths):
        for code, shape in _headers(path).values():
            dtype = STORED_DTYPES.get(code, "")
            if "float" in dtype:  # a model does not run in integers or booleans
                sizes[dtype] += prod(shape) * DTYPE_BYTES[dtype]
    return dict(sizes)


def safetensors_dtypes(path: Path) -> dict[str, str]:
    """The dtype code of each tensor in a file, e.g. "BF16". JobError for a file that is not safetensors."""
    return {name: code for name, (code, _) in _headers(path).items()}


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a file. JobError for a file that is not safetensors."""
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
