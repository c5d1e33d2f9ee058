"""A program of `ROWS` rows as a CUDA graph: its kernels are queued once, where queuing them one by one takes longer than they do."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from fusion.runtime.planes.codegen import Program
from fusion.runtime.planes.cuda.row_attention import RowAttention
from fusion.runtime.planes.kv_cache import SessionCache
from fusion.swarm.printable import error_line

logger = logging.getLogger(__name__)
_WARM = 2  # runs before one is captured: they compile kernels and take the library's memory

Tensors = tuple[torch.Tensor, ...]


class GraphedRows:
    """One graph for each number of chunks of keys (`RowAttention.begin`). `slots`: as of `RowAttention`. Where a program
    cannot be captured its operators are queued one by one."""

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
        self, given: Sequence[torch.Tensor], caches: Sequence[SessionCache], positions: Sequence[int]
    ) -> Tensors:
        """`given`: the inputs of all the rows. The outputs are the caller's."""
        state = self._state
        chunks = state.begin(caches, positions)
        if not self._inputs:
            self._inputs = [torch.empty_like(value, device=self._device) for value in given]
        for mine, value in zip(self._inputs, given, strict=True):
            mine.copy_(value, non_blocking=True)
        if self._captures and chunks not in self._graphs:
            state.clear()  # of what is run to capture it nothing is kept
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
            beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(beside):
                for _ in range(_WARM):
                    self._program.run(self._inputs, self._variables, self._state)
            torch.cuda.current_stream(self._device).wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=beside, capture_error_mode="thread_local"):
                outputs = self._program.run(self._inputs, self._variables, self._state)
        except RuntimeError as error:
            logger.warning("this stage runs without CUDA graphs: %s", error_line(error))
            self._captures = False
            return
        self._graphs[chunks] = graph, outputs
