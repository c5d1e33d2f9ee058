"""A decoding stage in torch: pieces of several sessions in one run, with a KV cache for each session."""

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
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.kv_cache import CacheShape, SessionCache, SourceCache
from fusion.runtime.planes.matrices import Matrices
from fusion.runtime.planes.plane import Piece, Tensors
from fusion.runtime.planes.products.fused_rows import fused_rows
from fusion.runtime.planes.products.packed import padded_rows
from fusion.runtime.planes.sequences import Sequences
from fusion.runtime.planes.sessions import Sessions, slot_shapes, state_bytes_of
from fusion.runtime.planes.stage_values import concatenated, count_positions, ordered_inputs, output_keys


class TorchDecodingStage(Sessions[SessionCache]):
    """A decoding stage. Weights are moved to the device once. `fixed_rows`: as in `Matrices`."""

    compiles = False

    def __init__(self, stage: Stage, variables: Tensors, device: str = "cpu", fixed_rows: int = 0) -> None:
        super().__init__()
        self.stage = stage
        self.device = torch.device(device)
        matrices = Matrices(stage.graph, variables, self.device, fixed_rows)
        encode_decode = halves(stage)
        self._encoder = None if encode_decode is None else _Encoder(encode_decode, matrices, self.device)
        if encode_decode is not None:
            stage = encode_decode.decode
        self._slots = slot_shapes(stage.graph)
        self._state_bytes = state_bytes_of(stage.graph)
        layout = end_to_end(stage.graph) if matrices.batch_invariant else None
        self._layout = layout
        self.least_rows = matrices.least_rows  # of a batch, at least
        self._by_piece = matrices.by_piece
        self._only_encodes = (
            encode_decode is not None and not stage.graph.outputs
        )  # all nodes belong to the encoder
        self.batched = layout is not None or self._only_encodes
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
        # Variables that stand for keys and values of the source are None: each session has its own.
        self._variables: tuple[Any, ...] = tuple(
            matrices.prepacked.get(v.name) for v in stage.graph.variables
        )
        if self._slots and layout is None:
            self._program.sizes.require("sequence")
        self._keys = output_keys(stage)
        self.has_cache = bool(self._slots)
        self.chunk_invariant = not _in_half(stage, self._slots)

    def _new(self, capacity: int, source: int) -> SessionCache:
        source_cache = None if self._encoder is None else self._encoder.new_cache(source)
        return SessionCache(self._slots, capacity, self.device, source_cache, self._state_bytes)

    def _retains(self, cache: SessionCache) -> bool:
        return bool(self._slots) and cache.source is None

    def run(self, pieces: Sequence[Piece]) -> list[dict[str, torch.Tensor]]:
        """ValueError for a session that is unknown or comes twice, a gap before `start`, positions beyond the capacity, or several
        positions `singly` where pieces are not batched."""
        caches = [self._cache(piece.session) for piece in pieces]
        if len(set(map(id, caches))) < len(caches):
            raise ValueError("a session runs one piece at a time")
        with torch.inference_mode():
            encoded = {
                index: self._encode(piece, cache)
                for index, (piece, cache) in enumerate(zip(pieces, caches, strict=True))
                if piece.start < 0
            }
            to_decode = [index for index in range(len(pieces)) if index not in encoded]
            decoded = self._decode(
                [pieces[index] for index in to_decode], [caches[index] for index in to_decode]
            )
            return [encoded[index] if index in encoded else next(decoded) for index in range(len(pieces))]

    def _encode(self, piece: Piece, cache: SessionCache) -> dict[str, torch.Tensor]:
        if self._encoder is None or cache.source is None:
            raise ValueError("the model reads no source")
        return self._encoder.run(piece, cache.source)

    def _decode(
        self, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> Iterator[dict[str, torch.Tensor]]:
        if not pieces:
            return iter(())
        if self._only_encodes:
            return iter([{} for _ in pieces])
        if self._layout is not None:
            return iter(self._run_batched(self._layout, pieces, caches))
        return iter([self._run_single(piece, cache) for piece, cache in zip(pieces, caches, strict=True)])

    def _run_single(self, piece: Piece, cache: SessionCache) -> dict[str, torch.Tensor]:
        if piece.singly:
            raise ValueError("this stage runs positions singly one after another only")
        inputs = ordered_inputs(self._program.inputs, piece.inputs, self.device)
        if self._slots:
            cache.begin(piece.start, self._program.sizes.size(inputs, "sequence"))
        outputs = self._program.run(inputs, self._variables, cache)
        if self._slots:
            cache.commit()
        return dict(zip(self._keys, outputs, strict=True))

    def _run_batched(
        self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> list[dict[str, torch.Tensor]]:
        lengths = self._begin(layout, pieces, caches)
        rows = padded_rows(sum(lengths), min_rows=self.least_rows)
        inputs, logit_counts = (
            self._concatenated_inputs(layout, pieces, rows),
            [piece.logit_positions for piece in pieces],
        )
        outputs = self._run_program(inputs, pieces, caches, lengths, logit_counts, rows)
        return self._split_outputs(layout, outputs, caches, lengths, logit_counts)

    def _lengths(self, layout: EndToEnd, pieces: Sequence[Piece]) -> list[int]:
        """The number of positions of each piece."""
        names = self._program.inputs
        axes = [layout.inputs[name] for name in names]
        return [count_positions(ordered_inputs(names, piece.inputs), axes, names) for piece in pieces]

    def _begin(self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]) -> list[int]:
        """Begin a run of the pieces in their caches. Returns the number of positions of each."""
        lengths = self._lengths(layout, pieces)
        if self._slots:
            for piece, cache, length in zip(pieces, caches, lengths, strict=True):
                cache.begin(piece.start, length, singly=piece.singly)
        return lengths

    def _concatenated_inputs(
        self, layout: EndToEnd, pieces: Sequence[Piece], rows: int
    ) -> list[torch.Tensor]:
        """The inputs of all pieces, concatenated and padded to `rows` positions."""
        names = self._program.inputs
        inputs_by_piece = [ordered_inputs(names, piece.inputs) for piece in pieces]
        batched = []
        for name, *parts in zip(names, *inputs_by_piece, strict=True):
            axis, rows_per_position = layout.inputs[name]
            missing = rows - sum(part.shape[axis] for part in parts) // rows_per_position
            batched.append(concatenated(parts, axis, rows_per_position, missing))
        return batched

    def _split_outputs(
        self,
        layout: EndToEnd,
        outputs: Sequence[torch.Tensor],
        caches: Sequence[SessionCache],
        lengths: Sequence[int],
        logit_counts: Sequence[int],
    ) -> list[dict[str, torch.Tensor]]:
        """Commit the run to the caches, and split the outputs by piece."""
        if self._slots:
            for cache in caches:
                cache.commit()
        results: list[dict[str, torch.Tensor]] = [{} for _ in lengths]
        for key, value, (axis, rows), only_logit_rows in zip(
            self._keys, outputs, layout.outputs, layout.ends, strict=True
        ):
            first = 0
            for result, count in zip(results, logit_counts if only_logit_rows else lengths, strict=True):
                result[key] = value.narrow(axis, first * rows, count * rows)
                first += count
        return results

    def _run_program(
        self,
        inputs: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        caches: Sequence[SessionCache],
        lengths: Sequence[int],
        logit_counts: Sequence[int],
        rows: int,
    ) -> tuple[torch.Tensor, ...]:
        """Run the program on concatenated inputs; each piece attends to its own cache."""
        logit_rows = [
            end - n
            for end, count in zip(accumulate(lengths), logit_counts, strict=True)
            for n in range(count, 0, -1)
        ]
        padded_count = (
            rows
            if len(logit_rows) == sum(lengths)
            else padded_rows(len(logit_rows), min_rows=self.least_rows)
        )
        logit_rows += logit_rows[-1:] * (padded_count - len(logit_rows))
        self._by_piece.begin(lengths, [piece.singly for piece in pieces], rows)
        state = Sequences(caches, lengths, rows, torch.tensor(logit_rows, device=self.device))
        return self._program.run([value.to(self.device) for value in inputs], self._variables, state)


def _in_half(stage: Stage, slots: Mapping[int, Sequence[CacheShape]]) -> bool:
    """Whether attention is in half precision, where it rounds by the number of queries on a CPU; for a stage without attention, whether an
    output is."""
    output_dtypes = (TORCH_DTYPES[stage.graph.types[ref].dtype] for ref in stage.graph.outputs)
    dtypes = {*output_dtypes, *(shape.dtype for shapes in slots.values() for shape in shapes)}
    return any(dtype.is_floating_point and dtype.itemsize == 2 for dtype in dtypes)


class _Encoder:
    """The encoder of a stage, which runs once a session."""

    def __init__(self, encode_decode: Halves, matrices: Matrices, device: torch.device) -> None:
        stage = encode_decode.encode
        self._device = device
        self._slots = encode_decode.slots
        self._types = [stage.graph.types[ref] for ref in encode_decode.keys_and_values]
        self._keys = output_keys(stage)
        products = matrices.products(batched=False)
        self._program = compile_graph(
            stage.graph, device, training=False, products=products, passed=(SOURCE,)
        )
        self._variables = tuple(matrices.prepacked[v.name] for v in stage.graph.variables)

    def new_cache(self, length: int) -> SourceCache:
        sizes = {"batch": 1, SOURCE: length}
        bound = (replace(t, shape=tuple(bind(d, sizes) for d in t.shape)) for t in self._types)
        return SourceCache(length, sum(map(type_bytes, bound)))

    def run(self, piece: Piece, cache: SourceCache) -> dict[str, torch.Tensor]:
        if piece.start != -cache.length:
            raise ValueError(f"the session's source has {cache.length} positions, not {-piece.start}")
        inputs = ordered_inputs(self._program.inputs, piece.inputs, self._device)
        outputs = self._program.run(inputs, self._variables, None, {SOURCE: cache.length})
        sends, handed = outputs[: len(self._keys)], outputs[len(self._keys) :]
        # Contiguous, as tensors that come over the wire are: the layout may change bits.
        contiguous = [value.clone(memory_format=torch.contiguous_format) for value in handed]
        cache.keys_and_values = dict(
            zip(self._slots, zip(contiguous[::2], contiguous[1::2], strict=True), strict=True)
        )
        return dict(zip(self._keys, sends, strict=True))
