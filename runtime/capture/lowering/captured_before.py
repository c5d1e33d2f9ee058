"""Graphs that were captured before, in a home. torch takes half a second of a slow core for each layer of a model, whenever it
is planned or served."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from fusion.dag.ir import serialise
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Graph
from fusion.swarm.newest_files import NewestFiles

FOLDER, SUFFIX = "captured", ".graph"
REMEMBERED = 32  # graphs, the most recently used ones
_LENGTH_BYTES = 8  # of a file, before the graph: the largest number of positions
_PACKAGE = Path(__file__).parents[3]
_CODE = ("dag", "runtime/capture")  # of the package: what a graph follows from beside the model


class CapturedBefore:
    """The graphs of a home, each with its largest number of positions. Damaged files are ignored."""

    def __init__(self, home: Path) -> None:
        self._files = NewestFiles(home / FOLDER, SUFFIX, REMEMBERED)

    def of(self, model: str, capture: Callable[[], tuple[Graph, int]]) -> tuple[Graph, int]:
        """The graph of the model that this text describes, captured now if it was not before by this software and this torch."""
        name = hashlib.sha256(repr((model, torch.__version__, _code())).encode()).hexdigest()
        found = _decoded(self._files.read(name, _LENGTH_BYTES + serialise.MAX_BYTES + 1))
        if found is None:
            graph, longest = found = capture()
            self._files.write(name, longest.to_bytes(_LENGTH_BYTES, "big") + serialise.encode(graph))
        return found


def _decoded(data: bytes | None) -> tuple[Graph, int] | None:
    """None for no data, or damaged ones."""
    if data is None:
        return None
    try:
        graph = serialise.decode(data[_LENGTH_BYTES:])
    except GraphError:
        return None
    return graph, int.from_bytes(data[:_LENGTH_BYTES], "big")


@cache
def _code() -> list[tuple[str, int, int]]:
    """The files of our code that a graph follows from: name, bytes, and nanoseconds of the last change."""
    files = sorted(path for folder in _CODE for path in (_PACKAGE / folder).rglob("*.py"))
    return [
        (str(path.relative_to(_PACKAGE)), (status := path.stat()).st_size, status.st_mtime_ns)
        for path in files
    ]
