"""Attendance: which stages have joined or want to leave, and which owners each is linked to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusion.runtime.training.step.history import Version
from fusion.runtime.training.step.messages import Join, JoinId, Links


def supersedes(join_id: JoinId, known: JoinId) -> bool:
    """Whether a join is newer than another of the same stage. Of two hosts under one term the last to join is the newer: the
    streams of the other have ended with its process."""
    if join_id[0] != known[0]:
        return join_id[0] > known[0]
    return join_id[1] != known[1] or join_id[2] > known[2]


@dataclass(frozen=True, kw_only=True)
class Attendance:
    joined: Mapping[int, Version] = field(default_factory=dict)  # stage -> the version of its state
    join_ids: Mapping[int, JoinId] = field(default_factory=dict)  # stage -> its newest join
    links: Mapping[int, Links] = field(default_factory=dict)  # stage -> its links when it joined
    leaving: frozenset[int] = frozenset()  # to be handed over
    held: frozenset[int] = frozenset()  # handed over: a new owner does not count as a loss

    @property
    def agree(self) -> bool:
        """Whether every stage is linked to the owners that have joined: a link to a previous owner will break, and with it any step
        that had begun. A link to a stage that the job does not have is ignored."""
        return all(
            self.join_ids[partner][0] == term
            for links in self.links.values()
            for partner, term in links
            if partner in self.join_ids
        )

    def replaced(self, stage: int, join_id: JoinId) -> bool:
        """Whether another owner joins than before, without a handover."""
        known = self.join_ids.get(stage)
        return known is not None and join_id[:2] != known[:2] and stage not in self.held

    def join(self, stage: int, message: Join) -> Attendance:
        return replace(
            self,
            joined={**self.joined, stage: message.version},
            join_ids={**self.join_ids, stage: message.join_id},
            links={**self.links, stage: message.links},
            held=self.held - {stage},
        )

    def lose(self, stage: int) -> Attendance:
        return replace(self, joined={s: state for s, state in self.joined.items() if s != stage})

    def leave(self, stage: int) -> Attendance:
        """`stage` is to be handed over."""
        return replace(self, leaving=self.leaving | {stage})

    def stay(self, stage: int) -> Attendance:
        """`stage` is not to be handed over, or no longer."""
        return replace(self, leaving=self.leaving - {stage})

    def part(self) -> Attendance:
        """The leaving stages are handed over and no longer joined. Their partners still are, but with links to the leaving owners,
        so no step begins until these have joined again (`agree`)."""
        joined = {s: state for s, state in self.joined.items() if s not in self.leaving}
        return replace(self, joined=joined, held=self.held | self.leaving, leaving=frozenset())
