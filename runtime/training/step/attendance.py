"""Who is here: the stages that have joined, those that want to leave, and whom each of them is linked to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusion.runtime.training.step.events import Entry, Joined, Links


@dataclass(frozen=True, kw_only=True)
class Attendance:
    joined: Mapping[int, int] = field(default_factory=dict)  # stage -> the step its state is of
    entries: Mapping[int, Entry] = field(default_factory=dict)  # stage -> its newest join
    links: Mapping[int, Links] = field(default_factory=dict)  # stage -> whom it was linked to then
    leaving: frozenset[int] = frozenset()  # want to be handed over
    held: frozenset[int] = frozenset()  # handed over: their next owner is no loss

    @property
    def agree(self) -> bool:
        """Whether every stage is linked to the owners that have joined: one that still has a link to the owner before
        will lose it, and with it whatever had begun."""
        return all(
            self.entries[partner][0] == term for links in self.links.values() for partner, term in links
        )

    def replaced(self, event: Joined) -> bool:
        """Whether another owner joins than did before, and nobody handed over to it."""
        known = self.entries.get(event.stage)
        return known is not None and event.entry[:2] != known[:2] and event.stage not in self.held

    def join(self, event: Joined) -> Attendance:
        stage = event.stage
        return replace(
            self,
            joined={**self.joined, stage: event.step},
            entries={**self.entries, stage: event.entry},
            links={**self.links, stage: event.links},
            held=self.held - {stage},
        )

    def lose(self, stage: int) -> Attendance:
        return replace(self, joined={s: step for s, step in self.joined.items() if s != stage})

    def leave(self, stage: int) -> Attendance:
        """It wants to be handed over."""
        return replace(self, leaving=self.leaving | {stage})

    def stay(self, stage: int) -> Attendance:
        """It does not, or not any more."""
        return replace(self, leaving=self.leaving - {stage})

    def part(self) -> Attendance:
        """The stages that leave have not joined any more. Those beside them have; but their links lead to the owner that
        leaves, so that nothing begins until they have joined again (`agree`), each at a time of its own."""
        joined = {s: step for s, step in self.joined.items() if s not in self.leaving}
        return replace(self, joined=joined, held=self.held | self.leaving, leaving=frozenset())
