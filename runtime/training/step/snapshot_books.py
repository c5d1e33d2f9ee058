"""The lead's books on snapshots: which there are to go back to, and whether one is due or under way. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusion.runtime.training.step.checkpoint import START, Checkpoint

TOLD = 2  # snapshots of which one stage is heard: what it knows to be held, and the one before
LACKS = 3  # times that a stage finds nobody with its shard of a snapshot, before the one before it is taken


@dataclass(frozen=True, kw_only=True)
class SnapshotBooks:
    newest: Checkpoint = START  # never an older one than any that was announced, unless nobody holds it
    # Stage -> what its owners knew to be held, the newest first. Each has a place of its own, the lead's stage too: what one of
    # them makes up crowds out nothing that others know.
    told: Mapping[int, tuple[Checkpoint, ...]] = field(default_factory=dict)
    held: Checkpoint = START  # the newest that was seen to be held, not only told of: what the swarm hears of
    loading: Checkpoint | None = None  # that everybody was told to go back to, and has not yet
    gone: frozenset[Checkpoint] = frozenset()  # nobody holds them
    lacks: int = 0  # of the newest
    due: bool = False  # one is to be asked for
    asked: int = -1  # the step of which one was asked for last
    saving: bool = False  # it is under way: no other one is asked for

    @classmethod
    def begin(cls, newest: Checkpoint) -> SnapshotBooks:
        """Of a lead whose stage was loaded from that one."""
        return cls(newest=newest, told={0: (newest,)}, held=newest)

    def learn(self, checkpoint: Checkpoint, stage: int = 0) -> SnapshotBooks:
        """That it is held, as the owner of `stage` says. The newest snapshot never gets older."""
        if not checkpoint.sound or checkpoint in self.gone:
            return self
        known = dict.fromkeys((checkpoint, *self.told.get(stage, ())))
        kept = sorted(known, key=lambda each: each.rank, reverse=True)[:TOLD]
        books = replace(self, told={**self.told, stage: tuple(kept)})
        return replace(books, newest=checkpoint, lacks=0) if checkpoint.rank > self.newest.rank else books

    def saved(self, checkpoint: Checkpoint) -> SnapshotBooks:
        """What was asked for is held."""
        held = max(self.held, checkpoint, key=lambda each: each.rank)
        saving = self.saving and checkpoint.step != self.asked
        return replace(self.learn(checkpoint), held=held, saving=saving)

    def go_back(self) -> SnapshotBooks:
        """Everybody is told to go back to the newest."""
        return replace(self, loading=self.newest)

    def arrive(self) -> SnapshotBooks:
        """Work goes on: where everybody was told to go back to, everybody is."""
        return self if self.loading is None else replace(self, held=self.loading, loading=None)

    def lack(self) -> SnapshotBooks:
        """A stage found nobody with its shard of the newest. After LACKS times the newest of the others that anybody knows takes
        its place; the initial weights are never given up."""
        lacks = self.lacks + 1
        if lacks < LACKS or self.newest.digest is None:
            return replace(self, lacks=lacks)
        gone = self.gone | {self.newest}
        told = {s: tuple(each for each in known if each not in gone) for s, known in self.told.items()}
        others = (each for known in told.values() for each in known)
        newest = max(others, key=lambda each: each.rank, default=START)
        ours = max(told.get(0, ()), key=lambda each: each.rank, default=START)
        held = ours if self.held in gone else self.held
        return replace(self, newest=newest, told=told, held=held, gone=gone, lacks=0)

    def ask(self, step: int) -> SnapshotBooks:
        """Everybody is told to save the state of `step`."""
        return replace(self, asked=step, saving=True, due=False)
