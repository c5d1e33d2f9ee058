"""The law of a job: what its manifest declares about who may take part. The job's id is the manifest's digest, so that
nobody can change it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

MAX_ADMITTED = 4096  # peers that are listed


@dataclass(frozen=True, kw_only=True)
class Admission:
    """`open`: everybody may take part. `listed`: `peers` may. `granted`: who shows a grant (`fusion.swarm.authority.grants`) by
    the author or one of `roots`. The author and `roots` always may."""

    kind: Literal["open", "listed", "granted"] = "open"
    peers: tuple[PeerId, ...] = ()
    roots: tuple[PeerId, ...] = ()  # whose grants count, besides the author's

    @cached_property
    def listed(self) -> frozenset[PeerId]:
        """`peers` as a set: every claim is looked up in it."""
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
    proposed: tuple[PeerId, ...] = ()  # whom the author proposes for each stage; a hint, and no right

    @cached_property
    def chosen(self) -> frozenset[PeerId]:
        """`proposed` as a set: every statement and claim is looked up in it, of jobs of thousands of stages."""
        return frozenset(self.proposed)

    @cached_property
    def issuers(self) -> frozenset[PeerId]:
        """Whose grants count."""
        return frozenset((self.author, *self.admission.roots))
