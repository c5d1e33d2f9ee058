"""The state of a run of single positions, each of which attends to the cache of its own session, all of them in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.ir.opset import kept
from fusion.runtime.planes.attention import Scored
from fusion.runtime.planes.cuda.fixed_batch import ROWS
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.kv_cache import SessionCache
from fusion.runtime.planes.torch_ops import STATEFUL

_WINDOW = {"fusion.cached_attention": 5, "fusion.cached_attention_scored": 7}  # the place of this argument
KEYS_AND_VALUES = 2  # tensors of a cache
# A kernel is compiled for each kind of attention, for a second or more, and a model may be a stranger's.
MOST_KINDS, WIDEST_HEAD = 8, 256


def served(graph: Graph) -> bool:
    """Whether attention to keys and values is all the state that the graph's nodes read, and of kinds that there is a kernel for."""
    nodes = [node for node in graph.nodes if node.op in STATEFUL]
    if any(node.op not in _WINDOW for node in nodes):
        return False
    kinds = {_kind(graph, node) for node in nodes}
    widest = max((width for kind in kinds for _, width in kind[:3]), default=0)
    keeps = (cache for node in nodes if (cache := kept(node)) is not None)
    plain = all(len(values) == KEYS_AND_VALUES for _, values in keeps)
    return plain and len(kinds) <= MOST_KINDS and widest <= WIDEST_HEAD


def _kind(graph: Graph, node: Node) -> tuple[Any, ...]:
    """What a kernel is compiled for: (heads, width) of query, key and value, the window, the operator. Heads and widths have fixed
    sizes (`fusion.runtime.planes.sessions.slot_shapes`)."""
    shapes = [graph.types[arg].shape for arg in node.args[:3] if isinstance(arg, Ref)]
    return (*((shape[1], shape[3]) for shape in shapes), node.args[_WINDOW[node.op]], node.op)


class RowAttention:
    """`slots`: of the attention nodes, in the order of what caches keep."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        made = kernels()
        assert made is not None
        found = made.attention
        self._kernels = found
        self._place = {slot: place for place, slot in enumerate(slots)}
        size = (len(slots) * found.ENTRY + 1) * ROWS
        self._host = torch.zeros(size, dtype=torch.int64)
        self._there = torch.zeros(size, dtype=torch.int64, device=device)
        self._table = self._there[ROWS:].view(len(slots), ROWS, found.ENTRY)
        self._positions = self._there[:ROWS]
        self._slopes: dict[Sequence[float], torch.Tensor] = {}
        self.chunks = 1
        self.clear()

    def clear(self) -> None:
        """All rows are padding."""
        self._host[:ROWS] = -1
        self._there.copy_(self._host)

    def begin(self, caches: Sequence[SessionCache], positions: Sequence[int]) -> int:
        """These rows run next, at these positions of theirs: how many chunks of keys the longest has, rounded up to a power of
        two."""
        count = len(positions)
        self._host[:count] = torch.tensor(positions)
        self._host[count:ROWS] = -1
        if self._place:
            table = self._host[ROWS:].view(self._table.shape)
            table[:, :count] = torch.stack([each.addresses for each in caches], 1)
        self._there.copy_(self._host)
        longest: int = max(positions) // self._kernels.CHUNK
        return 1 << longest.bit_length()

    def attend(
        self,
        query: torch.Tensor,  # (1, heads, ROWS, width)
        new: Sequence[torch.Tensor],  # key and value, each (1, key heads, ROWS, width)
        slot: int,
        scale: float | None,
        window: int | None,
        scored: Scored | None = None,
    ) -> torch.Tensor:
        scored = Scored() if scored is None else scored
        found: torch.Tensor = self._kernels.attend(
            *(query, *new, self._table[self._place[slot]], self._positions, self.chunks, scale, window),
            *(scored.softcap, self._sloped(scored.slopes), scored.sinks),
        )
        return found

    def _sloped(self, slopes: Sequence[float] | None) -> torch.Tensor | None:
        if slopes is not None and slopes not in self._slopes:
            self._slopes[slopes] = torch.tensor(slopes, dtype=torch.float32, device=self._there.device)
        return None if slopes is None else self._slopes[slopes]

    def last(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """Every row is the last one of its own."""
        return values
