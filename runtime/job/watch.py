"""An observer of stages: does nothing in a peer of the swarm; in a simulation, it checks what must hold."""

from __future__ import annotations

from fusion.swarm.transport import Frame


class Watch:
    """Called with what a training stage that runs here is about to do. Does nothing."""

    def takes(self, stage: int, term: int, incarnation: int, source: int, frame: Frame) -> None:
        """A frame of the owner of stage `source` is accepted. `incarnation` distinguishes runs of the stage here under one
        term."""

    def commits(self, stage: int, attempt: tuple[int, int], step: int) -> None:
        """The update of `step` is applied, and cannot be taken back."""
