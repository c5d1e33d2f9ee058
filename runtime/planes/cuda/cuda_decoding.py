"""A stage of a served model on CUDA: positions that run singly in batches of one size, pieces of prompts by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.dag.cutting.stage import Stage
from fusion.dag.rewrites.end_to_end import EndToEnd
from fusion.runtime.planes.cuda.fixed_batch import ROWS, batches, cut, gathered
from fusion.runtime.planes.cuda.graph import GraphedRows
from fusion.runtime.planes.cuda.row_attention import served
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.kv_cache import SessionCache
from fusion.runtime.planes.plane import Piece, Tensors
from fusion.runtime.planes.torch_decoding import TorchDecodingStage


class CudaDecodingStage(TorchDecodingStage):
    """Where its attention has a kernel here (`row_attention.served`), batches go through CUDA graphs."""

    def __init__(self, stage: Stage, variables: Tensors, device: str = "cuda") -> None:
        super().__init__(stage, variables, device, fixed_rows=ROWS)
        graph = self._program.graph
        self._graphed: GraphedRows | None = None
        if (
            self.device.type == "cuda"
            and self._layout is not None
            and served(graph)
            and kernels() is not None
        ):
            self._graphed = GraphedRows(self._program, self._variables, tuple(self._slots), self.device)

    def _together(
        self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> list[dict[str, torch.Tensor]]:
        lengths = self._lengths(layout, pieces)
        single = [place for place, piece in enumerate(pieces) if lengths[place] == 1 or piece.singly]
        found: dict[int, dict[str, torch.Tensor]] = {}
        for place in range(len(pieces)):
            if place not in single:
                [found[place]] = super()._together(layout, [pieces[place]], [caches[place]])
        parts: dict[int, list[dict[str, torch.Tensor]]] = {place: [] for place in single}
        for batch in batches([lengths[place] for place in single]):
            places = [single[part.place] for part in batch]
            cuts = [
                cut(pieces[place], part, lengths[place], layout.inputs)
                for place, part in zip(places, batch, strict=True)
            ]
            made = self._batch(layout, cuts, [caches[place] for place in places])
            for place, values in zip(places, made, strict=True):
                parts[place].append(values)
        for place, each in parts.items():
            found[place] = gathered(layout, self._keys, pieces[place], each)
        return [found[place] for place in range(len(pieces))]

    def _batch(
        self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> list[dict[str, torch.Tensor]]:
        """At most ROWS positions, each of which has a result of its own."""
        lengths = self._begin(layout, pieces, caches)
        laid = self._laid(layout, pieces, ROWS)
        if self._graphed is None:
            outputs = self._of_sequences(laid, pieces, caches, lengths, lengths, ROWS)
        else:
            rows = [
                (cache, piece.start + i)
                for piece, cache, length in zip(pieces, caches, lengths, strict=True)
                for i in range(length)
            ]
            outputs = self._graphed.run(laid, *zip(*rows, strict=True))
        return self._parted(layout, outputs, caches, lengths, lengths)
