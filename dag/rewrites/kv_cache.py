"""Give attention a memory, so that a sequence may be run in pieces: it becomes `fusion.cached_attention`, which reads the
keys and values of earlier positions from a cache, `fusion.cached_attention_scored` where its scores are not plain ones, or
`fusion.cached_attention_selected` where an indexer selects the keys, or a sequence is in chunks that see nothing of each other.

Only for attention, fused or eager, that is recognised as causal, over all positions, a window or a chunk of them, with no
bias but one by position; whatever else the model does must treat positions one by one. Anything not recognised is refused:
a model is never served almost right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusion.dag.cutting.references import needed
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
from fusion.dag.rewrites.cached_recurrence import cache_states
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.eager_attention import (
    SOFTMAX,
    Added,
    EagerAttention,
    Hides,
    heads_of,
    hidden_parts,
    maker,
    positional_names,
    read_attention,
    swaps_last_two,
)
from fusion.dag.rewrites.masks import (
    MAX_CHUNK,
    POSITIONS,
    Bias,
    Evaluate,
    Reach,
    affine_bias,
    shows_all,
    visible_reach,
)
from fusion.dag.rewrites.own_positions import given_positions
from fusion.dag.rewrites.positions import SEQUENCE, require_separate_positions
from fusion.dag.rewrites.relative_bias import RelativeBias, relative_bias
from fusion.dag.rewrites.repeated_heads import before_repeat
from fusion.dag.rewrites.selected_keys import Selection, all_selected, parts_of, read_selection, taken_places

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
    walk = _Caching(given_positions(graph, evaluate), evaluate, maximum_sequence, maximum_source, taken)
    cached = clean(cache_states(clean(walk.run())))
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

    def __init__(
        self,
        graph: Graph,
        evaluate: Evaluate,
        longest: int | None,
        longest_source: int | None,
        taken: Mapping[str, tuple[Ref, int]],
    ) -> None:
        self.graph = graph
        self.evaluate = evaluate
        self.longest = longest
        self.longest_source = longest_source
        self.taken = taken  # see `taken_places`
        self.of_source = source_values(graph)
        self.positional = positional_names(graph)
        self.types = dict(graph.types)
        self.nodes: list[Node] = []
        self.slots = 0
        self.reaches: dict[Hides, Reach] = {}
        self.biases: dict[Ref, Bias] = {}
        self.relatives: dict[Ref, RelativeBias | None] = {}
        self.shown: dict[Hides, bool] = {}
        self.selections: dict[Ref, Ref] = {}  # by what tells one from another: what selects
        self.chunks: dict[int, Ref] = {}  # by size: the places of each position's chunk

    def run(self) -> Graph:
        graph = self.graph
        written = {
            found.end.name: found
            for node in graph.nodes
            if node.op == SOFTMAX and (found := read_attention(graph, node, self.positional)) is not None
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
                raise _refusal(node, f"does not fit a cache: {why}") from None
        return replace(graph, nodes=tuple(self.nodes))

    def across(self, node: Node) -> None:
        """Attention of the sequence to the source: to all of it."""
        query, key, value = (a for a in node.args[:3] if isinstance(a, Ref))
        mask, dropout, is_causal, scale, _ = node.args[3:]
        if dropout != 0 or is_causal is True:
            raise _refusal(node, "sees a part of the source")
        if isinstance(mask, Ref):
            self.require_shown(node, Hides(mask))
        self.attention(node, SOURCE_ATTENTION, query, key, value, self.slot(), scale)

    def written_across(self, found: EagerAttention) -> None:
        """Eager attention of the sequence to the source: to all of it."""
        if found.sinks is not None:
            raise _refusal(found.end, "has sinks beside the source")
        for hides in (*found.hides, *(Hides(added.bias) for added in found.added)):
            self.require_shown(found.end, hides)
        query, key, value = self.written_values(found)
        self.attention(
            found.end, SOURCE_ATTENTION_SCORED, query, key, value, self.slot(), found.scale, found.softcap
        )

    def require_shown(self, node: Node, hides: Hides) -> None:
        """UnsupportedModel for a mask that hides a part of the source, or adds to scores."""
        if not self.shows_all(hides):
            raise _refusal(node, "hides a part of the source, or adds to its scores")

    def shows_all(self, hides: Hides) -> bool:
        """Whether the mask hides nothing, and adds nothing to scores."""
        if hides not in self.shown:
            most = {SEQUENCE: self.longest or 1 << 30, SOURCE: self.longest_source or 1 << 30}
            self.shown[hides] = shows_all(self.graph, hides.mask, self.evaluate, most, hides=hides.inverts)
        return self.shown[hides]

    def fused(self, node: Node) -> None:
        query, key, value = (a for a in node.args[:3] if isinstance(a, Ref))
        mask, dropout, is_causal, scale, grouped = node.args[3:]
        if SOURCE in symbols_of(self.types[key].shape[-2]):
            raise _refusal(node, "sees the source and the sequence at once")
        if dropout != 0:
            raise _refusal(node, "drops out weights: capture the model in evaluation mode")
        if is_causal is True and mask is not None:
            raise _refusal(node, "has a mask beside its causal one")
        if is_causal is not True and not isinstance(mask, Ref):
            raise _refusal(node, "sees later positions")
        seen = _Seen()
        if isinstance(mask, Ref):
            self.look(node, seen, Added(mask))
            if not seen.causal:
                raise _refusal(node, "sees later positions")
        assert scale is None or isinstance(scale, (int, float))
        keys = self.unrepeated(node, query, key, value, grouped is True)
        if seen.selection is not None:
            self.selected(node, (query, *keys), scale, seen)
            return
        if (size := self.chunk(node, seen)) is not None:
            self.in_chunks(node, (query, *keys), scale, seen, size)
            return
        if not seen.biases and seen.slopes is None and seen.relative is None:
            self.plain(node, query, *keys, scale, self.window(seen))
            return
        width = self.types[query].shape[3]
        if not isinstance(width, int):
            raise _refusal(node, f"has queries {self.types[query]}")
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
        seen = _Seen()
        for hides in found.hides:
            if self.types[hides.mask].shape[-2:-1] == (symbol(SEQUENCE),) or not self.shows_all(hides):
                seen.add(self.seen_by(hides))
        for added in found.added:
            self.look(end, seen, added)
        if not seen.causal:
            raise _refusal(end, "sees later positions")
        if found.sinks is not None and (seen.slopes is not None or seen.constant):
            raise _refusal(end, "has sinks, which see the numbers that are added to a whole row")
        keys = self.unrepeated(end, query, key, value, True)
        # Plain scores as well: the fused kernel would round them in another order than the model does.
        self.scored(found, (query, *keys), seen)

    def selected(self, node: Node, values: tuple[Ref, Ref, Ref], scale: float | None, seen: _Seen) -> None:
        """Attention to the keys that an indexer selects."""
        if not self.reaches_alone(seen) or seen.chunks:
            raise _refusal(node, "selects keys beside a window or a bias")
        assert seen.selection is not None
        chosen = self.selection(node, seen.selection)
        self.attention(node, "fusion.cached_attention_selected", *values, chosen, self.slot(), scale)

    def reaches_alone(self, seen: _Seen) -> bool:
        """Whether there is no window, and nothing that is added to scores."""
        return not seen.biases and (seen.slopes, seen.relative, self.window(seen)) == (None,) * 3

    def in_chunks(
        self, node: Node, values: tuple[Ref, Ref, Ref], scale: float | None, seen: _Seen, size: int
    ) -> None:
        """Attention within chunks of a sequence: to the places of the query's own."""
        if not self.reaches_alone(seen):
            raise _refusal(node, "sees a chunk beside a window or a bias")
        places = self.places_of_chunk(node, size)
        self.attention(node, "fusion.cached_attention_selected", *values, places, self.slot(), scale)

    def places_of_chunk(self, node: Node, size: int) -> Ref:
        """(batch, 1, sequence, size), once for all attentions: later ones than the query, too, which it does not see."""
        if size not in self.chunks:
            if size > MAX_CHUNK or POSITIONS not in self.graph.input_names:
                raise _refusal(node, f"sees chunks of {size} positions")
            number = self.emit(node, "chunk", "fusion.div_floor", Ref(POSITIONS), size)
            first = self.emit(node, "chunk_first", "aten.mul.Tensor", number, size)
            target = (symbol("batch"), 1, symbol(SEQUENCE), 1)
            row = self.emit(node, "chunk_row", "aten.reshape", first, target)
            within = self.emit(node, "chunk_within", "aten.arange", size, None)
            self.chunks[size] = self.emit(node, "chunk_places", "aten.add.Tensor", row, within, 1)
        return self.chunks[size]

    def chunk(self, node: Node, seen: _Seen) -> int | None:
        """The size of the chunks, where a sequence can have several."""
        sizes = {size for size in seen.chunks if self.longest is None or size < self.longest}
        if len(sizes) > 1:
            raise _refusal(node, "sees chunks of several sizes")
        return next(iter(sizes), None)

    def selection(self, node: Node, found: Selection) -> Ref:
        """What selects, once for all attentions that it is made for."""
        if found.order not in self.selections:
            seen = _Seen()
            if isinstance(found.visible, Added):
                self.look(node, seen, found.visible)
            else:
                seen.add(self.seen_by(found.visible))
            if seen != _Seen(causal=True):
                raise _refusal(node, "selects keys among other ones than all before a query")
            query = self.emit(node, "selecting", "aten.transpose.int", found.query, 1, 2)
            key = self.emit(node, "selected_by", "aten.unsqueeze", found.key, 1)
            rows = self.emit(node, "head_rows", "aten.unsqueeze", found.weights, -1)
            weights = self.emit(node, "head_weights", "aten.transpose.int", rows, 1, 2)
            self.selections[found.order] = self.emit(
                node, "selected", "fusion.cached_selection", query, key, weights, self.slot(), found.scale, found.count
            )  # fmt: skip
        return self.selections[found.order]

    def window(self, seen: _Seen) -> int | None:
        window = seen.window
        return None if window is not None and self.longest is not None and window >= self.longest else window

    def seen_by(self, hides: Hides) -> Reach:
        if hides not in self.reaches:
            self.reaches[hides] = visible_reach(
                self.graph, hides.mask, self.evaluate, self.longest, hides=hides.inverts
            )
        return self.reaches[hides]

    def look(self, node: Node, seen: _Seen, added: Added) -> None:
        """What a mask or a bias that is added to the scores lets a position see, and adds to it."""
        type_ = self.types[added.bias]
        if type_.dtype == "bool":
            self.hide(node, seen, Hides(added.bias))
            return
        if symbol(SEQUENCE) not in type_.shape and added.bias.name in self.positional:
            seen.constant = True  # the same for all keys, which a softmax does not see
            return
        if type_.shape[-1:] != (symbol(SEQUENCE),):
            raise _refusal(node, f"adds what depends on {added.bias}, {type_}, to its scores")
        if len(type_.shape) > 1 and type_.shape[-2] == symbol(SEQUENCE):
            try:
                reach = self.seen_by(Hides(added.bias))
            except UnsupportedModel as why:
                parts = hidden_parts(self.graph, added)
                if parts is None:
                    if not self.by_distance(node, seen, added):
                        self.slope(node, seen, added, str(why))
                    return
                for hides in parts[0]:
                    self.hide(node, seen, hides)
                for part in parts[1]:
                    self.look(node, seen, part)
                return
            seen.add(reach)
        elif added.bias.name in self.positional and self.separate(added.bias):
            seen.biases.append(self.for_each_key(node, added))
        else:
            self.slope(node, seen, added, f"the bias {added.bias} depends on more than positions")

    def hide(self, node: Node, seen: _Seen, hides: Hides) -> None:
        """What a mask lets a position see, which may be keys that the model selects."""
        for part in parts_of(self.graph, hides, self.positional):
            found = read_selection(self.graph, part, self.positional, self.taken)
            if found is None:
                seen.add(self.seen_by(part))
            elif self.longest is None or found.count < self.longest:
                if seen.selection not in (None, found):
                    raise _refusal(node, "selects keys twice")
                seen.selection = found

    def separate(self, ref: Ref) -> bool:
        """Whether the value at a position is made of that position alone, so that a cache can keep it."""
        part = replace(self.graph, nodes=needed(self.graph, [ref]), outputs=(ref,))
        try:
            require_separate_positions(part)
        except UnsupportedModel:
            return False
        return True

    def by_distance(self, node: Node, seen: _Seen, added: Added) -> bool:
        """Whether the bias is one that is looked up by distance."""
        if added.bias not in self.relatives:
            self.relatives[added.bias] = relative_bias(self.graph, added.bias, self.evaluate, self.longest)
        found = self.relatives[added.bias]
        if found is None:
            return False
        if added.times != 1 or seen.relative is not None:
            raise _refusal(node, "scales a bias by distance, or has two of them")
        seen.relative = found
        return True

    def slope(self, node: Node, seen: _Seen, added: Added, why: str) -> None:
        if added.bias.name not in self.positional:
            raise UnsupportedModel(why)
        if added.bias not in self.biases:
            self.biases[added.bias] = affine_bias(self.graph, added.bias, self.evaluate, self.longest)
        bias = self.biases[added.bias]
        heads = self.heads(node, len(bias.slopes))
        if bias.masks:
            if added.times != 1:
                raise _refusal(node, "scales its mask")
            seen.add(Reach(bias.window))
        own = bias.slopes * heads if len(bias.slopes) == 1 else bias.slopes
        before = seen.slopes or (0.0,) * len(own)
        seen.slopes = tuple(a + added.times * b for a, b in zip(before, own, strict=True))

    def heads(self, node: Node, found: int) -> int:
        shape = node.results[0].shape
        heads = shape[1] if len(shape) == 4 else heads_of(shape[0])
        if not isinstance(heads, int) or found not in (1, heads):
            raise _refusal(node, f"has a bias for {found} heads, and {heads} heads")
        return heads

    def for_each_key(self, node: Node, added: Added) -> Ref:
        """The bias as (batch or 1, heads or 1, sequence, 1)."""
        shape = self.types[added.bias].shape
        if added.merged and len(shape) == 3 and shape[0] != 1:
            heads = heads_of(shape[0])
            if heads is None:
                raise _refusal(node, f"adds {self.types[added.bias]} to its scores")
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

    def scored(self, found: EagerAttention, values: tuple[Ref, Ref, Ref], seen: _Seen) -> None:
        query, key, value = values
        if seen.selection is not None or self.chunk(found.end, seen) is not None:
            raise _refusal(found.end, "selects keys, or sees a chunk, beside scores that are not plain")
        if seen.relative is not None:
            more = seen.biases or (seen.slopes, found.softcap, found.sinks, self.window(seen)) != (None,) * 4
            if more:
                raise _refusal(
                    found.end, "has a bias by distance beside a window, a cap, sinks or another bias"
                )
            table, buckets = seen.relative.table, seen.relative.buckets
            op = "fusion.cached_attention_relative"
            self.attention(found.end, op, query, key, value, table, self.slot(), found.scale, buckets)
            return
        bias: Ref | None = None
        for i, ref in enumerate(seen.biases):
            ref = self.cast(found.end, f"bias_cast_{i}", ref) if found.end.op == FUSED else ref
            if self.types[ref].dtype != self.types[query].dtype:
                raise _refusal(found.end, f"adds {self.types[ref]} to scores of {self.types[query]}")
            bias = (
                ref
                if bias is None
                else self.emit(found.end, f"bias_sum_{i}", "aten.add.Tensor", bias, ref, 1)
            )
        self.attention(
            found.end, "fusion.cached_attention_scored", query, key, value, bias, found.sinks, self.slot(),
            found.scale, self.window(seen), found.softcap, seen.slopes,
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
            raise _refusal(node, f"gives {node.results[0]}")
        self.nodes.append(replace(node, op="aten.reshape", args=args))

    def emit(self, node: Node, name: str, op: str, *args: Arg) -> Ref:
        made = Node(f"{node.name}:{name}", op, args, infer(op, args, self.types))
        self.nodes.append(made)
        self.types[Ref(made.name)] = made.results[0]
        return Ref(made.name)


@dataclass
class _Seen:
    """What the masks and biases of one attention come to."""

    causal: bool = False
    window: int | None = None
    chunks: set[int] = field(default_factory=set)
    biases: list[Ref] = field(default_factory=list)  # for each key
    slopes: tuple[float, ...] | None = None
    relative: RelativeBias | None = None
    constant: bool = False  # whether a number for all keys was left out
    selection: Selection | None = None

    def add(self, reach: Reach) -> None:
        self.causal = True
        self.window = min((w for w in (self.window, reach.window) if w is not None), default=None)
        if reach.chunk is not None:
            self.chunks.add(reach.chunk)


def _refuse_shapes(node: Node, types: list[TensorType], grouped: bool) -> None:
    for type_ in types:
        shape = type_.shape
        if len(shape) != 4 or shape[2] != symbol(SEQUENCE) or shape[0] != types[0].shape[0]:
            raise _refusal(node, f"has {type_}, not (batch, heads, sequence, width)")
    heads = [t.shape[1] for t in types]
    q, k, v = (h if isinstance(h, int) else 0 for h in heads)
    if not (q and k == v and k and q % k == 0 and (grouped or k in (1, q))):
        raise _refusal(node, f"has {heads[0]} query heads over {heads[1]} key and {heads[2]} value heads")


def _heads(graph: Graph, ref: Ref) -> object:
    return graph.types[ref].shape[1]


def _refusal(node: Node, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"no KV cache for this model: the attention {node.name} {why}")
