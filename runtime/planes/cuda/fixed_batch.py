"""Batches of a fixed number of single positions, which make any library batch-invariant.

On CUDA the library chooses kernels by the number of rows. So a decode step always runs as one of `ROWS` rows, padded: up to there a
product costs what it costs to read the matrix once. A piece of a prompt runs by itself, in the same shape everywhere.
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
    """Positions [first, first + count) of the piece with index `piece`."""

    piece: int
    first: int
    count: int


def batches(lengths: Sequence[int], rows: int = ROWS) -> Iterator[list[Part]]:
    """All positions of pieces of these lengths, in order, in batches of at most `rows`. Pieces may be cut."""
    batch, free_rows = list[Part](), rows
    for piece, length in enumerate(lengths):
        first = 0
        while first < length:
            count = min(free_rows, length - first)
            batch.append(Part(piece, first, count))
            first, free_rows = first + count, free_rows - count
            if not free_rows:
                yield batch
                batch, free_rows = [], rows
    if batch:
        yield batch


def cut(piece: Piece, part: Part, length: int, inputs: Mapping[str, tuple[int, int]]) -> Piece:
    """The part of a piece of `length` positions. `inputs`: by input, its sequence dimension and the rows of a position there."""
    return piece if part.count == length else piece.slice(part.first, part.count, inputs)


def merged(
    layout: EndToEnd, keys: Sequence[str], piece: Piece, parts: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The outputs of a piece, merged from those of its parts, which have a result for every position."""
    outputs: dict[str, torch.Tensor] = {}
    for key, (axis, rows), only_logit_rows in zip(keys, layout.outputs, layout.ends, strict=True):
        value = parts[0][key] if len(parts) == 1 else torch.cat([part[key] for part in parts], axis)
        if only_logit_rows:
            count = piece.logit_positions * rows
            value = value.narrow(axis, value.shape[axis] - count, count)
        outputs[key] = value
    return outputs
