"""Give attention a KV cache, so that a sequence may be run in pieces. Attention becomes `fusion.cached_attention`, which reads
the keys and values of earlier positions from a cache; `fusion.cached_attention_scored` or `..._relative` where scores have a
bias, a cap or sinks; or `fusion.cached_attention_selected` where an indexer selects the keys, or attention is chunked.

Attention, fused or eager, must be recognised as causal, over all positions, a sliding window or a chunk of them, with no
bias but one by position, and all else must treat positions one by one. Anything not recognised is refused:
a model is never served almost right.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.cutting.source import (
    SOURCE,
    SOURCE_ATTENTION,
    SOURCE_ATTENTION_SCORED,
    misused_source,
    source_values,
)
from fusion.dag.ir.dims import Dim, symbol, symbols_of
from fusion.dag.ir.errors import GraphError, UnsupportedModel
from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import infer
from fusion.dag.rewrites.caches.cached_recurrence import cache_states
from fusion.dag.rewrites.caches.eager_attention import (
    SOFTMAX,
    AttentionBias,
    AttentionMask,
    EagerAttention,
    heads_of,
    read_attention,
)
from fusion.dag.rewrites.caches.masks import MAX_CHUNK, POSITIONS, Evaluate
from fusion.dag.rewrites.caches.node_patterns import producer, swaps_last_two
from fusion.dag.rewrites.caches.own_positions import use_position_ids
from fusion.dag.rewrites.caches.repeated_heads import before_repeat
from fusion.dag.rewrites.caches.selected_keys import Selection, top_k_masks, without_full_selections
from fusion.dag.rewrites.caches.visible_keys import MaskReader, Visibility, refusal
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
    the order of the nodes; keys and values that are repeated for grouped queries are cached before the repeat. A
    window of `maximum_sequence` positions or more is left out. Cross-attention of an encoder-decoder becomes
    `fusion.source_attention`, or `fusion.source_attention_scored` where it is eager, and the encoder stays as it is;
    `maximum_source` limits the source's positions.
    UnsupportedModel, in one line, for any other model.
    """
    graph = clean(without_full_selections(graph))
    top_k = top_k_masks(graph)
    graph = use_position_ids(graph, evaluate)
    mask_reader = MaskReader(graph, evaluate, maximum_sequence, maximum_source, top_k)
    cached = clean(cache_states(clean(_CacheRewrite(graph, mask_reader).run())))
    require_separate_positions(cached)
    if (node := misused_source(cached)) is not None:
        raise UnsupportedModel(
            f"no KV cache for this model: {node.name} ({node.op}) reads the encoder in another way than attention does"
        )
    for ref in cached.outputs:
        if symbol(SEQUENCE) not in cached.types[ref].shape:
            raise UnsupportedModel(
                f"no KV cache for this model: the output {ref} has no dimension for the sequence"
            )
    return cached


