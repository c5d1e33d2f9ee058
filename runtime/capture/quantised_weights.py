"""Matrices of a model as int8 and int4 in groups, made where the model is read, a matrix at a time. It needs no data.

int8: the largest absolute value of a group is 127 of its scale. int4: 16 values from the least to the largest of a group.
Shares of that range with less squared error cost perplexity: what they cut off are the weights that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from fusion.dag.ir.graph import Graph, Variable
from fusion.dag.rewrites.expert_groups import Part, part_of
from fusion.dag.rewrites.quantise import GROUP, Kind, Source, quantise, store_matrices
from fusion.runtime.capture.sources import Read, StoredBlocks
from fusion.runtime.job.errors import JobError

Tensor = torch.Tensor

_TILE_ELEMENTS = 1 << 22  # of a matrix, that are looked at together


def quantised_model(graph: Graph, read: Read, kind: Kind) -> tuple[Graph, Read]:
    """A graph that is to be served, with its large matrices stored as `kind`, and what reads its variables. JobError for one
    without any."""
    found = quantise(graph, kind)
    if not found.sources:
        raise JobError(
            f"--quantization: the model has no matrix that can be stored as {kind}; serve it without"
        )
    return found.graph, quantised_read(read, found.sources)


def quantised_read(read: Read, sources: Sequence[Source]) -> Read:
    """Reads the variables of a quantised graph: those that `sources` tell of out of the tensors that `read` gives. JobError
    for a tensor that has other numbers than finite ones of float16's range."""

    def made(source: Source) -> tuple[Tensor, ...]:
        (whole,) = read([source.variable]).values()
        parts = quantised(whole.mT if source.transposed else whole, source.layout.kind)
        if not all(bool(part.isfinite().all()) for part in parts):
            name = source.variable.name
            raise JobError(f"--quantization: {name} has weights that are no numbers, or larger than 60000")
        return parts

    return stored_read(read, sources, made)


def stored_model(graph: Graph, read: Read, blocks: StoredBlocks) -> tuple[Graph, Read]:
    """A graph that is to be served, with the matrices that the model's files have quantised as they are there, and what
    reads its variables."""
    found = store_matrices(graph, blocks.layout)
    return found.graph, stored_read(read, found.sources, blocks.read)


def stored_read(read: Read, sources: Sequence[Source], made: Callable[[Source], tuple[Tensor, ...]]) -> Read:
    """Reads the variables of a graph in which `sources` are stored in several tensors, which `made` gives, one source, or one
    part of its experts (`fusion.dag.rewrites.expert_groups`), at a time."""
    by_name = {name: source for source in sources for name in source.names}

    def found(variables: Iterable[Variable]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        others: list[Variable] = []
        # What each of its tensors is called, of those that are wanted
        asked: dict[Source, dict[str, str]] = {}
        for variable in variables:
            part = part_of(variable.name)
            name = variable.name if part is None else part.name
            if name in by_name:
                own = by_name[name] if part is None else _of_experts(by_name[name], part.start, part.stop)
                asked.setdefault(own, {})[name] = variable.name
            else:
                others.append(variable)
        values = read(others)
        for source, names in asked.items():
            whole = by_name[next(iter(names))]
            for name, tensor in zip(whole.names, made(source), strict=True):
                if name in names:
                    values[names[name]] = tensor
        return values

    return found


def _of_experts(source: Source, start: int, stop: int) -> Source:
    """For these of its experts only."""
    whole = source.variable
    type_ = replace(whole.type, shape=(stop - start, *whole.type.shape[1:]))
    name = str(Part(whole.name, start, stop))
    return replace(source, variable=replace(whole, name=name, type=type_, aliases=()))


def quantised(matrix: Tensor, kind: Kind) -> tuple[Tensor, ...]:
    """(..., rows, columns) floats as what `fusion.dag.ir.opset_quantised` reads: int8 numbers (..., rows, columns) and scales
    (..., rows, groups), or uint8 (..., rows, columns / 2), scales and minimums. Where a scale is not finite, a weight of its
    group was not, or is too large for float16."""
    *outer, columns = matrix.shape
    tiles = torch.split(matrix.reshape(-1, columns), max(1, _TILE_ELEMENTS // columns))
    stored = [_int8(tile.float()) if kind == "int8" else _int4(tile.float()) for tile in tiles]
    return tuple(torch.cat(parts).view(*outer, -1) for parts in zip(*stored, strict=True))


def _int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    grouped = matrix.reshape(len(matrix), -1, GROUP)
    scales = _up(grouped.abs().amax(-1) / 127)
    return _nearest(grouped, scales, None, -127, 127).to(torch.int8).flatten(1), scales


def _int4(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grouped = matrix.reshape(len(matrix), -1, GROUP)
    least, most = grouped.aminmax(dim=-1)
    scales, minimums = _up((most - least) / 15), least.half()
    numbers = _nearest(grouped, scales, minimums, 0, 15)
    flat = numbers.to(torch.uint8).flatten(1)
    return flat[:, 0::2] | flat[:, 1::2] << 4, scales, minimums


def _up(scales: Tensor) -> Tensor:
    """In float16, none smaller: the largest number of a group is not cut off."""
    near = scales.half()
    return torch.where(near.float() < scales, torch.nextafter(near, near.new_tensor(torch.inf)), near)


def _nearest(grouped: Tensor, scales: Tensor, minimums: Tensor | None, least: int, most: int) -> Tensor:
    """The whole numbers that stand for these, as floats."""
    shares = scales.float()[..., None]
    from_least = grouped if minimums is None else grouped - minimums.float()[..., None]
    return torch.where(shares > 0, from_least / shares, 0.0).round_().clamp_(least, most)
