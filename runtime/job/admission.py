"""Which peers a trainer admits to a job: `[admission]` and `[limits]` of a job file, or the options of `serve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import MAX_STAGES
from fusion.swarm.authority.law import MAX_ADMITTED, Admission, Limits
from fusion.swarm.identity import is_peer_id
from fusion.swarm.transport import PeerId

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class AdmissionSpec:
    """`open`: all peers. `listed`: `peers`, for good. `granted`: peers that show a grant; `peers` get one when the job is
    launched, others by `fusion-peer jobs invite`. `roots`: peers whose grants count besides the trainer's."""

    kind: Literal["open", "listed", "granted"] = "open"
    peers: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, ids in (("peers", self.peers), ("roots", self.roots)):
            if len(ids) > MAX_ADMITTED:
                raise JobError(f"{name}: at most {MAX_ADMITTED}")
            for each in ids:
                if not is_peer_id(each):
                    raise JobError(f"{name}: peer ids, as `fusion-peer start` prints them, not {each!r:.80}")
        if self.kind == "open" and (self.peers or self.roots):
            raise JobError('peers and roots are for kind = "listed" or "granted"')
        if self.kind == "listed" and self.roots:
            raise JobError('roots are for kind = "granted"')
        if self.kind != "open" and not self.peers:
            raise JobError(f'peers: kind = "{self.kind}" needs the ids of those that may take part')

    @property
    def admission(self) -> Admission:
        """As the manifest has it."""
        listed = tuple(map(PeerId, self.peers)) if self.kind == "listed" else ()
        return Admission(kind=self.kind, peers=listed, roots=tuple(map(PeerId, self.roots)))

    @property
    def invited(self) -> tuple[PeerId, ...]:
        """Those that get a grant when the job is launched."""
        return tuple(map(PeerId, self.peers)) if self.kind == "granted" else ()

    def among(self, peers: Sequence[P], peer_id: Callable[[P], PeerId]) -> list[P]:
        """Those of `peers` that may own a stage. JobError where none may."""
        found = [peer for peer in peers if self.kind == "open" or peer_id(peer) in self.peers]
        if not found:
            raise JobError("admission.peers: none of them is in the swarm now")
        return found


@dataclass(frozen=True, kw_only=True)
class LimitsSpec:
    stages_per_owner: int = 0  # 0: as many as it likes

    def __post_init__(self) -> None:
        if not 0 <= self.stages_per_owner <= MAX_STAGES:
            raise JobError(f"stages_per_owner must be from 0 to {MAX_STAGES}, not {self.stages_per_owner}")

    @property
    def limits(self) -> Limits:
        """As the manifest has it."""
        return Limits(stages_per_owner=self.stages_per_owner)
