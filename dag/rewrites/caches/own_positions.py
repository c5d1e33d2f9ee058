"""Replace positions that a model computes itself by the input `position_ids`.

A model without an input for positions computes them from sizes: `arange(length)`, a slice of a longer arange, or a cumsum of
ones. For a piece of a sequence it would count from 0 again. Such a value is recognised by its producers, which read sizes and
numbers alone, and by its values at several lengths: position k has `step * k + start` at each of them.

The decoder of an encoder-decoder may count its tokens that are not padding (M2M-100, NLLB). transformers decodes one token at a
time and adds the number of tokens before it, padding or not, so what it counts is the position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fusion.dag.cutting.references import argument_symbols, constants, needed, substitute
from fusion.dag.cutting.source import SOURCE
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import infer
from fusion.dag.rewrites.caches.masks import POSITIONS, Evaluate
from fusion.dag.rewrites.positions import SEQUENCE, sequence_axis

# Sums and products of integers, and moves of them: their values are polynomials of the position, so a line through enough
# lengths holds for all. Nothing that compares, clamps or rounds is among them.
_POLYNOMIAL = frozenset({
    "aten.arange", "aten.arange.start", "aten.ones", "aten.zeros", "aten.full", "aten.cumsum", "aten.add.Tensor",
    "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.mul.Tensor", "aten.mul.Scalar", "aten.to.dtype",
    "aten.reshape", "aten.unsqueeze", "aten.expand", "aten.alias", "aten.contiguous", "aten.clone", "aten.slice.Tensor",
})  # fmt: skip
_COUNTS = ("aten.arange", "aten.cumsum")
_CASTS = ("aten.to.dtype", "aten.type_as")
_EXACT = frozenset({"int32", "int64", "float32", "float64"})  # hold every position
_RAISES_DEGREE = ("aten.cumsum", "aten.mul.")  # at most three of them make a polynomial of degree 8
_MAX_RAISING = 3
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 21, 40, 90)  # more than that degree


def use_position_ids(graph: Graph, evaluate: Evaluate) -> Graph:
    """The graph that reads `position_ids` wherever it computed positions itself, from 0 at the start of a sequence. What is not
    recognised stays."""
    if Ref(POSITIONS) not in graph.types:
        return graph
    own, tokens = _size_only_nodes(graph), _token_counts(graph)
    read = {ref for node in graph.nodes if node.name not in own for ref in node.refs()} | set(graph.outputs)
    lines = dict.fromkeys(tokens, (1, 1))
    renamed: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    used_names = {*graph.input_names, *graph.variable_names, *(node.name for node in graph.nodes)}
    for node in graph.nodes:
        nodes.append(replace(node, args=substitute(node.args, renamed)))
        ref = Ref(node.name)
        if node.name in own and ref in read:
            line = _linear_positions(graph, ref, evaluate)
            if line is not None:
                lines[ref] = line
        if ref in lines:
            position_nodes = _position_nodes(
                node.results[0], *lines[ref], f"{node.name}_given", used_names, graph.types
            )
            nodes.extend(position_nodes)
            renamed[ref] = Ref(position_nodes[-1].name)
    outputs = tuple(renamed.get(ref, ref) for ref in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _size_only_nodes(graph: Graph) -> set[str]:
    """The names of nodes that depend on no input and no variable, through ops whose values are polynomials of the position."""
    nodes_of_sizes: set[str] = set()
    for node in graph.nodes:
        integers = not any(isinstance(c, float) for c in constants(node.args))
        exact = node.results[0].dtype in _EXACT
        if (
            node.op in _POLYNOMIAL
            and integers
            and exact
            and all(ref.name in nodes_of_sizes for ref in node.refs())
        ):
            nodes_of_sizes.add(node.name)
    return nodes_of_sizes


def _token_counts(graph: Graph) -> set[Ref]:
    """The running counts of the decoder's tokens that are not padding, each read once, by the product with the padding mask."""
    if SOURCE not in graph.symbols:
        return set()
    producers = {node.name: node for node in graph.nodes}
    counts: set[Ref] = set()
    for node in graph.nodes:
        if node.op == "aten.mul.Tensor" and all(
            isinstance(arg, Ref) and arg.name in producers for arg in node.args
        ):
            (first, first_read_once), (second, second_read_once) = (
                _uncast(graph, producers, ref) for ref in node.refs()
            )
            for count, read_once, mask in (
                (first, first_read_once, second),
                (second, second_read_once, first),
            ):
                if read_once and _is_count(count, mask, graph, producers):
                    counts.add(Ref(count.name))
    return counts


