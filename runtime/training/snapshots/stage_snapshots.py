"""One stage's part in the snapshots of its job: its state is copied between two steps, saved as a blob, replicated, and
restored. The host and the lead decide when.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import torch

from fusion.runtime.job.errors import JobError, StageFailed
from fusion.runtime.job.worker import Worker
from fusion.runtime.training.compute.stage_codecs import StageCodecs
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.snapshots.stage_files import KEPT, ShardRefused
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.history import Version
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import QuotaExceeded, SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # before saving or replicating a snapshot is tried again
MOST_RESTS = 60  # times that, after a failed write: each try may have written most of the shard
HOLD_ATTEMPTS = 3  # at copies that the job does not wait for


class StageSnapshots:
    """`send` sends to the lead, `spawn` starts a task that ends with the host, `owners` returns the current owners by stage, and
    `clock` monotonic seconds, on any thread."""

    def __init__(
        self,
        loaded: Loaded,
        codecs: StageCodecs,
        compute: Worker,
        owners: Callable[[], dict[int, PeerId]],
        send: Callable[[m.Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # The newest snapshot that the stage knows to be durable, and the one before it
        self.newest, self.before = loaded.start, START
        self._stage = loaded.plan.stage.index
        self._plane = loaded.plane
        self._files = loaded.files
        self._codecs = codecs
        self._compute = compute
        self._owners = owners
        self._send = send
        self._spawn = spawn
        self._clock = clock
        self._saving: asyncio.Task[None] | None = None
        self._requested: Version | None = None  # the newest state that we were asked to save
        self._replica: Digest | None = None  # the newest index that we were asked to hold
        self._replicating: asyncio.Task[None] | None = None
        self._holding_again: asyncio.Task[None] | None = None
        self._held: int | None = (
            None  # step of the last snapshot that we reported to hold since the last `begin`
        )
        # Steps of earlier ones, or of those before a restore: they may be durable without our knowing.
        self._doubtful: tuple[int, ...] = ()
        self.waits_since: float | None = None  # by `clock`: as in `waited_seconds`
        self._begun_at = clock()  # the attempt

    async def take(self, version: Version) -> None:
        """Copy the state, which is that of `version`. It is saved, and reported to the lead, beside the steps that follow; an
        earlier save that has not succeeded is given up."""
        state, seconds = await self._compute.run(self._timed_state)
        self._requested = None  # also a save of the same state: a full disk must not hold up the steps
        self._replica = None
        await self._saved()
        self._requested = version
        self._saving = self._spawn(self._save(version, state, seconds))

    async def store(self, version: Version) -> Digest:
        """Save the state, which is that of `version`, and return its blob. Raises JobError where it cannot be saved."""
        state = await self._compute.run(self._state_now)
        if self._saving is not None:  # other stages may wait for it
            self._requested = version
            await self._saved()
        try:
            return await self._files.save(version, state)
        except (SwarmError, OSError) as error:
            raise JobError(f"stage {self._stage} could not store its state: {error}") from None

    async def store_index(self, data: bytes) -> Digest:
        """Store a snapshot's index and return its blob. Retries until the disk takes it: without the last one the job could not end."""
        while True:
            try:
                return await self._files.put(data)
            except SwarmError as error:
                log.warning("the index of a snapshot could not be stored: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    @property
    def waited_seconds(self) -> float:
        """Since we reported our shard of a snapshot, if no snapshot has become durable since; else 0."""
        return 0.0 if self.waits_since is None else self._clock() - self.waits_since

    @property
    def attempt_seconds(self) -> float:
        """The same, since the attempt began at most."""
        return min(self.waited_seconds, self._clock() - self._begun_at)

    @property
    def indexed(self) -> Digest | None:
        """The index of the snapshot under way, once the lead has written it."""
        return self._replica

    async def refuses_shard(self, stage: int, index: Digest, seconds: float) -> bool:
        """Whether a copy of that stage's shard of this snapshot can neither be fetched nor loaded. Our own full disk, and a fetch that takes
        more than `seconds`, prove nothing."""
        try:
            async with asyncio.timeout(seconds):
                await self._files.check_shard(index, stage, self._owners())
        except (QuotaExceeded, TimeoutError):
            return False
        except (SwarmError, JobError) as error:
            log.warning("stage %d refuses the shard of stage %d: %s", self._stage, stage, error)
            return True
        return False

    def hold(
        self, step: int, index: Digest, away: int = m.NEXT_STAGE, *, after: asyncio.Event | None = None
    ) -> None:
        """`replicate` in the background, once `after` is set. An earlier request is obsolete and cancelled, so a lead may send any
        number."""
        if self._replicating is not None:
            self._replicating.cancel()
        self._replicating = self._spawn(self._replicate_after(after, step, index, away))

    async def _replicate_after(
        self, after: asyncio.Event | None, step: int, index: Digest, away: int
    ) -> None:
        if after is not None:
            await after.wait()
        await self.replicate(step, index, away)

    async def replicate(self, step: int, index: Digest, away: int = m.NEXT_STAGE) -> None:
        """Retries until it succeeds or a newer snapshot is requested: without the last one the job could not end."""
        self._replica = index
        reported = ""
        while self._replica == index:
            try:
                await self._files.replicate(index, self._owners(), away)
            except (SwarmError, JobError) as error:
                refused = error.stage if isinstance(error, ShardRefused) else None
                reported = self._report(
                    f"could not hold the snapshot of step {step}: {error}", step, reported, refused
                )
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._held = step
            self._send(m.Held(step, index))
            return

    def _report(self, text: str, step: int, last: str, refused: int | None = None) -> str:
        """Report to the lead why the snapshot of `step` is not durable, unless that was the `last` report: the job may wait for it,
        and its author does not see this peer's log. `refused`: the stage whose shard is at fault."""
        text = text[: m.MAX_TROUBLE]
        if text != last:
            log.warning("stage %d %s", self._stage, text)
            self._send(m.Held(step, m.NOTHING, text, refused))
        return text

    def begin(self) -> None:
        """A lead has begun an attempt. Snapshots that were held before may have become durable without our knowing."""
        if self._held is not None:
            self._doubt(self._held)
            self._held = None
        self._begun_at, self._replica = self._clock(), None
        self.hold_again()

    def _doubt(self, step: int) -> None:
        """The snapshot of `step` may be durable: keep it on disk."""
        self._doubtful = (*(other for other in self._doubtful if other != step), step)[-KEPT:]

    def hold_again(self) -> None:
        """The owners have changed, so some shard may have lost its second copy, and the next snapshot may be far away: replicate the
        newest one again, in the background."""
        if self._holding_again is not None:
            self._holding_again.cancel()
        if self.newest.digest is not None:
            self._holding_again = self._spawn(self._hold_again(self.newest.digest))

    async def _hold_again(self, index: Digest) -> None:
        for _ in range(HOLD_ATTEMPTS):
            if self.newest.digest != index:
                return
            try:
                await self._files.replicate(index, self._owners(), look=True)
                return
            except (SwarmError, JobError) as error:
                log.debug("stage %d does not hold its copies again: %s", self._stage, error)
                await asyncio.sleep(RETRY_SECONDS)

    async def complete(self) -> bool:
        """Read the ledger of the newest snapshot from its index, where it is missing: job records do not carry it. Whether it was.
        Raises BlobError, JobError."""
        if self.newest.digest is None or self.newest.sound:
            return False
        self.newest = await self._files.checkpoint(self.newest.digest)
        return True

    def has_part(self, index: Digest | None, step: int) -> bool:
        """Whether `index`, of `step`, is the newest snapshot with our stage's shard."""
        return self._files.has_part(index, step)

    def saved(self, checkpoint: Checkpoint) -> None:
        """The lead reports that `checkpoint` is durable."""
        if self.has_part(checkpoint.digest, checkpoint.step):
            self.waits_since = None
        if checkpoint.rank > self.newest.rank:
            self.newest, self.before = checkpoint, self.newest
        before = self.before if checkpoint == self.newest else None
        self._spawn(self._files.forget_before(checkpoint, before))

    def announce_restore(self, checkpoint: Checkpoint) -> None:
        """All stages are about to `restore` it."""
        if checkpoint.rank < self.newest.rank:
            log.warning(
                "stage %d goes back beyond the newest snapshot, to step %d", self._stage, checkpoint.step
            )
        self._requested = None  # a state that is not saved yet is of a history that may have ended

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Load the state of `checkpoint`. Raises JobError where no peer has it; StageFailed where our own disk does not take it, since
        the job must not give up a snapshot that other peers have."""
        try:
            state = await self._files.load(checkpoint, self._owners())
        except (QuotaExceeded, OSError) as error:
            raise StageFailed(
                f"stage {self._stage} cannot go back to step {checkpoint.step}: {error}"
            ) from None
        except SwarmError as error:
            raise JobError(str(error)) from None
        await self._compute.run(self._plane.load_state, state)
        self._codecs.load(snapshot.residuals(state))
        if checkpoint.rank < self.newest.rank:
            self._doubt(self.newest.step)
        if checkpoint.rank > self.newest.rank:
            self.before = self.newest
        self.newest = checkpoint  # not earlier: the stage that reported it to the lead may have lied
        self.hold_again()

    async def _save(self, version: Version, state: Mapping[str, torch.Tensor], seconds: float) -> None:
        step, reported, rests = version.step, "", 1
        while self._requested == version:
            try:
                # The lead ignores shards of earlier requests; deleting them may make room for this one.
                await self._files.forget_given_up(self.newest, {step, *self._doubtful})
                digest = await self._files.save(version, state)
            except (SwarmError, OSError) as error:
                reported = self._report(
                    f"could not save the snapshot of step {step}: {error}", step, reported
                )
                rests = 1 if isinstance(error, QuotaExceeded) else min(2 * rests, MOST_RESTS)
                for _ in range(rests):  # in slices: a newer request ends the wait
                    if self._requested == version:
                        await asyncio.sleep(RETRY_SECONDS)
                continue
            self._send(m.Shard(step, digest, seconds, version.history, snapshot.FURTHEST))
            if self.waits_since is None:
                self.waits_since = self._clock()
            return

    async def _saved(self) -> None:
        """Wait until no save is under way. A caller that is cancelled, with the step that it is about to run, must not cancel the
        save: later ones would wait for it in vain."""
        if self._saving is not None:
            await asyncio.wait([self._saving])

    def _timed_state(self) -> tuple[Mapping[str, torch.Tensor], float]:
        began = self._clock()
        state = self._state_now()
        return state, self._clock() - began

    def _state_now(self) -> dict[str, torch.Tensor]:
        """Runs on the device's thread, between two steps."""
        left_out = {snapshot.CODEC + name: tensor for name, tensor in self._codecs.state().items()}
        return {**self._plane.state(), **left_out}
