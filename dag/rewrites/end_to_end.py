"""Whether several sequences may be laid end to end along the dimension `sequence` and run at once, and where they lie.

A graph with cached attention treats positions one by one, so linear layers see one matrix, whoever its rows belong to;
only attention, and the cut to the last position, have to know where a sequence ends.
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

_ALONE = frozenset({"pointwise", "contraction"})  # what may follow the cut to the last position
# Products whose rows are those of one tensor along the sequence, and the place of the matrix among their arguments; others mix
# rows in ways that nobody has looked at.
_ROW_PRODUCTS = {
    "aten.linear": 1, "aten.addmm": 2, "fusion.linear_int8": 1, "fusion.linear_int4": 1,
    "fusion.expert_linear": 2, "fusion.expert_linear_int8": 2, "fusion.expert_linear_int4": 2,
}  # fmt: skip

Along = tuple[int, int]


@dataclass(frozen=True)
class EndToEnd:
    """`inputs` and `outputs`: the dimension along the sequence of each, and how many rows a position has there; `last`: the
    nodes that keep the last position of a sequence; `ends`: for each output whether it holds one position a sequence, the
    last."""

    inputs: Mapping[str, Along]
    outputs: tuple[Along, ...]
    last: frozenset[str]
    ends: tuple[bool, ...]


def end_to_end(graph: Graph) -> EndToEnd | None:
    """None where sequences have to be run one after another."""
    last = frozenset(node.name for node in graph.nodes if keeps_last(graph, node))
    try:
        whole, short = _every_position(graph, last)
        require_separate_positions(whole)
        inputs = {given.name: _along(given.type) for given in whole.inputs}
        outputs = [_along(whole.types[ref]) for ref in whole.outputs]
    except (UnsupportedModel, GraphError, ValueError):
        return None
    given = {name: along for name, along in inputs.items() if along is not None}
    made = tuple(along for along in outputs if along is not None)
    if len(given) < len(inputs) or len(made) < len(outputs) or not given or not _rows_apart(whole):
        return None
    return EndToEnd(given, made, last, tuple(ref in short for ref in graph.outputs))


def _along(type_: TensorType) -> Along | None:
    axis = sequence_axis(type_)
    return None if axis is None else (axis, rows_per_position(type_, axis))


def _every_position(graph: Graph, last: frozenset[str]) -> tuple[Graph, frozenset[Ref]]:
    """The graph without the cut to the last position, and the values that come after the cut. GraphError, ValueError where
    something after it is made for one position."""
    kept: dict[Ref, Ref] = {}
    short: set[Ref] = set()
    types, nodes = dict(graph.types), list[Node]()
    for node in graph.nodes:
        refs = set(node.refs())
        if node.name in last:
            source = node.args[0]
            assert isinstance(source, Ref)
            if refs & short:
                raise ValueError("cut twice")
            kept[Ref(node.name)] = source
            short.add(Ref(node.name))
            continue
        if refs & short:
            beside = [ref for ref in refs - short if sequence_axis(types[ref]) is not None]
            if beside or spec(node.op).family not in _ALONE:
                raise ValueError(f"{node.name} reads the last position and others")
            args = substitute(node.args, kept)
            node = replace(node, args=args, results=infer(node.op, args, types))
            made = [Ref(node.name, i) for i in range(len(node.results))]
            short.update(made)
            types.update(zip(made, node.results, strict=True))
        nodes.append(node)
    outputs = tuple(kept.get(ref, ref) for ref in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs), frozenset(short)


def _rows_apart(graph: Graph) -> bool:
    """Whether every product along the sequence is of rows with a matrix, or of numbers one by one."""
    for node in graph.nodes:
        family = spec(node.op).family
        if family == "convolution":
            return False
        if family == "contraction" and not _sums_one(graph, node):
            place = _ROW_PRODUCTS.get(node.op)
            others = node.refs() if place is None else (node.args[place],)
            along = [
                ref for ref in others if isinstance(ref, Ref) and sequence_axis(graph.types[ref]) is not None
            ]
            if along:
                return False
    return True


def _sums_one(graph: Graph, node: Node) -> bool:
    """Whether a sum of products is of one product, as where a model multiplies frequencies with positions."""
    given = node.args[0]
    return (
        node.op in ("aten.matmul", "aten.bmm", "aten.linear")
        and isinstance(given, Ref)
        and graph.types[given].shape[-1:] == (1,)
    )
