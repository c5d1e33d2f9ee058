"""Fuse products of rows with their experts: index(weights, ids) -> bmm, with or without a bias, becomes `fusion.expert_linear`.

Mixtures of experts are captured in that form, `batched_mm` of transformers, without data-dependent control flow. As it is, it
would copy the weights for every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusion.dag.cutting.references import produced_by, without_dead_nodes
from fusion.dag.ir.dims import Dim
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.ir.opset import spec

EXPERT_LINEAR = "fusion.expert_linear"
EXPERT_LINEARS = frozenset({EXPERT_LINEAR, f"{EXPERT_LINEAR}_int8", f"{EXPERT_LINEAR}_int4"})
_LOOK_UP = "aten.index.Tensor"
# Ops that only change the shape, which is read from their types.
_RESHAPES = frozenset({
    "aten.unsqueeze", "aten.squeeze.dim", "aten.squeeze", "aten.reshape", "aten.view", "aten._unsafe_view",
})  # fmt: skip


@dataclass(frozen=True)
class ExpertLinear:
    """The arguments that all of EXPERT_LINEARS have."""

    ids: Ref
    held: tuple[Ref, ...]  # tensors whose first dimension is the experts: weight, scales, minimums, bias
    first: int
    of: int


def expert_linear(node: Node) -> ExpertLinear | None:
    """The arguments of a node of EXPERT_LINEARS; None for another op."""
    if node.op not in EXPERT_LINEARS:
        return None
    arguments = dict(zip((p.name for p in spec(node.op).parameters), node.args, strict=True))
    held = (arguments.get(name) for name in ("weight", "scales", "minimums", "bias"))
    ids, first, of = arguments["ids"], arguments["first"], arguments["of"]
    assert isinstance(ids, Ref) and isinstance(first, int) and isinstance(of, int)
    return ExpertLinear(ids, tuple(ref for ref in held if isinstance(ref, Ref)), first, of)


def with_first_expert(node: Node, first: int) -> Node:
    """The node, one of EXPERT_LINEARS, with its experts from `first` on."""
    at = [p.name for p in spec(node.op).parameters].index("first")
    return replace(node, args=(*node.args[:at], first, *node.args[at + 1 :]))


def name_experts(graph: Graph) -> Graph:
    """The graph with `fusion.expert_linear`, for serving and training: the same products, with additions in another order. The node
    of the whole product, with its bias, keeps its name. Expects the output of `clean`."""
    producers = {node.name: node for node in graph.nodes}
    products: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        fused = _product(graph, node, producers)
        if fused is None:
            fused = _biased(graph, node, producers, products)
        if fused is not None:
            products[node.name] = node = fused
        nodes.append(node)
    return without_dead_nodes(replace(graph, nodes=tuple(nodes)))


def require_named_experts(graph: Graph) -> None:
    """UnsupportedModel, naming the node, if weights are copied for each row: experts in a form that `name_experts` does not
    match."""
    static = {Ref(v.name) for v in graph.variables}
    copied: set[Ref] = set()
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node.op == _LOOK_UP and source in static and len(graph.types[source].shape) > 2:  # type: ignore[index]
            copied.add(Ref(node.name))
        elif copied & set(node.refs()):
            family = spec(node.op).family
            if family == "contraction":
                raise UnsupportedModel(
                    f"the model's experts have a form that is not recognised: {node.name} ({node.op}) multiplies "
                    "weights that are copied for each position"
                )
            if family == "view":
                copied.add(Ref(node.name))


class _LookUp(NamedTuple):
    """A look-up of rows or matrices of `weight` by `ids`."""

    weight: Ref
    ids: Ref


def _product(graph: Graph, node: Node, producers: Mapping[str, Node]) -> Node | None:
    """`fusion.expert_linear`, (rows, out), for a reshaped bmm of looked-up matrices with one row each; else None."""
    bmm = produced_by(node.args[0], "aten.bmm", producers) if node.op in _RESHAPES and node.args else None
    if bmm is None or len(node.results[0].shape) != 2:
        return None
    for at, transposed in ((0, False), (1, True)):  # matrix @ column, or row @ matrix
        lookup = _look_up(graph, bmm.args[at], producers)
        x = _row(graph, bmm.args[1 - at], transposed, producers)
        if lookup is None or x is None:
            continue
        held, *matrix = graph.types[lookup.weight].shape
        out = matrix[1] if transposed else matrix[0]
        rows = graph.types[x].shape[0]
        if node.results[0].shape != (rows, out) or graph.types[lookup.ids].shape != (rows,):
            continue
        args = (x, lookup.ids, lookup.weight, None, 0, held, transposed)
        return replace(node, op=EXPERT_LINEAR, args=args)  # type: ignore[arg-type]
    return None


def _biased(
    graph: Graph, node: Node, producers: Mapping[str, Node], products: Mapping[str, Node]
) -> Node | None:
    """The product with its bias, for the sum of a product without other readers and a bias looked up by the same ids."""
    if node.op != "aten.add.Tensor" or node.args[2] != 1:
        return None
    for product, bias in (node.args[:2], node.args[1::-1]):
        fused = products.get(product.name) if isinstance(product, Ref) else None
        bias_lookup = _look_up(graph, bias, producers, rank=2)
        if (
            fused is None
            or bias_lookup is None
            or fused.args[3] is not None
            or bias_lookup.ids != fused.args[1]
        ):
            continue
        read_once = len(graph.uses[Ref(fused.name)]) == 1 and Ref(fused.name) not in graph.outputs
        if read_once and graph.types[bias_lookup.weight].shape == (fused.args[5], fused.results[0].shape[1]):
            return replace(fused, name=node.name, args=(*fused.args[:3], bias_lookup.weight, *fused.args[4:]))
    return None


def _look_up(graph: Graph, arg: object, producers: Mapping[str, Node], rank: int = 3) -> _LookUp | None:
    """The look-up in a tensor of `rank` and fixed sizes by a row of ids; else None."""
    node = produced_by(arg, _LOOK_UP, producers)
    if node is None:
        return None
    weight, indices = node.args
    if not isinstance(weight, Ref) or not isinstance(indices, tuple) or len(indices) != 1:
        return None
    ids, shape = indices[0], graph.types[weight].shape
    if not isinstance(ids, Ref) or len(shape) != rank or not all(isinstance(d, int) for d in shape):
        return None
    type_ = graph.types[ids]
    return _LookUp(weight, ids) if len(type_.shape) == 1 and type_.dtype == "int64" else None


def _row(graph: Graph, arg: object, transposed: bool, producers: Mapping[str, Node]) -> Ref | None:
    """The tensor (rows, in) that is reshaped to (rows, 1, in) if `transposed`, else to (rows, in, 1)."""
    if not isinstance(arg, Ref):
        return None
    node = producers.get(arg.name)
    source = node.args[0] if node is not None and node.op in _RESHAPES else None
    if not isinstance(source, Ref) or len(graph.types[source].shape) != 2:
        return None
    rows, width = graph.types[source].shape
    expected: tuple[Dim, ...] = (rows, 1, width) if transposed else (rows, width, 1)
    return source if graph.types[arg].shape == expected else None
