"""What an attention sees and what is added to its scores: its masks and biases, classified as a window or chunk, ALiBi slopes,
biases by key or by distance, and keys that an indexer selects. Anything else is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fusion.dag.cutting.references import needed
from fusion.dag.cutting.source import SOURCE
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.rewrites.caches.eager_attention import (
    AttentionBias,
    AttentionMask,
    heads_of,
    positional_names,
    split_bias,
)
from fusion.dag.rewrites.caches.masks import (
    AffineBias,
    Evaluate,
    Span,
    affine_bias,
    hides_nothing,
    visible_span,
)
from fusion.dag.rewrites.caches.relative_bias import RelativeBias, relative_bias
from fusion.dag.rewrites.caches.selected_keys import Selection, conjuncts, read_selection
from fusion.dag.rewrites.positions import SEQUENCE, require_separate_positions


@dataclass
class Visibility:
    """The combined effect of the masks and biases of one attention."""

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    biases: list[AttentionBias] = field(default_factory=list)  # a number for each key
    slopes: tuple[float, ...] | None = None
    relative: RelativeBias | None = None
    constant: bool = False  # whether a bias that is the same for all keys was left out
    selection: Selection | None = None

    @property
    def unrestricted(self) -> bool:
        """Whether there is no window and no bias."""
        return not self.biases and (self.slopes, self.relative, self.window) == (None,) * 3


class MaskReader:
    """Classifies the masks of one graph's attentions, each once. `max_length`, `max_source_length`: the most positions of a
    sequence and of a source, None for no limit."""

    def __init__(
        self,
        graph: Graph,
        evaluate: Evaluate,
        max_length: int | None,
        max_source_length: int | None,
        top_k: Mapping[str, tuple[Ref, int]],
    ) -> None:
        """`top_k`: see `top_k_masks`."""
        self._graph = graph
        self._evaluate = evaluate
        self._max_length = max_length
        self._max_source_length = max_source_length
        self._top_k = top_k
        self.positional = positional_names(graph)
        self._spans: dict[AttentionMask, Span] = {}
        self._biases: dict[Ref, AffineBias] = {}
        self._relatives: dict[Ref, RelativeBias | None] = {}
        self._hides_nothing: dict[AttentionMask, bool] = {}

    def read(self, node: Node, terms: Iterable[AttentionMask | AttentionBias]) -> Visibility:
        """The combined effect of masks and biases of the attention `node`. UnsupportedModel for one that is not recognised."""
        visibility = Visibility()
        for term in terms:
            if isinstance(term, AttentionBias):
                self._read_bias(node, visibility, term)
            elif self._depends_on_query(term) or not self.hides_nothing(term):
                self._restrict(node, visibility, self._span(term))
        return visibility

    def _depends_on_query(self, mask: AttentionMask) -> bool:
        return self._graph.types[mask.mask].shape[-2:-1] == (symbol(SEQUENCE),)

    def hides_nothing(self, mask: AttentionMask) -> bool:
        """Whether the mask hides nothing, and adds nothing to scores."""
        if mask not in self._hides_nothing:
            max_lengths = {SEQUENCE: self._max_length or 1 << 30, SOURCE: self._max_source_length or 1 << 30}
            self._hides_nothing[mask] = hides_nothing(
                self._graph, mask.mask, self._evaluate, max_lengths, inverted=mask.inverted
            )
        return self._hides_nothing[mask]

    def _restrict(self, node: Node, visibility: Visibility, span: Span) -> None:
        """Narrow `visibility` to the span; a window or chunk that no sequence fills is left out."""
        visibility.causal = True
        window, chunk = (
            None if size is None or (self._max_length is not None and size >= self._max_length) else size
            for size in (span.window, span.chunk)
        )
        visibility.window = min((w for w in (visibility.window, window) if w is not None), default=None)
        if chunk is not None and visibility.chunk not in (None, chunk):
            raise refusal(node, "sees chunks of several sizes")
        visibility.chunk = visibility.chunk if chunk is None else chunk

    def _span(self, mask: AttentionMask) -> Span:
        if mask not in self._spans:
            self._spans[mask] = visible_span(
                self._graph, mask.mask, self._evaluate, self._max_length, inverted=mask.inverted
            )
        return self._spans[mask]

    def _read_bias(self, node: Node, visibility: Visibility, added: AttentionBias) -> None:
        """Classify a tensor that is added to the scores: a mask, a bias, or both."""
        type_ = self._graph.types[added.bias]
        if type_.dtype == "bool":
            self._apply_mask(node, visibility, AttentionMask(added.bias))
            return
        if symbol(SEQUENCE) not in type_.shape and added.bias.name in self.positional:
            visibility.constant = True  # the same for all keys, so a softmax ignores it
            return
        if type_.shape[-1:] != (symbol(SEQUENCE),):
            raise refusal(node, f"adds what depends on {added.bias}, {type_}, to its scores")
        if len(type_.shape) > 1 and type_.shape[-2] == symbol(SEQUENCE):
            try:
                span = self._span(AttentionMask(added.bias))
            except UnsupportedModel as why:
                parts = split_bias(self._graph, added)
                if parts is None:
                    if not self._read_relative_bias(node, visibility, added):
                        self._read_affine_bias(node, visibility, added, str(why))
                    return
                for mask in parts[0]:
                    self._apply_mask(node, visibility, mask)
                for part in parts[1]:
                    self._read_bias(node, visibility, part)
                return
            self._restrict(node, visibility, span)
        elif added.bias.name in self.positional and self._is_per_position(added.bias):
            visibility.biases.append(added)
        else:
            self._read_affine_bias(
                node, visibility, added, f"the bias {added.bias} depends on more than positions"
            )

    def _apply_mask(self, node: Node, visibility: Visibility, mask: AttentionMask) -> None:
        """Classify a mask, which may select keys."""
        for part in conjuncts(self._graph, mask, self.positional):
            selection = read_selection(self._graph, part, self.positional, self._top_k)
            if selection is None:
                self._restrict(node, visibility, self._span(part))
            elif self._max_length is None or selection.count < self._max_length:
                if visibility.selection not in (None, selection):
                    raise refusal(node, "selects keys twice")
                visibility.selection = selection

    def _is_per_position(self, ref: Ref) -> bool:
        """Whether the value at a position depends on that position alone, so that a cache can keep it."""
        part = replace(self._graph, nodes=needed(self._graph, [ref]), outputs=(ref,))
        try:
            require_separate_positions(part)
        except UnsupportedModel:
            return False
        return True

    def _read_relative_bias(self, node: Node, visibility: Visibility, added: AttentionBias) -> bool:
        """Classify a bias that is looked up by distance, as T5 has it; False if it is none."""
        if added.bias not in self._relatives:
            self._relatives[added.bias] = relative_bias(
                self._graph, added.bias, self._evaluate, self._max_length
            )
        bias = self._relatives[added.bias]
        if bias is None:
            return False
        if added.scale != 1 or visibility.relative is not None:
            raise refusal(node, "scales a bias by distance, or has two of them")
        visibility.relative = bias
        return True

    def _read_affine_bias(self, node: Node, visibility: Visibility, added: AttentionBias, why: str) -> None:
        """Classify a bias that is linear in distance, perhaps with a mask in it. UnsupportedModel (`why`) if it depends on more than
        positions."""
        if added.bias.name not in self.positional:
            raise UnsupportedModel(why)
        if added.bias not in self._biases:
            self._biases[added.bias] = affine_bias(self._graph, added.bias, self._evaluate, self._max_length)
        bias = self._biases[added.bias]
        heads = self._heads(node, len(bias.slopes))
        if bias.masks:
            if added.scale != 1:
                raise refusal(node, "scales its mask")
            self._restrict(node, visibility, Span(bias.window))
        slopes = bias.slopes * heads if len(bias.slopes) == 1 else bias.slopes
        previous = visibility.slopes or (0.0,) * len(slopes)
        visibility.slopes = tuple(a + added.scale * b for a, b in zip(previous, slopes, strict=True))

    def _heads(self, node: Node, bias_heads: int) -> int:
        """The number of heads of the attention; refused if a bias has another number than that or 1."""
        shape = node.results[0].shape
        heads = shape[1] if len(shape) == 4 else heads_of(shape[0])
        if not isinstance(heads, int) or bias_heads not in (1, heads):
            raise refusal(node, f"has a bias for {bias_heads} heads, and {heads} heads")
        return heads


def refusal(node: Node, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"no KV cache for this model: the attention {node.name} {why}")
