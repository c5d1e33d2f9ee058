"""Who looks on while stages run: nobody, in a peer of the swarm; in a simulation, whoever knows what must hold."""

from __future__ import annotations

from fusion.swarm.transport import Frame


class Watch:
    """Is told what a training stage that runs here is about to do. Does nothing."""

    def takes(self, stage: int, term: int, incarnation: int, source: int, frame: Frame) -> None:
        """A frame of the owner of stage `source` was let in. `incarnation` tells those apart that run the stage here
        under one term."""

    def commits(self, stage: int, attempt: tuple[int, int], step: int) -> None:
        """The update of `step` is applied, and cannot be taken back."""
