"""Patterns of a node or two, from which those of attention are made: who produces a value, who reads it, what it is multiplied by."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.dag.ir.graph import Arg, Graph, Node, Ref


def producer(graph: Graph, ref: Arg) -> Node | None:
    """The node that produces the value; None for an input, a variable or a constant."""
    at = graph.node_index.get(ref.name) if isinstance(ref, Ref) else None
    return None if at is None else graph.nodes[at]


def only_reader(graph: Graph, ref: Ref) -> Node | None:
    """The node that reads the value, if it is read once and is no output."""
    uses = graph.uses.get(ref, ())
    if len(uses) != 1 or ref in graph.outputs:
        return None
    node = graph.nodes[uses[0]]
    return node if list(node.refs()).count(ref) == 1 else None


def read_once(graph: Graph, ref: Ref) -> bool:
    return only_reader(graph, ref) is not None


def scalar_constant(graph: Graph, arg: Arg) -> float | None:
    """The number that the argument is, or that its scalar tensor holds; None for anything else."""
    if isinstance(arg, Ref):
        node = producer(graph, arg)
        if node is None or node.results[0].shape != ():
            return None
        if node.op == "aten.full":
            arg = node.args[1]
        elif node.op == "aten.scalar_tensor":
            arg = node.args[0]
    return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None


_MULTIPLIES: Mapping[str, bool] = {
    "aten.mul.Tensor": True, "aten.mul.Scalar": True, "aten.div.Tensor": False, "aten.div.Scalar": False,
}  # fmt: skip


def scalar_multiple(graph: Graph, node: Node) -> tuple[Ref, float] | None:
    """The tensor that the node multiplies by a number, and the number."""
    if node.op not in _MULTIPLIES:
        return None
    tensor, multiplier = node.args[:2]
    factor = scalar_constant(graph, multiplier)
    if factor is None and _MULTIPLIES[node.op]:
        tensor, factor = multiplier, scalar_constant(graph, tensor)
    if factor is None or factor == 0 or not isinstance(tensor, Ref):
        return None
    return tensor, factor if _MULTIPLIES[node.op] else 1 / factor


def swaps_last_two(transpose: Node) -> bool:
    """Whether the node swaps the last two dimensions."""
    rank = len(transpose.results[0].shape)
    return {d % rank for d in transpose.args[1:] if isinstance(d, int)} == {rank - 1, rank - 2}
