"""A model's matrices as int8 and int4 in groups, quantised while the model is read, a matrix at a time, without calibration data.

int8: the largest absolute value of a group is 127 times its scale. int4: 16 values from the minimum to the maximum of a group. Smaller ranges
with less squared error cost perplexity: the weights that they clip are those that matter.
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

_TILE_ELEMENTS = 1 << 22  # of a matrix, quantised together


def quantised_model(graph: Graph, read: Read, kind: Kind) -> tuple[Graph, Read]:
    """A graph to be served, with its large matrices stored as `kind`, and what reads its variables. JobError for a model without any such matrix."""
    result = quantise(graph, kind)
    if not result.sources:
        raise JobError(
            f"--quantization: the model has no matrix that can be stored as {kind}; serve it without"
        )
    return result.graph, quantised_read(read, result.sources)


def quantised_read(read: Read, sources: Sequence[Source]) -> Read:
    """Reads the variables of a quantised graph: `sources` are quantised from the tensors that `read` returns. JobError for a tensor with numbers
    that are not finite or beyond float16's range."""

    def quantise_source(source: Source) -> tuple[Tensor, ...]:
        (matrix,) = read([source.variable]).values()
        parts = quantised(matrix.mT if source.transposed else matrix, source.layout.kind)
        if not all(bool(part.isfinite().all()) for part in parts):
            name = source.variable.name
            raise JobError(f"--quantization: {name} has weights that are no numbers, or larger than 60000")
        return parts

    return stored_read(read, sources, quantise_source)


def stored_model(graph: Graph, read: Read, blocks: StoredBlocks) -> tuple[Graph, Read]:
    """A graph to be served, with the matrices that the model's files have quantised as they are there, and what reads its variables."""
    result = store_matrices(graph, blocks.layout)
    return result.graph, stored_read(read, result.sources, blocks.read)


def stored_read(
    read: Read, sources: Sequence[Source], read_source: Callable[[Source], tuple[Tensor, ...]]
) -> Read:
    """Reads the variables of a graph in which each of `sources` is stored in several tensors. `read_source` returns these for one source, or
    for one part of its experts (`fusion.dag.rewrites.expert_groups`)."""
    by_name = {name: source for source in sources for name in source.names}

    def read_variables(variables: Iterable[Variable]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        others: list[Variable] = []
        # By source: name of its tensor -> requested variable
        requested: dict[Source, dict[str, str]] = {}
        for variable in variables:
            part = part_of(variable.name)
            name = variable.name if part is None else part.name
            if name in by_name:
                wanted = by_name[name] if part is None else _expert_part(by_name[name], part.start, part.stop)
                requested.setdefault(wanted, {})[name] = variable.name
            else:
                others.append(variable)
        values = read(others)
        for source, names in requested.items():
            original = by_name[next(iter(names))]
            for name, tensor in zip(original.names, read_source(source), strict=True):
                if name in names:
                    values[names[name]] = tensor
        return values

    return read_variables


def _expert_part(source: Source, start: int, stop: int) -> Source:
    """The source for these of its experts only."""
    variable = source.variable
    part_type = replace(variable.type, shape=(stop - start, *variable.type.shape[1:]))
    name = str(Part(variable.name, start, stop))
    return replace(source, variable=replace(variable, name=name, type=part_type, aliases=()))


def quantised(matrix: Tensor, kind: Kind) -> tuple[Tensor, ...]:
    """Floats (..., rows, columns) as `fusion.dag.ir.opset_quantised` reads them: int8 numbers (..., rows, columns) and scales (..., rows, groups),
    or uint8 (..., rows, columns / 2), scales and minimums. A scale is not finite if a weight of its group was not, or is beyond float16's range."""
    *outer, columns = matrix.shape
    tiles = torch.split(matrix.reshape(-1, columns), max(1, _TILE_ELEMENTS // columns))
    stored = [_int8(tile.float()) if kind == "int8" else _int4(tile.float()) for tile in tiles]
    return tuple(torch.cat(parts).view(*outer, -1) for parts in zip(*stored, strict=True))


def _int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    grouped = matrix.reshape(len(matrix), -1, GROUP)
    scales = _rounded_up(grouped.abs().amax(-1) / 127)
    return _rounded(grouped, scales, None, -127, 127).to(torch.int8).flatten(1), scales


def _int4(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grouped = matrix.reshape(len(matrix), -1, GROUP)
    minimum, maximum = grouped.aminmax(dim=-1)
    scales, minimums = _rounded_up((maximum - minimum) / 15), minimum.half()
    numbers = _rounded(grouped, scales, minimums, 0, 15)
    flat = numbers.to(torch.uint8).flatten(1)
    return flat[:, 0::2] | flat[:, 1::2] << 4, scales, minimums


def _rounded_up(scales: Tensor) -> Tensor:
    """Scales in float16, none smaller, so that no number of a group is clipped."""
    nearest = scales.half()
    return torch.where(
        nearest.float() < scales, torch.nextafter(nearest, nearest.new_tensor(torch.inf)), nearest
    )


def _rounded(grouped: Tensor, scales: Tensor, minimums: Tensor | None, least: int, most: int) -> Tensor:
    """The quantised numbers as floats."""
    divisors = scales.float()[..., None]
    offset = grouped if minimums is None else grouped - minimums.float()[..., None]
    return torch.where(divisors > 0, offset / divisors, 0.0).round_().clamp_(least, most)
