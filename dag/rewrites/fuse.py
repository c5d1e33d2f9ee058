"""Operator fusion for serving graphs: fewer kernel calls for each token when decoding, where calls dominate.

A fused kernel rounds in another order, so training graphs are left as the model's author wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusion.dag.cutting.references import produced_by, without_dead_nodes
from fusion.dag.ir.graph import Graph, Node, Ref


def fuse(graph: Graph) -> Graph:
    """weight * (x * rsqrt(mean(x ** 2, -1, keepdim) + eps)) becomes aten.rms_norm, in float32 only. The product with
    the weight keeps its name. Expects the output of `clean`."""
    producers = {n.name: n for n in graph.nodes}
    fused = [_rms_norm(graph, node, producers) or node for node in graph.nodes]
    return without_dead_nodes(replace(graph, nodes=tuple(fused)))


def _rms_norm(graph: Graph, node: Node, producers: Mapping[str, Node]) -> Node | None:
    for weight, scaled in _factors(node):
        inner = producers.get(scaled.name)
        for x, root in _factors(inner) if inner is not None else ():
            eps = _epsilon(x, root, producers)
            width = graph.types[x].shape[-1:]
            same_type = graph.types[x] == node.results[0] and graph.types[x].dtype == "float32"
            if (
                eps is None
                or not same_type
                or graph.types[weight].shape != width
                or graph.types[weight].dtype != "float32"
            ):
                continue
            return replace(node, op="aten.rms_norm", args=(x, width, weight, eps))
    return None


def _factors(node: Node) -> list[tuple[Ref, Ref]]:
    """The factors of a product of two tensors, in both orders."""
    if node.op != "aten.mul.Tensor":
        return []
    a, b = node.args
    return [(a, b), (b, a)] if isinstance(a, Ref) and isinstance(b, Ref) else []


def _epsilon(x: Ref, root: Ref, producers: Mapping[str, Node]) -> float | None:
    """eps where `root` is rsqrt(mean(x ** 2, -1, keepdim) + eps)."""
    rsqrt = produced_by(root, "aten.rsqrt", producers)
    total = rsqrt and produced_by(rsqrt.args[0], "aten.add.Tensor", producers)
    if not total or not isinstance(total.args[1], float) or total.args[2] != 1:
        return None
    mean = produced_by(total.args[0], "aten.mean.dim", producers)
    if not mean or mean.args[1:] != ((-1,), True, None):
        return None
    square = produced_by(mean.args[0], "aten.pow.Tensor_Scalar", producers)
    return total.args[1] if square and square.args == (x, 2) else None
