"""Where the elements of a view lie: a part of a tensor has gaps between its elements, and a reshape across one has to copy.

A gap is told by the number of elements that lie behind it in the view (of a (2, 3) part of the columns of a matrix: 3).
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


def view_gaps(call: Call, shape: Shape, given: Gaps) -> Gaps | None:
    """Of a view of the shape, of a tensor whose own gaps are `given`; None if that cannot be a view, or none that we can tell.
    The order of elements must be that of the tensor."""
    before = call["self"].shape
    if not given and (call.op not in PARTS or before == shape):
        return given
    old, new = _volumes(before), _volumes(shape)
    if old is None or new is None or call.op == "aten.contiguous":
        return None
    if call.op not in PARTS:
        return given if given <= set(new) else None
    at = call["dim"] % len(before)
    # What lies before the dimension has less behind it now.
    found = {new[place] if (place := old.index(gap)) <= at else gap for gap in given}
    selected = len(shape) < len(before)
    if before != shape and not (selected and before[at] == 1):  # the only one of one is all of them
        found.add(old[at + 1] if selected else new[at])
    if call.values.get("step", 1) != 1:
        found.add(old[at + 1])
    return frozenset(found - {new[0]})


def _volumes(shape: Shape) -> list[Dim] | None:
    """The elements in all dimensions, in all but the first, ..., in none; None where that is too intricate."""
    found: list[Dim] = [1]
    for dim in reversed(shape):
        found.append(found[-1] * dim)
        if terms(found[-1]) > MAX_TERMS:
            return None
    return found[::-1]
