"""Whose part of a snapshot is late, and which owner is replaced for it. Pure.

Every stage saves its shard, then every stage holds copies of other stages' shards. A stage that cannot do its part reports
why, or reports nothing. One that cannot fetch or load the shard of another stage contradicts that stage's owner: the owner
that saved the shard is replaced first, and if its successor's shard is refused as well, the owner that refused it. So a
false report moves the reporter's own stage, or once that of a neighbour, as in `fusion.runtime.training.step.stalls`.

While steps go on, a stage that reports a trouble of its own (a full disk, say) keeps its owner: to replace it would cost all
steps since the last durable snapshot, which may never be needed. A job that waits for its last snapshot has to end, so there
it is replaced as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

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

    def suspects(self, moved: Collection[int] = (), *, ending: bool) -> tuple[int, ...]:
        """The stages of which one owner is to be replaced, in order of suspicion.

        `moved`: stages whose owner was replaced before. `ending`: the job waits for this snapshot.
        """
        accused, accusers, own = [], [], []
        for stage in sorted(self.pending & set(self.troubles)):
            refused = self.troubles[stage].refused
            if refused is None or refused == stage:
                own.append(stage)
            else:
                believed = refused not in (LEAD, *moved) or stage == LEAD
                accused.append(refused if believed else stage)
                accusers.append(stage)
        silent = sorted(self.pending - set(self.troubles))
        # The accused may have no standby: an accuser could choose it for that.
        order = dict.fromkeys((*accused, *silent, *((*own, *accusers) if ending else ())))
        return tuple(stage for stage in order if stage != LEAD)


NONE_LATE = LateParts()
