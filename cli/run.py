"""`fusion-peer run NAME --input x.npz --output y.npz`: run a model on named arrays, through any peer."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from fusion.cli import client, grants, job_client
from fusion.cli.terminal import options
from fusion.cli.terminal.loop import run as run_loop
from fusion.cli.terminal.output import Output, seconds_text
from fusion.swarm.errors import FrameError, NotAdmitted, RemoteError
from fusion.swarm.identity import friendly_name
from fusion.swarm.lean_imports import is_installed

if TYPE_CHECKING:
    from fusion.runtime.serving.graphs.client import ModelRuns, RunResult


@options.grouped
def run(
    model: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model (fusion-peer models).")],
    given: Annotated[
        Path,
        typer.Option(
            "--input",
            metavar="X.npz",
            parser=options.a_path,
            help="Its inputs by name; the first dimension counts samples.",
        ),
    ],
    made: Annotated[
        Path,
        typer.Option(
            "--output",
            metavar="Y.npz",
            parser=options.a_path,
            help="File to write its outputs to, by name.",
        ),
    ],
    batch: Annotated[int, typer.Option("--batch", min=0, help="Samples of one run (0: all at once).")] = 0,
    *,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run a model that does not generate on arrays: a classifier, a segmentation, an encoder."""
    if not is_installed("numpy"):
        raise ValueError("--input needs numpy: pip install 'fusion-peer[peer]'")
    if not made.resolve().parent.is_dir():
        raise ValueError(f"--output: there is no folder {made.resolve().parent}")
    if made.is_dir():
        raise ValueError(f"--output: {made} is a folder")
    if given.exists() and not given.is_file():
        raise ValueError(f"--input: {given} is not a regular file")
    arrays = _read(given)
    run_loop(_run(model, arrays, made, batch, way, Output(as_json=json)), debug=debug)


async def _run(
    model: str, arrays: Mapping[str, Any], path: Path, batch: int, way: client.JoinOptions, output: Output
) -> None:
    found: dict[str, list[Any]] = {}
    last: RunResult | None = None
    from fusion.runtime.serving.graphs.client import ModelRuns
    from fusion.runtime.serving.requests.client import another_peer

    async with client.connect(way) as context:
        gateway = await client.gateway(context, way.peer)
        others = another_peer(context.directory)  # one of them takes over if the gateway vanishes
        runs = ModelRuns(context.transport, gateway, others, grants.grants_from(context))
        for part in _parts(arrays, batch):
            last = await _ask(context, runs, model, part)
            for array in last.arrays:
                found.setdefault(array.name, []).append(_numbers(array))
    assert last is not None
    whole = {name: _joined(name, parts) for name, parts in found.items()}
    _write(path, whole)
    shapes = {name: list(value.shape) for name, value in whole.items()}
    output.emit({"event": "made", "outputs": shapes, "route": list(last.route), "seconds": last.seconds})
    outputs = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in whole.items())
    through = ", ".join(map(friendly_name, last.route))
    output.print_line(f"{path}: {outputs}; the last of it in {seconds_text(last.seconds)} through {through}")


async def _ask(context: Any, runs: ModelRuns, model: str, part: Mapping[str, Any]) -> RunResult:
    from fusion.runtime.serving.graphs.arrays import Array

    given = [Array(name, value.dtype.name, value.shape, value.tobytes()) for name, value in part.items()]
    try:
        return await runs.run(model, given)
    except NotAdmitted:
        raise
    except RemoteError as error:
        await job_client.find_model(context, model, "NAME")  # is it the name?
        if str(error).startswith("input: "):
            raise ValueError(f"--{error}") from None
        raise


def _parts(arrays: Mapping[str, Any], batch: int) -> Iterator[Mapping[str, Any]]:
    samples = max(len(value) for value in arrays.values())
    for first in range(0, samples, batch or samples):
        yield {name: value[first : first + (batch or samples)] for name, value in arrays.items()}


def _joined(name: str, parts: Sequence[Any]) -> Any:
    """One output, joined over the batches. Raises FrameError where their shapes or dtypes differ."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1 or not all(part.ndim for part in parts):
        raise FrameError(f"the peer gives {name!r:.80} another shape or dtype from one batch to the next")
    return np.concatenate(parts)


def _read(path: Path) -> dict[str, Any]:
    """The file's arrays, float64 as float32. Raises ValueError for any other file."""
    from fusion.runtime.datasets.npz import Npz
    from fusion.runtime.job.protocol import MAX_RUN_BYTES

    source = Npz(path)
    return source.read(source.names, 64 * MAX_RUN_BYTES, lambda line: None)


def _write(path: Path, arrays: Mapping[str, Any]) -> None:
    """As `np.savez`, but for arrays of any name (it has arguments of its own). An existing file is replaced only once all is written."""
    import zipfile

    import numpy as np

    scratch = path  # a pipe or a device is written directly
    if path.is_file() or not path.exists():
        path = path.resolve()  # a link stays one
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as made, zipfile.ZipFile(_target(made), "w") as archive:
            for name, value in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.ascontiguousarray(value), allow_pickle=False)
        if scratch != path:
            scratch.replace(path)
    except BaseException as error:
        if scratch != path:
            scratch.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _target(file: BinaryIO) -> Any:
    """The file as `ZipFile` takes it: anything but a regular file without `seek`, which /dev/null wrongly claims to support."""
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    return SimpleNamespace(write=file.write, flush=file.flush)


def _numbers(array: Any) -> Any:
    import numpy as np

    if array.dtype == "bfloat16":  # unknown to numpy: the upper half of a float32
        wide = np.frombuffer(array.data, "<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(array.shape)
    return np.frombuffer(array.data, np.dtype(array.dtype).newbyteorder("<")).reshape(array.shape)
