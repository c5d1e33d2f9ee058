"""A graph as bytes: canonical msgpack, so that equal graphs have equal bytes and the SHA-256 of them names the graph.

    [format, version, needed op-set version, [symbol], [input], [variable], [node], [output]]
    input     [name, type]                      type  [dtype, [dimension]]
    variable  [name, type, is_parameter, trainable, [alias]]
    node      [name, op, [argument], [type]]
    output    [value, result]                   value: its index among inputs, variables and nodes, in that order
    dimension  an integer, or [[coefficient, symbol number, ...], ...]
    argument   nil, a boolean, an integer, a float, [0, value, result], [1, argument, ...] (a list), [2, dtype], or
               [3, [coefficient, symbol number, ...], ...] (a polynomial)

Values are referred to by index, so a cycle or a forward reference is detected when it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgpack

from fusion.dag.ir.dims import Dim, Poly
from fusion.dag.ir.errors import GraphError, NewerGraph
from fusion.dag.ir.graph import Arg, DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import OPSET_VERSION, needed_version
from fusion.dag.ir.validation import MAX_INTERFACE, MAX_NAME, MAX_NODES, MAX_SYMBOLS, MAX_VARIABLES, validate

__all__ = ["FORMAT_VERSION", "MAX_BYTES", "decode", "digest", "encode", "validate"]

FORMAT = "fusion.graph"
FORMAT_VERSION = 1
MAX_BYTES = 64 * 2**20
MAX_ITEM_BYTES = 64 * 2**10  # one input, variable or node
# Numbers, names and lists in the whole graph: bounds the memory and the time of decoding.
MAX_PARTS = 2_000_000  # a Llama of 70 billion parameters has about 150 000

_REF, _LIST, _DTYPE, _POLY = range(4)
_T = TypeVar("_T")


def encode(graph: Graph) -> bytes:
    """The canonical bytes of a valid graph. GraphError if it is not valid or over a size limit."""
    validate(graph)
    data = _encode(graph)
    if len(data) > MAX_BYTES:
        raise GraphError(f"the graph takes {len(data)} bytes: more than {MAX_BYTES}")
    return data


def digest(graph: Graph) -> str:
    """SHA-256 of the canonical bytes, in hexadecimal."""
    return hashlib.sha256(encode(graph)).hexdigest()


def decode(data: bytes) -> Graph:
    """The graph that `encode` made these bytes from, validated. NewerGraph if it needs a newer op-set or format
    version; GraphError, in one line, on any other bytes. Time and memory are bounded by a small multiple of `MAX_BYTES` and
    `MAX_PARTS`, whatever lengths the bytes claim."""
    if len(data) > MAX_BYTES:
        raise GraphError(f"{len(data)} bytes: more than {MAX_BYTES}")
    try:
        graph = _Reader(data).graph()
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        if isinstance(error, GraphError):
            raise
        raise GraphError(
            f"not a graph: {type(error).__name__} {str(error).splitlines()[:1]!r:.120}"
        ) from None
    validate(graph)
    if _encode(graph) != data:
        raise GraphError("not the canonical form of a graph")
    return graph


def _encode(graph: Graph) -> bytes:
    owners: tuple[Input | Variable | Node, ...] = (*graph.inputs, *graph.variables, *graph.nodes)
    numbers = {owner.name: i for i, owner in enumerate(owners)}
    symbols = {s: i for i, s in enumerate(graph.symbols)}

    def poly(p: Poly) -> list[Any]:
        return [[coefficient, *(symbols[s] for s in monomial)] for monomial, coefficient in p.terms]

    def type_(t: TensorType) -> list[Any]:
        return [t.dtype, [poly(d) if isinstance(d, Poly) else d for d in t.shape]]

    def arg(a: Arg) -> Any:
        if isinstance(a, Ref):
            return [_REF, numbers[a.name], a.index]
        if isinstance(a, tuple):
            return [_LIST, *map(arg, a)]
        if isinstance(a, DType):
            return [_DTYPE, a.name]
        return [_POLY, *poly(a)] if isinstance(a, Poly) else a

    pack = msgpack.Packer(use_bin_type=True, autoreset=False)
    pack.pack_array_header(8)
    for value in (FORMAT, FORMAT_VERSION, needed_version(graph), graph.symbols):
        pack.pack(value)
    pack.pack_array_header(len(graph.inputs))
    for i in graph.inputs:
        pack.pack([i.name, type_(i.type)])
    pack.pack_array_header(len(graph.variables))
    for v in graph.variables:
        pack.pack([v.name, type_(v.type), v.kind == "parameter", v.trainable, v.aliases])
    pack.pack_array_header(len(graph.nodes))
    for n in graph.nodes:
        pack.pack([n.name, n.op, [arg(a) for a in n.args], [type_(t) for t in n.results]])
    pack.pack([[numbers[r.name], r.index] for r in graph.outputs])
    data: bytes = pack.bytes()
    return data


class _Reader:
    """Reads item by item, and checks the length of each before it allocates objects."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stream = msgpack.Unpacker(max_buffer_size=MAX_BYTES)
        self._stream.feed(data)
        self._parts = 0
        self._symbols: tuple[str, ...] = ()
        self._values: list[tuple[Ref, ...]] = []  # the refs of each value so far, shared

    def graph(self) -> Graph:
        if self._stream.read_array_header() != 8 or self._item() != FORMAT:
            raise GraphError("not a graph")
        for what, known in (("form", FORMAT_VERSION), ("op-set", OPSET_VERSION)):
            version = self._item()
            if type(version) is not int or version < 1:
                raise GraphError(f"a graph of {what} {version!r:.20}")
            if version > known:
                raise NewerGraph(f"it needs {what} {version}: this peer knows {known}")
        symbols = self._item()
        self._symbols = tuple(_text(s) for s in _list(symbols, 0, MAX_SYMBOLS))
        inputs = tuple(self._each("inputs", MAX_INTERFACE, self._input))
        variables = tuple(self._each("variables", MAX_VARIABLES, self._variable))
        nodes = tuple(self._each("nodes", MAX_NODES, self._node))
        outputs = tuple(self._each("outputs", MAX_INTERFACE, self._output))
        if self._stream.tell() != len(self._data):
            raise GraphError("bytes after the end of the graph")
        return Graph(inputs=inputs, variables=variables, nodes=nodes, outputs=outputs, symbols=self._symbols)

    def _each(self, what: str, limit: int, make: Callable[[Any], _T]) -> Iterator[_T]:
        count = self._stream.read_array_header()
        if count > limit:
            raise GraphError(f"{count} {what}: more than {limit}")
        for _ in range(count):
            yield make(self._item())

    def _item(self) -> Any:
        start = self._stream.tell()
        self._stream.skip()  # skips it without allocating
        end = self._stream.tell()
        if end - start > MAX_ITEM_BYTES:
            raise GraphError(f"an item of {end - start} bytes: more than {MAX_ITEM_BYTES}")
        return msgpack.unpackb(
            memoryview(self._data)[start:end],
            max_str_len=MAX_NAME, max_bin_len=0, max_ext_len=0, max_map_len=0, strict_map_key=True,
        )  # fmt: skip

    def _count(self, parts: int) -> None:
        self._parts += parts
        if self._parts > MAX_PARTS:
            raise GraphError(f"more than {MAX_PARTS} parts")

    def _define(self, name: str, results: int) -> str:
        self._count(1 + results)
        self._values.append(tuple(Ref(name, i) for i in range(results)))
        return name

    def _input(self, raw: Any) -> Input:
        name, type_ = _list(raw, 2, 2)
        return Input(self._define(_text(name), 1), self._type(type_))

    def _variable(self, raw: Any) -> Variable:
        name, type_, parameter, trainable, aliases = _list(raw, 5, 5)
        if type(parameter) is not bool or type(trainable) is not bool:
            raise GraphError("a variable with a flag that is no boolean")
        return Variable(
            name=self._define(_text(name), 1),
            type=self._type(type_),
            kind="parameter" if parameter else "buffer",
            trainable=trainable,
            aliases=tuple(_text(a) for a in _list(aliases)),
        )

    def _node(self, raw: Any) -> Node:
        name, op, args, results = _list(raw, 4, 4)
        # arguments before the node's own results exist: a node cannot read itself
        arguments = tuple(self._arg(a) for a in _list(args))
        types = tuple(self._type(t) for t in _list(results))
        return Node(name=self._define(_text(name), len(types)), op=_text(op), args=arguments, results=types)

    def _output(self, raw: Any) -> Ref:
        return self._ref(*_list(raw, 2, 2))

    def _ref(self, value: Any, result: Any) -> Ref:
        if type(value) is not int or type(result) is not int or not 0 <= value < len(self._values):
            raise GraphError(
                f"reads value {value!r:.20} of {len(self._values)} defined so far: a cycle or a wrong order"
            )
        results = self._values[value]
        if not 0 <= result < len(results):
            raise GraphError(f"reads result {result} of {results[0].name if results else 'nothing'!r:.80}")
        return results[result]

    def _arg(self, raw: Any, inside: bool = False) -> Arg:
        self._count(1)
        if raw is None or type(raw) in (bool, int, float):
            constant: Arg = raw
            return constant
        if isinstance(raw, str):
            raise GraphError(
                "an argument is a string: constants are numbers, booleans, dtypes and lists of them"
            )
        tag, *rest = _list(raw, 1)
        if tag == _REF and len(rest) == 2:
            return self._ref(*rest)
        if tag == _LIST and not inside:
            return tuple(self._arg(a, inside=True) for a in rest)
        if tag == _DTYPE and len(rest) == 1:
            return DType(_text(rest[0]))
        if tag == _POLY:
            return self._poly(rest)
        raise GraphError("an argument of an unknown sort")

    def _type(self, raw: Any) -> TensorType:
        dtype, shape = _list(raw, 2, 2)
        self._count(1 + len(_list(shape)))
        return TensorType(tuple(self._dim(d) for d in shape), _text(dtype))

    def _dim(self, raw: Any) -> Dim:
        return raw if type(raw) is int else self._poly(_list(raw))

    def _poly(self, raw: list[Any]) -> Poly:
        terms = []
        for term in raw:
            coefficient, *symbols = _list(term, 1)
            self._count(1 + len(symbols))
            if type(coefficient) is not int or any(
                type(s) is not int or not 0 <= s < len(self._symbols) for s in symbols
            ):
                raise GraphError("a polynomial of an unknown symbol")
            terms.append((tuple(self._symbols[s] for s in symbols), coefficient))
        return Poly(tuple(terms))


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise GraphError(f"a name that is a {type(raw).__name__}")
    return raw


def _list(raw: Any, least: int = 0, most: int = MAX_ITEM_BYTES) -> list[Any]:
    if not isinstance(raw, list) or not least <= len(raw) <= most:
        raise GraphError(f"a {type(raw).__name__} where a list of {least} or more belongs")
    return raw
