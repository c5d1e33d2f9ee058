"""The draft model in memory: a whole small model as one stage, with keys and values of its own for each session. Every method
runs in the device's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusion.runtime.planes.plane import DecodingStage, Piece
from fusion.runtime.serving.drafts.drafter import DraftStep


class DraftModel:
    """`positions`: that it can read at most. `vocabulary`: of the model that it guesses for."""

    def __init__(self, plane: DecodingStage, vocabulary: int, positions: int, weights_bytes: int) -> None:
        self.positions = positions
        self.weights_bytes = weights_bytes
        self._plane = plane
        self._vocabulary = vocabulary
        self._reads_positions = "position_ids" in plane.stage.graph.input_names
        self._open: set[str] = set()

    def used_bytes(self) -> int:
        """Of KV memory."""
        return self._plane.used_bytes()

    def run(self, steps: Sequence[DraftStep], account: Callable[[], None]) -> list[int | None]:
        """The token that is guessed after each step. None where there is no memory for the session's keys and values, or they had
        to give way. `account`: MemoryError where the peer would hold more than it lends."""
        ready = [step for step in steps if self._reserved(step, account)]
        found = self._plane.run([self._piece(step) for step in ready]) if ready else []
        tokens = {
            step.session: step.guess(outputs["result/0"][0, -1, : self._vocabulary], step.end)
            for step, outputs in zip(ready, found, strict=True)
        }
        return [tokens.get(step.session) for step in steps]

    def close(self, session: str) -> None:
        if session in self._open:
            self._open.discard(session)
            self._plane.close(session)

    def clear(self) -> bool:
        """Free the keys and values of all sessions. Whether there were any."""
        found = bool(self._open)
        self._open.clear()
        self._plane.clear()
        return found

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
