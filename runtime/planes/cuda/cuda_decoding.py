"""A decoding stage on CUDA: single positions run in batches of a fixed size, prefill pieces by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.dag.cutting.stage import Stage
from fusion.dag.rewrites.end_to_end import EndToEnd
from fusion.runtime.planes.cuda.fixed_batch import ROWS, batches, cut, merged
from fusion.runtime.planes.cuda.graph import GraphedRows
from fusion.runtime.planes.cuda.row_attention import is_supported
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.kv_cache import SessionCache
from fusion.runtime.planes.plane import Piece, Tensors
from fusion.runtime.planes.torch_decoding import TorchDecodingStage


class CudaDecodingStage(TorchDecodingStage):
    """Fixed batches are replayed as CUDA graphs where the kernels support the attention (`row_attention.is_supported`)."""

    def __init__(self, stage: Stage, variables: Tensors, device: str = "cuda") -> None:
        super().__init__(stage, variables, device, fixed_rows=ROWS)
        graph = self._program.graph
        self._graphed: GraphedRows | None = None
        if (
            self.device.type == "cuda"
            and self._layout is not None
            and is_supported(graph)
            and kernels() is not None
        ):
            self._graphed = GraphedRows(self._program, self._variables, tuple(self._slots), self.device)

    def _run_batched(
        self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> list[dict[str, torch.Tensor]]:
        lengths = self._lengths(layout, pieces)
        singles = [index for index, piece in enumerate(pieces) if lengths[index] == 1 or piece.singly]
        results: dict[int, dict[str, torch.Tensor]] = {}
        for index in range(len(pieces)):
            if index not in singles:
                [results[index]] = super()._run_batched(layout, [pieces[index]], [caches[index]])
        parts: dict[int, list[dict[str, torch.Tensor]]] = {index: [] for index in singles}
        for batch in batches([lengths[index] for index in singles]):
            indices = [singles[part.piece] for part in batch]
            cuts = [
                cut(pieces[index], part, lengths[index], layout.inputs)
                for index, part in zip(indices, batch, strict=True)
            ]
            outputs = self._batch(layout, cuts, [caches[index] for index in indices])
            for index, values in zip(indices, outputs, strict=True):
                parts[index].append(values)
        for index, each in parts.items():
            results[index] = merged(layout, self._keys, pieces[index], each)
        return [results[index] for index in range(len(pieces))]

    def _batch(
        self, layout: EndToEnd, pieces: Sequence[Piece], caches: Sequence[SessionCache]
    ) -> list[dict[str, torch.Tensor]]:
        """Run at most ROWS positions, each with a result."""
        lengths = self._begin(layout, pieces, caches)
        inputs = self._concatenated_inputs(layout, pieces, ROWS)
        if self._graphed is None:
            outputs = self._run_program(inputs, pieces, caches, lengths, lengths, ROWS)
        else:
            rows = [
                (cache, piece.start + i)
                for piece, cache, length in zip(pieces, caches, lengths, strict=True)
                for i in range(length)
            ]
            outputs = self._graphed.run(inputs, *zip(*rows, strict=True))
        return self._split_outputs(layout, outputs, caches, lengths, lengths)
