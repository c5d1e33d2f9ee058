"""A stage of a served model in torch: pieces of several sessions in one run, keys and values by session."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Graph
from fusion.dag.ir.opset import kept
from fusion.dag.rewrites.end_to_end import Along, EndToEnd, end_to_end
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.codegen import TORCH_DTYPES, compile_graph
from fusion.runtime.planes.kv_cache import KeptShape, SessionCache
from fusion.runtime.planes.matrices import Matrices
from fusion.runtime.planes.plane import Piece, Tensors
from fusion.runtime.planes.products.packed import padded
from fusion.runtime.planes.sequences import Sequences
from fusion.runtime.planes.stage_values import output_keys, selected


class TorchDecodingStage:
    """A stage being served. Weights are moved to the device once; KV memory is reserved for each session within
    `memory_bytes` (None: no limit). A stage without attention to a cache keeps nothing between runs."""

    def __init__(self, stage: Stage, variables: Tensors, device: str = "cpu") -> None:
        self.stage = stage
        self.device = torch.device(device)
        self._slots = _slot_shapes(stage.graph)
        matrices = Matrices(stage.graph, variables, self.device)
        layout = end_to_end(stage.graph) if matrices.rows_agree else None
        self._layout = layout
        self.least_rows = matrices.least_rows  # how many rows run at once at least
        self.together = layout is not None  # whether pieces run as one
        self._program = compile_graph(
            stage.graph,
            self.device,
            training=False,
            products=matrices.products(together=layout is not None),
            last=layout.last if layout is not None else frozenset(),
        )
        self._variables = tuple(matrices.laid_out[v.name] for v in stage.graph.variables)
        if self._slots and layout is None:
            self._program.require("sequence")
        self._keys = output_keys(stage)
        self.caches = bool(self._slots)
        self._sessions: dict[str, SessionCache] = {}
        self._retained: dict[int, SessionCache] = {}

    def open(self, session: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: at least 1 position, not {capacity}")
        self._sessions[session] = SessionCache(self._slots, capacity, self.device)

    def reserve(self, session: str, positions: int) -> bool:
        cache = self._sessions.get(session)
        if cache is None:
            return False
        before = cache.bytes
        cache.reserve(positions)
        return cache.bytes != before

    def run(self, pieces: Sequence[Piece]) -> list[dict[str, torch.Tensor]]:
        """ValueError for an unknown session, one that comes twice, a gap before `start`, positions beyond the capacity, or
        several positions `singly` where pieces do not run together."""
        caches = [self._cache(piece.session) for piece in pieces]
        if len(set(map(id, caches))) < len(caches):
            raise ValueError("a session runs one piece at a time")
        with torch.inference_mode():
            if self._layout is not None:
                return self._together(self._layout, pieces, caches)
            return [self._alone(piece, cache) for piece, cache in zip(pieces, caches, strict=True)]

    def _cache(self, session: str) -> SessionCache:
        cache = self._sessions.get(session)
        if cache is None:
            raise ValueError(f"session {session!r:.80} is not open")
        return cache

    def _alone(self, piece: Piece, cache: SessionCache) -> dict[str, torch.Tensor]:
        if piece.singly:
            raise ValueError("this stage runs positions singly one after another only")
        given = selected(self._program, piece.inputs, self.device)
        if self._slots:
            cache.begin(piece.start, self._program.size(given, "sequence"))
        outputs = self._program.run(given, self._variables, cache)
        if self._slots:
            cache.commit()
        return dict(zip(self._keys, outputs, strict=True))

    def _together(
        self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> list[dict[str, torch.Tensor]]:
        given = [selected(self._program, piece.inputs, self.device) for piece in pieces]
        along = [layout.inputs[name] for name in self._program.inputs]
        lengths = [_positions(each, along, self._program.inputs) for each in given]
        if self._slots:
            for piece, cache, length in zip(pieces, caches, lengths, strict=True):
                cache.begin(piece.start, length, singly=piece.singly)
        total = sum(lengths)
        rows = padded(total, least=self.least_rows)
        joined = [
            _joined(parts, axis, each, rows - total)
            for (axis, each), *parts in zip(along, *given, strict=True)
        ]
        shown = [length if piece.singly else 1 for piece, length in zip(pieces, lengths, strict=True)]
        ends = [
            end - n
            for end, count in zip(accumulate(lengths), shown, strict=True)
            for n in range(count, 0, -1)
        ]
        ends += ends[-1:] * (padded(len(ends), least=self.least_rows) - len(ends))
        state = Sequences(caches, lengths, rows, torch.tensor(ends, device=self.device))
        outputs = self._program.run(joined, self._variables, state)
        if self._slots:
            for cache in caches:
                cache.commit()
        found: list[dict[str, torch.Tensor]] = [{} for _ in pieces]
        for key, value, (axis, each), end in zip(
            self._keys, outputs, layout.outputs, layout.ends, strict=True
        ):
            at = 0
            for result, count in zip(found, shown if end else lengths, strict=True):
                result[key] = value.narrow(axis, at * each, count * each)
                at += count
        return found

    def close(self, session: str) -> None:
        self._sessions.pop(session, None)

    def retain(self, session: str, name: int, positions: int) -> tuple[int, int]:
        cache = self._sessions.pop(session, None)
        if cache is None or not self._slots or not (held := cache.cut(positions)):
            return 0, 0
        self._retained[name] = cache
        return held, cache.bytes

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
        return sum(cache.bytes for cache in self._sessions.values()) + self.retained_bytes()

    def retained_bytes(self) -> int:
        return sum(cache.bytes for cache in self._retained.values())


def _positions(values: Sequence[torch.Tensor], along: Sequence[Along], names: Sequence[str]) -> int:
    """How many positions a piece has. ValueError where its values do not agree, or one has a part of a position."""
    found = set()
    for value, (axis, each), name in zip(values, along, names, strict=True):
        if value.dim() <= axis or value.shape[axis] % each:
            raise ValueError(f"input {name} has shape {tuple(value.shape)}: not {each} rows a position")
        found.add(value.shape[axis] // each)
    if len(found) > 1:
        raise ValueError(f"the inputs are of {min(found)} and of {max(found)} positions")
    return found.pop()


def _joined(parts: Sequence[torch.Tensor], axis: int, each: int, padding: int) -> torch.Tensor:
    """The pieces one behind the other, and the last position, of `each` rows, again as often as positions are missing."""
    if padding:
        length = parts[-1].shape[axis]
        last = parts[-1].narrow(axis, length - each, each)
        parts = [*parts, *[last] * padding]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def _slot_shapes(graph: Graph) -> dict[int, tuple[KeptShape, ...]]:
    """What each attention of the stage that has a cache keeps there."""
    found: dict[int, tuple[KeptShape, ...]] = {}
    for node in graph.nodes:
        cache = kept(node)
        if cache is None:
            continue
        slot, values = cache
        if slot in found:
            raise JobError(f"two attention nodes share slot {slot} of the KV cache")
        shapes = []
        for type_ in (graph.types[ref] for ref in values):
            heads, width = type_.shape[1], type_.shape[3]
            if not (isinstance(heads, int) and isinstance(width, int)):
                raise JobError(f"the heads of attention slot {slot} have no fixed size")
            shapes.append(KeptShape(heads, width, TORCH_DTYPES[type_.dtype]))
        found[slot] = tuple(shapes)
    return found
