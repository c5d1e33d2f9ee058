"""The lead's books on snapshots: which there are to go back to, and whether one is due or under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion.runtime.training.step.checkpoint import START, Checkpoint

LACKS = 3  # times that a stage finds nobody with its shard of a snapshot, before the one before it is taken


@dataclass(frozen=True, kw_only=True)
class SnapshotBooks:
    newest: Checkpoint = START  # never an older one than any that was announced, unless nobody holds it
    before: Checkpoint = START  # the one before it
    gone: frozenset[Checkpoint] = frozenset()  # nobody holds them
    lacks: int = 0  # of the newest
    due: bool = False  # one is to be asked for
    asked: int = -1  # the step of which one was asked for last
    saving: bool = False  # it is under way: no other one is asked for

    def learn(self, checkpoint: Checkpoint) -> SnapshotBooks:
        """That it is held. The newest snapshot never gets older."""
        if not checkpoint.sound or checkpoint in self.gone:
            return self
        if checkpoint.rank <= self.newest.rank:
            between = self.before.rank < checkpoint.rank < self.newest.rank
            return replace(self, before=checkpoint) if between else self
        return replace(self, newest=checkpoint, before=self.newest, lacks=0)

    def saved(self, checkpoint: Checkpoint) -> SnapshotBooks:
        """What was asked for is held."""
        return replace(self.learn(checkpoint), saving=self.saving and checkpoint.step != self.asked)

    def lack(self) -> SnapshotBooks:
        """A stage found nobody with its shard of the newest. After LACKS times the one before it is the newest; the
        initial weights are never given up."""
        lacks = self.lacks + 1
        if lacks < LACKS or self.newest.digest is None:
            return replace(self, lacks=lacks)
        return replace(self, newest=self.before, before=START, gone=self.gone | {self.newest}, lacks=0)

    def ask(self, step: int) -> SnapshotBooks:
        """Everybody is told to save the state of `step`."""
        return replace(self, asked=step, saving=True, due=False)
