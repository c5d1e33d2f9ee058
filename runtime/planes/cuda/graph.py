"""A program of `ROWS` rows as a CUDA graph: its kernels are launched at once, where launching each takes longer than it runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from fusion.runtime.planes.codegen import Program
from fusion.runtime.planes.cuda.row_attention import RowAttention
from fusion.runtime.planes.kv_cache import SessionCache
from fusion.swarm.printable import error_line

logger = logging.getLogger(__name__)
_WARM_UP_RUNS = 2  # warm-up runs before capture, which compile kernels and allocate the library's workspace

Tensors = tuple[torch.Tensor, ...]


class GraphedRows:
    """One CUDA graph for each number of key chunks (`RowAttention.begin`). `slots`: as in `RowAttention`. A program that cannot be captured
    runs operator by operator."""

    def __init__(
        self,
        program: Program,
        variables: Tensors,
        slots: Sequence[int],
        device: torch.device,
    ) -> None:
        self._program = program
        self._variables = variables
        self._state = RowAttention(slots, device)
        self._device = device
        self._captures = True
        self._inputs: list[torch.Tensor] = []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensors]] = {}

    def run(
        self, inputs: Sequence[torch.Tensor], caches: Sequence[SessionCache], positions: Sequence[int]
    ) -> Tensors:
        """`inputs`: of all rows. The caller owns the outputs."""
        state = self._state
        chunks = state.begin(caches, positions)
        if not self._inputs:
            self._inputs = [torch.empty_like(value, device=self._device) for value in inputs]
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        if self._captures and chunks not in self._graphs:
            state.clear()  # warm-up runs write to no cache
            self._capture(chunks)
            state.begin(caches, positions)
        if chunks not in self._graphs:
            state.chunks = chunks
            return self._program.run(self._inputs, self._variables, state)
        graph, outputs = self._graphs[chunks]
        graph.replay()
        return tuple(value.clone() for value in outputs)

    def _capture(self, chunks: int) -> None:
        self._state.chunks = chunks
        try:
            side_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            side_stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side_stream):
                for _ in range(_WARM_UP_RUNS):
                    self._program.run(self._inputs, self._variables, self._state)
            torch.cuda.current_stream(self._device).wait_stream(side_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side_stream, capture_error_mode="thread_local"):
                outputs = self._program.run(self._inputs, self._variables, self._state)
        except RuntimeError as error:
            logger.warning("this stage runs without CUDA graphs: %s", error_line(error))
            self._captures = False
            return
        self._graphs[chunks] = graph, outputs
