"""The state of a run of single positions: each attends to the cache of its session, all in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.ir.opset import kept
from fusion.runtime.planes.attention import ScoreMods
from fusion.runtime.planes.cuda.fixed_batch import ROWS
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.kv_cache import SessionCache
from fusion.runtime.planes.torch_ops import STATEFUL

_WINDOW_ARGUMENT = {
    "fusion.cached_attention": 5,
    "fusion.cached_attention_scored": 7,
}  # the index of this argument
KEYS_AND_VALUES = 2  # tensors of a cache
# A kernel is compiled for each kind of attention, for a second or more, and models are untrusted.
MAX_KINDS, MAX_HEAD_WIDTH = 8, 256


def is_supported(graph: Graph) -> bool:
    """Whether the graph's only state is attention to keys and values, of kinds that the kernels support."""
    nodes = [node for node in graph.nodes if node.op in STATEFUL]
    if any(node.op not in _WINDOW_ARGUMENT for node in nodes):
        return False
    kinds = {_kernel_key(graph, node) for node in nodes}
    widest = max((width for kind in kinds for _, width in kind[:3]), default=0)
    caches = (cache for node in nodes if (cache := kept(node)) is not None)
    only_keys_and_values = all(len(values) == KEYS_AND_VALUES for _, values in caches)
    return only_keys_and_values and len(kinds) <= MAX_KINDS and widest <= MAX_HEAD_WIDTH


def _kernel_key(graph: Graph, node: Node) -> tuple[Any, ...]:
    """What a kernel is compiled for: (heads, width) of query, key and value, the window, the operator. Heads and widths have fixed sizes
    (`fusion.runtime.planes.sessions.slot_shapes`)."""
    shapes = [graph.types[arg].shape for arg in node.args[:3] if isinstance(arg, Ref)]
    return (*((shape[1], shape[3]) for shape in shapes), node.args[_WINDOW_ARGUMENT[node.op]], node.op)


class RowAttention:
    """`slots`: of the attention nodes, in the order of the caches."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        available = kernels()
        assert available is not None
        attention_kernels = available.attention
        self._kernels = attention_kernels
        self._index = {slot: index for index, slot in enumerate(slots)}
        size = (len(slots) * attention_kernels.ENTRY + 1) * ROWS
        self._on_host = torch.zeros(size, dtype=torch.int64)
        self._on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self._table = self._on_device[ROWS:].view(len(slots), ROWS, attention_kernels.ENTRY)
        self._positions = self._on_device[:ROWS]
        self._slopes: dict[Sequence[float], torch.Tensor] = {}
        self.chunks = 1
        self.clear()

    def clear(self) -> None:
        """Make all rows padding."""
        self._on_host[:ROWS] = -1
        self._on_device.copy_(self._on_host)

    def begin(self, caches: Sequence[SessionCache], positions: Sequence[int]) -> int:
        """Set the caches and positions of the rows of the next run. Returns the number of key chunks of the longest, rounded up to a power
        of two."""
        count = len(positions)
        self._on_host[:count] = torch.tensor(positions)
        self._on_host[count:ROWS] = -1
        if self._index:
            table = self._on_host[ROWS:].view(self._table.shape)
            table[:, :count] = torch.stack([each.addresses for each in caches], 1)
        self._on_device.copy_(self._on_host)
        longest: int = max(positions) // self._kernels.CHUNK
        return 1 << longest.bit_length()

    def attend(
        self,
        query: torch.Tensor,  # (1, heads, ROWS, width)
        new: Sequence[torch.Tensor],  # key and value, each (1, key heads, ROWS, width)
        slot: int,
        scale: float | None,
        window: int | None,
        score_mods: ScoreMods | None = None,
    ) -> torch.Tensor:
        score_mods = ScoreMods() if score_mods is None else score_mods
        output: torch.Tensor = self._kernels.attend(
            *(query, *new, self._table[self._index[slot]], self._positions, self.chunks, scale, window),
            *(score_mods.softcap, self._slope_tensor(score_mods.slopes), score_mods.sinks),
        )
        return output

    def _slope_tensor(self, slopes: Sequence[float] | None) -> torch.Tensor | None:
        if slopes is not None and slopes not in self._slopes:
            self._slopes[slopes] = torch.tensor(slopes, dtype=torch.float32, device=self._on_device.device)
        return None if slopes is None else self._slopes[slopes]

    def last(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """All rows: each is the last of its session."""
        return values
