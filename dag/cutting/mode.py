"""What of a graph is computed in which mode: while it is trained, or evaluated on samples that are held out.

One graph has both. Evaluated, dropout is off, running statistics are used, and a value that is kept is the buffer as it is; where a model
computes something else in evaluation, `BY_MODE` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fusion.dag.cutting.references import needed, roots
from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.dag.ir.opset_pointwise import BY_MODE, KEEP


def in_mode(node: Node, *, training: bool) -> tuple[str, tuple[Arg, ...]]:
    """The operator that stands for the node's in this mode, and its arguments."""
    if not training:
        return evaluation(node.op, node.args)
    return ("aten.alias", node.args[:1]) if node.op == BY_MODE else (node.op, node.args)


def evaluation(op: str, args: tuple[Arg, ...]) -> tuple[str, tuple[Arg, ...]]:
    """The operator that stands for `op` when the model is evaluated."""
    if op == "fusion.dropout":
        return "aten.dropout", (*args, False)
    if op == "fusion.dropout_attention":
        return "aten.scaled_dot_product_attention", (*args[:4], 0.0, *args[5:])
    if op == "aten.batch_norm" and args[3] is not None:
        return op, (*args[:5], False, *args[6:])
    if op == KEEP:
        return "aten.alias", args[:1]
    if op == BY_MODE:
        return "aten.alias", args[1:]
    return op, args


def read_in_training(node: Node) -> Iterator[Ref]:
    """What the node reads in training, and has a gradient for."""
    return replace(node, args=node.args[:1]).refs() if node.op == BY_MODE else node.refs()


def computed(graph: Graph, *, training: bool) -> frozenset[str]:
    """Names of the nodes that a run in this mode is for, of a graph that chooses by it; else all."""
    if all(node.op != BY_MODE for node in graph.nodes):
        return frozenset(graph.node_index)
    wanted: Iterable[Ref] = roots(graph) if training else graph.outputs
    return frozenset(
        node.name for node in needed(graph, wanted, read_in_training if training else _evaluated)
    )


def _evaluated(node: Node) -> Iterator[Ref]:
    return replace(node, args=evaluation(node.op, node.args)[1]).refs()
