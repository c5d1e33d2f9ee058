"""Whether several sequences may be concatenated along the dimension `sequence` and run at once (continuous batching).

A graph with cached attention treats positions one by one, so linear layers see one matrix, whichever sequences its rows belong
to; only attention and the slice of the last position depend on where a sequence ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusion.dag.cutting.positional import keeps_last
from fusion.dag.cutting.references import substitute
from fusion.dag.ir.errors import GraphError, UnsupportedModel
from fusion.dag.ir.graph import Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import infer, spec
from fusion.dag.rewrites.positions import require_separate_positions, rows_per_position, sequence_axis

_PER_POSITION = frozenset({"pointwise", "contraction"})  # may follow the slice of the last position
# Products of rows along the sequence with a matrix, and the index of the matrix among their arguments; others may mix rows.
_ROW_PRODUCTS = {
    "aten.linear": 1, "aten.addmm": 2, "fusion.linear_int8": 1, "fusion.linear_int4": 1,
    "fusion.expert_linear": 2, "fusion.expert_linear_int8": 2, "fusion.expert_linear_int4": 2,
}  # fmt: skip

Along = tuple[int, int]


@dataclass(frozen=True)
class EndToEnd:
    """`inputs` and `outputs`: the dimension along the sequence of each, and how many rows a position has there; `last`: the
    nodes that slice the last position; `ends`: for each output whether it has the last position of each sequence only."""

    inputs: Mapping[str, Along]
    outputs: tuple[Along, ...]
    last: frozenset[str]
    ends: tuple[bool, ...]


def end_to_end(graph: Graph) -> EndToEnd | None:
    """How to run concatenated sequences; None if each has to run by itself."""
    last = frozenset(node.name for node in graph.nodes if keeps_last(graph, node))
    try:
        all_positions, last_only = _every_position(graph, last)
        require_separate_positions(all_positions)
        inputs = {i.name: _along(i.type) for i in all_positions.inputs}
        outputs = [_along(all_positions.types[ref]) for ref in all_positions.outputs]
    except (UnsupportedModel, GraphError, ValueError):
        return None
    known_inputs = {name: along for name, along in inputs.items() if along is not None}
    known_outputs = tuple(along for along in outputs if along is not None)
    if (
        len(known_inputs) < len(inputs)
        or len(known_outputs) < len(outputs)
        or not known_inputs
        or not _keeps_rows_separate(all_positions)
    ):
        return None
    return EndToEnd(known_inputs, known_outputs, last, tuple(ref in last_only for ref in graph.outputs))


def _along(type_: TensorType) -> Along | None:
    axis = sequence_axis(type_)
    return None if axis is None else (axis, rows_per_position(type_, axis))


def _every_position(graph: Graph, last: frozenset[str]) -> tuple[Graph, frozenset[Ref]]:
    """The graph without the slice of the last position, and the values after it. GraphError or ValueError if one of these needs
    a single position."""
    kept: dict[Ref, Ref] = {}
    last_only: set[Ref] = set()
    types, nodes = dict(graph.types), list[Node]()
    for node in graph.nodes:
        refs = set(node.refs())
        if node.name in last:
            source = node.args[0]
            assert isinstance(source, Ref)
            if refs & last_only:
                raise ValueError("cut twice")
            kept[Ref(node.name)] = source
            last_only.add(Ref(node.name))
            continue
        if refs & last_only:
            others = [ref for ref in refs - last_only if sequence_axis(types[ref]) is not None]
            if others or spec(node.op).family not in _PER_POSITION:
                raise ValueError(f"{node.name} reads the last position and others")
            args = substitute(node.args, kept)
            node = replace(node, args=args, results=infer(node.op, args, types))
            results = [Ref(node.name, i) for i in range(len(node.results))]
            last_only.update(results)
            types.update(zip(results, node.results, strict=True))
        nodes.append(node)
    outputs = tuple(kept.get(ref, ref) for ref in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs), frozenset(last_only)


def _keeps_rows_separate(graph: Graph) -> bool:
    """Whether every product along the sequence is of rows with a matrix, or element-wise."""
    for node in graph.nodes:
        family = spec(node.op).family
        if family == "convolution":
            return False
        if family == "contraction" and not _is_outer_product(graph, node):
            place = _ROW_PRODUCTS.get(node.op)
            others = node.refs() if place is None else (node.args[place],)
            along = [
                ref for ref in others if isinstance(ref, Ref) and sequence_axis(graph.types[ref]) is not None
            ]
            if along:
                return False
    return True


def _is_outer_product(graph: Graph, node: Node) -> bool:
    """Whether the contracted dimension is 1, as where a model multiplies frequencies with positions."""
    operand = node.args[0]
    return (
        node.op in ("aten.matmul", "aten.bmm", "aten.linear")
        and isinstance(operand, Ref)
        and graph.types[operand].shape[-1:] == (1,)
    )
