"""Pattern matching of eager attention, which a model spells out: softmax(query @ key^T, scaled, capped, biased, masked) @ value.

The match walks from the softmax back to the product of queries and keys, and forward to the product with the values. Each
value on the way must have one reader, the next step; an unknown step ends the match. What masks and biases mean is decided
by their values (`fusion.dag.rewrites.caches.masks`), not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion.dag.cutting.source import SOURCE
from fusion.dag.ir.dims import Dim, Poly, symbol, symbols_of
from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.ir.opset import spec
from fusion.dag.rewrites.caches.masks import FAMILIES, HIDDEN, POSITIONS
from fusion.dag.rewrites.caches.node_patterns import (
    only_reader,
    producer,
    read_once,
    scalar_constant,
    scalar_multiple,
)
from fusion.dag.rewrites.positions import SEQUENCE

SOFTMAX = "aten.softmax.int"
_PRODUCTS = frozenset({"aten.matmul", "aten.bmm"})
_S = symbol(SEQUENCE)
_BATCH = symbol("batch")


@dataclass(frozen=True)
class AttentionMask:
    """A mask of booleans, True for visible positions, or for hidden ones where `inverted`; or one that is added to scores."""

    mask: Ref
    inverted: bool = False


@dataclass(frozen=True)
class AttentionBias:
    """`bias` * `scale` is added to the scores, which are (batch, heads, ...), or (batch * heads, ...) where `heads_merged`."""

    bias: Ref
    scale: float = 1.0
    heads_merged: bool = False


@dataclass
class EagerAttention:
    """Attention whose result is that of the node `end`: query (..., sequence, width), key_transposed (..., width, keys), value
    (..., keys, width'), where ... is (batch, heads) or (batch * heads), and keys are the positions of the sequence or of the
    source. Scores are scaled before they are capped."""

    end: Node
    query: Ref
    key_transposed: Ref
    value: Ref
    scale: float = 1.0
    softcap: float | None = None
    masks: list[AttentionMask] = field(default_factory=list)
    biases: list[AttentionBias] = field(default_factory=list)
    sinks: Ref | None = None

    @property
    def keys_and_values(self) -> tuple[Ref, Ref]:
        return self.key_transposed, self.value


def positional_names(graph: Graph) -> frozenset[str]:
    """The names of nodes that depend on positions and sizes alone."""
    names = {POSITIONS}
    for node in graph.nodes:
        if spec(node.op).family in FAMILIES and all(ref.name in names for ref in node.refs()):
            names.add(node.name)
    return frozenset(names)


def split_bias(graph: Graph, bias: AttentionBias) -> tuple[list[AttentionMask], list[AttentionBias]] | None:
    """The masks and biases that a masked_fill or a sum combines into the bias; None if it is made otherwise."""
    node = producer(graph, bias.bias)
    if node is None:
        return None
    fill = masked_fill(graph, node)
    if fill is not None:
        inner, mask = fill
        return [mask], [AttentionBias(inner, bias.scale, bias.heads_merged)]
    if node.op == "aten.add.Tensor" and node.args[2] == 1:
        parts = [AttentionBias(ref, bias.scale, bias.heads_merged) for ref in node.refs()]
        return ([], parts) if len(parts) == 2 else None
    return None


def read_attention(graph: Graph, softmax: Node, positional: frozenset[str]) -> EagerAttention | None:
    """The attention that this softmax is part of; None if it does not match."""
    x, dim = softmax.args[:2]
    shape = softmax.results[0].shape
    if not isinstance(x, Ref) or dim not in (-1, len(shape) - 1) or len(shape) not in (3, 4):
        return None
    product = _value_product(graph, softmax)
    if product is None:
        return None
    end, dropped = product
    value = end.args[1]
    assert isinstance(value, Ref)
    attention = EagerAttention(end, value, value, value)
    if dropped:
        scores = _strip_sink_column(graph, x, attention)
        return None if scores is None else _walk_to_product(graph, scores, attention, positional)
    full_scores = _strip_row_max(graph, x)
    if full_scores is not None:
        return _walk_to_product(graph, full_scores, attention, positional, readers=2)
    scaled = _sink_gate(graph, x, end)
    if scaled is None:
        return _walk_to_product(graph, x, attention, positional)
    attention.end, attention.sinks = scaled
    return _walk_to_product(graph, x, attention, positional, readers=2)


def heads_of(dim: object) -> int | None:
    """n if the dimension is n times the batch, else None."""
    if isinstance(dim, Poly) and len(dim.terms) == 1:
        ((monomial, coefficient),) = dim.terms
        return coefficient if monomial == ("batch",) else None
    return None


def _is_score_matrix(graph: Graph, ref: Ref) -> bool:
    """Whether the value has a number for each query and key."""
    shape = graph.types[ref].shape
    if len(shape) not in (3, 4) or shape[-2] != _S or not _is_key_dimension(shape[-1]):
        return False
    if len(shape) == 3:
        return heads_of(shape[0]) is not None
    return shape[0] == _BATCH and isinstance(shape[1], int)


def _is_key_dimension(dim: Dim) -> bool:
    """Whether the dimension is the sequence, or depends on the length of the source alone."""
    return dim == _S or symbols_of(dim) == {SOURCE}


def _value_product(graph: Graph, softmax: Node) -> tuple[Node, bool] | None:
    """The product with the values, and whether a slice drops the column of the sinks on the way."""
    at, dropped = Ref(softmax.name), False
    while (node := only_reader(graph, at)) is not None:
        if node.op in _PRODUCTS and node.args[0] == at and isinstance(node.args[1], Ref):
            shape, value = graph.types[at].shape, graph.types[node.args[1]].shape
            fits = _is_score_matrix(graph, at) and len(value) == len(shape) and value[-2] == shape[-1]
            return (node, dropped) if fits else None
        if node.op == "aten.slice.Tensor" and not dropped:
            rank = len(graph.types[at].shape)
            if node.args[1] not in (-1, rank - 1) or node.args[2] not in (0, None) or node.args[4] != 1:
                return None
            dropped = True
        elif node.op not in ("aten.to.dtype", "aten.reshape") or "float" not in node.results[0].dtype:
            return None
        at = Ref(node.name)
        if not _is_score_matrix(graph, at):
            return None
    return None


def _strip_sink_column(graph: Graph, x: Ref, attention: EagerAttention) -> Ref | None:
    """The scores without the column of sinks that is concatenated to them; the sinks go into `attention.sinks`."""
    scores_with_max = _strip_row_max(graph, x)
    if scores_with_max is None and not read_once(graph, x):
        return None
    node = producer(graph, x if scores_with_max is None else scores_with_max)
    if node is None or node.op != "aten.cat" or node.args[1] not in (-1, 3):
        return None
    parts = node.args[0]
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    scores, column = parts
    if not isinstance(scores, Ref) or not isinstance(column, Ref) or not _is_score_matrix(graph, scores):
        return None
    attention.sinks = _per_head_row(graph, column)
    return scores if attention.sinks is not None and graph.types[column].shape[3] == 1 else None


def _strip_row_max(graph: Graph, x: Ref) -> Ref | None:
    """The scores before the maximum of each row is subtracted, which does not change a softmax; None if nothing of that kind."""
    node = producer(graph, x)
    if node is None or node.op != "aten.sub.Tensor" or node.args[2] != 1 or not read_once(graph, x):
        return None
    scores, row_max = node.args[:2]
    max_node = producer(graph, row_max)
    if (
        max_node is None
        or max_node.args[0] != scores
        or max_node.args[2] is not True
        or not isinstance(scores, Ref)
    ):
        return None
    last = len(graph.types[scores].shape) - 1
    if not (
        (max_node.op == "aten.max.dim" and max_node.args[1] in (-1, last) and row_max == Ref(max_node.name))
        or (max_node.op == "aten.amax" and max_node.args[1] in ((-1,), (last,)))
    ):
        return None
    return scores if {graph.nodes[i] for i in graph.uses[scores]} == {node, max_node} else None


def _sink_gate(graph: Graph, scores: Ref, end: Node) -> tuple[Node, Ref] | None:
    """The product of the result with sigmoid(logsumexp(scores) - sinks), and the sinks: it equals a softmax over one more key with
    the sinks as its scores."""
    logsumexps = [node for i in graph.uses[scores] if (node := graph.nodes[i]).op == "aten.logsumexp"]
    rank = len(graph.types[scores].shape)
    if len(logsumexps) != 1 or rank != 4 or logsumexps[0].args[1] not in ((-1,), (rank - 1,)):
        return None
    difference = only_reader(graph, Ref(logsumexps[0].name))
    if (
        difference is None
        or difference.op != "aten.sub.Tensor"
        or difference.args[0] != Ref(logsumexps[0].name)
        or difference.args[2] != 1
    ):
        return None
    sigmoid = only_reader(graph, Ref(difference.name))
    if sigmoid is None or sigmoid.op != "aten.sigmoid":
        return None
    at = Ref(sigmoid.name)
    step = only_reader(graph, at)
    if logsumexps[0].args[2] is not True:
        if step is None or step.op != "aten.unsqueeze" or step.args[1] not in (-1, rank - 1):
            return None
        at = Ref(step.name)
        step = only_reader(graph, at)
    scaled = only_reader(graph, Ref(end.name))
    if step is None or step != scaled or step.op != "aten.mul.Tensor" or step.results != end.results:
        return None
    sinks = producer(graph, difference.args[1])
    source = sinks.args[0] if sinks is not None and sinks.op == "aten.reshape" else None
    heads = graph.types[scores].shape[1]
    if not isinstance(source, Ref) or graph.types[source].shape != (heads,) or sinks is None:
        return None
    broadcast_shape = (1, heads, 1, 1) if logsumexps[0].args[2] is True else (1, heads, 1)
    dtypes = {graph.types[ref].dtype for ref in (scores, source, Ref(end.name))}
    return (step, source) if sinks.results[0].shape == broadcast_shape and len(dtypes) == 1 else None


def _per_head_row(graph: Graph, ref: Ref) -> Ref | None:
    """The row (heads,) that is broadcast to (batch, heads, sequence, 1)."""
    shape = graph.types[ref].shape
    heads = shape[1] if len(shape) == 4 else None
    while (node := producer(graph, ref)) is not None and node.op in (
        "aten.expand",
        "aten.reshape",
        "aten.unsqueeze",
    ):
        source = node.args[0]
        assert isinstance(source, Ref)
        source_shape = graph.types[source].shape
        if source_shape == (heads,):
            shape_with_heads = node.results[0].shape
            return (
                source
                if shape_with_heads[-3:] == (heads, 1, 1) and set(shape_with_heads[:-3]) <= {1}
                else None
            )
        if node.op != "aten.expand" and (source_shape[-3:] != (heads, 1, 1) or set(source_shape[:-3]) - {1}):
            return None
        ref = source
    return None


def _walk_to_product(
    graph: Graph, ref: Ref, attention: EagerAttention, positional: frozenset[str], readers: int = 1
) -> EagerAttention | None:
    """Match from the scores `ref` back to the product; `readers`: how many nodes of the attention read them."""
    if len(graph.uses[ref]) != readers or ref in graph.outputs:
        return None
    scores, walk = ref, _Walk(graph, attention, positional)
    while _is_score_matrix(graph, ref) and (ref == scores or read_once(graph, ref)):
        node = producer(graph, ref)
        if node is None:
            return None
        if node.op in _PRODUCTS or node.op == "aten.baddbmm":
            return _query_key_product(graph, node, walk.scale, attention, positional)
        previous = walk.previous_scores(node)
        if previous is None:
            return None
        ref = previous
    return None


@dataclass
class _Walk:
    """A walk back over the steps that change scores, which are recorded in `attention`."""

    graph: Graph
    attention: EagerAttention
    positional: frozenset[str]
    scale: float = 1.0  # product of the factors of later steps
    inexact: bool = False  # whether later steps would round differently in another dtype

    @property
    def unscaled(self) -> bool:
        """Whether no later step scales or caps the scores, which would change what hides positions too."""
        return self.scale == 1 and self.attention.softcap is None

    def previous_scores(self, node: Node) -> Ref | None:
        """The scores before the step `node`; None if the step is not known."""
        fill = masked_fill(self.graph, node)
        if fill is not None and fill[1].mask.name in self.positional:
            if not self.unscaled:
                return None
            self.attention.masks.append(fill[1])
            return fill[0]
        if node.op == "aten.add.Tensor" and node.args[2] == 1:
            return self._strip_bias(node)
        source = node.args[0] if node.args and isinstance(node.args[0], Ref) else None
        if node.op in ("aten.maximum", "aten.clamp_min") and self.unscaled:
            least = scalar_constant(self.graph, node.args[1])
            return None if least is None or least > HIDDEN else source
        if (scaled := scalar_multiple(self.graph, node)) is not None:
            return self._strip_scale(*scaled)
        if node.op == "aten.to.dtype" and source is not None:
            same = not self.inexact and "float" in self.graph.types[source].dtype
            return source if same else None
        return source if node.op == "aten.reshape" else None

    def _strip_bias(self, node: Node) -> Ref | None:
        operands = list(node.refs())
        biases = [ref for ref in operands if ref.name in self.positional or self._is_position_embedding(ref)]
        if len(operands) != 2 or len(biases) != 1 or self.attention.softcap is not None:
            return None
        (scores,) = (ref for ref in operands if ref not in biases)
        self.attention.biases.append(AttentionBias(biases[0], self.scale, len(node.results[0].shape) == 3))
        self.inexact = True
        return scores

    def _is_position_embedding(self, ref: Ref) -> bool:
        """Whether the value is a view of an embedding of positions."""
        node = producer(self.graph, ref)
        while node is not None and spec(node.op).family == "view":
            (source, *others) = node.refs()
            node = None if others else producer(self.graph, source)
        if node is None or node.op != "aten.embedding":
            return False
        table, index = node.args[:2]
        variable = isinstance(table, Ref) and table.name in self.graph.variable_names
        return variable and isinstance(index, Ref) and index.name in self.positional

    def _strip_scale(self, scores: Ref, factor: float) -> Ref | None:
        """Record that `scores` are multiplied by `factor`, or the softcap factor * tanh(scores); give the scores before."""
        self.inexact = True
        tanh = producer(self.graph, scores)
        if tanh is None or tanh.op != "aten.tanh":
            self.scale *= factor
            return scores
        tanh_input = tanh.args[0]
        inner = producer(self.graph, tanh_input)
        inner_scale = scalar_multiple(self.graph, inner) if inner is not None else None
        both_read_once = (
            read_once(self.graph, scores)
            and isinstance(tanh_input, Ref)
            and read_once(self.graph, tanh_input)
        )
        if inner_scale is None or not self.unscaled or factor <= 0 or not both_read_once:
            return None
        self.attention.softcap = factor
        self.scale = 1.0 if abs(inner_scale[1] * factor - 1) < 1e-6 else inner_scale[1] * factor
        return inner_scale[0]


def _query_key_product(
    graph: Graph, node: Node, scale: float, attention: EagerAttention, positional: frozenset[str]
) -> EagerAttention | None:
    query, key_transposed = node.args[-2:] if node.op in _PRODUCTS else node.args[1:3]
    if not isinstance(query, Ref) or not isinstance(key_transposed, Ref):
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
            if bias.name not in positional or attention.softcap is not None:
                return None
            attention.biases.append(AttentionBias(bias, scale * beta, True))
        scale *= alpha
    if len(graph.types[query].shape) != len(graph.types[key_transposed].shape) or scale == 0:
        return None
    attention.query, attention.key_transposed, attention.scale = query, key_transposed, scale
    return attention


def masked_fill(graph: Graph, node: Node) -> tuple[Ref, AttentionMask] | None:
    """The scores that the node fills with a number that hides positions, and the mask of these."""
    args = node.args
    if node.op in ("aten.where.self", "aten.where.ScalarOther"):
        mask, scores, fill, inverted = args[0], args[1], args[2], False
    elif node.op in ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"):
        scores, mask, fill, inverted = args[0], args[1], args[2], True
    else:
        return None
    filled_with = scalar_constant(graph, fill)
    if (
        filled_with is None
        or filled_with > HIDDEN
        or not isinstance(scores, Ref)
        or not isinstance(mask, Ref)
    ):
        return None
    return scores, AttentionMask(mask, inverted)
