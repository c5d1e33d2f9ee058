"""Validation of graphs. A graph from anywhere, a hostile peer included, is either refused here or safe to plan with:
names are restricted, values are defined before they are read, ops are known, and result types are correct.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

from fusion.dag.ir.dims import Poly, blocks
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DTYPE_BYTES, Arg, DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer, kept
from fusion.dag.ir.opset_pointwise import KEEP
from fusion.dag.ir.opset_shapes import MAX_ELEMENTS, MAX_TERMS
from fusion.dag.ir.opset_spec import MAX_LIST, MAX_RANK

MAX_VARIABLE_ELEMENTS = 2**36  # of one variable: the largest of published models are below 2**32
MAX_PARAMETERS = 2**42  # of all variables together
MAX_NODES = 200_000
MAX_VARIABLES = 200_000
MAX_INTERFACE = 4096  # inputs, and outputs
MAX_SYMBOLS = 8
MAX_NAME = 256
MAX_NUMBER = 2**40  # a dimension or a coefficient
MAX_DEGREE = 4

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_SYMBOL = re.compile(r"[a-z][a-z0-9_]{0,31}")


def validate(graph: Graph) -> None:
    """GraphError, in one line that names the place, on the first rule that `graph` breaks."""
    _check_counts(graph)
    _check_symbols(graph.symbols)
    symbols = frozenset(graph.symbols)
    _check_names(graph)
    types: dict[Ref, TensorType] = {}
    sources: tuple[Input | Variable, ...] = (*graph.inputs, *graph.variables)
    for source in sources:
        check_type(source.type, symbols, source.name)
        types[Ref(source.name)] = source.type
    elements = 0
    for variable in graph.variables:
        if variable.kind not in ("parameter", "buffer") or any(
            isinstance(d, Poly) for d in variable.type.shape
        ):
            raise GraphError(f"variable {variable.name}: unknown kind or a size that is not a number")
        count = prod(d for d in variable.type.shape if isinstance(d, int))
        if count > MAX_VARIABLE_ELEMENTS:
            raise GraphError(f"variable {variable.name}: more than {MAX_VARIABLE_ELEMENTS} elements")
        elements += count
    if elements > MAX_PARAMETERS:
        raise GraphError(f"variables of {elements} elements: more than {MAX_PARAMETERS}")
    slots: set[int] = set()
    written = {v.name for v in graph.variables if v.trainable}  # written by the optimizer
    for node in graph.nodes:
        _check_node(node, types, symbols)
        if node.op == KEEP:
            _check_kept(node, graph.variable_names, written)
        types.update((Ref(node.name, i), t) for i, t in enumerate(node.results))
        cache = kept(node)
        if cache is not None:
            if cache[0] in slots:
                raise GraphError(f"node {node.name}: cache slot {cache[0]} is taken by another node")
            slots.add(cache[0])
    for ref in graph.outputs:
        if ref not in types:
            raise GraphError(f"output {ref.name:.80} is not a value of the graph")


def _check_counts(graph: Graph) -> None:
    for what, count, limit in (
        ("symbols", len(graph.symbols), MAX_SYMBOLS),
        ("inputs", len(graph.inputs), MAX_INTERFACE),
        ("variables", len(graph.variables), MAX_VARIABLES),
        ("nodes", len(graph.nodes), MAX_NODES),
        ("outputs", len(graph.outputs), MAX_INTERFACE),
    ):
        if count > limit:
            raise GraphError(f"{count} {what}: more than {limit}")
    if not graph.outputs:
        raise GraphError("the graph has no outputs")


def _check_symbols(symbols: tuple[str, ...]) -> None:
    for symbol in symbols:
        if not isinstance(symbol, str) or not _SYMBOL.fullmatch(symbol):
            raise GraphError(f"{symbol!r:.60} is not a name for a symbol")
        counted = blocks(symbol)
        if counted is not None and (
            counted.name != symbol or counted.of not in symbols or blocks(counted.of)
        ):
            raise GraphError(f"{symbol!r:.60} counts blocks of what is no symbol")
    if len(set(symbols)) != len(symbols):
        raise GraphError("a symbol is listed twice")


def _check_names(graph: Graph) -> None:
    seen: set[str] = set()
    owners: tuple[Input | Variable | Node, ...] = (*graph.inputs, *graph.variables, *graph.nodes)
    for name in (*(o.name for o in owners), *(a for v in graph.variables for a in v.aliases)):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise GraphError(f"{name!r:.60} is not a name: 1 to {MAX_NAME} of A-Z a-z 0-9 _ . : / -")
        if name in seen:
            raise GraphError(f"the name {name} is used twice")
        seen.add(name)
    values = {o.name for o in owners}
    for name in seen:
        producer, slash, index = name.rpartition("/")
        if slash and producer in values and index.isdigit():
            raise GraphError(f"the name {name} is kept for a result of {producer} that another stage reads")


def check_type(type_: TensorType, symbols: frozenset[str], where: str) -> None:
    if type_.dtype not in DTYPE_BYTES:
        raise GraphError(f"{where}: unknown dtype {type_.dtype!r:.40}")
    if len(type_.shape) > MAX_RANK:
        raise GraphError(f"{where}: rank {len(type_.shape)} is over {MAX_RANK}")
    count = 1
    for dim in type_.shape:
        if isinstance(dim, Poly):
            check_poly(dim, symbols, where)
        elif type(dim) is not int or not 0 <= dim <= MAX_NUMBER:
            raise GraphError(f"{where}: dimension {dim!r:.40} is not in 0 .. {MAX_NUMBER}")
        else:
            count *= dim
    if count > MAX_ELEMENTS:
        raise GraphError(f"{where}: more than {MAX_ELEMENTS} elements")


def check_poly(poly: Poly, symbols: frozenset[str], where: str) -> None:
    """GraphError unless the polynomial is in normal form (`dims`), within limits, and over the graph's symbols."""
    if len(poly.terms) > MAX_TERMS:
        raise GraphError(f"{where}: a dimension of more than {MAX_TERMS} terms")
    before: tuple[str, ...] | None = None
    for monomial, coefficient in poly.terms:
        if len(monomial) > MAX_DEGREE or not symbols.issuperset(monomial):
            raise GraphError(f"{where}: a dimension of unknown symbols or over degree {MAX_DEGREE}")
        if type(coefficient) is not int or coefficient == 0 or abs(coefficient) > MAX_NUMBER:
            raise GraphError(f"{where}: a dimension with a coefficient of 0 or over {MAX_NUMBER}")
        if tuple(sorted(monomial)) != monomial or (before is not None and monomial <= before):
            raise GraphError(f"{where}: a dimension that is not in normal form")
        before = monomial
    if before in (None, ()):
        raise GraphError(f"{where}: a constant dimension written as a polynomial")


