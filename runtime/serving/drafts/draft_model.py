"""The draft model in memory: a whole small model as one stage, with a KV cache for each session. Every method
runs in the device's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusion.runtime.planes.plane import DecodingStage, Piece
from fusion.runtime.serving.drafts.drafter import DraftStep


class DraftModel:
    """`positions`: of its context. `vocabulary`: of the large model."""

    def __init__(self, plane: DecodingStage, vocabulary: int, positions: int, weights_bytes: int) -> None:
        self.positions = positions
        self.weights_bytes = weights_bytes
        self._plane = plane
        self._vocabulary = vocabulary
        self._reads_positions = "position_ids" in plane.stage.graph.input_names
        self._open: set[str] = set()

    def used_bytes(self) -> int:
        """Bytes of its KV caches."""
        return self._plane.used_bytes()

    def run(self, steps: Sequence[DraftStep], account: Callable[[], None]) -> list[int | None]:
        """The guessed token after each step. None where there is no memory for the session's KV cache, or it was dropped. `account` raises
        MemoryError where the peer would hold more than it lends."""
        ready = [step for step in steps if self._reserved(step, account)]
        outputs_of = self._plane.run([self._piece(step) for step in ready]) if ready else []
        tokens = {
            step.session: step.guess(outputs["result/0"][0, -1, : self._vocabulary], step.end)
            for step, outputs in zip(ready, outputs_of, strict=True)
        }
        return [tokens.get(step.session) for step in steps]

    def close(self, session: str) -> None:
        if session in self._open:
            self._open.discard(session)
            self._plane.close(session)

    def clear(self) -> bool:
        """Free the KV caches of all sessions. Whether there were any."""
        any_open = bool(self._open)
        self._open.clear()
        self._plane.clear()
        return any_open

    def _reserved(self, step: DraftStep, account: Callable[[], None]) -> bool:
        session = step.session
        try:
            if session not in self._open:
                if step.start:
                    return False
                self._open.add(session)
                self._plane.open(session, step.capacity)
            if self._plane.reserve(session, step.end):
                account()
        except MemoryError:
            self.close(session)
            return False
        return True

    def _piece(self, step: DraftStep) -> Piece:
        inputs = {"input_ids": torch.tensor([step.ids])}
        if self._reads_positions:
            inputs["position_ids"] = torch.arange(step.start, step.end).unsqueeze(0)
        return Piece(step.session, step.start, inputs)
