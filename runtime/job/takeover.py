"""Who follows the owner of a stage, as the rooms that need it see it. `fusion.runtime.hosting.takeover` implements `Takeover`,
`fusion.runtime.hosting.hosting` is the `StageHolder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.transport import PeerId


class StageHolder(Protocol):
    """What hosts stages on this peer."""

    def holds(self, job: JobId, stage: int) -> int:
        """The term under which the stage runs here; 0 if it does not."""

    @property
    def occupied(self) -> bool:
        """Whether a stage runs here, or is about to."""

    async def take_over(
        self, job: JobId, stage: int, over: int, handover: Mapping[str, Any] | None
    ) -> ClaimRecord | None:
        """Claim the stage above the term `over` and begin to host it; our claim, or None where we did not get it."""

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """As in `Takeover`."""


class Takeover(Protocol):
    """How a stage gets its next owner: what whoever works with an owner, or is one, asks for."""

    async def start(self, holder: StageHolder) -> None:
        """Answer other peers from now on, and let `holder` take stages over."""

    async def suspect(self, job: JobId, stage: int, peer: PeerId, term: int) -> ClaimRecord | None:
        """`peer`, who held the stage under `term`, does not answer us: ask its standbys to take over. The claim of the
        new owner (which `Leases.owner` knows of then, too), or None where nobody can take over now."""

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """Begin to hand a stage that runs here to `peer`, at the next boundary where nothing is lost. It stays here if
        the peer does not take it."""

    async def holds(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """Whether `peer` says that it holds the stage; it is asked now."""

    async def attends(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """Whether `peer` answers at all."""

    async def hand_over(
        self, job: JobId, stage: int, term: int, handover: Mapping[str, Any], order: Sequence[PeerId]
    ) -> ClaimRecord | None:
        """Give the stage, which we own under `term`, to the first of these peers that takes it; its claim."""
