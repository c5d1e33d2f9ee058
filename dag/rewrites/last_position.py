"""Compute the logits of the last position only: a prefill needs no others, and the vocabulary is the widest layer."""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.cutting.references import argument_symbols, substitute
from fusion.dag.ir.dims import symbol, symbols_of
from fusion.dag.ir.graph import Arg, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import infer, mixed_dims, spec
from fusion.dag.rewrites.positions import SEQUENCE

NAME = "last_position"
_END = 2**63 - 1
_MOVABLE = frozenset({"pointwise", "contraction"})


def last_position(graph: Graph) -> Graph:
    """The graph whose only output, (batch, sequence, ...), becomes (batch, 1, ...): its last position.

    The slice is moved up before the trailing ops that treat positions one by one and read nothing else along the sequence
    (the head, a softcap on the logits), as far as each has one reader; the nodes after it keep their names. A graph with several outputs, or one whose output has no sequence, is returned as it is.
    """
    if len(graph.outputs) != 1 or NAME in graph.node_index or _axis(graph.types[graph.outputs[0]]) is None:
        return graph
    at, chain = graph.outputs[0], list[Node]()
    while (node := _movable_producer(graph, at)) is not None:
        chain.append(node)
        at = next(ref for ref in node.refs() if _sequence_dims(graph.types[ref]))
    axis = _axis(graph.types[at])
    args: tuple[Arg, ...] = (at, axis, -1, _END, 1)
    types = dict(graph.types)
    cut = Node(NAME, "aten.slice.Tensor", args, infer("aten.slice.Tensor", args, types))
    types[Ref(NAME)] = cut.results[0]
    moved = {n.name for n in chain}
    nodes = [n for n in graph.nodes if n.name not in moved]
    nodes.append(cut)
    for node in reversed(chain):
        args = substitute(node.args, {at: Ref(NAME)})
        node = replace(node, args=args, results=infer(node.op, args, types))
        types[Ref(node.name)] = node.results[0]
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), outputs=(Ref(nodes[-1].name),))


def _sequence_dims(type_: TensorType) -> list[int]:
    return [i for i, d in enumerate(type_.shape) if SEQUENCE in symbols_of(d)]


def _axis(type_: TensorType) -> int | None:
    """The dimension that is exactly the sequence, if no other depends on it."""
    axes = _sequence_dims(type_)
    return axes[0] if len(axes) == 1 and type_.shape[axes[0]] == symbol(SEQUENCE) else None


def _movable_producer(graph: Graph, ref: Ref) -> Node | None:
    """The node that produces `ref`, if it may run on the last position alone and has one reader."""
    index = graph.node_index.get(ref.name)
    if index is None or len(graph.uses.get(ref, ())) + graph.outputs.count(ref) != 1:
        return None
    node, types = graph.nodes[index], graph.types
    along = [r for r in dict.fromkeys(node.refs()) if _sequence_dims(types[r])]
    if len(along) != 1 or len(node.results) != 1 or spec(node.op).family not in _MOVABLE:
        return None
    axis = _axis(types[along[0]])
    if axis is None or _axis(node.results[0]) is None or SEQUENCE in argument_symbols(node.args):
        return None
    mixed = dict(mixed_dims(node.op, node.args, types))[along[0]]
    return None if axis in mixed else node
