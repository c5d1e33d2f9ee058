"""Validation of the inputs of a model or of a stage, and the largest batch; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import Dim, bind, symbol, symbols_of
from fusion.dag.ir.graph import DTYPE_BYTES, Input, TensorType
from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.graphs.arrays import Array


def checked_inputs(
    stages: tuple[Stage, ...], given: Mapping[str, Array], sizes: Mapping[str, int], *, edges: bool = False
) -> dict[str, Array]:
    """The model's inputs that the stages read, or with `edges` all inputs of one stage. `sizes`: largest value of each symbol of the
    graph, for which the stages have reserved memory. JobError, which lists the model's inputs, for arrays that are missing, unknown, of
    another shape or dtype, or larger than these sizes allow."""
    wanted: dict[str, Input] = {}
    for stage in stages:
        received = set() if edges else {edge.name for edge in stage.receives}
        wanted.update({i.name: i for i in stage.graph.inputs if i.name not in received})
    takes = ", ".join(f"{name} {i.type}" for name, i in wanted.items())
    unlike = [name for name in (*wanted, *given) if (name in wanted) != (name in given)]
    if unlike:
        what = "is missing" if unlike[0] in wanted else "is none of its inputs"
        raise JobError(f"input: {unlike[0]:.80} {what}; the model takes {takes}")
    batch: int | None = None
    for name, each in wanted.items():
        array, shape = given[name], each.type.shape
        if len(array.shape) != len(shape) or array.dtype != each.type.dtype:
            raise JobError(f"input: {array} does not fit; the model takes {takes}")
        for size, dim in zip(array.shape, shape, strict=True):
            if dim == symbol("batch"):
                batch = size if batch is None else batch
                most = sizes["batch"]
                if batch > most:
                    raise JobError(
                        f"input: {batch} samples; at most {most} at once (--batch {most} asks in parts)"
                    )
                fits = size == batch
            else:
                fits = size == dim if isinstance(dim, int) else size <= _most(dim, sizes)
            if not fits:
                raise JobError(f"input: {array} does not fit; the model takes {takes}")
    return {name: given[name] for name in wanted}


def most_samples(stages: Sequence[Stage], sizes: Mapping[str, int], frame_bytes: int) -> int:
    """The largest batch, up to `sizes["batch"]`, with which inputs and outputs of every stage fit into `frame_bytes`. At least 1."""
    frames = [[i.type for i in stage.graph.inputs] for stage in stages]
    frames += [[stage.graph.types[ref] for ref in stage.graph.outputs] for stage in stages]

    def largest(samples: int) -> int:
        return max((_bytes(types, {**sizes, "batch": samples}) for types in frames), default=0)

    return max(1, bisect_right(range(1, sizes["batch"] + 1), frame_bytes, key=largest))


def _bytes(types: Sequence[TensorType], sizes: Mapping[str, int]) -> int:
    return sum(DTYPE_BYTES[each.dtype] * prod(_most(dim, sizes) for dim in each.shape) for each in types)


def _most(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The largest value of a dimension; 0 where it has a symbol that `sizes` lacks."""
    return bind(dim, sizes) if symbols_of(dim) <= sizes.keys() else 0