def _check_node(node: Node, types: dict[Ref, TensorType], symbols: frozenset[str]) -> None:
    where = f"node {node.name}"
    _check_constants(node.args, symbols, where)
    if not 0 < len(node.results) <= MAX_LIST:
        raise GraphError(f"{where}: {len(node.results)} results")
    try:
        expected = infer(node.op, node.args, types)
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from None
    for result in node.results:
        check_type(result, symbols, where)
    if expected != node.results:
        raise GraphError(f"{where}: {node.op} gives {_list(expected)}, not {_list(node.results)}")


def _check_kept(node: Node, variables: frozenset[str], written: set[str]) -> None:
    """GraphError unless the node writes to a buffer that nothing else writes to; adds it to `written`."""
    buffer = node.args[0]
    if not isinstance(buffer, Ref) or buffer.name not in variables or buffer.name in written:
        raise GraphError(f"node {node.name}: {node.op} writes to what is no buffer, or to one twice")
    written.add(buffer.name)


def _check_constants(args: tuple[Arg, ...], symbols: frozenset[str], where: str, depth: int = 0) -> None:
    if depth > 1:
        raise GraphError(f"{where}: a list in a list")
    for arg in args:
        if isinstance(arg, tuple):
            if len(arg) > MAX_LIST:
                raise GraphError(f"{where}: a list of {len(arg)}")
            _check_constants(arg, symbols, where, depth + 1)
        elif isinstance(arg, Poly):
            check_poly(arg, symbols, where)
        elif isinstance(arg, DType):
            if arg.name not in DTYPE_BYTES:
                raise GraphError(f"{where}: unknown dtype {arg.name!r:.40}")
        elif type(arg) is int:
            if not -(2**63) <= arg < 2**63:
                raise GraphError(f"{where}: an integer over 64 bits")
        elif type(arg) is float:
            # Infinities occur in masks. A NaN does not equal itself, so a graph with one would have no stable digest.
            if arg != arg:
                raise GraphError(f"{where}: a constant is not a number (NaN)")
        elif not (arg is None or type(arg) is bool or isinstance(arg, Ref)):
            raise GraphError(f"{where}: a constant of the sort {type(arg).__name__}")


def _list(types: Iterable[TensorType]) -> str:
    text = ", ".join(str(t) for _, t in zip(range(4), types, strict=False))
    return f"{text:.200}"
