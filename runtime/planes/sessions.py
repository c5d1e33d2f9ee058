"""The sessions of a decoding stage: the shapes of their caches, and the table of open sessions and retained caches."""

from __future__ import annotations

from typing import Generic, Protocol, Self, TypeVar

import torch

from fusion.dag.cutting.source import SOURCE_ATTENTIONS
from fusion.dag.ir.graph import Graph
from fusion.dag.ir.opset import kept
from fusion.dag.ir.opset_recurrence import state_bytes
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.kv_cache import CacheShape


def slot_shapes(graph: Graph) -> dict[int, tuple[CacheShape, ...]]:
    """The shapes of the tensors in each slot of the KV cache."""
    shapes_by_slot: dict[int, tuple[CacheShape, ...]] = {}
    for node in graph.nodes:
        cache = kept(node)
        if cache is None or node.op in SOURCE_ATTENTIONS:
            continue
        slot, values = cache
        if slot in shapes_by_slot:
            raise JobError(f"two attention nodes share slot {slot} of the KV cache")
        shapes = []
        for type_ in (graph.types[ref] for ref in values):
            heads, width = type_.shape[1], type_.shape[3]
            if not (isinstance(heads, int) and isinstance(width, int)):
                raise JobError(f"the heads of attention slot {slot} have no fixed size")
            shapes.append(CacheShape(heads, width, TORCH_DTYPES[type_.dtype]))
        shapes_by_slot[slot] = tuple(shapes)
    return shapes_by_slot


def state_bytes_of(graph: Graph) -> int:
    """The bytes of the states of recurrences, which do not grow with positions."""
    return sum(state_bytes(graph.types, node) for node in graph.nodes)


class Cache(Protocol):
    """The cache of one session."""

    capacity: int  # positions at most

    @property
    def bytes(self) -> int:
        """Reserved bytes."""

    def reserve(self, positions: int) -> None: ...

    def cut(self, positions: int) -> int: ...

    def copy(self, other: Self, positions: int) -> int: ...


C = TypeVar("C", bound=Cache)


class Sessions(Generic[C]):
    """The part of a `DecodingStage` that manages sessions, for caches of any plane. The methods are those of the protocol."""

    def __init__(self) -> None:
        self._sessions: dict[str, C] = {}
        self._retained: dict[int, C] = {}

    def _new(self, capacity: int, source: int) -> C:
        """An empty cache."""
        raise NotImplementedError

    def _retains(self, cache: C) -> bool:
        """Whether the cache may be reused by another session."""
        raise NotImplementedError

    def _cache(self, session: str) -> C:
        cache = self._sessions.get(session)
        if cache is None:
            raise ValueError(f"session {session!r:.80} is not open")
        return cache

    def open(self, session: str, capacity: int, source: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: at least 1 position, not {capacity}")
        self._sessions[session] = self._new(capacity, source)

    def reserve(self, session: str, positions: int) -> bool:
        cache = self._sessions.get(session)
        if cache is None:
            return False
        before = cache.bytes
        cache.reserve(positions)
        return cache.bytes != before

    def close(self, session: str) -> None:
        self._sessions.pop(session, None)

    def retain(self, session: str, name: int, positions: int) -> tuple[int, int]:
        cache = self._sessions.pop(session, None)
        if cache is None or not self._retains(cache) or not (length := cache.cut(positions)):
            return 0, 0
        self._retained[name] = cache
        return length, cache.bytes

    def resume(self, session: str, capacity: int, name: int, positions: int) -> int:
        self.open(session, capacity)
        cache = self._retained.pop(name, None)
        if cache is None:
            return 0
        cache.capacity = capacity
        self._sessions[session] = cache
        return cache.cut(min(positions, capacity))

    def copy(self, source: int | str, session: str, positions: int) -> int:
        other = self._sessions.get(source) if isinstance(source, str) else self._retained.get(source)
        if other is None:
            return 0
        with torch.inference_mode():
            return self._cache(session).copy(other, positions)

    def forget(self, name: int) -> None:
        self._retained.pop(name, None)

    def clear(self) -> None:
        self._sessions.clear()
        self._retained.clear()

    def used_bytes(self) -> int:
        # Also called in the event loop's thread, while the worker's thread opens and closes sessions.
        return sum(cache.bytes for cache in list(self._sessions.values())) + self.retained_bytes()

    def retained_bytes(self) -> int:
        return sum(cache.bytes for cache in list(self._retained.values()))
