"""Expert parallelism: split the experts of a layer into groups with cuts between them, so that a layer that fits no peer runs on
several.

Each group holds a slice of every expert variable, computes the rows routed to it, and gives zeros for the others, so the
groups' results add up to the layer's. If only linear ops lie between, they are added after the sum over each row's experts, so
that one row for each position crosses a cut, not one for each of its experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fusion.dag.cutting.references import substitute
from fusion.dag.ir.dims import Poly
from fusion.dag.ir.graph import Arg, Graph, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import mixed_dims, spec
from fusion.dag.rewrites.experts import ExpertLinear, expert_linear, with_first_expert

_PART = re.compile(r"(.+):([0-9]{1,9})-([0-9]{1,9})")
_REPEAT = "aten.repeat_interleave.self_int"
# Ops that are linear in their first argument.
_LINEAR = frozenset(
    {"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.sum.dim_IntList"}
)


@dataclass(frozen=True)
class Part:
    """The experts [start, stop) of the variable `name`."""

    name: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.name}:{self.start}-{self.stop}"


def part_of(variable: str) -> Part | None:
    """The part that a variable of `group_experts` is; None for any other variable."""
    match = _PART.fullmatch(variable)
    return None if match is None else Part(match[1], int(match[2]), int(match[3]))


def group_experts(graph: Graph, groups: int) -> Graph:
    """The graph with the experts of every layer in `groups` contiguous groups, one after the other, at most one for each expert.
    The products are the same, the sums over a position's experts in another order. A layer that is not
    rows -> products -> row-wise ops -> products is not split; nor is one whose variables have other readers."""
    by_ids: dict[Ref, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if (linear := expert_linear(node)) is not None:
            by_ids.setdefault(linear.ids, []).append(i)
    layers = [layer for products in by_ids.values() if (layer := _layer(graph, products)) is not None]
    for layer in layers if groups > 1 else ():
        graph = _grouped(graph, layer, groups)
    return graph


@dataclass(frozen=True)
class _Layer:
    """Names of the nodes that are copied for each group, in order; the results of the last one are added."""

    nodes: tuple[str, ...]
    experts: int


def _layer(graph: Graph, products: Sequence[int]) -> _Layer | None:
    nodes, last = graph.nodes, products[-1]
    linears = [linear for i in products if (linear := expert_linear(nodes[i])) is not None]
    expert_counts = {linear.of for linear in linears}
    if len(expert_counts) != 1 or any(not _has_all_experts(graph, linear) for linear in linears):
        return None
    product_names = {nodes[i].name for i in products}
    between = _between(graph, product_names, last)
    rows = nodes[last].results[0].shape[0]
    # A group's values for rows of other groups are arbitrary: rows must not mix, and nothing else may read them.
    for name in between - {nodes[last].name}:
        node = graph.nodes[graph.node_index[name]]
        if name not in product_names and not _by_row(graph, node, between, rows):
            return None
        if not _readers(graph, node) <= between:
            return None
    repeated_inputs = {ref.name for i in products for ref in nodes[i].refs()} - between
    for name in repeated_inputs & graph.node_index.keys():
        node = graph.nodes[graph.node_index[name]]
        if node.op == _REPEAT and _readers(graph, node) <= between:
            between.add(name)
    inside = sorted(graph.node_index[name] for name in between)
    ends = [*_linear_chain(graph, last)]
    end = min(range(len(ends)), key=lambda i: (_elements_per_position(nodes[ends[i]].results[0]), i))
    return _Layer(tuple(nodes[i].name for i in (*inside, *ends[1 : end + 1])), expert_counts.pop())


def _has_all_experts(graph: Graph, linear: ExpertLinear) -> bool:
    """Whether the product has all experts, in variables without other readers."""
    return linear.first == 0 and all(
        graph.types[ref].shape[0] == linear.of
        and ref.name in graph.variable_names
        and len(graph.uses[ref]) == 1
        and ref not in graph.outputs
        for ref in linear.held
    )


def _between(graph: Graph, products: Collection[str], last: int) -> set[str]:
    """The nodes on a path from one of the products to the last one, these included."""
    after: set[str] = set(products)
    for node in graph.nodes[:last]:
        if any(ref.name in after for ref in node.refs()):
            after.add(node.name)
    path, todo = set[str](), [graph.nodes[last].name]
    while todo:
        name = todo.pop()
        if name in after and name not in path:
            path.add(name)
            todo.extend(ref.name for ref in graph.nodes[graph.node_index[name]].refs())
    return path | set(products)


def _by_row(graph: Graph, node: Node, between: Collection[str], rows: object) -> bool:
    """Whether the node treats the rows of values between the products one by one."""
    if any(t.shape[:1] != (rows,) for t in node.results):
        return False
    mixed = mixed_dims(node.op, node.args, graph.types)
    return all(
        graph.types[ref].shape[:1] == (rows,) and 0 not in dims for ref, dims in mixed if ref.name in between
    )


def _readers(graph: Graph, node: Node) -> set[str]:
    refs = [Ref(node.name, i) for i in range(len(node.results))]
    outputs = {""} if any(ref in graph.outputs for ref in refs) else set[str]()
    return {graph.nodes[i].name for ref in refs for i in graph.uses.get(ref, ())} | outputs


def _linear_chain(graph: Graph, last: int) -> Iterator[int]:
    """The node `last` and its successors, each the only reader of the one before and linear in it."""
    while True:
        yield last
        node = graph.nodes[last]
        value, readers = Ref(node.name), graph.uses.get(Ref(node.name), ())
        if len(readers) != 1 or value in graph.outputs:
            return
        reader = graph.nodes[readers[0]]
        view = spec(reader.op).family == "view" and list(reader.refs()) == [value]
        first = reader.op in _LINEAR and reader.args[0] == value and list(reader.refs()).count(value) == 1
        factor = reader.op == "aten.mul.Tensor" and list(reader.refs()).count(value) == 1
        if not (view or first or factor) or len(reader.results) != 1:
            return
        if reader.results[0].dtype != node.results[0].dtype:
            return
        last = readers[0]


def _elements_per_position(type_: TensorType) -> int:
    """The elements for each position: the product of the numeric factors."""
    total = 1
    for dim in type_.shape:
        total *= dim.terms[0][1] if isinstance(dim, Poly) else dim
    return total


def _grouped(graph: Graph, layer: _Layer, groups: int) -> Graph:
    count = min(groups, layer.experts)
    bounds = [*pairwise(layer.experts * g // count for g in range(count + 1))]
    if count < 2:
        return graph
    used_names = {*graph.node_index, *graph.variable_names, *graph.input_names}
    repeated = [graph.nodes[graph.node_index[name]] for name in layer.nodes]
    end = repeated[-1].name
    parts = {
        ref.name: [Part(ref.name, *bound) for bound in bounds]
        for node in repeated
        if (linear := expert_linear(node)) is not None
        for ref in linear.held
    }
    copies = [_copy(repeated, g, bounds[g], parts, used_names) for g in range(count)]
    inside = {node.name: copy for node, copy in zip(repeated, copies[0], strict=True)}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(inside.get(node.name, node))
        if node.name != end:
            continue
        total = Ref(copies[0][-1].name)
        for g, copy in enumerate(copies[1:], 1):
            nodes += copy
            name = end if g == count - 1 else _unused(f"{end}_to_{g}", used_names)
            nodes.append(Node(name, "aten.add.Tensor", (total, Ref(copy[-1].name), 1), node.results))
            total = Ref(name)
    variables = [part for v in graph.variables for part in _split_variable(v, parts.get(v.name))]
    return replace(graph, nodes=tuple(nodes), variables=tuple(variables))


def _copy(
    repeated: Sequence[Node],
    group: int,
    bound: tuple[int, int],
    parts: Mapping[str, Sequence[Part]],
    used_names: set[str],
) -> list[Node]:
    """The nodes of one group. Those of group 0 keep their names, but for the last, whose name the sum takes."""
    renamed: dict[Ref, Ref] = {Ref(name): Ref(str(own[group])) for name, own in parts.items()}
    copies = []
    for node in repeated:
        name = (
            node.name
            if group == 0 and node is not repeated[-1]
            else _unused(f"{node.name}_{group}", used_names)
        )
        renamed.update({Ref(node.name, i): Ref(name, i) for i in range(len(node.results))})
        args: tuple[Arg, ...] = substitute(node.args, renamed)
        copied = replace(node, name=name, args=args)
        copies.append(copied if expert_linear(node) is None else with_first_expert(copied, bound[0]))
    return copies


def _unused(name: str, used_names: set[str]) -> str:
    while name in used_names:
        name += "_"
    used_names.add(name)
    return name


def _split_variable(variable: Variable, parts: Sequence[Part] | None) -> list[Variable]:
    if parts is None:
        return [variable]
    return [
        replace(
            variable,
            name=str(part),
            type=replace(variable.type, shape=(part.stop - part.start, *variable.type.shape[1:])),
            aliases=(),
        )
        for part in parts
    ]
