"""Graphs that were captured before, in a home. torch takes a third of a second for each layer of a model, whenever it is planned or served."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from fusion.dag.ir import serialise
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Graph

FOLDER = "captured"
REMEMBERED = 32  # graphs, the most recently used ones
_LENGTH_BYTES = 8  # of a file, before the graph: the largest number of positions
_PACKAGE = Path(__file__).parents[3]
_CODE = ("dag", "runtime/capture")  # of the package: what a graph follows from beside the model


class CapturedBefore:
    """The graphs of a home, each with its largest number of positions. Damaged files are ignored."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def of(self, model: str, capture: Callable[[], tuple[Graph, int]]) -> tuple[Graph, int]:
        """The graph of the model that this text describes, captured now if it was not before by this software and this torch."""
        about = json.dumps([model, torch.__version__, _code()])
        path = self._folder / f"{hashlib.sha256(about.encode()).hexdigest()}.graph"
        found = _read(path)
        if found is None:
            found = capture()
            self._write(path, *found)
        return found

    def _write(self, path: Path, graph: Graph, longest: int) -> None:
        """Does nothing where the folder cannot be written to."""
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(longest.to_bytes(_LENGTH_BYTES, "big") + serialise.encode(graph))
            scratch.replace(path)
            files = sorted(self._folder.glob("*.graph"), key=lambda file: file.stat().st_mtime)
            for old in files[:-REMEMBERED]:
                old.unlink(missing_ok=True)
        except OSError:
            with suppress(OSError):
                scratch.unlink()


def _read(path: Path) -> tuple[Graph, int] | None:
    try:
        with path.open("rb") as file:
            longest, data = file.read(_LENGTH_BYTES), file.read(serialise.MAX_BYTES + 1)
        graph = serialise.decode(data)
        os.utime(path)
    except (OSError, GraphError):
        return None
    return graph, int.from_bytes(longest, "big")


@cache
def _code() -> list[tuple[str, int, int]]:
    """The files of our code that a graph follows from: name, bytes, and nanoseconds of the last change."""
    files = sorted(path for folder in _CODE for path in (_PACKAGE / folder).rglob("*.py"))
    return [
        (str(path.relative_to(_PACKAGE)), (status := path.stat()).st_size, status.st_mtime_ns)
        for path in files
    ]
