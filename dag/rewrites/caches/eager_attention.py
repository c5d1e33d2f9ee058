"""Recognising eager attention, which a model writes out: softmax(query @ key^T, scaled, capped, biased, masked) @ value.

Read backwards from the softmax to the product of queries and keys, and forwards to the product with the values. Each value
on the way must be read once, by the next step; what is not exactly a step that is known here ends the search. What masks and
biases say is told by their values (`fusion.dag.rewrites.caches.masks`), not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusion.dag.cutting.source import SOURCE
from fusion.dag.ir.dims import Dim, Poly, symbol, symbols_of
from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.dag.ir.opset import spec
from fusion.dag.rewrites.caches.masks import FAMILIES, HIDDEN, POSITIONS
from fusion.dag.rewrites.positions import SEQUENCE

SOFTMAX = "aten.softmax.int"
_PRODUCTS = frozenset({"aten.matmul", "aten.bmm"})
_S = symbol(SEQUENCE)
_BATCH = symbol("batch")


@dataclass(frozen=True)
class Hides:
    """A mask: of booleans, of which True says that a position is seen, or hidden where it `inverts`; or added to scores."""

    mask: Ref
    inverts: bool = False


@dataclass(frozen=True)
class Added:
    """`bias` * `times` is added to the scores, which are (batch, heads, ...), or (batch * heads, ...) where `merged`."""

    bias: Ref
    times: float = 1.0
    merged: bool = False


@dataclass
class EagerAttention:
    """The result of the node `end`. Query (..., sequence, width), `across` the keys as (..., width, keys), value
    (..., keys, width'), where ... is (batch, heads) or (batch * heads), and there are as many keys as positions in the sequence or
    in the source. Scores are first scaled, then capped."""

    end: Node
    query: Ref
    across: Ref
    value: Ref
    scale: float = 1.0
    softcap: float | None = None
    hides: list[Hides] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    sinks: Ref | None = None

    @property
    def keys_and_values(self) -> tuple[Ref, Ref]:
        return self.across, self.value


def positional_names(graph: Graph) -> frozenset[str]:
    """Nodes that depend on nothing but positions and sizes."""
    found = {POSITIONS}
    for node in graph.nodes:
        if spec(node.op).family in FAMILIES and all(ref.name in found for ref in node.refs()):
            found.add(node.name)
    return frozenset(found)


def hidden_parts(graph: Graph, bias: Added) -> tuple[list[Hides], list[Added]] | None:
    """What a bias that hides positions is made of, where a node says so: masks, and biases without them."""
    node = maker(graph, bias.bias)
    if node is None:
        return None
    filled = filled_at(graph, node)
    if filled is not None:
        inner, hides = filled
        return [hides], [Added(inner, bias.times, bias.merged)]
    if node.op == "aten.add.Tensor" and node.args[2] == 1:
        parts = [Added(ref, bias.times, bias.merged) for ref in node.refs()]
        return ([], parts) if len(parts) == 2 else None
    return None


def read_attention(graph: Graph, softmax: Node, positional: frozenset[str]) -> EagerAttention | None:
    """The attention that this softmax is part of, or None."""
    x, dim = softmax.args[:2]
    shape = softmax.results[0].shape
    if not isinstance(x, Ref) or dim not in (-1, len(shape) - 1) or len(shape) not in (3, 4):
        return None
    ends = _forwards(graph, softmax)
    if ends is None:
        return None
    end, dropped = ends
    value = end.args[1]
    assert isinstance(value, Ref)
    found = EagerAttention(end, value, value, value)
    if dropped:
        scores = _without_sinks(graph, x, found)
        return None if scores is None else _backwards(graph, scores, found, positional)
    whole = _largest_taken(graph, x)
    if whole is not None:
        return _backwards(graph, whole, found, positional, readers=2)
    scaled = _scaled_by_sinks(graph, x, end)
    if scaled is None:
        return _backwards(graph, x, found, positional)
    found.end, found.sinks = scaled
    return _backwards(graph, x, found, positional, readers=2)


def maker(graph: Graph, ref: Arg) -> Node | None:
    at = graph.node_index.get(ref.name) if isinstance(ref, Ref) else None
    return None if at is None else graph.nodes[at]


def heads_of(dim: object) -> int | None:
    """n where the dimension is n times the batch."""
    if isinstance(dim, Poly) and len(dim.terms) == 1:
        ((monomial, times),) = dim.terms
        return times if monomial == ("batch",) else None
    return None


def _pairs(graph: Graph, ref: Ref) -> bool:
    """Whether the value is a number for each query and key."""
    shape = graph.types[ref].shape
    if len(shape) not in (3, 4) or shape[-2] != _S or not _counts_keys(shape[-1]):
        return False
    if len(shape) == 3:
        return heads_of(shape[0]) is not None
    return shape[0] == _BATCH and isinstance(shape[1], int)


def _counts_keys(dim: Dim) -> bool:
    """Whether the dimension is as long as the sequence, or follows from the length of the source alone."""
    return dim == _S or symbols_of(dim) == {SOURCE}


def _reader(graph: Graph, ref: Ref) -> Node | None:
    """The node that reads the value, where it is read once and is no output."""
    uses = graph.uses.get(ref, ())
    if len(uses) != 1 or ref in graph.outputs:
        return None
    node = graph.nodes[uses[0]]
    return node if list(node.refs()).count(ref) == 1 else None


def _forwards(graph: Graph, softmax: Node) -> tuple[Node, bool] | None:
    """The product with the values, and whether the weight of one more key was dropped on the way."""
    at, dropped = Ref(softmax.name), False
    while (node := _reader(graph, at)) is not None:
        if node.op in _PRODUCTS and node.args[0] == at and isinstance(node.args[1], Ref):
            shape, value = graph.types[at].shape, graph.types[node.args[1]].shape
            fits = _pairs(graph, at) and len(value) == len(shape) and value[-2] == shape[-1]
            return (node, dropped) if fits else None
        if node.op == "aten.slice.Tensor" and not dropped:
            rank = len(graph.types[at].shape)
            if node.args[1] not in (-1, rank - 1) or node.args[2] not in (0, None) or node.args[4] != 1:
                return None
            dropped = True
        elif node.op not in ("aten.to.dtype", "aten.reshape") or "float" not in node.results[0].dtype:
            return None
        at = Ref(node.name)
        if not _pairs(graph, at):
            return None
    return None


def _without_sinks(graph: Graph, x: Ref, found: EagerAttention) -> Ref | None:
    """The scores that were joined with one column more, which becomes `found.sinks`."""
    whole = _largest_taken(graph, x)
    if whole is None and not _alone(graph, x):
        return None
    node = maker(graph, x if whole is None else whole)
    if node is None or node.op != "aten.cat" or node.args[1] not in (-1, 3):
        return None
    parts = node.args[0]
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    scores, column = parts
    if not isinstance(scores, Ref) or not isinstance(column, Ref) or not _pairs(graph, scores):
        return None
    found.sinks = _one_a_head(graph, column)
    return scores if found.sinks is not None and graph.types[column].shape[3] == 1 else None


def _largest_taken(graph: Graph, x: Ref) -> Ref | None:
    """The scores that the largest of each row was taken from, and that nothing else reads: a softmax does not see a number that
    is taken from a whole row."""
    node = maker(graph, x)
    if node is None or node.op != "aten.sub.Tensor" or node.args[2] != 1 or not _alone(graph, x):
        return None
    whole, most = node.args[:2]
    top = maker(graph, most)
    if top is None or top.args[0] != whole or top.args[2] is not True or not isinstance(whole, Ref):
        return None
    last = len(graph.types[whole].shape) - 1
    if not (
        (top.op == "aten.max.dim" and top.args[1] in (-1, last) and most == Ref(top.name))
        or (top.op == "aten.amax" and top.args[1] in ((-1,), (last,)))
    ):
        return None
    return whole if {graph.nodes[i] for i in graph.uses[whole]} == {node, top} else None


def _scaled_by_sinks(graph: Graph, scores: Ref, end: Node) -> tuple[Node, Ref] | None:
    """The product of the result with sigmoid(logsumexp(scores) - sinks), and these: what a softmax gives where the sinks are
    scores of one more key."""
    sums = [node for i in graph.uses[scores] if (node := graph.nodes[i]).op == "aten.logsumexp"]
    rank = len(graph.types[scores].shape)
    if len(sums) != 1 or rank != 4 or sums[0].args[1] not in ((-1,), (rank - 1,)):
        return None
    less = _reader(graph, Ref(sums[0].name))
    if less is None or less.op != "aten.sub.Tensor" or less.args[0] != Ref(sums[0].name) or less.args[2] != 1:
        return None
    shown = _reader(graph, Ref(less.name))
    if shown is None or shown.op != "aten.sigmoid":
        return None
    at = Ref(shown.name)
    step = _reader(graph, at)
    if sums[0].args[2] is not True:
        if step is None or step.op != "aten.unsqueeze" or step.args[1] not in (-1, rank - 1):
            return None
        at = Ref(step.name)
        step = _reader(graph, at)
    scaled = _reader(graph, Ref(end.name))
    if step is None or step != scaled or step.op != "aten.mul.Tensor" or step.results != end.results:
        return None
    sinks = maker(graph, less.args[1])
    source = sinks.args[0] if sinks is not None and sinks.op == "aten.reshape" else None
    heads = graph.types[scores].shape[1]
    if not isinstance(source, Ref) or graph.types[source].shape != (heads,) or sinks is None:
        return None
    across = (1, heads, 1, 1) if sums[0].args[2] is True else (1, heads, 1)
    same = {graph.types[ref].dtype for ref in (scores, source, Ref(end.name))}
    return (step, source) if sinks.results[0].shape == across and len(same) == 1 else None


def _alone(graph: Graph, ref: Ref) -> bool:
    return _reader(graph, ref) is not None


def _one_a_head(graph: Graph, ref: Ref) -> Ref | None:
    """The row (heads) that was spread over (batch, heads, sequence, 1)."""
    shape = graph.types[ref].shape
    heads = shape[1] if len(shape) == 4 else None
    while (node := maker(graph, ref)) is not None and node.op in (
        "aten.expand",
        "aten.reshape",
        "aten.unsqueeze",
    ):
        source = node.args[0]
        assert isinstance(source, Ref)
        before = graph.types[source].shape
        if before == (heads,):
            made = node.results[0].shape
            return source if made[-3:] == (heads, 1, 1) and set(made[:-3]) <= {1} else None
        if node.op != "aten.expand" and (before[-3:] != (heads, 1, 1) or set(before[:-3]) - {1}):
            return None
        ref = source
    return None


def _backwards(
    graph: Graph, at: Ref, found: EagerAttention, positional: frozenset[str], readers: int = 1
) -> EagerAttention | None:
    """From the scores `at`, which so many nodes of the attention read."""
    if len(graph.uses[at]) != readers or at in graph.outputs:
        return None
    scores, walk = at, _Walk(graph, found, positional)
    while _pairs(graph, at) and (at == scores or _alone(graph, at)):
        node = maker(graph, at)
        if node is None:
            return None
        if node.op in _PRODUCTS or node.op == "aten.baddbmm":
            return _product(graph, node, walk.times, found, positional)
        before = walk.before(node)
        if before is None:
            return None
        at = before
    return None


@dataclass
class _Walk:
    """Back from scores, a step at a time; what steps do to them goes into `found`."""

    graph: Graph
    found: EagerAttention
    positional: frozenset[str]
    times: float = 1.0  # what the scores so far are multiplied by later
    inexact: bool = False  # whether later steps would round otherwise in another dtype

    @property
    def bare(self) -> bool:
        """Whether no later step scales or caps the scores: what is hidden would be scaled or capped as well."""
        return self.times == 1 and self.found.softcap is None

    def before(self, node: Node) -> Ref | None:
        """The scores that the node, a step, makes those of that follow; None where it is no known step."""
        filled = filled_at(self.graph, node)
        if filled is not None and filled[1].mask.name in self.positional:
            if not self.bare:
                return None
            self.found.hides.append(filled[1])
            return filled[0]
        if node.op == "aten.add.Tensor" and node.args[2] == 1:
            return self._unbiased(node)
        source = node.args[0] if node.args and isinstance(node.args[0], Ref) else None
        if node.op in ("aten.maximum", "aten.clamp_min") and self.bare:
            least = number(self.graph, node.args[1])
            return None if least is None or least > HIDDEN else source
        if (scaled := scaled_by(self.graph, node)) is not None:
            return self._unscaled(*scaled)
        if node.op == "aten.to.dtype" and source is not None:
            same = not self.inexact and "float" in self.graph.types[source].dtype
            return source if same else None
        return source if node.op == "aten.reshape" else None

    def _unbiased(self, node: Node) -> Ref | None:
        given = list(node.refs())
        known = [ref for ref in given if ref.name in self.positional or self._looked_up_by_position(ref)]
        if len(given) != 2 or len(known) != 1 or self.found.softcap is not None:
            return None
        (scores,) = (ref for ref in given if ref not in known)
        self.found.added.append(Added(known[0], self.times, len(node.results[0].shape) == 3))
        self.inexact = True
        return scores

    def _looked_up_by_position(self, ref: Ref) -> bool:
        """Whether the value is rows of a table that positions choose, and views of them."""
        node = maker(self.graph, ref)
        while node is not None and spec(node.op).family == "view":
            (source, *others) = node.refs()
            node = None if others else maker(self.graph, source)
        if node is None or node.op != "aten.embedding":
            return False
        table, index = node.args[:2]
        variable = isinstance(table, Ref) and table.name in self.graph.variable_names
        return variable and isinstance(index, Ref) and index.name in self.positional

    def _unscaled(self, scores: Ref, factor: float) -> Ref | None:
        """`scores` were multiplied by `factor`, perhaps capped before: factor * tanh(inner)."""
        self.inexact = True
        capped = maker(self.graph, scores)
        if capped is None or capped.op != "aten.tanh":
            self.times *= factor
            return scores
        within = capped.args[0]
        inner = maker(self.graph, within)
        scaled = scaled_by(self.graph, inner) if inner is not None else None
        alone = _alone(self.graph, scores) and isinstance(within, Ref) and _alone(self.graph, within)
        if scaled is None or not self.bare or factor <= 0 or not alone:
            return None
        self.found.softcap = factor
        self.times = 1.0 if abs(scaled[1] * factor - 1) < 1e-6 else scaled[1] * factor
        return scaled[0]


def _product(
    graph: Graph, node: Node, times: float, found: EagerAttention, positional: frozenset[str]
) -> EagerAttention | None:
    query, across = node.args[-2:] if node.op in _PRODUCTS else node.args[1:3]
    if not isinstance(query, Ref) or not isinstance(across, Ref):
        return None
    if node.op == "aten.baddbmm":
        bias, beta, alpha = node.args[0], node.args[3], node.args[4]
        if (
            not isinstance(bias, Ref)
            or not isinstance(beta, (int, float))
            or not isinstance(alpha, (int, float))
        ):
            return None
        if beta != 0:
            if bias.name not in positional or found.softcap is not None:
                return None
            found.added.append(Added(bias, times * beta, True))
        times *= alpha
    if len(graph.types[query].shape) != len(graph.types[across].shape) or times == 0:
        return None
    found.query, found.across, found.scale = query, across, times
    return found


def filled_at(graph: Graph, node: Node) -> tuple[Ref, Hides] | None:
    """What is filled with a number that hides it, and where."""
    args = node.args
    if node.op in ("aten.where.self", "aten.where.ScalarOther"):
        mask, kept, fill, inverts = args[0], args[1], args[2], False
    elif node.op in ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"):
        kept, mask, fill, inverts = args[0], args[1], args[2], True
    else:
        return None
    least = number(graph, fill)
    if least is None or least > HIDDEN or not isinstance(kept, Ref) or not isinstance(mask, Ref):
        return None
    return kept, Hides(mask, inverts)


def number(graph: Graph, arg: Arg) -> float | None:
    """The number that the argument is, be it a tensor of one."""
    if isinstance(arg, Ref):
        node = maker(graph, arg)
        if node is None or node.results[0].shape != ():
            return None
        if node.op == "aten.full":
            arg = node.args[1]
        elif node.op == "aten.scalar_tensor":
            arg = node.args[0]
    return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None


_TIMES: Mapping[str, bool] = {
    "aten.mul.Tensor": True, "aten.mul.Scalar": True, "aten.div.Tensor": False, "aten.div.Scalar": False,
}  # fmt: skip


def scaled_by(graph: Graph, node: Node) -> tuple[Ref, float] | None:
    """What is multiplied by a number, and the number."""
    if node.op not in _TIMES:
        return None
    of, by = node.args[:2]
    factor = number(graph, by)
    if factor is None and _TIMES[node.op]:
        of, factor = by, number(graph, of)
    if factor is None or factor == 0 or not isinstance(of, Ref):
        return None
    return of, factor if _TIMES[node.op] else 1 / factor


def swaps_last_two(turned: Node) -> bool:
    """Whether the node swaps the last two dimensions."""
    rank = len(turned.results[0].shape)
    return {d % rank for d in turned.args[1:] if isinstance(d, int)} == {rank - 1, rank - 2}
