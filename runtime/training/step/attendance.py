"""Who is here: the stages that have joined, those that want to leave, and whom each of them is linked to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusion.runtime.training.step.history import Version
from fusion.runtime.training.step.messages import Join, JoinId, Links


def supersedes(join_id: JoinId, known: JoinId) -> bool:
    """Whether a join is newer than another of the same stage. Of two hosts under one term the one that speaks last is
    the newer: the streams of the other have ended with its process."""
    if join_id[0] != known[0]:
        return join_id[0] > known[0]
    return join_id[1] != known[1] or join_id[2] > known[2]


@dataclass(frozen=True, kw_only=True)
class Attendance:
    joined: Mapping[int, Version] = field(default_factory=dict)  # stage -> the state that it has
    join_ids: Mapping[int, JoinId] = field(default_factory=dict)  # stage -> its newest join
    links: Mapping[int, Links] = field(default_factory=dict)  # stage -> whom it was linked to then
    leaving: frozenset[int] = frozenset()  # want to be handed over
    held: frozenset[int] = frozenset()  # handed over: their next owner is no loss

    @property
    def agree(self) -> bool:
        """Whether every stage is linked to the owners that have joined: one that still has a link to the owner before
        will lose it, and with it whatever had begun. A link to a stage that the job has not holds nobody up."""
        return all(
            self.join_ids[partner][0] == term
            for links in self.links.values()
            for partner, term in links
            if partner in self.join_ids
        )

    def replaced(self, stage: int, join_id: JoinId) -> bool:
        """Whether another owner joins than did before, and nobody handed over to it."""
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
        """It wants to be handed over."""
        return replace(self, leaving=self.leaving | {stage})

    def stay(self, stage: int) -> Attendance:
        """It does not, or not any more."""
        return replace(self, leaving=self.leaving - {stage})

    def part(self) -> Attendance:
        """The stages that leave have not joined any more. Those beside them have; but their links lead to the owner that
        leaves, so that nothing begins until they have joined again (`agree`), each at a time of its own."""
        joined = {s: state for s, state in self.joined.items() if s not in self.leaving}
        return replace(self, joined=joined, held=self.held | self.leaving, leaving=frozenset())
