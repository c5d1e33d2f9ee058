"""Positions that a model counts itself, taken from the input `position_ids` instead.

A model that takes no positions makes them from sizes: `arange(length)`, the beginning of a longer row that counts, or a running sum of an attention mask of ones.
Given a piece of a sequence it would count from 0 again. Such a value is recognised by what it is made of, which is sizes and
numbers alone, and by its values at several lengths: position k has `step * k + start` at every one of them.

The decoder of an encoder-decoder may count its tokens that are not padding (M2M-100, NLLB). transformers, which gives it one token at a
time, adds to what it counts of that one how many came before, padding or not: the position.
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

# Sums and products of whole numbers, moved about: what they count is a polynomial of the position, so that lengths which
# agree on a line agree on it for ever. Nothing that compares, clamps or rounds is among them.
_POLYNOMIAL = frozenset({
    "aten.arange", "aten.arange.start", "aten.ones", "aten.zeros", "aten.full", "aten.cumsum", "aten.add.Tensor",
    "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.mul.Tensor", "aten.mul.Scalar", "aten.to.dtype",
    "aten.reshape", "aten.unsqueeze", "aten.expand", "aten.alias", "aten.contiguous", "aten.clone", "aten.slice.Tensor",
})  # fmt: skip
_COUNTS = ("aten.arange", "aten.cumsum")
_CASTS = ("aten.to.dtype", "aten.type_as")
_EXACT = frozenset({"int32", "int64", "float32", "float64"})  # hold every position
_RAISE = ("aten.cumsum", "aten.mul.")  # the degree: at most three of them make a polynomial of degree 8
_MOST_RAISING = 3
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 21, 40, 90)  # more of them than that


def given_positions(graph: Graph, evaluate: Evaluate) -> Graph:
    """The graph with `position_ids` wherever it counted positions of its own, from 0 at the start of a sequence. What is not
    recognised stays."""
    if Ref(POSITIONS) not in graph.types:
        return graph
    own, tokens = _made_of_sizes(graph), _tokens_counted(graph)
    read = {ref for node in graph.nodes if node.name not in own for ref in node.refs()} | set(graph.outputs)
    lines = dict.fromkeys(tokens, (1, 1))
    renamed: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    taken = {*graph.input_names, *graph.variable_names, *(node.name for node in graph.nodes)}
    for node in graph.nodes:
        nodes.append(replace(node, args=substitute(node.args, renamed)))
        ref = Ref(node.name)
        if node.name in own and ref in read:
            line = _line(graph, ref, evaluate)
            if line is not None:
                lines[ref] = line
        if ref in lines:
            made = _from_input(node.results[0], *lines[ref], f"{node.name}_given", taken, graph.types)
            nodes.extend(made)
            renamed[ref] = Ref(made[-1].name)
    outputs = tuple(renamed.get(ref, ref) for ref in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _made_of_sizes(graph: Graph) -> set[str]:
    """The nodes that depend on no input and no variable, by operators whose values are polynomials of the position."""
    found: set[str] = set()
    for node in graph.nodes:
        whole = not any(isinstance(c, float) for c in constants(node.args))
        exact = node.results[0].dtype in _EXACT
        if node.op in _POLYNOMIAL and whole and exact and all(ref.name in found for ref in node.refs()):
            found.add(node.name)
    return found


def _tokens_counted(graph: Graph) -> set[Ref]:
    """What counts the decoder's tokens up to each that are not padding: it is read once, by the product that has 0 for padding itself."""
    if SOURCE not in graph.symbols:
        return set()
    made = {node.name: node for node in graph.nodes}
    found: set[Ref] = set()
    for node in graph.nodes:
        if node.op == "aten.mul.Tensor" and all(
            isinstance(arg, Ref) and arg.name in made for arg in node.args
        ):
            (first, alone), (second, also_alone) = (_uncast(graph, made, ref) for ref in node.refs())
            for count, once, mask in ((first, alone, second), (second, also_alone, first)):
                if once and _is_count(count, mask, graph, made):
                    found.add(Ref(count.name))
    return found


def _is_count(count: Node, mask: Node, graph: Graph, made: Mapping[str, Node]) -> bool:
    match count, mask:
        case (
            Node(op="aten.cumsum", args=(Ref() as ones, 1, _)),
            Node(op="aten.ne.Scalar", args=(Ref(name="input_ids"), int())),
        ) if ones.name in made:
            return _uncast(graph, made, ones)[0] is mask
    return False


def _uncast(graph: Graph, made: Mapping[str, Node], ref: Ref) -> tuple[Node, bool]:
    """What makes the value, whatever its dtype is then; and whether nothing else reads it, nor any dtype of it."""

    def read_once(ref: Ref) -> bool:
        return len(graph.uses.get(ref, ())) == 1 and ref not in graph.outputs

    node, alone = made[ref.name], read_once(ref)
    while node.op in _CASTS and isinstance(of := node.args[0], Ref) and of.name in made:
        node, alone = made[of.name], alone and read_once(of)
    return node, alone


def _line(graph: Graph, ref: Ref, evaluate: Evaluate) -> tuple[int, int] | None:
    """step and start, where the value counts positions along its one dimension of the sequence."""
    part = Graph((), (), needed(graph, [ref]), (ref,), graph.symbols)
    raising = sum(node.op.startswith(_RAISE) for node in part.nodes)
    if raising > _MOST_RAISING or not any(node.op.startswith(_COUNTS) for node in part.nodes):
        return None
    try:
        axis = sequence_axis(graph.types[ref])
    except ValueError:  # compares positions with each other: a mask
        return None
    if axis is None or argument_symbols(graph.types[ref].shape[axis : axis + 1]) != {SEQUENCE}:
        return None
    found: set[tuple[int, int]] = set()
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
            found.add((step, start))
    return found.pop() if len(found) == 1 else None


def _from_input(
    wanted: TensorType, step: int, start: int, name: str, taken: set[str], types: Mapping[Ref, TensorType]
) -> list[Node]:
    """Nodes that give `position_ids * step + start`, one row for all, as `wanted`."""
    nodes: list[Node] = []
    known = {Ref(POSITIONS): types[Ref(POSITIONS)]}

    def add(op: str, *args: Arg) -> Ref:
        unique, count = name, 1
        while unique in taken:
            unique, count = f"{name}_{count}", count + 1
        taken.add(unique)
        nodes.append(Node(unique, op, args, infer(op, args, known)))
        known[Ref(unique)] = nodes[-1].results[0]
        return Ref(unique)

    # The rows of a batch are at the same positions: the model counted them without looking at the rows.
    row = add("aten.select.int", Ref(POSITIONS), 0, 0)
    if step != 1:
        row = add("aten.mul.Tensor", row, step)
    if start != 0:
        row = add("aten.add.Tensor", row, start, 1)
    if wanted.dtype != "int64":
        row = add("aten.to.dtype", row, DType(wanted.dtype))
    axis = sequence_axis(wanted)
    assert axis is not None
    shape = tuple(symbol(SEQUENCE) if i == axis else 1 for i in range(len(wanted.shape)))
    if shape != known[row].shape:
        row = add("aten.reshape", row, tuple(-1 if i == axis else 1 for i in range(len(shape))))
    if shape != wanted.shape:
        add("aten.expand", row, wanted.shape)
    return nodes
