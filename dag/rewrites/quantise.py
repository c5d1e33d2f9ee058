"""Weight-only quantisation for serving: large matrices stored as int8 or int4, a quarter or a seventh of the bytes that decoding
reads. They are quantised when they are loaded, or come quantised in the file.

Only the graph is rewritten; `sources` maps the stored numbers to the tensors of the model.
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

GROUP = 32  # columns that share a scale, as in GGUF's types
MIN_ELEMENTS = 1 << 12  # of a matrix; a smaller one saves nothing
SCALES = "float16"
_FLOATS = frozenset({"float32", "bfloat16", "float16"})
# Ops that choose by size, each with the index of the result that has the choice.
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
    """A variable of the model and how it is stored: (rows, columns), each row along the input features of a product, or
    (experts, rows, columns)."""

    variable: Variable
    layout: Layout
    transposed: bool  # the variable is (columns, rows), or (experts, columns, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, rows, columns = (d for d in self.variable.type.shape if isinstance(d, int))
        return (*experts, columns, rows) if self.transposed else (*experts, rows, columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stored tensors: numbers, scales and perhaps minimums."""
        parts = (self.layout.kind, "scales", "minimums")
        return tuple(f"{self.variable.name}:{part}" for part in parts[: 3 if self.layout.minimums else 2])

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The stored tensors, by `names`."""
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
    """Quantise every matrix that is large enough, except those of routers, where rounding would choose other experts. With "int4",
    embedding tables and output matrices are stored as int8: they are read least (a row a token, and once), so that precision
    costs little there."""
    output_matrices, routers = _last_matrices(graph), _routers(graph)

    def choose(variable: Variable, uses: frozenset[Use]) -> Layout | None:
        if variable.name in routers:
            return None
        return LAYOUTS["int8" if "embedding" in uses or variable.name in output_matrices else kind]

    return store_matrices(graph, choose)


def store_matrices(graph: Graph, choose: Callable[[Variable, frozenset[Use]], Layout | None]) -> Quantised:
    """Store the matrices of `aten.linear`, plain `aten.addmm` and `fusion.expert_linear`, and the tables of `aten.embedding`, that
    have no other use, are large enough, and for which `choose` gives a layout."""
    used_names = {*graph.input_names, *graph.node_index}
    used_names.update(name for v in graph.variables for name in (v.name, *v.aliases))
    sources = {}
    for variable in graph.variables:
        uses = _uses(graph, variable.name)
        if not uses or (source := _source(graph, variable, uses, choose)) is None:
            continue
        if not used_names.intersection(source.names) and all(len(name) <= MAX_NAME for name in source.names):
            sources[variable.name] = source
            used_names.update(source.names)
    variables = tuple(
        each for v in graph.variables for each in (sources[v.name].variables if v.name in sources else (v,))
    )
    nodes = tuple(_with_stored_matrix(node, sources) for node in graph.nodes)
    return Quantised(replace(graph, variables=variables, nodes=nodes), tuple(sources.values()))


def _source(
    graph: Graph,
    variable: Variable,
    uses: frozenset[Use],
    choose: Callable[[Variable, frozenset[Use]], Layout | None],
) -> Source | None:
    transposed = {_is_transposed(graph.nodes[at]) for at in graph.uses[Ref(variable.name)]}
    if variable.type.dtype not in _FLOATS or len(transposed) > 1:
        return None
    layout = choose(variable, uses)
    if layout is None:
        return None
    source = Source(variable, layout, transposed.pop())
    shape = source.shape
    fits = len(shape) == (3 if "expert_linear" in uses else 2)
    return source if fits and not shape[-1] % layout.group and prod(shape) >= MIN_ELEMENTS else None


def _is_transposed(node: Node) -> bool:
    """Whether a node with a `_use` reads its matrix transposed."""
    return node.op == "aten.addmm" or (node.op == EXPERT_LINEAR and bool(node.args[6]))


def _uses(graph: Graph, name: str) -> frozenset[Use]:
    """The uses of a variable; empty if it has any other."""
    ref, uses = Ref(name), set[Use]()
    if ref in graph.outputs:
        return frozenset()
    for at in graph.uses.get(ref, ()):
        use = _use(graph, graph.nodes[at], ref)
        if use is None:
            return frozenset()
        uses.add(use)
    return frozenset(uses)


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
    """The variables in the last product before an output."""
    return _matrices_before(graph, graph.outputs, lambda node: True)


def _routers(graph: Graph) -> frozenset[str]:
    """The variables in the last product before a choice by size, such as topk; only pointwise ops, softmax and views between."""
    read = {*graph.uses, *graph.outputs}
    choices = [n for n in graph.nodes if n.op in _CHOICES and Ref(n.name, _CHOICES[n.op]) in read]
    starts = [ref for node in choices if isinstance(ref := node.args[0], Ref)]
    return _matrices_before(graph, starts, _keeps_elements)


def _keeps_elements(node: Node) -> bool:
    return node.op in _SOFTMAXES or spec(node.op).family in ("pointwise", "view")


def _matrices_before(graph: Graph, refs: Iterable[Ref], passes: Callable[[Node], bool]) -> frozenset[str]:
    """The variables of the last products or look-ups on every path to these values, through nodes that satisfy `passes`."""
    todo, seen, names = list(refs), set[Ref](), set[str]()
    while todo:
        ref = todo.pop()
        at = graph.node_index.get(ref.name)
        if ref in seen or at is None:
            continue
        seen.add(ref)
        node = graph.nodes[at]
        matrices = [r.name for r in node.refs() if r.name in graph.variable_names and _use(graph, node, r)]
        names.update(matrices)
        if not matrices and passes(node):
            todo.extend(node.refs())
    return frozenset(names)


def _with_stored_matrix(node: Node, sources: Mapping[str, Source]) -> Node:
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
        input_, ids, _, bias, first, of, _ = node.args
        args = (input_, ids, numbers, scales, minimums, bias, first, of)
        return replace(node, op=f"{EXPERT_LINEAR}_{source.layout.kind}", args=args)
    input_, bias = (node.args[0], node.args[2]) if node.op == "aten.linear" else (node.args[1], node.args[0])
    args = (input_, numbers, scales, minimums, bias)
    return replace(node, op=f"fusion.linear_{source.layout.kind}", args=args)
