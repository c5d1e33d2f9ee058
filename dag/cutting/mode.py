"""The modes of a graph: training, and evaluation on held-out samples.

One graph has both. In evaluation dropout is off, batch normalisation uses running statistics, and `KEEP` gives the buffer as it is;
where a model computes something else in evaluation, `BY_MODE` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fusion.dag.cutting.references import needed, roots
from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.dag.ir.opset_pointwise import BY_MODE, KEEP


def in_mode(node: Node, *, training: bool) -> tuple[str, tuple[Arg, ...]]:
    """The operator and arguments to run for the node in this mode."""
    if not training:
        return evaluation(node.op, node.args)
    return ("aten.alias", node.args[:1]) if node.op == BY_MODE else (node.op, node.args)


def evaluation(op: str, args: tuple[Arg, ...]) -> tuple[str, tuple[Arg, ...]]:
    """The operator and arguments to run for `op` in evaluation."""
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
    """The values that the node reads in training."""
    return replace(node, args=node.args[:1]).refs() if node.op == BY_MODE else node.refs()


def computed(graph: Graph, *, training: bool) -> frozenset[str]:
    """Names of the nodes that a run in this mode needs: all, if the graph has no `BY_MODE`."""
    if all(node.op != BY_MODE for node in graph.nodes):
        return frozenset(graph.node_index)
    outputs: Iterable[Ref] = roots(graph) if training else graph.outputs
    return frozenset(
        node.name for node in needed(graph, outputs, read_in_training if training else _read_in_evaluation)
    )


def _read_in_evaluation(node: Node) -> Iterator[Ref]:
    return replace(node, args=evaluation(node.op, node.args)[1]).refs()
