"""Whether arrays are what a model takes, or one of its stages; pure."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Input
from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.graphs.arrays import Array


def checked_inputs(
    stages: tuple[Stage, ...], given: Mapping[str, Array], most: int, *, edges: bool = False
) -> dict[str, Array]:
    """What the stages read of the model's inputs, or with `edges` all that one of them reads. JobError, which says what the
    model takes, for arrays that are missing, others, of another shape or dtype, or of more than `most` samples."""
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
        sizes = zip(array.shape, shape, strict=False)
        fits = len(array.shape) == len(shape) and array.dtype == each.type.dtype
        counted = next((size for size, dim in sizes if dim == symbol("batch")), None)
        batch = counted if batch is None else batch
        bound = [batch if dim == symbol("batch") else dim for dim in shape]
        plain = all(
            size == dim or not isinstance(dim, int) for size, dim in zip(array.shape, bound, strict=False)
        )
        if not fits or not plain:
            raise JobError(f"input: {array} does not fit; the model takes {takes}")
    if batch is not None and batch > most:
        raise JobError(f"input: {batch} samples; at most {most} at once (--batch {most} asks in parts)")
    return {name: given[name] for name in wanted}
