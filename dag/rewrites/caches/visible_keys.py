"""What an attention sees and what is added to its scores: its masks and biases, read as a reach over positions, slopes, biases by key
or by distance, and keys that an indexer selects. What is none of these is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fusion.dag.cutting.references import needed
from fusion.dag.cutting.source import SOURCE
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.rewrites.caches.eager_attention import Added, Hides, heads_of, hidden_parts, positional_names
from fusion.dag.rewrites.caches.masks import Bias, Evaluate, Reach, affine_bias, shows_all, visible_reach
from fusion.dag.rewrites.caches.relative_bias import RelativeBias, relative_bias
from fusion.dag.rewrites.caches.selected_keys import Selection, parts_of, read_selection
from fusion.dag.rewrites.positions import SEQUENCE, require_separate_positions


@dataclass
class Seen:
    """What the masks and biases of one attention come to."""

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    biases: list[Added] = field(default_factory=list)  # for each key
    slopes: tuple[float, ...] | None = None
    relative: RelativeBias | None = None
    constant: bool = False  # whether a number for all keys was left out
    selection: Selection | None = None

    @property
    def whole(self) -> bool:
        """Whether there is no window, and nothing that is added to scores."""
        return not self.biases and (self.slopes, self.relative, self.window) == (None,) * 3


class MaskReader:
    """Reads the masks of one graph's attentions; what is found of one that several share is kept. `longest`, `longest_source`: the
    most positions of a sequence and of a source, None where there is no limit."""

    def __init__(
        self,
        graph: Graph,
        evaluate: Evaluate,
        longest: int | None,
        longest_source: int | None,
        taken: Mapping[str, tuple[Ref, int]],
    ) -> None:
        """`taken`: see `taken_places`."""
        self._graph = graph
        self._evaluate = evaluate
        self._longest = longest
        self._longest_source = longest_source
        self._taken = taken
        self.positional = positional_names(graph)
        self._reaches: dict[Hides, Reach] = {}
        self._biases: dict[Ref, Bias] = {}
        self._relatives: dict[Ref, RelativeBias | None] = {}
        self._shown: dict[Hides, bool] = {}

    def read(self, node: Node, parts: Iterable[Hides | Added]) -> Seen:
        """What the masks and what is added to the scores of the attention `node` come to. UnsupportedModel for what is not recognised."""
        seen = Seen()
        for part in parts:
            if isinstance(part, Added):
                self._look(node, seen, part)
            elif self._is_of_queries(part) or not self.shows_all(part):
                self._add(node, seen, self._reach(part))
        return seen

    def _is_of_queries(self, hides: Hides) -> bool:
        return self._graph.types[hides.mask].shape[-2:-1] == (symbol(SEQUENCE),)

    def shows_all(self, hides: Hides) -> bool:
        """Whether the mask hides nothing, and adds nothing to scores."""
        if hides not in self._shown:
            most = {SEQUENCE: self._longest or 1 << 30, SOURCE: self._longest_source or 1 << 30}
            self._shown[hides] = shows_all(self._graph, hides.mask, self._evaluate, most, hides=hides.inverts)
        return self._shown[hides]

    def _add(self, node: Node, seen: Seen, reach: Reach) -> None:
        """A window or a chunk that no sequence fills is none."""
        seen.causal = True
        window, chunk = (
            None if size is None or (self._longest is not None and size >= self._longest) else size
            for size in (reach.window, reach.chunk)
        )
        seen.window = min((w for w in (seen.window, window) if w is not None), default=None)
        if chunk is not None and seen.chunk not in (None, chunk):
            raise refusal(node, "sees chunks of several sizes")
        seen.chunk = seen.chunk if chunk is None else chunk

    def _reach(self, hides: Hides) -> Reach:
        if hides not in self._reaches:
            self._reaches[hides] = visible_reach(
                self._graph, hides.mask, self._evaluate, self._longest, hides=hides.inverts
            )
        return self._reaches[hides]

    def _look(self, node: Node, seen: Seen, added: Added) -> None:
        """What a mask or a bias that is added to the scores lets a position see, and adds to it."""
        type_ = self._graph.types[added.bias]
        if type_.dtype == "bool":
            self._hide(node, seen, Hides(added.bias))
            return
        if symbol(SEQUENCE) not in type_.shape and added.bias.name in self.positional:
            seen.constant = True  # the same for all keys, which a softmax does not see
            return
        if type_.shape[-1:] != (symbol(SEQUENCE),):
            raise refusal(node, f"adds what depends on {added.bias}, {type_}, to its scores")
        if len(type_.shape) > 1 and type_.shape[-2] == symbol(SEQUENCE):
            try:
                reach = self._reach(Hides(added.bias))
            except UnsupportedModel as why:
                parts = hidden_parts(self._graph, added)
                if parts is None:
                    if not self._by_distance(node, seen, added):
                        self._slope(node, seen, added, str(why))
                    return
                for hides in parts[0]:
                    self._hide(node, seen, hides)
                for part in parts[1]:
                    self._look(node, seen, part)
                return
            self._add(node, seen, reach)
        elif added.bias.name in self.positional and self._separate(added.bias):
            seen.biases.append(added)
        else:
            self._slope(node, seen, added, f"the bias {added.bias} depends on more than positions")

    def _hide(self, node: Node, seen: Seen, hides: Hides) -> None:
        """What a mask lets a position see, which may be keys that the model selects."""
        for part in parts_of(self._graph, hides, self.positional):
            found = read_selection(self._graph, part, self.positional, self._taken)
            if found is None:
                self._add(node, seen, self._reach(part))
            elif self._longest is None or found.count < self._longest:
                if seen.selection not in (None, found):
                    raise refusal(node, "selects keys twice")
                seen.selection = found

    def _separate(self, ref: Ref) -> bool:
        """Whether the value at a position is made of that position alone, so that a cache can keep it."""
        part = replace(self._graph, nodes=needed(self._graph, [ref]), outputs=(ref,))
        try:
            require_separate_positions(part)
        except UnsupportedModel:
            return False
        return True

    def _by_distance(self, node: Node, seen: Seen, added: Added) -> bool:
        """Whether the bias is one that is looked up by distance."""
        if added.bias not in self._relatives:
            self._relatives[added.bias] = relative_bias(
                self._graph, added.bias, self._evaluate, self._longest
            )
        found = self._relatives[added.bias]
        if found is None:
            return False
        if added.times != 1 or seen.relative is not None:
            raise refusal(node, "scales a bias by distance, or has two of them")
        seen.relative = found
        return True

    def _slope(self, node: Node, seen: Seen, added: Added, why: str) -> None:
        """A bias that falls with distance, and perhaps a mask in it. UnsupportedModel (`why`) where it depends on more than positions."""
        if added.bias.name not in self.positional:
            raise UnsupportedModel(why)
        if added.bias not in self._biases:
            self._biases[added.bias] = affine_bias(self._graph, added.bias, self._evaluate, self._longest)
        bias = self._biases[added.bias]
        heads = self._heads(node, len(bias.slopes))
        if bias.masks:
            if added.times != 1:
                raise refusal(node, "scales its mask")
            self._add(node, seen, Reach(bias.window))
        own = bias.slopes * heads if len(bias.slopes) == 1 else bias.slopes
        before = seen.slopes or (0.0,) * len(own)
        seen.slopes = tuple(a + added.times * b for a, b in zip(before, own, strict=True))

    def _heads(self, node: Node, found: int) -> int:
        """How many the attention has, of which a bias has `found`."""
        shape = node.results[0].shape
        heads = shape[1] if len(shape) == 4 else heads_of(shape[0])
        if not isinstance(heads, int) or found not in (1, heads):
            raise refusal(node, f"has a bias for {found} heads, and {heads} heads")
        return heads


def refusal(node: Node, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"no KV cache for this model: the attention {node.name} {why}")
