"""What a job's manifest says of who may take part, as the swarm sees it: the job's id is the manifest's digest, so that
nobody can change the law of a job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

MAX_ADMITTED = 4096  # peers that are listed


@dataclass(frozen=True, kw_only=True)
class Admission:
    """`open`: everybody may. `listed`: `peers` may. `granted`: whoever shows a grant (`fusion.swarm.authority.grants`) of the
    author's or of one of `roots`. The author always may, and so may whoever gives grants."""

    kind: Literal["open", "listed", "granted"] = "open"
    peers: tuple[PeerId, ...] = ()
    roots: tuple[PeerId, ...] = ()  # whose grants count, besides the author's

    @cached_property
    def listed(self) -> frozenset[PeerId]:
        """`peers`: every claim is looked for among them."""
        return frozenset(self.peers)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of a job one party may hold; 0: as much as it likes."""

    stages_per_owner: int = 0
    stages_per_subnet: int = 0  # of the wire form only: always 0, see SECURITY.md, "Closed jobs"


@dataclass(frozen=True, kw_only=True)
class JobLaw:
    job: JobId
    author: PeerId  # whose key launched it
    stages: int
    admission: Admission = Admission()
    limits: Limits = Limits()
    launched_at: int = 0  # unix seconds
    steps: int = 0  # at which a training job is done; 0: it never is (serving)
    name: str = ""
    proposed: tuple[PeerId, ...] = ()  # to whom the author would give its stages; a hint, and no right

    @cached_property
    def chosen(self) -> frozenset[PeerId]:
        """Those of `proposed`: of a job of thousands of stages every word and claim is looked for among them."""
        return frozenset(self.proposed)

    @cached_property
    def issuers(self) -> frozenset[PeerId]:
        """Whose grants count."""
        return frozenset((self.author, *self.admission.roots))
