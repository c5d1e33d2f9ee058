"""The memory layout of views: a slice of a tensor has gaps between its elements, and a reshape across one has to copy.

A gap is identified by the number of elements of the view between two of them (for a (2, 3) slice of columns of a matrix: 3).
"""

from __future__ import annotations

from fusion.dag.ir.dims import Dim
from fusion.dag.ir.opset_shapes import MAX_TERMS, Shape, terms
from fusion.dag.ir.opset_spec import Call

Gaps = frozenset[Dim]

PARTS = frozenset({
    "aten.slice.Tensor", "aten.select.int", "aten.narrow", "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes",
    "aten.chunk", "aten.unbind.int",
})  # fmt: skip


def view_gaps(call: Call, shape: Shape, source_gaps: Gaps) -> Gaps | None:
    """The gaps of a view of that shape of a tensor with the gaps `source_gaps`; None if it has to copy, or may have to. The order of
    elements must be that of the tensor."""
    before = call["self"].shape
    if not source_gaps and (call.op not in PARTS or before == shape):
        return source_gaps
    old, new = _volumes(before), _volumes(shape)
    if old is None or new is None or call.op == "aten.contiguous":
        return None
    if call.op not in PARTS:
        return source_gaps if source_gaps <= set(new) else None
    at = call["dim"] % len(before)
    # Gaps of earlier dimensions have fewer elements now.
    gaps = {new[place] if (place := old.index(gap)) <= at else gap for gap in source_gaps}
    selected = len(shape) < len(before)
    if before != shape and not (selected and before[at] == 1):  # selecting the only element is no slice
        gaps.add(old[at + 1] if selected else new[at])
    if call.values.get("step", 1) != 1:
        gaps.add(old[at + 1])
    return frozenset(gaps - {new[0]})


def _volumes(shape: Shape) -> list[Dim] | None:
    """The elements in all dimensions, in all but the first, ..., in none; None if a polynomial has too many terms."""
    volumes: list[Dim] = [1]
    for dim in reversed(shape):
        volumes.append(volumes[-1] * dim)
        if terms(volumes[-1]) > MAX_TERMS:
            return None
    return volumes[::-1]
