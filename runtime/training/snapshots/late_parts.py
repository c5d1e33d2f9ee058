"""Whose part of a snapshot is late, and which owner is replaced for it. Pure.

Every stage saves its shard, then every stage holds copies of other stages' shards. A stage that cannot do its part reports
why, or reports nothing. One that cannot fetch or load the shard of another stage contradicts that stage's owner: the owner
that saved the shard is replaced first, and if its successor's shard is refused as well, the owner that refused it. So a
false report moves the reporter's own stage, or once that of a neighbour, as in `fusion.runtime.training.step.stalls`.

While steps go on, a stage that reports a trouble of its own (a full disk, say) keeps its owner: to replace it would cost all
steps since the last durable snapshot, which may never be needed. A job that waits for its last snapshot has to end, so there
it is replaced as well.

The lead judges neither its own shard nor itself. So a stage that has saved its shard, and hears of no durable snapshot, fetches the
lead's shard in the end, and votes against a lead whose shard it refuses (`LeadDoubt`). Only after that does a lead replace an owner
that refuses its shard. Where the job waits for its last snapshot, a stage votes in time against a lead without such a proof, too: that
one may have written no index at all. Another stage may be at fault that has no ready standby, so each such vote takes twice as
long as the last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fusion.runtime.training.step.stalls import LEAD_STALLS

LEAD = 0  # its own stage: a lead believes its own shard, and does not replace itself


@dataclass(frozen=True)
class Trouble:
    """Why a stage cannot do its part."""

    text: str
    refused: int | None = None  # the stage whose shard it can neither fetch nor load


@dataclass(frozen=True)
class LateParts:
    """What a snapshot lacks `seconds` after it was requested."""

    seconds: float = 0.0
    pending: frozenset[int] = frozenset()  # stages that have not done their part
    troubles: Mapping[int, Trouble] = field(default_factory=dict)  # by the stage that reports it

    def suspects(
        self, moved: Collection[int] = (), *, ending: bool, believed: bool = True
    ) -> tuple[int, ...]:
        """The stages of which one owner is to be replaced, in order of suspicion.

        `moved`: stages whose owner was replaced before. `ending`: the job waits for this snapshot. `believed`: other stages would have
        voted against a lead with an invalid shard.
        """
        accused, accusers, own = [], [], []
        for stage in sorted(self.pending & set(self.troubles)):
            refused = self.troubles[stage].refused
            if refused == LEAD != stage and not believed:
                continue
            if refused is None or refused == stage:
                own.append(stage)
            else:
                trusted = refused not in (LEAD, *moved) or stage == LEAD
                accused.append(refused if trusted else stage)
                accusers.append(stage)
        silent = sorted(self.pending - set(self.troubles))
        # The accused may have no standby: an accuser could choose it for that.
        order = dict.fromkeys((*accused, *silent, *((*own, *accusers) if ending else ())))
        return tuple(stage for stage in order if stage != LEAD)


NONE_LATE = LateParts()
# Times the patience with which a lead is checked: before it is voted against though its shard may be sound
UNPROVEN = 2.0
BELIEVED = LEAD_STALLS + 2.0  # times that patience: before the lead replaces owners that refuse its shard


@dataclass(frozen=True, kw_only=True)
class LeadDoubt:
    """What a stage knows of the lead while it waits for a snapshot to become durable."""

    checked: float = 0.0  # seconds into the wait when the lead's shard was last checked
    refused: bool = False  # it could not be loaded
    unproven: int = 0  # other leads that this stage voted against without a proof

    def next(
        self, seconds: float, attempt_seconds: float, patience: float, *, indexed: bool, ending: bool
    ) -> Literal["wait", "check", "vote"]:
        """What to do `seconds` into the wait, of which this attempt has taken `attempt_seconds`. `patience`: seconds that a snapshot may
        take; `indexed`: its index is known; `ending`: the job waits for it."""
        doubted = LEAD_STALLS * patience
        if seconds < doubted:
            return "wait"
        if self.refused or (ending and attempt_seconds >= UNPROVEN * doubted * 2**self.unproven):
            return "vote"
        return "check" if indexed and seconds >= 2 * self.checked else "wait"
