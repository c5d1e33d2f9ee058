"""Large matrices stored as int8 or int4: what decoding reads of a model in a quarter or a seventh of the bytes. Quantised
when they are read, or as the file has them already.

For what is served. The graph alone is rewritten: `sources` says of which tensor of the model the numbers are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import spec
from fusion.dag.ir.validation import MAX_NAME
from fusion.dag.rewrites.experts import EXPERT_LINEAR

Kind = Literal["int8", "int4"]
Use = Literal["linear", "addmm", "embedding", "expert_linear"]

GROUP = 32  # columns that share a scale, as in GGUF's kinds
LEAST_ELEMENTS = 1 << 12  # of a matrix: what is smaller saves nothing
SCALES = "float16"
_FLOATS = frozenset({"float32", "bfloat16", "float16"})
# Ops that choose by size, each with which of its results says what was chosen.
_CHOICES = {"aten.topk": 1, "aten.sort": 1, "aten.max.dim": 1, "aten.argmax": 0, "aten.argsort": 0}
_SOFTMAXES = frozenset({"aten.softmax.int", "aten.log_softmax.int"})


@dataclass(frozen=True)
class Layout:
    """How a matrix is stored."""

    kind: Kind
    group: int = GROUP
    scales: str = SCALES
    minimums: bool = False


LAYOUTS: Mapping[Kind, Layout] = {"int8": Layout("int8"), "int4": Layout("int4", minimums=True)}


@dataclass(frozen=True)
class Source:
    """A variable of the model, and how the graph has it instead: (rows, columns), each row along the inputs of a product; those
    of experts one behind the other, (experts, rows, columns)."""

    variable: Variable
    layout: Layout
    transposed: bool  # the variable is (columns, rows), or (experts, columns, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, rows, columns = (d for d in self.variable.type.shape if isinstance(d, int))
        return (*experts, columns, rows) if self.transposed else (*experts, rows, columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Of what it is stored as: numbers, scales and perhaps minimums."""
        parts = (self.layout.kind, "scales", "minimums")
        return tuple(f"{self.variable.name}:{part}" for part in parts[: 3 if self.layout.minimums else 2])

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Under `names`."""
        *rows, columns = self.shape
        numbers = TensorType((*rows, columns), "int8")
        if self.layout.kind == "int4":
            numbers = TensorType((*rows, columns // 2), "uint8")
        shares = TensorType((*rows, columns // self.layout.group), self.layout.scales)
        return tuple(
            Variable(name, type_, trainable=False)
            for name, type_ in zip(self.names, (numbers, shares, shares), strict=False)
        )


@dataclass(frozen=True)
class Quantised:
    graph: Graph
    sources: tuple[Source, ...]


def quantise(graph: Graph, kind: Kind) -> Quantised:
    """Every matrix that can be stored so and is large enough, but those of routers: rounded, they run other experts. With "int4"
    tables, and matrices that the outputs are made with, are stored as int8: they are read least, a row a token and once, and what
    is lost there is lost last."""
    late, routers = _last_matrices(graph), _routers(graph)

    def choose(variable: Variable, uses: frozenset[Use]) -> Layout | None:
        if variable.name in routers:
            return None
        return LAYOUTS["int8" if "embedding" in uses or variable.name in late else kind]

    return store_matrices(graph, choose)


def store_matrices(graph: Graph, choose: Callable[[Variable, frozenset[Use]], Layout | None]) -> Quantised:
    """With the matrices of rows with `aten.linear`, a plain `aten.addmm` or `fusion.expert_linear`, and the tables of
    `aten.embedding`, that are used for nothing else, are large enough, and for which `choose` says how they are stored."""
    taken = {*graph.input_names, *graph.node_index}
    taken.update(name for v in graph.variables for name in (v.name, *v.aliases))
    sources = {}
    for variable in graph.variables:
        uses = _uses(graph, variable.name)
        if not uses or (source := _source(graph, variable, uses, choose)) is None:
            continue
        if not taken.intersection(source.names) and all(len(name) <= MAX_NAME for name in source.names):
            sources[variable.name] = source
            taken.update(source.names)
    variables = tuple(
        each for v in graph.variables for each in (sources[v.name].variables if v.name in sources else (v,))
    )
    nodes = tuple(_rewritten(node, sources) for node in graph.nodes)
    return Quantised(replace(graph, variables=variables, nodes=nodes), tuple(sources.values()))


def _source(
    graph: Graph,
    variable: Variable,
    uses: frozenset[Use],
    choose: Callable[[Variable, frozenset[Use]], Layout | None],
) -> Source | None:
    turned = {_is_transposed(graph.nodes[at]) for at in graph.uses[Ref(variable.name)]}
    if variable.type.dtype not in _FLOATS or len(turned) > 1:
        return None
    layout = choose(variable, uses)
    if layout is None:
        return None
    source = Source(variable, layout, turned.pop())
    shape = source.shape
    fits = len(shape) == (3 if "expert_linear" in uses else 2)
    return source if fits and not shape[-1] % layout.group and prod(shape) >= LEAST_ELEMENTS else None


def _is_transposed(node: Node) -> bool:
    """Whether a node with a `_use` reads its matrix the other way round."""
    return node.op == "aten.addmm" or (node.op == EXPERT_LINEAR and bool(node.args[6]))


def _uses(graph: Graph, name: str) -> frozenset[Use]:
    """How a variable is used; nothing where it is read in another way too."""
    ref, found = Ref(name), set[Use]()
    if ref in graph.outputs:
        return frozenset()
    for at in graph.uses.get(ref, ()):
        use = _use(graph, graph.nodes[at], ref)
        if use is None:
            return frozenset()
        found.add(use)
    return frozenset(found)


def _use(graph: Graph, node: Node, ref: Ref) -> Use | None:
    if sum(each == ref for each in node.refs()) != 1:
        return None
    match node.op, node.args:
        case "aten.linear", (_, matrix, _) if matrix == ref:
            return "linear"
        case "aten.embedding", (table, *_) if table == ref:
            return "embedding"
        case "aten.addmm", (Ref() as bias, _, matrix, 1, 1) if matrix == ref:
            return "addmm" if len(graph.types[bias].shape) == 1 else None
        case "fusion.expert_linear", (_, _, matrices, *_) if matrices == ref:
            return "expert_linear"
    return None


def _last_matrices(graph: Graph) -> frozenset[str]:
    """The variables that are matrices of products from which an output comes without another product with a variable."""
    return _matrices_before(graph, graph.outputs, lambda node: True)


def _routers(graph: Graph) -> frozenset[str]:
    """The variables that are matrices of products by whose size something is chosen: what is done to them before may be pointwise, a
    softmax or another view."""
    read = {*graph.uses, *graph.outputs}
    choices = [n for n in graph.nodes if n.op in _CHOICES and Ref(n.name, _CHOICES[n.op]) in read]
    starts = [ref for node in choices if isinstance(ref := node.args[0], Ref)]
    return _matrices_before(graph, starts, _keeps_elements)


def _keeps_elements(node: Node) -> bool:
    return node.op in _SOFTMAXES or spec(node.op).family in ("pointwise", "view")


def _matrices_before(graph: Graph, refs: Iterable[Ref], passes: Callable[[Node], bool]) -> frozenset[str]:
    """The variables that are matrices of the last products, tables of the last look-ups, that these values are made of; only through
    nodes that it `passes`."""
    waiting, seen, found = list(refs), set[Ref](), set[str]()
    while waiting:
        ref = waiting.pop()
        at = graph.node_index.get(ref.name)
        if ref in seen or at is None:
            continue
        seen.add(ref)
        node = graph.nodes[at]
        matrices = [r.name for r in node.refs() if r.name in graph.variable_names and _use(graph, node, r)]
        found.update(matrices)
        if not matrices and passes(node):
            waiting.extend(node.refs())
    return frozenset(found)


def _rewritten(node: Node, sources: Mapping[str, Source]) -> Node:
    source = next((sources[ref.name] for ref in node.refs() if ref.name in sources), None)
    if source is None:
        return node
    stored: list[Arg] = [Ref(name) for name in source.names]
    numbers, scales, minimums = (*stored, None)[:3]
    args: tuple[Arg, ...]
    if node.op == "aten.embedding":
        dtype = DType(node.results[0].dtype)
        return replace(
            node,
            op=f"fusion.embedding_{source.layout.kind}",
            args=(numbers, scales, minimums, node.args[1], dtype),
        )
    if node.op == EXPERT_LINEAR:
        given, ids, _, bias, first, of, _ = node.args
        args = (given, ids, numbers, scales, minimums, bias, first, of)
        return replace(node, op=f"{EXPERT_LINEAR}_{source.layout.kind}", args=args)
    given, bias = (node.args[0], node.args[2]) if node.op == "aten.linear" else (node.args[1], node.args[0])
    args = (given, numbers, scales, minimums, bias)
    return replace(node, op=f"fusion.linear_{source.layout.kind}", args=args)
