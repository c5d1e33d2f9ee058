"""Positions that run singly, a fixed number at a time, so that each has the same bits in any company.

On CUDA the library chooses how it multiplies and sums up by how many rows there are. A position of an answer, whoever else runs,
is therefore one of `ROWS` rows always, the rest of which is padding: up to there a product costs what it costs to read the
matrix once. A piece of a prompt runs by itself, in the shape that it has wherever it is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion.dag.rewrites.end_to_end import EndToEnd
from fusion.runtime.planes.plane import Piece

ROWS = 32


@dataclass(frozen=True)
class Part:
    """Positions [first, first + count) of the piece at `place` of a run."""

    place: int
    first: int
    count: int


def batches(lengths: Sequence[int], rows: int = ROWS) -> Iterator[list[Part]]:
    """All positions of pieces so long, in order, as many at a time as there are rows; a piece may be cut."""
    batch, room = list[Part](), rows
    for place, length in enumerate(lengths):
        first = 0
        while first < length:
            count = min(room, length - first)
            batch.append(Part(place, first, count))
            first, room = first + count, room - count
            if not room:
                yield batch
                batch, room = [], rows
    if batch:
        yield batch


def cut(piece: Piece, part: Part, length: int, inputs: Mapping[str, tuple[int, int]]) -> Piece:
    """These positions of a piece of so many. `inputs`: the dimension along the sequence of each, and how many rows a position has."""
    return piece if part.count == length else piece.part(part.first, part.count, inputs)


def gathered(
    layout: EndToEnd, keys: Sequence[str], piece: Piece, parts: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What a piece gets, of what its parts got, each of all of its positions."""
    found: dict[str, torch.Tensor] = {}
    for key, (axis, each), end in zip(keys, layout.outputs, layout.ends, strict=True):
        value = parts[0][key] if len(parts) == 1 else torch.cat([part[key] for part in parts], axis)
        if end:
            shown = piece.shown * each
            value = value.narrow(axis, value.shape[axis] - shown, shown)
        found[key] = value
    return found
