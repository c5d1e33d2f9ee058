"""Whether a graph may run a sequence in pieces: positions are independent but for cached attention.

Refused by default: a value is accepted if its one dimension along the sequence follows, position by position, from that of an
input. A position may have several adjacent rows there, as where each is routed to several experts.
"""

from __future__ import annotations

from fusion.dag.cutting.references import argument_symbols
from fusion.dag.ir.dims import Dim, Poly, size, symbols_of
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Graph, Node, TensorType
from fusion.dag.ir.opset import mixed_dims, spec

SEQUENCE = "sequence"
# Ops that may create a dimension along the sequence, with the same value at every position.
_UNIFORM = frozenset({"aten.expand", "aten.zeros", "aten.ones", "aten.full"})
_RESHAPES = frozenset({
    "aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze",
})  # fmt: skip
REPEATS = "aten.repeat_interleave.self_int"  # a position's rows stay together
# Parameters that determine only the shape of the result
_SHAPES = frozenset({"size", "shape", "sizes"})


def require_separate_positions(graph: Graph) -> None:
    """UnsupportedModel, naming the node, unless every value at a position depends on the inputs at that position
    alone, and on earlier ones through caches."""
    # Results first: that check names attention itself, not one of its parts.
    for check in (_check_results, _check_flow):
        for node in graph.nodes:
            try:
                check(graph, node)
            except ValueError as why:
                raise UnsupportedModel(f"no KV cache for this model: {node.name} ({node.op}) {why}") from None


def sequence_axis(type_: TensorType) -> int | None:
    """The dimension along the sequence, or None. ValueError, with the reason, if there are several or an unsupported one."""
    axes = [i for i, d in enumerate(type_.shape) if SEQUENCE in symbols_of(d)]
    if len(axes) > 1:
        raise ValueError("compares positions with each other: attention in a form that is not recognised")
    if axes and not _is_sequence_multiple(type_.shape[axes[0]]):
        raise ValueError(f"has a dimension of {type_.shape[axes[0]]}")
    return axes[0] if axes else None


def rows_per_position(type_: TensorType, axis: int) -> int:
    """How many elements of the dimension along the sequence belong to one position."""
    dim = type_.shape[axis]
    assert isinstance(dim, Poly)
    return dim.terms[0][1]


def _is_sequence_multiple(dim: Dim) -> bool:
    """Whether the dimension is a monomial with one factor of the sequence, such as batch * sequence * 8."""
    assert isinstance(dim, Poly)
    (monomial, coefficient), *more = dim.terms
    return not more and coefficient >= 1 and monomial.count(SEQUENCE) == 1


def _check_results(_: Graph, node: Node) -> None:
    for type_ in node.results:
        sequence_axis(type_)


def _check_flow(graph: Graph, node: Node) -> None:
    types = graph.types
    axes = {ref: sequence_axis(types[ref]) for ref in node.refs()}
    along = {ref: axis for ref, axis in axes.items() if axis is not None}
    results = [sequence_axis(t) for t in node.results]
    for parameter, arg in zip(spec(node.op).parameters, node.args, strict=True):
        if SEQUENCE in argument_symbols((arg,)) and parameter.name not in _SHAPES:
            raise ValueError("depends on the length of the sequence")
    for ref, dims in mixed_dims(node.op, node.args, types):
        if along.get(ref) in dims and node.op != REPEATS:
            raise ValueError("combines or moves values of different positions")
    if not along:
        if any(axis is not None for axis in results) and node.op not in _UNIFORM:
            raise ValueError("makes positions that are not those of position_ids")
        return
    if any(axis is None for axis in results):
        raise ValueError("loses track of the positions")
    if node.op in _RESHAPES or node.op == REPEATS:
        (source,) = along
        # In row-major order positions are kept if the stride of one position is the same, or grows by the number of repeats.
        expected = _position_stride(types[source], along[source])
        if node.op == REPEATS:
            assert isinstance(node.args[1], int | Poly)
            expected = expected * node.args[1]
        if _position_stride(node.results[0], results[0]) != expected:
            raise ValueError("reshapes across positions")


def _position_stride(type_: TensorType, axis: int | None) -> Dim:
    """The stride from one position to the next, in elements."""
    assert axis is not None
    return rows_per_position(type_, axis) * size(type_.shape[axis + 1 :])
