"""One op for a product of rows with the experts that they have chosen: index(weights, ids) -> bmm, with or without a bias,
becomes `fusion.expert_linear`.

That form, `batched_mm` of transformers, is how mixtures of experts are captured: without data-dependent control flow, and
with a copy of the weights for every row, which nobody should run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusion.dag.cutting.references import made_by, without_dead_nodes
from fusion.dag.ir.dims import Dim
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.ir.opset import spec

EXPERT_LINEAR = "fusion.expert_linear"
EXPERT_LINEARS = frozenset({EXPERT_LINEAR, f"{EXPERT_LINEAR}_int8", f"{EXPERT_LINEAR}_int4"})
_LOOK_UP = "aten.index.Tensor"
# Ops that give a value of one shape another one and nothing else: which shape is read from their types.
_RESHAPES = frozenset({
    "aten.unsqueeze", "aten.squeeze.dim", "aten.squeeze", "aten.reshape", "aten.view", "aten._unsafe_view",
})  # fmt: skip


@dataclass(frozen=True)
class ExpertLinear:
    """The arguments of one of EXPERT_LINEARS that all of them have."""

    ids: Ref
    held: tuple[Ref, ...]  # what has the experts as its first dimension: weight, bias, scales, minimums
    first: int
    of: int


def expert_linear(node: Node) -> ExpertLinear | None:
    """Of a node; None for another op."""
    if node.op not in EXPERT_LINEARS:
        return None
    named = dict(zip((p.name for p in spec(node.op).parameters), node.args, strict=True))
    held = (named.get(name) for name in ("weight", "scales", "minimums", "bias"))
    ids, first, of = named["ids"], named["first"], named["of"]
    assert isinstance(ids, Ref) and isinstance(first, int) and isinstance(of, int)
    return ExpertLinear(ids, tuple(ref for ref in held if isinstance(ref, Ref)), first, of)


def starting_at(node: Node, first: int) -> Node:
    """One of EXPERT_LINEARS whose experts are those from `first` on."""
    at = [p.name for p in spec(node.op).parameters].index("first")
    return replace(node, args=(*node.args[:at], first, *node.args[at + 1 :]))


def name_experts(graph: Graph) -> Graph:
    """For serving and training: the same products, in another order of additions. A node that gives the whole product, with
    its bias, keeps its name. Expects a graph that `clean` has gone over."""
    made = {node.name: node for node in graph.nodes}
    products: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        found = _product(graph, node, made)
        if found is None:
            found = _biased(graph, node, made, products)
        if found is not None:
            products[node.name] = node = found
        nodes.append(node)
    return without_dead_nodes(replace(graph, nodes=tuple(nodes)))


def require_named_experts(graph: Graph) -> None:
    """UnsupportedModel, naming the node, where weights would be copied for each row: experts in a form that `name_experts`
    does not know."""
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
    """What rows are looked up in, and by which ids."""

    weight: Ref
    ids: Ref


def _product(graph: Graph, node: Node, made: Mapping[str, Node]) -> Node | None:
    """(rows, out), where it is a bmm of looked up matrices with one row each, without its dimension of 1."""
    bmm = made_by(node.args[0], "aten.bmm", made) if node.op in _RESHAPES and node.args else None
    if bmm is None or len(node.results[0].shape) != 2:
        return None
    for at, transposed in ((0, False), (1, True)):  # matrix @ column, or row @ matrix
        found = _look_up(graph, bmm.args[at], made)
        x = _row(graph, bmm.args[1 - at], transposed, made)
        if found is None or x is None:
            continue
        held, *matrix = graph.types[found.weight].shape
        out = matrix[1] if transposed else matrix[0]
        rows = graph.types[x].shape[0]
        if node.results[0].shape != (rows, out) or graph.types[found.ids].shape != (rows,):
            continue
        args = (x, found.ids, found.weight, None, 0, held, transposed)
        return replace(node, op=EXPERT_LINEAR, args=args)  # type: ignore[arg-type]
    return None


def _biased(graph: Graph, node: Node, made: Mapping[str, Node], products: Mapping[str, Node]) -> Node | None:
    """A product that nothing else reads, and to which the rows of a bias with the same ids are added."""
    if node.op != "aten.add.Tensor" or node.args[2] != 1:
        return None
    for product, bias in (node.args[:2], node.args[1::-1]):
        found = products.get(product.name) if isinstance(product, Ref) else None
        given = _look_up(graph, bias, made, rank=2)
        if found is None or given is None or found.args[3] is not None or given.ids != found.args[1]:
            continue
        single = len(graph.uses[Ref(found.name)]) == 1 and Ref(found.name) not in graph.outputs
        if single and graph.types[given.weight].shape == (found.args[5], found.results[0].shape[1]):
            return replace(found, name=node.name, args=(*found.args[:3], given.weight, *found.args[4:]))
    return None


def _look_up(graph: Graph, arg: object, made: Mapping[str, Node], rank: int = 3) -> _LookUp | None:
    """The matrices, or rows, of a tensor of plain sizes by a row of ids."""
    node = made_by(arg, _LOOK_UP, made)
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


def _row(graph: Graph, arg: object, transposed: bool, made: Mapping[str, Node]) -> Ref | None:
    """(rows, in) of what is (rows, 1, in), or (rows, in, 1)."""
    if not isinstance(arg, Ref):
        return None
    node = made.get(arg.name)
    source = node.args[0] if node is not None and node.op in _RESHAPES else None
    if not isinstance(source, Ref) or len(graph.types[source].shape) != 2:
        return None
    rows, width = graph.types[source].shape
    wanted: tuple[Dim, ...] = (rows, 1, width) if transposed else (rows, width, 1)
    return source if graph.types[arg].shape == wanted else None
