"""A stage of a served model in torch: pieces of several sessions in one run, keys and values by session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from fusion.dag.cutting.costs import type_bytes
from fusion.dag.cutting.source import SOURCE, Halves, halves
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import bind
from fusion.dag.rewrites.end_to_end import EndToEnd, end_to_end
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.input_sizes import HALF, TORCH_DTYPES
from fusion.runtime.planes.kv_cache import KeptShape, KeptSource, SessionCache
from fusion.runtime.planes.matrices import Matrices
from fusion.runtime.planes.plane import Piece, Tensors
from fusion.runtime.planes.products.fused_rows import fused_rows
from fusion.runtime.planes.products.packed import padded_rows
from fusion.runtime.planes.sequences import Sequences
from fusion.runtime.planes.sessions import Sessions, slot_shapes, state_bytes_of
from fusion.runtime.planes.stage_values import joined, output_keys, positions_of, selected


class TorchDecodingStage(Sessions[SessionCache]):
    """A stage being served. Weights are moved to the device once. A stage without attention to a cache keeps
    nothing between runs. `fixed_rows`: as of `Matrices`."""

    compiles = False

    def __init__(self, stage: Stage, variables: Tensors, device: str = "cpu", fixed_rows: int = 0) -> None:
        super().__init__()
        self.stage = stage
        self.device = torch.device(device)
        matrices = Matrices(stage.graph, variables, self.device, fixed_rows)
        both = halves(stage)
        self._encoder = None if both is None else _Encoder(both, matrices, self.device)
        if both is not None:
            stage = both.decode
        self._slots = slot_shapes(stage.graph)
        self._state_bytes = state_bytes_of(stage.graph)
        layout = end_to_end(stage.graph) if matrices.batch_invariant else None
        self._layout = layout
        self.least_rows = matrices.least_rows  # how many rows run at once at least
        self._by_piece = matrices.by_piece
        self._idle = both is not None and not stage.graph.outputs  # all that is here is an encoder's
        self.together = layout is not None or self._idle  # whether pieces run as one
        products = matrices.products(batched=layout is not None)
        last = layout.last if layout is not None else frozenset[str]()
        cpu = self.device.type == "cpu"
        self._program = compile_graph(
            stage.graph,
            self.device,
            training=False,
            products=products,
            last=last,
            fused=fused_rows(stage.graph, {*products, *last}) if cpu else {},
        )
        # What stands for keys and values of the source is with each session.
        self._variables: tuple[Any, ...] = tuple(
            matrices.prepacked.get(v.name) for v in stage.graph.variables
        )
        if self._slots and layout is None:
            self._program.sizes.require("sequence")
        self._keys = output_keys(stage)
        self.caches = bool(self._slots)
        self.chunks_agree = not _in_half(stage, self._slots)

    def _new(self, capacity: int, source: int) -> SessionCache:
        kept = None if self._encoder is None else self._encoder.kept(source)
        return SessionCache(self._slots, capacity, self.device, kept, self._state_bytes)

    def _retains(self, cache: SessionCache) -> bool:
        return bool(self._slots) and cache.source is None

    def run(self, pieces: Sequence[Piece]) -> list[dict[str, torch.Tensor]]:
        """ValueError for an unknown session, one that comes twice, a gap before `start`, positions beyond the capacity, or
        several positions `singly` where pieces do not run together."""
        caches = [self._cache(piece.session) for piece in pieces]
        if len(set(map(id, caches))) < len(caches):
            raise ValueError("a session runs one piece at a time")
        with torch.inference_mode():
            encoded = {
                place: self._encode(piece, cache)
                for place, (piece, cache) in enumerate(zip(pieces, caches, strict=True))
                if piece.start < 0
            }
            rest = [place for place in range(len(pieces)) if place not in encoded]
            found = self._decode([pieces[place] for place in rest], [caches[place] for place in rest])
            return [encoded[place] if place in encoded else next(found) for place in range(len(pieces))]

    def _encode(self, piece: Piece, cache: SessionCache) -> dict[str, torch.Tensor]:
        if self._encoder is None or cache.source is None:
            raise ValueError("the model reads no source")
        return self._encoder.run(piece, cache.source)

    def _decode(
        self, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> Iterator[dict[str, torch.Tensor]]:
        if not pieces:
            return iter(())
        if self._idle:
            return iter([{} for _ in pieces])
        if self._layout is not None:
            return iter(self._together(self._layout, pieces, caches))
        return iter([self._alone(piece, cache) for piece, cache in zip(pieces, caches, strict=True)])

    def _alone(self, piece: Piece, cache: SessionCache) -> dict[str, torch.Tensor]:
        if piece.singly:
            raise ValueError("this stage runs positions singly one after another only")
        given = selected(self._program.inputs, piece.inputs, self.device)
        if self._slots:
            cache.begin(piece.start, self._program.sizes.size(given, "sequence"))
        outputs = self._program.run(given, self._variables, cache)
        if self._slots:
            cache.commit()
        return dict(zip(self._keys, outputs, strict=True))

    def _together(
        self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> list[dict[str, torch.Tensor]]:
        lengths = self._begin(layout, pieces, caches)
        rows = padded_rows(sum(lengths), min_rows=self.least_rows)
        laid, shown = self._laid(layout, pieces, rows), [piece.shown for piece in pieces]
        outputs = self._of_sequences(laid, pieces, caches, lengths, shown, rows)
        return self._parted(layout, outputs, caches, lengths, shown)

    def _lengths(self, layout: EndToEnd, pieces: Sequence[Piece]) -> list[int]:
        """How many positions each has."""
        names = self._program.inputs
        along = [layout.inputs[name] for name in names]
        return [positions_of(selected(names, piece.inputs), along, names) for piece in pieces]

    def _begin(self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]) -> list[int]:
        """The pieces run next; how many positions each has."""
        lengths = self._lengths(layout, pieces)
        if self._slots:
            for piece, cache, length in zip(pieces, caches, lengths, strict=True):
                cache.begin(piece.start, length, singly=piece.singly)
        return lengths

    def _laid(self, layout: EndToEnd, pieces: Sequence[Piece], rows: int) -> list[torch.Tensor]:
        """The inputs of the pieces end to end, and of padding up to so many positions."""
        names = self._program.inputs
        given = [selected(names, piece.inputs) for piece in pieces]
        found = []
        for name, *parts in zip(names, *given, strict=True):
            axis, each = layout.inputs[name]
            missing = rows - sum(part.shape[axis] for part in parts) // each
            found.append(joined(parts, axis, each, missing))
        return found

    def _parted(
        self,
        layout: EndToEnd,
        outputs: Sequence[torch.Tensor],
        caches: Sequence[SessionCache],
        lengths: Sequence[int],
        shown: Sequence[int],
    ) -> list[dict[str, torch.Tensor]]:
        """The run has ended: what each piece gets."""
        if self._slots:
            for cache in caches:
                cache.commit()
        found: list[dict[str, torch.Tensor]] = [{} for _ in lengths]
        for key, value, (axis, each), end in zip(
            self._keys, outputs, layout.outputs, layout.ends, strict=True
        ):
            at = 0
            for result, count in zip(found, shown if end else lengths, strict=True):
                result[key] = value.narrow(axis, at * each, count * each)
                at += count
        return found

    def _of_sequences(
        self,
        laid: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        caches: Sequence[SessionCache],
        lengths: Sequence[int],
        shown: Sequence[int],
        rows: int,
    ) -> tuple[torch.Tensor, ...]:
        """The attention of each piece by itself."""
        ends = [
            end - n
            for end, count in zip(accumulate(lengths), shown, strict=True)
            for n in range(count, 0, -1)
        ]
        least = rows if len(ends) == sum(lengths) else padded_rows(len(ends), min_rows=self.least_rows)
        ends += ends[-1:] * (least - len(ends))
        self._by_piece.begin(lengths, [piece.singly for piece in pieces], rows)
        state = Sequences(caches, lengths, rows, torch.tensor(ends, device=self.device))
        return self._program.run([value.to(self.device) for value in laid], self._variables, state)


def _in_half(stage: Stage, slots: Mapping[int, Sequence[KeptShape]]) -> bool:
    """Whether the model's attention is in half precision, which rounds, on a CPU, by how many queries there are; of a stage
    without attention by what it hands on."""
    handed = (TORCH_DTYPES[stage.graph.types[ref].dtype] for ref in stage.graph.outputs)
    return not HALF.isdisjoint({*handed, *(shape.dtype for shapes in slots.values() for shape in shapes)})


class _Encoder:
    """The half of a stage that is run once for a session."""

    def __init__(self, both: Halves, matrices: Matrices, device: torch.device) -> None:
        stage = both.encode
        self._device = device
        self._slots = both.slots
        self._types = [stage.graph.types[ref] for ref in both.keys_and_values]
        self._keys = output_keys(stage)
        products = matrices.products(batched=False)
        self._program = compile_graph(
            stage.graph, device, training=False, products=products, passed=(SOURCE,)
        )
        self._variables = tuple(matrices.prepacked[v.name] for v in stage.graph.variables)

    def kept(self, length: int) -> KeptSource:
        sizes = {"batch": 1, SOURCE: length}
        bound = (replace(t, shape=tuple(bind(d, sizes) for d in t.shape)) for t in self._types)
        return KeptSource(length, sum(map(type_bytes, bound)))

    def run(self, piece: Piece, kept: KeptSource) -> dict[str, torch.Tensor]:
        if piece.start != -kept.length:
            raise ValueError(f"the session's source has {kept.length} positions, not {-piece.start}")
        given = selected(self._program.inputs, piece.inputs, self._device)
        outputs = self._program.run(given, self._variables, None, {SOURCE: kept.length})
        sends, handed = outputs[: len(self._keys)], outputs[len(self._keys) :]
        # Laid out alike wherever they were made: what comes over the wire is.
        own = [value.clone(memory_format=torch.contiguous_format) for value in handed]
        kept.kept = dict(zip(self._slots, zip(own[::2], own[1::2], strict=True), strict=True))
        return dict(zip(self._keys, sends, strict=True))
