"""What the lead knows of snapshots: which can be restored, and whether one is due or being taken. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusion.runtime.training.step.checkpoint import START, Checkpoint

KEPT_PER_STAGE = 2  # reported snapshots: the newest that the stage knows to be held, and the one before
MAX_LACKS = 3  # reports that no peer holds some shard of a snapshot, before an older snapshot is restored


@dataclass(frozen=True, kw_only=True)
class SnapshotState:
    newest: Checkpoint = START  # at least as new as any that was announced, unless its shards are lost
    # Stage -> snapshots that its owners reported as held, newest first. Each stage has its own slots, the lead's included, so that
    # one owner's false reports displace none of the others'.
    reported: Mapping[int, tuple[Checkpoint, ...]] = field(default_factory=dict)
    held: Checkpoint = START  # the newest that is known first-hand to be held: what the lead announces
    loading: Checkpoint | None = None  # that all stages are restoring
    lost: frozenset[Checkpoint] = frozenset()  # no peer holds some shard of them
    lacks: int = 0  # reports that a shard of the newest is missing
    due: bool = False  # one is to be requested at the next step boundary
    requested: int = -1  # the step of the last snapshot that was requested
    saving: bool = False  # the requested one is being taken: no other is requested

    @classmethod
    def begin(cls, newest: Checkpoint) -> SnapshotState:
        """The initial state of a lead whose stage was loaded from the snapshot `newest`."""
        return cls(newest=newest, reported={0: (newest,)}, held=newest)

    def learn(self, checkpoint: Checkpoint, stage: int = 0) -> SnapshotState:
        """The owner of `stage` reports that `checkpoint` is held. `newest` never moves to an older one."""
        if not checkpoint.sound or checkpoint in self.lost:
            return self
        known = dict.fromkeys((checkpoint, *self.reported.get(stage, ())))
        kept = sorted(known, key=lambda each: each.rank, reverse=True)[:KEPT_PER_STAGE]
        learned = replace(self, reported={**self.reported, stage: tuple(kept)})
        return replace(learned, newest=checkpoint, lacks=0) if checkpoint.rank > self.newest.rank else learned

    def saved(self, checkpoint: Checkpoint) -> SnapshotState:
        """`checkpoint` is held by all stages, the requested one included."""
        held = max(self.held, checkpoint, key=lambda each: each.rank)
        saving = self.saving and checkpoint.step != self.requested
        return replace(self.learn(checkpoint), held=held, saving=saving)

    def restore(self) -> SnapshotState:
        """The state once all stages are ordered to restore the newest snapshot."""
        return replace(self, loading=self.newest)

    def resume(self) -> SnapshotState:
        """Steps run again: the snapshot that was being restored, if any, is held."""
        return self if self.loading is None else replace(self, held=self.loading, loading=None)

    def lack(self) -> SnapshotState:
        """A stage found no peer with its shard of the newest. After MAX_LACKS reports the next newest takes its place; the initial
        weights are never given up."""
        lacks = self.lacks + 1
        if lacks < MAX_LACKS or self.newest.digest is None:
            return replace(self, lacks=lacks)
        lost = self.lost | {self.newest}
        reported = {
            s: tuple(each for each in known if each not in lost) for s, known in self.reported.items()
        }
        others = (each for known in reported.values() for each in known)
        newest = max(others, key=lambda each: each.rank, default=START)
        own = max(reported.get(0, ()), key=lambda each: each.rank, default=START)
        held = own if self.held in lost else self.held
        return replace(self, newest=newest, reported=reported, held=held, lost=lost, lacks=0)

    def request(self, step: int) -> SnapshotState:
        """The state once all stages are ordered to save the state of `step`."""
        return replace(self, requested=step, saving=True, due=False)