def _is_count(count: Node, mask: Node, graph: Graph, producers: Mapping[str, Node]) -> bool:
    match count, mask:
        case (
            Node(op="aten.cumsum", args=(Ref() as ones, 1, _)),
            Node(op="aten.ne.Scalar", args=(Ref(name="input_ids"), int())),
        ) if ones.name in producers:
            return _uncast(graph, producers, ones)[0] is mask
    return False


def _uncast(graph: Graph, producers: Mapping[str, Node], ref: Ref) -> tuple[Node, bool]:
    """The producer of the value before casts, and whether it and each cast have one reader."""

    def read_once(ref: Ref) -> bool:
        return len(graph.uses.get(ref, ())) == 1 and ref not in graph.outputs

    node, once = producers[ref.name], read_once(ref)
    while node.op in _CASTS and isinstance(source := node.args[0], Ref) and source.name in producers:
        node, once = producers[source.name], once and read_once(source)
    return node, once


def _linear_positions(graph: Graph, ref: Ref, evaluate: Evaluate) -> tuple[int, int] | None:
    """(step, start) if the value is `step * position + start` along its one dimension of the sequence, else None."""
    part = Graph((), (), needed(graph, [ref]), (ref,), graph.symbols)
    degree_raising = sum(node.op.startswith(_RAISES_DEGREE) for node in part.nodes)
    if degree_raising > _MAX_RAISING or not any(node.op.startswith(_COUNTS) for node in part.nodes):
        return None
    try:
        axis = sequence_axis(graph.types[ref])
    except ValueError:  # compares positions with each other: a mask
        return None
    if axis is None or argument_symbols(graph.types[ref].shape[axis : axis + 1]) != {SEQUENCE}:
        return None
    lines: set[tuple[int, int]] = set()
    for length in _LENGTHS:
        try:
            (values,) = evaluate(part, {}, {"batch": 2, SEQUENCE: length})
        except (RuntimeError, ValueError, IndexError):  # a slice of a shorter row
            return None
        rows = np.moveaxis(values, axis, -1).reshape(-1, length)
        start = int(rows[0, 0])
        step = int(rows[0, 1]) - start if length > 1 else None
        if not np.array_equal(rows, np.broadcast_to(start + (step or 0) * np.arange(length), rows.shape)):
            return None
        if step is not None:
            lines.add((step, start))
    return lines.pop() if len(lines) == 1 else None


def _position_nodes(
    type_: TensorType, step: int, start: int, name: str, used_names: set[str], types: Mapping[Ref, TensorType]
) -> list[Node]:
    """Nodes that compute `position_ids * step + start`, one row for the whole batch, as `type_`."""
    nodes: list[Node] = []
    known = {Ref(POSITIONS): types[Ref(POSITIONS)]}

    def add(op: str, *args: Arg) -> Ref:
        unique, count = name, 1
        while unique in used_names:
            unique, count = f"{name}_{count}", count + 1
        used_names.add(unique)
        nodes.append(Node(unique, op, args, infer(op, args, known)))
        known[Ref(unique)] = nodes[-1].results[0]
        return Ref(unique)

    # All rows of a batch have the same positions: the model computed them from sizes alone.
    row = add("aten.select.int", Ref(POSITIONS), 0, 0)
    if step != 1:
        row = add("aten.mul.Tensor", row, step)
    if start != 0:
        row = add("aten.add.Tensor", row, start, 1)
    if type_.dtype != "int64":
        row = add("aten.to.dtype", row, DType(type_.dtype))
    axis = sequence_axis(type_)
    assert axis is not None
    shape = tuple(symbol(SEQUENCE) if i == axis else 1 for i in range(len(type_.shape)))
    if shape != known[row].shape:
        row = add("aten.reshape", row, tuple(-1 if i == axis else 1 for i in range(len(shape))))
    if shape != type_.shape:
        add("aten.expand", row, type_.shape)
    return nodes
