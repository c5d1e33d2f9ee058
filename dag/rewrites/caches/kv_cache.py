"""Give attention a memory, so that a sequence may be run in pieces: it becomes `fusion.cached_attention`, which reads the
keys and values of earlier positions from a cache, `fusion.cached_attention_scored` where its scores are not plain ones, or
`fusion.cached_attention_selected` where an indexer selects the keys, or a sequence is in chunks that see nothing of each other.

Only for attention, fused or eager, that is recognised as causal, over all positions, a window or a chunk of them, with no
bias but one by position; whatever else the model does must treat positions one by one. Anything not recognised is refused:
a model is never served almost right.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.cutting.source import (
    SOURCE,
    SOURCE_ATTENTION,
    SOURCE_ATTENTION_SCORED,
    misread,
    source_values,
)
from fusion.dag.ir.dims import Dim, symbol, symbols_of
from fusion.dag.ir.errors import GraphError, UnsupportedModel
from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import infer
from fusion.dag.rewrites.caches.cached_recurrence import cache_states
from fusion.dag.rewrites.caches.eager_attention import (
    SOFTMAX,
    Added,
    EagerAttention,
    Hides,
    heads_of,
    maker,
    read_attention,
    swaps_last_two,
)
from fusion.dag.rewrites.caches.masks import MAX_CHUNK, POSITIONS, Evaluate
from fusion.dag.rewrites.caches.own_positions import given_positions
from fusion.dag.rewrites.caches.repeated_heads import before_repeat
from fusion.dag.rewrites.caches.selected_keys import Selection, all_selected, taken_places
from fusion.dag.rewrites.caches.visible_keys import MaskReader, Seen, refusal
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.positions import SEQUENCE, require_separate_positions

FUSED = "aten.scaled_dot_product_attention"


def cache_attention(
    graph: Graph,
    evaluate: Evaluate,
    maximum_sequence: int | None = None,
    maximum_source: int | None = None,
) -> Graph:
    """The inference graph for a piece of a sequence: its inputs and outputs are of the new positions only.

    `position_ids` must count from 0 at the start of each sequence, and a session must give its positions in order.
    `evaluate` runs the small sub-graphs that make masks (see `masks.Evaluate`). Slots number the caches 0, 1, ... in
    the order of the nodes; keys and values that were repeated for grouped queries are cached before that. A window
    that `maximum_sequence` positions never fill is left out. Of an encoder-decoder, attention to what the encoder gives becomes
    `fusion.source_attention`, or `fusion.source_attention_scored` where it is eager, and the encoder stays as it is;
    `maximum_source`: of the source's positions.
    UnsupportedModel, in one line, for any other model.
    """
    graph = clean(all_selected(graph))
    taken = taken_places(graph)
    graph = given_positions(graph, evaluate)
    masks = MaskReader(graph, evaluate, maximum_sequence, maximum_source, taken)
    cached = clean(cache_states(clean(_Caching(graph, masks).run())))
    require_separate_positions(cached)
    if (node := misread(cached)) is not None:
        raise UnsupportedModel(
            f"no KV cache for this model: {node.name} ({node.op}) reads the encoder in another way than attention does"
        )
    for ref in cached.outputs:
        if symbol(SEQUENCE) not in cached.types[ref].shape:
            raise UnsupportedModel(
                f"no KV cache for this model: the output {ref} has no dimension for the sequence"
            )
    return cached


class _Caching:
    """One walk over the nodes, in which each attention becomes one with a cache."""

    def __init__(self, graph: Graph, masks: MaskReader) -> None:
        self.graph = graph
        self.of_source = source_values(graph)
        self.masks = masks
        self.types = dict(graph.types)
        self.nodes: list[Node] = []
        self.slots = 0
        self.selections: dict[Ref, Ref] = {}  # by what tells one from another: what selects
        self.chunks: dict[int, Ref] = {}  # by size: the places of each position's chunk

    def run(self) -> Graph:
        graph = self.graph
        written = {
            found.end.name: found
            for node in graph.nodes
            if node.op == SOFTMAX
            and (found := read_attention(graph, node, self.masks.positional)) is not None
        }
        for node in graph.nodes:
            try:
                if Ref(node.name) in self.of_source:
                    self.nodes.append(node)  # runs once, over all of the source
                elif node.op == FUSED and set(node.args[1:3]) <= self.of_source:
                    self.across(node)
                elif node.op == FUSED:
                    self.fused(node)
                elif node.name in written and set(written[node.name].keys_and_values) <= self.of_source:
                    self.written_across(written[node.name])
                elif node.name in written:
                    self.written(written[node.name])
                else:
                    self.nodes.append(node)
            except UnsupportedModel:
                raise
            except GraphError as why:
                raise refusal(node, f"does not fit a cache: {why}") from None
        return replace(graph, nodes=tuple(self.nodes))

    def across(self, node: Node) -> None:
        """Attention of the sequence to the source: to all of it."""
        query, key, value = (a for a in node.args[:3] if isinstance(a, Ref))
        mask, dropout, is_causal, scale, _ = node.args[3:]
        if dropout != 0 or is_causal is True:
            raise refusal(node, "sees a part of the source")
        if isinstance(mask, Ref):
            self.require_shown(node, Hides(mask))
        self.attention(node, SOURCE_ATTENTION, query, key, value, self.slot(), scale)

    def written_across(self, found: EagerAttention) -> None:
        """Eager attention of the sequence to the source: to all of it."""
        if found.sinks is not None:
            raise refusal(found.end, "has sinks beside the source")
        for hides in (*found.hides, *(Hides(added.bias) for added in found.added)):
            self.require_shown(found.end, hides)
        query, key, value = self.written_values(found)
        self.attention(
            found.end, SOURCE_ATTENTION_SCORED, query, key, value, self.slot(), found.scale, found.softcap
        )

    def require_shown(self, node: Node, hides: Hides) -> None:
        """UnsupportedModel for a mask that hides a part of the source, or adds to scores."""
        if not self.masks.shows_all(hides):
            raise refusal(node, "hides a part of the source, or adds to its scores")

    def fused(self, node: Node) -> None:
        query, key, value = (a for a in node.args[:3] if isinstance(a, Ref))
        mask, dropout, is_causal, scale, grouped = node.args[3:]
        if SOURCE in symbols_of(self.types[key].shape[-2]):
            raise refusal(node, "sees the source and the sequence at once")
        if dropout != 0:
            raise refusal(node, "drops out weights: capture the model in evaluation mode")
        if is_causal is True and mask is not None:
            raise refusal(node, "has a mask beside its causal one")
        if is_causal is not True and not isinstance(mask, Ref):
            raise refusal(node, "sees later positions")
        seen = self.masks.read(node, [Added(mask)] if isinstance(mask, Ref) else [])
        if isinstance(mask, Ref) and not seen.causal:
            raise refusal(node, "sees later positions")
        assert scale is None or isinstance(scale, (int, float))
        keys = self.unrepeated(node, query, key, value, grouped is True)
        if seen.selection is not None:
            self.selected(node, (query, *keys), scale, seen)
            return
        if seen.chunk is not None:
            self.in_chunks(node, (query, *keys), scale, seen, seen.chunk)
            return
        if not seen.biases and seen.slopes is None and seen.relative is None:
            self.plain(node, query, *keys, scale, seen.window)
            return
        width = self.types[query].shape[3]
        if not isinstance(width, int):
            raise refusal(node, f"has queries {self.types[query]}")
        # The fused kernel computes its scores in float32, whatever it is given.
        self.scored(
            EagerAttention(node, query, key, value, scale=width**-0.5 if scale is None else float(scale)),
            (self.cast(node, "query", query), self.cast(node, "key", keys[0]), keys[1]),
            seen,
        )

    def written_values(self, found: EagerAttention) -> tuple[Ref, Ref, Ref]:
        """Query (batch, heads, sequence, width), key and value (batch, heads, keys, width[']) of eager attention."""
        end, turned = found.end, maker(self.graph, found.across)
        key = (
            turned.args[0]
            if turned is not None and turned.op == "aten.transpose.int" and swaps_last_two(turned)
            else self.emit(end, "key_turned", "aten.transpose.int", found.across, -2, -1)
        )
        assert isinstance(key, Ref)
        return (
            self.apart(end, "query", found.query),
            self.apart(end, "key", key),
            self.apart(end, "value", found.value),
        )

    def written(self, found: EagerAttention) -> None:
        end = found.end
        query, key, value = self.written_values(found)
        seen = self.masks.read(end, (*found.hides, *found.added))
        if not seen.causal:
            raise refusal(end, "sees later positions")
        if found.sinks is not None and (seen.slopes is not None or seen.constant):
            raise refusal(end, "has sinks, which see the numbers that are added to a whole row")
        keys = self.unrepeated(end, query, key, value, True)
        # Plain scores as well: the fused kernel would round them in another order than the model does.
        self.scored(found, (query, *keys), seen)

    def selected(self, node: Node, values: tuple[Ref, Ref, Ref], scale: float | None, seen: Seen) -> None:
        """Attention to the keys that an indexer selects."""
        if not seen.whole or seen.chunk is not None:
            raise refusal(node, "selects keys beside a window or a bias")
        assert seen.selection is not None
        chosen = self.selection(node, seen.selection)
        self.attention(node, "fusion.cached_attention_selected", *values, chosen, self.slot(), scale)

    def in_chunks(
        self, node: Node, values: tuple[Ref, Ref, Ref], scale: float | None, seen: Seen, size: int
    ) -> None:
        """Attention within chunks of a sequence: to the places of the query's own."""
        if not seen.whole:
            raise refusal(node, "sees a chunk beside a window or a bias")
        places = self.places_of_chunk(node, size)
        self.attention(node, "fusion.cached_attention_selected", *values, places, self.slot(), scale)

    def places_of_chunk(self, node: Node, size: int) -> Ref:
        """(batch, 1, sequence, size), once for all attentions: later ones than the query, too, which it does not see."""
        if size not in self.chunks:
            if size > MAX_CHUNK or POSITIONS not in self.graph.input_names:
                raise refusal(node, f"sees chunks of {size} positions")
            number = self.emit(node, "chunk", "fusion.div_floor", Ref(POSITIONS), size)
            first = self.emit(node, "chunk_first", "aten.mul.Tensor", number, size)
            target = (symbol("batch"), 1, symbol(SEQUENCE), 1)
            row = self.emit(node, "chunk_row", "aten.reshape", first, target)
            within = self.emit(node, "chunk_within", "aten.arange", size, None)
            self.chunks[size] = self.emit(node, "chunk_places", "aten.add.Tensor", row, within, 1)
        return self.chunks[size]

    def selection(self, node: Node, found: Selection) -> Ref:
        """What selects, once for all attentions that it is made for."""
        if found.order not in self.selections:
            if self.masks.read(node, [found.visible]) != Seen(causal=True):
                raise refusal(node, "selects keys among other ones than all before a query")
            query = self.emit(node, "selecting", "aten.transpose.int", found.query, 1, 2)
            key = self.emit(node, "selected_by", "aten.unsqueeze", found.key, 1)
            rows = self.emit(node, "head_rows", "aten.unsqueeze", found.weights, -1)
            weights = self.emit(node, "head_weights", "aten.transpose.int", rows, 1, 2)
            self.selections[found.order] = self.emit(
                node, "selected", "fusion.cached_selection", query, key, weights, self.slot(), found.scale, found.count
            )  # fmt: skip
        return self.selections[found.order]

    def for_each_key(self, node: Node, added: Added) -> Ref:
        """The bias as (batch or 1, heads or 1, sequence, 1)."""
        shape = self.types[added.bias].shape
        if added.merged and len(shape) == 3 and shape[0] != 1:
            heads = heads_of(shape[0])
            if heads is None:
                raise refusal(node, f"adds {self.types[added.bias]} to its scores")
            lead: tuple[Dim, ...] = (symbol("batch"), heads)
        else:
            lead = (1, 1, *shape[:-2])[-2:]
        target = (*lead, symbol(SEQUENCE), 1)
        ref = self.emit(node, f"bias_{len(self.nodes)}", "aten.reshape", added.bias, target)
        if added.times == 1:
            return ref
        return self.emit(node, f"bias_{len(self.nodes)}", "aten.mul.Tensor", ref, added.times)

    def apart(self, node: Node, name: str, ref: Ref) -> Ref:
        """(batch * heads, sequence, width) as (batch, heads, sequence, width)."""
        shape = self.types[ref].shape
        heads = heads_of(shape[0])
        if len(shape) != 3 or heads is None:
            return ref
        target = (symbol("batch"), heads, *shape[1:])
        merged = maker(self.graph, ref)
        source = merged.args[0] if merged is not None and merged.op == "aten.reshape" else None
        if isinstance(source, Ref) and self.types[source].shape == target:
            return source
        return self.emit(node, name, "aten.reshape", ref, target)

    def cast(self, node: Node, name: str, ref: Ref) -> Ref:
        if self.types[ref].dtype == "float32":
            return ref
        return self.emit(node, name, "aten.to.dtype", ref, DType("float32"))

    def unrepeated(self, node: Node, query: Ref, key: Ref, value: Ref, grouped: bool) -> tuple[Ref, Ref]:
        known = self.graph.types
        shared = tuple(before_repeat(self.graph, ref) if ref in known else None for ref in (key, value))
        if shared[0] and shared[1] and _heads(self.graph, shared[0]) == _heads(self.graph, shared[1]):
            key, value = shared[0], shared[1]
        types = [self.types[r] for r in (query, key, value)]
        _refuse_shapes(node, types, grouped or shared == (key, value))
        return key, value

    def plain(
        self, node: Node, query: Ref, key: Ref, value: Ref, scale: float | None, window: int | None
    ) -> None:
        self.attention(node, "fusion.cached_attention", query, key, value, self.slot(), scale, window)

    def scored(self, found: EagerAttention, values: tuple[Ref, Ref, Ref], seen: Seen) -> None:
        query, key, value = values
        if seen.selection is not None or seen.chunk is not None:
            raise refusal(found.end, "selects keys, or sees a chunk, beside scores that are not plain")
        if seen.relative is not None:
            more = seen.biases or (seen.slopes, found.softcap, found.sinks, seen.window) != (None,) * 4
            if more:
                raise refusal(
                    found.end, "has a bias by distance beside a window, a cap, sinks or another bias"
                )
            table, buckets = seen.relative.table, seen.relative.buckets
            op = "fusion.cached_attention_relative"
            self.attention(found.end, op, query, key, value, table, self.slot(), found.scale, buckets)
            return
        bias: Ref | None = None
        for i, added in enumerate(seen.biases):
            ref = self.for_each_key(found.end, added)
            ref = self.cast(found.end, f"bias_cast_{i}", ref) if found.end.op == FUSED else ref
            if self.types[ref].dtype != self.types[query].dtype:
                raise refusal(found.end, f"adds {self.types[ref]} to scores of {self.types[query]}")
            bias = (
                ref
                if bias is None
                else self.emit(found.end, f"bias_sum_{i}", "aten.add.Tensor", bias, ref, 1)
            )
        self.attention(
            found.end, "fusion.cached_attention_scored", query, key, value, bias, found.sinks, self.slot(),
            found.scale, seen.window, found.softcap, seen.slopes,
        )  # fmt: skip

    def slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def attention(self, node: Node, op: str, *args: Arg) -> None:
        """The attention under the name of `node`, in its shape."""
        results = infer(op, args, self.types)
        if results == node.results:
            self.nodes.append(replace(node, op=op, args=args))
            return
        merged = self.emit(node, "attention", op, *args)
        shape: Arg = node.results[0].shape
        args = (merged, shape)
        if infer("aten.reshape", args, self.types) != node.results:
            raise refusal(node, f"gives {node.results[0]}")
        self.nodes.append(replace(node, op="aten.reshape", args=args))

    def emit(self, node: Node, name: str, op: str, *args: Arg) -> Ref:
        made = Node(f"{node.name}:{name}", op, args, infer(op, args, self.types))
        self.nodes.append(made)
        self.types[Ref(made.name)] = made.results[0]
        return Ref(made.name)


def _refuse_shapes(node: Node, types: list[TensorType], grouped: bool) -> None:
    for type_ in types:
        shape = type_.shape
        if len(shape) != 4 or shape[2] != symbol(SEQUENCE) or shape[0] != types[0].shape[0]:
            raise refusal(node, f"has {type_}, not (batch, heads, sequence, width)")
    heads = [t.shape[1] for t in types]
    q, k, v = (h if isinstance(h, int) else 0 for h in heads)
    if not (q and k == v and k and q % k == 0 and (grouped or k in (1, q))):
        raise refusal(node, f"has {heads[0]} query heads over {heads[1]} key and {heads[2]} value heads")


def _heads(graph: Graph, ref: Ref) -> object:
    return graph.types[ref].shape[1]