class _CacheRewrite:
    """One pass over the nodes, which replaces each attention by one with a cache."""

    def __init__(self, graph: Graph, mask_reader: MaskReader) -> None:
        self.graph = graph
        self.source_values = source_values(graph)
        self.mask_reader = mask_reader
        self.types = dict(graph.types)
        self.nodes: list[Node] = []
        self.slot_count = 0
        self.selection_refs: dict[Ref, Ref] = {}  # by `Selection.order`: the emitted selection
        self.chunk_places: dict[int, Ref] = {}  # by chunk size: `chunk_positions`

    def run(self) -> Graph:
        graph = self.graph
        eager = {
            attention.end.name: attention
            for node in graph.nodes
            if node.op == SOFTMAX
            and (attention := read_attention(graph, node, self.mask_reader.positional)) is not None
        }
        for node in graph.nodes:
            try:
                if Ref(node.name) in self.source_values:
                    self.nodes.append(node)  # runs once, over all of the source
                elif node.op == FUSED and set(node.args[1:3]) <= self.source_values:
                    self.fused_source_attention(node)
                elif node.op == FUSED:
                    self.fused_attention(node)
                elif node.name in eager and set(eager[node.name].keys_and_values) <= self.source_values:
                    self.eager_source_attention(eager[node.name])
                elif node.name in eager:
                    self.eager_attention(eager[node.name])
                else:
                    self.nodes.append(node)
            except UnsupportedModel:
                raise
            except GraphError as why:
                raise refusal(node, f"does not fit a cache: {why}") from None
        return replace(graph, nodes=tuple(self.nodes))

    def fused_source_attention(self, node: Node) -> None:
        """Rewrite fused cross-attention to the whole source."""
        query, key, value = (a for a in node.args[:3] if isinstance(a, Ref))
        mask, dropout, is_causal, scale, _ = node.args[3:]
        if dropout != 0 or is_causal is True:
            raise refusal(node, "sees a part of the source")
        if isinstance(mask, Ref):
            self.require_all_visible(node, AttentionMask(mask))
        self.emit_attention(node, SOURCE_ATTENTION, query, key, value, self.new_slot(), scale)

    def eager_source_attention(self, attention: EagerAttention) -> None:
        """Rewrite eager cross-attention to the whole source."""
        if attention.sinks is not None:
            raise refusal(attention.end, "has sinks beside the source")
        for mask in (*attention.masks, *(AttentionMask(bias.bias) for bias in attention.biases)):
            self.require_all_visible(attention.end, mask)
        query, key, value = self.query_key_value(attention)
        self.emit_attention(
            attention.end,
            SOURCE_ATTENTION_SCORED,
            query,
            key,
            value,
            self.new_slot(),
            attention.scale,
            attention.softcap,
        )

    def require_all_visible(self, node: Node, mask: AttentionMask) -> None:
        """UnsupportedModel for a mask that hides a part of the source, or adds to scores."""
        if not self.mask_reader.hides_nothing(mask):
            raise refusal(node, "hides a part of the source, or adds to its scores")

    def fused_attention(self, node: Node) -> None:
        """Rewrite a call of the fused kernel."""
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
        visibility = self.mask_reader.read(node, [AttentionBias(mask)] if isinstance(mask, Ref) else [])
        if isinstance(mask, Ref) and not visibility.causal:
            raise refusal(node, "sees later positions")
        assert scale is None or isinstance(scale, (int, float))
        keys = self.without_repeated_heads(node, query, key, value, grouped is True)
        if visibility.selection is not None:
            self.emit_selected(node, (query, *keys), scale, visibility)
            return
        if visibility.chunk is not None:
            self.emit_chunked(node, (query, *keys), scale, visibility, visibility.chunk)
            return
        if not visibility.biases and visibility.slopes is None and visibility.relative is None:
            op = "fusion.cached_attention"
            self.emit_attention(node, op, query, *keys, self.new_slot(), scale, visibility.window)
            return
        width = self.types[query].shape[3]
        if not isinstance(width, int):
            raise refusal(node, f"has queries {self.types[query]}")
        # The fused kernel computes its scores in float32, whatever it is given.
        self.emit_scored(
            EagerAttention(node, query, key, value, scale=width**-0.5 if scale is None else float(scale)),
            (self.to_float32(node, "query", query), self.to_float32(node, "key", keys[0]), keys[1]),
            visibility,
        )

    def query_key_value(self, attention: EagerAttention) -> tuple[Ref, Ref, Ref]:
        """Query (batch, heads, sequence, width), key and value (batch, heads, keys, width[']) of eager attention."""
        end, transpose = attention.end, producer(self.graph, attention.key_transposed)
        key = (
            transpose.args[0]
            if transpose is not None and transpose.op == "aten.transpose.int" and swaps_last_two(transpose)
            else self.emit(end, "key_turned", "aten.transpose.int", attention.key_transposed, -2, -1)
        )
        assert isinstance(key, Ref)
        return (
            self.split_heads(end, "query", attention.query),
            self.split_heads(end, "key", key),
            self.split_heads(end, "value", attention.value),
        )

    def eager_attention(self, attention: EagerAttention) -> None:
        """Rewrite attention that the model spells out."""
        end = attention.end
        query, key, value = self.query_key_value(attention)
        visibility = self.mask_reader.read(end, (*attention.masks, *attention.biases))
        if not visibility.causal:
            raise refusal(end, "sees later positions")
        if attention.sinks is not None and (visibility.slopes is not None or visibility.constant):
            raise refusal(end, "has sinks, which see the numbers that are added to a whole row")
        keys = self.without_repeated_heads(end, query, key, value, True)
        # Plain scores as well: the fused kernel would round them in another order than the model does.
        self.emit_scored(attention, (query, *keys), visibility)

    def emit_selected(
        self, node: Node, values: tuple[Ref, Ref, Ref], scale: float | None, visibility: Visibility
    ) -> None:
        """Emit attention to the keys that an indexer selects."""
        if not visibility.unrestricted or visibility.chunk is not None:
            raise refusal(node, "selects keys beside a window or a bias")
        assert visibility.selection is not None
        chosen = self.selected_indices(node, visibility.selection)
        self.emit_attention(node, "fusion.cached_attention_selected", *values, chosen, self.new_slot(), scale)

    def emit_chunked(
        self, node: Node, values: tuple[Ref, Ref, Ref], scale: float | None, visibility: Visibility, size: int
    ) -> None:
        """Emit attention within chunks of `size` positions."""
        if not visibility.unrestricted:
            raise refusal(node, "sees a chunk beside a window or a bias")
        places = self.chunk_positions(node, size)
        self.emit_attention(node, "fusion.cached_attention_selected", *values, places, self.new_slot(), scale)

    def chunk_positions(self, node: Node, size: int) -> Ref:
        """(batch, 1, sequence, size) positions of each query's chunk, emitted once for all attentions. Those after the query are
        among them: attention masks these itself."""
        if size not in self.chunk_places:
            if size > MAX_CHUNK or POSITIONS not in self.graph.input_names:
                raise refusal(node, f"sees chunks of {size} positions")
            number = self.emit(node, "chunk", "fusion.div_floor", Ref(POSITIONS), size)
            first = self.emit(node, "chunk_first", "aten.mul.Tensor", number, size)
            target = (symbol("batch"), 1, symbol(SEQUENCE), 1)
            row = self.emit(node, "chunk_row", "aten.reshape", first, target)
            within = self.emit(node, "chunk_within", "aten.arange", size, None)
            self.chunk_places[size] = self.emit(node, "chunk_places", "aten.add.Tensor", row, within, 1)
        return self.chunk_places[size]

    def selected_indices(self, node: Node, selection: Selection) -> Ref:
        """The indices of the selected keys, emitted once for all attentions that share the selection."""
        if selection.order not in self.selection_refs:
            if self.mask_reader.read(node, [selection.visible]) != Visibility(causal=True):
                raise refusal(node, "selects keys among other ones than all before a query")
            query = self.emit(node, "selecting", "aten.transpose.int", selection.query, 1, 2)
            key = self.emit(node, "selected_by", "aten.unsqueeze", selection.key, 1)
            rows = self.emit(node, "head_rows", "aten.unsqueeze", selection.weights, -1)
            weights = self.emit(node, "head_weights", "aten.transpose.int", rows, 1, 2)
            self.selection_refs[selection.order] = self.emit(
                node, "selected", "fusion.cached_selection", query, key, weights, self.new_slot(), selection.scale, selection.count
            )  # fmt: skip
        return self.selection_refs[selection.order]

    def bias_by_key(self, node: Node, bias: AttentionBias) -> Ref:
        """The bias as (batch or 1, heads or 1, sequence, 1): a number for each key."""
        shape = self.types[bias.bias].shape
        if bias.heads_merged and len(shape) == 3 and shape[0] != 1:
            heads = heads_of(shape[0])
            if heads is None:
                raise refusal(node, f"adds {self.types[bias.bias]} to its scores")
            lead: tuple[Dim, ...] = (symbol("batch"), heads)
        else:
            lead = (1, 1, *shape[:-2])[-2:]
        target = (*lead, symbol(SEQUENCE), 1)
        ref = self.emit(node, f"bias_{len(self.nodes)}", "aten.reshape", bias.bias, target)
        if bias.scale == 1:
            return ref
        return self.emit(node, f"bias_{len(self.nodes)}", "aten.mul.Tensor", ref, bias.scale)

    def split_heads(self, node: Node, name: str, ref: Ref) -> Ref:
        """(batch * heads, sequence, width) as (batch, heads, sequence, width)."""
        shape = self.types[ref].shape
        heads = heads_of(shape[0])
        if len(shape) != 3 or heads is None:
            return ref
        target = (symbol("batch"), heads, *shape[1:])
        merge = producer(self.graph, ref)
        source = merge.args[0] if merge is not None and merge.op == "aten.reshape" else None
        if isinstance(source, Ref) and self.types[source].shape == target:
            return source
        return self.emit(node, name, "aten.reshape", ref, target)

    def to_float32(self, node: Node, name: str, ref: Ref) -> Ref:
        if self.types[ref].dtype == "float32":
            return ref
        return self.emit(node, name, "aten.to.dtype", ref, DType("float32"))

    def without_repeated_heads(
        self, node: Node, query: Ref, key: Ref, value: Ref, grouped: bool
    ) -> tuple[Ref, Ref]:
        unrepeated = tuple(
            before_repeat(self.graph, ref) if ref in self.graph.types else None for ref in (key, value)
        )
        if (
            unrepeated[0]
            and unrepeated[1]
            and _heads(self.graph, unrepeated[0]) == _heads(self.graph, unrepeated[1])
        ):
            key, value = unrepeated[0], unrepeated[1]
        types = [self.types[r] for r in (query, key, value)]
        _require_head_shapes(node, types, grouped or unrepeated == (key, value))
        return key, value

    def emit_scored(
        self, attention: EagerAttention, values: tuple[Ref, Ref, Ref], visibility: Visibility
    ) -> None:
        query, key, value = values
        if visibility.selection is not None or visibility.chunk is not None:
            raise refusal(attention.end, "selects keys, or sees a chunk, beside scores that are not plain")
        if visibility.relative is not None:
            unsupported = (
                visibility.biases
                or (visibility.slopes, attention.softcap, attention.sinks, visibility.window) != (None,) * 4
            )
            if unsupported:
                raise refusal(
                    attention.end, "has a bias by distance beside a window, a cap, sinks or another bias"
                )
            table, buckets = visibility.relative.table, visibility.relative.buckets
            op = "fusion.cached_attention_relative"
            self.emit_attention(
                attention.end, op, query, key, value, table, self.new_slot(), attention.scale, buckets
            )
            return
        total: Ref | None = None
        for i, bias in enumerate(visibility.biases):
            ref = self.bias_by_key(attention.end, bias)
            ref = self.to_float32(attention.end, f"bias_cast_{i}", ref) if attention.end.op == FUSED else ref
            if self.types[ref].dtype != self.types[query].dtype:
                raise refusal(attention.end, f"adds {self.types[ref]} to scores of {self.types[query]}")
            total = (
                ref
                if total is None
                else self.emit(attention.end, f"bias_sum_{i}", "aten.add.Tensor", total, ref, 1)
            )
        self.emit_attention(
            attention.end, "fusion.cached_attention_scored", query, key, value, total, attention.sinks, self.new_slot(),
            attention.scale, visibility.window, attention.softcap, visibility.slopes,
        )  # fmt: skip

    def new_slot(self) -> int:
        self.slot_count += 1
        return self.slot_count - 1

    def emit_attention(self, node: Node, op: str, *args: Arg) -> None:
        """Emit the attention `op` under the name of `node`, in its shape."""
        results = infer(op, args, self.types)
        if results == node.results:
            self.nodes.append(replace(node, op=op, args=args))
            return
        merge = self.emit(node, "attention", op, *args)
        shape: Arg = node.results[0].shape
        args = (merge, shape)
        if infer("aten.reshape", args, self.types) != node.results:
            raise refusal(node, f"gives {node.results[0]}")
        self.nodes.append(replace(node, op="aten.reshape", args=args))

    def emit(self, node: Node, name: str, op: str, *args: Arg) -> Ref:
        emitted = Node(f"{node.name}:{name}", op, args, infer(op, args, self.types))
        self.nodes.append(emitted)
        self.types[Ref(emitted.name)] = emitted.results[0]
        return Ref(emitted.name)


def _require_head_shapes(node: Node, types: list[TensorType], grouped: bool) -> None:
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
