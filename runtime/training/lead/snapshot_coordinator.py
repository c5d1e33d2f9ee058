"""The lead's part in a snapshot: it requests every stage's shard, writes the index once it has all digests, and has each shard
replicated; then the snapshot is durable. One at a time. The rules, both pure, are
`fusion.runtime.training.snapshots.snapshot.Collector` and `fusion.runtime.training.snapshots.snapshot_period`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.snapshots.late_parts import NONE_LATE, LateParts, Trouble
from fusion.runtime.training.snapshots.snapshot import Collector, copies_away, encode_index
from fusion.runtime.training.snapshots.snapshot_period import SnapshotPeriod, first_cost_seconds
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.run_statistics import RunStatistics
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)


class SnapshotCoordinator:
    """`everyone` sends a message to each stage; `spawn`, `put`, `owners` and `clock` are as in `Lead`; `state_bytes`: of the largest
    stage."""

    def __init__(
        self,
        job: JobId,
        stages: int,
        state_bytes: int,
        *,
        everyone: Callable[[m.Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        put: Callable[[bytes], Awaitable[Digest]],
        owners: Callable[[], Mapping[int, PeerId]],
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._stages = stages
        self._first_cost_seconds = first_cost_seconds(state_bytes)
        self._everyone = everyone
        self._spawn = spawn
        self._put = put
        self._owners = owners
        self._clock = clock
        self._collector = Collector(stages=stages)
        self._index: Digest | None = None  # of the snapshot under way, once it is written
        # stage -> why it cannot do its part of the snapshot under way
        self._troubles: dict[int, Trouble] = {}
        self._given_up = NONE_LATE  # what the last snapshot lacked when it was given up
        # `away` of the copies of the newest snapshot, and of the one under way.
        self._away = self._next_away = m.NEXT_STAGE
        self.restart()

    def restart(self) -> None:
        """Losses, and the time to the next snapshot, are counted from now on."""
        now = self._clock()
        self._period = SnapshotPeriod(began=now, taken=now, cost_seconds=self._first_cost_seconds)

    @property
    def trouble(self) -> str:
        """Why the first stage with a trouble cannot do its part; empty if none has."""
        return next((f"stage {stage} {why.text}" for stage, why in sorted(self._troubles.items())), "")

    @property
    def due(self) -> bool:
        """Whether to take a snapshot before the next step, by its cost and the losses so far."""
        return self._period.due(self._clock())

    def late(
        self, least_seconds: float, moved: Collection[int], *, ending: bool, believed: bool
    ) -> tuple[int, ...]:
        """The stages of which one owner is to be replaced, once the snapshot under way is overdue, or the last one was given up, after
        `least_seconds` or more. `believed`: as in `LateParts.suspects`."""
        late = self._late_parts() if self._period.overdue(self._clock()) else self._given_up
        return late.suspects(moved, ending=ending, believed=believed) if late.seconds >= least_seconds else ()

    def _late_parts(self) -> LateParts:
        if self._collector.complete and self._index is None:  # the stages wait for our index
            return NONE_LATE
        seconds = self._period.seconds(self._clock())
        return LateParts(seconds, self._collector.pending, dict(self._troubles))

    def begun(self, statistics: RunStatistics) -> None:
        """An attempt begins: an owner that was saving may have been replaced, and its successor does not know of the request."""
        self._period = self._period.seen(self._clock(), statistics.seconds, statistics.losses).give_up()
        self._given_up = NONE_LATE
        self._begin(Collector(stages=self._stages))

    def request(self, ledger: Ledger, history: str) -> None:
        """Called when all stages are ordered to save the state of that ledger and history."""
        self._begin(Collector(stages=self._stages, ledger=ledger, history=history))
        self._period = self._period.request(self._clock())

    def _begin(self, collector: Collector) -> None:
        self._collector, self._index = collector, None
        self._troubles.clear()

    def stepped(self, seconds: float) -> None:
        """A step took `seconds`, from one commit to the next."""
        self._period = self._period.stepped(seconds)

    def restored(self) -> None:
        """All stages restore the newest snapshot, and replicate it again (`StageSnapshots.hold_again`)."""
        self._period = self._period.restored(self._clock())
        self._away = m.NEXT_STAGE

    def give_up_overdue(self) -> bool:
        """Whether the snapshot under way took too long, and is given up."""
        if not self._period.overdue(self._clock()):
            return False
        log.warning("the snapshot of step %d was not held in time", self._collector.step)
        self._given_up = self._late_parts()
        self._period = self._period.give_up_overdue()
        return True

    def saved(self, stage: int, shard: m.Shard) -> None:
        """A stage has saved its shard."""
        self._note(stage, shard.step, None)
        before = self._collector
        self._collector = before.shard(stage, shard.version, shard.digest, shard.seconds, shard.furthest)
        if self._collector.complete and self._collector.shards != before.shards:
            self._index = None
            self._spawn(self._write_index(self._collector))

    async def _write_index(self, collector: Collector) -> None:
        index = await self._put(encode_index(collector.index(self._job)))
        if self._collector.shards == collector.shards and self._collector.version == collector.version:
            self._index = index
            owners = self._owners()
            self._next_away = copies_away(self._away, self._collector.furthest, owners, self._stages)
            self._everyone(m.Replicate(collector.step, index, self._next_away))

    def held(self, stage: int, held: m.Held) -> m.Saved | None:
        """A stage holds its copies, or reports why it cannot. Returns the snapshot, if this makes it durable."""
        refused = held.refused if held.refused in range(self._stages) else None
        trouble = Trouble(held.trouble[: m.MAX_TROUBLE], refused) if held.trouble else None
        self._note(stage, held.step, trouble)
        if held.index != self._index or self._collector.durable:
            return None
        self._collector = self._collector.held(stage, held.step)
        if not self._collector.durable:
            return None
        self._troubles.clear()
        self._given_up = NONE_LATE
        self._away = self._next_away
        self._period = self._period.durable(self._clock(), self._collector.seconds)
        return m.Saved(self._collector.index(self._job).checkpoint(held.index))

    def _note(self, stage: int, step: int, trouble: Trouble | None) -> None:
        if step == self._collector.step and not self._collector.durable:
            self._troubles.pop(stage, None)
            if trouble is not None:
                self._troubles[stage] = trouble
                if stage > 0:  # our own stage has logged it itself
                    log.warning("stage %d %s", stage, trouble.text)
