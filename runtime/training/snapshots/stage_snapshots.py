"""One stage's part in the snapshots of its job: its state is taken between two steps, saved as a blob, held for a
neighbour, and gone back to. When, and what it is good for, the host and the lead decide.
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
from fusion.runtime.training.snapshots.stage_files import KEPT
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.history import Version
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import QuotaExceeded, SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # before a snapshot that could not be saved or held is tried again
MOST_RESTS = 60  # so long, after a shard that could not be written: each try may have written most of it
HOLD_ATTEMPTS = 3  # at copies that the job does not wait for


class StageSnapshots:
    """`tell` sends to the lead, `spawn` starts a task that ends with the host, `owners` are those of all stages now,
    `clock` gives seconds that only rise, on any thread."""

    def __init__(
        self,
        loaded: Loaded,
        codecs: StageCodecs,
        compute: Worker,
        owners: Callable[[], dict[int, PeerId]],
        tell: Callable[[m.Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # That the stage knows to be held, and the one before it
        self.newest, self.before = loaded.start, START
        self._stage = loaded.plan.stage.index
        self._plane = loaded.plane
        self._files = loaded.files
        self._codecs = codecs
        self._compute = compute
        self._owners = owners
        self._tell = tell
        self._spawn = spawn
        self._clock = clock
        self._saving: asyncio.Task[None] | None = None
        self._asked: Version | None = None  # the newest state that we were asked to save
        self._replica: Digest | None = None  # the newest index that we were asked to hold
        self._replicating: asyncio.Task[None] | None = None
        self._holding_again: asyncio.Task[None] | None = None
        self._held: int | None = None  # step of the last snapshot that we said to hold since work began anew
        # Steps of those before it did, or from which we went back: the word that they are durable may not have come here.
        self._doubtful: tuple[int, ...] = ()

    async def take(self, version: Version) -> None:
        """Copy the state, which is that of `version`. It is saved, and the lead told of it, beside the steps that follow;
        a save before it that does not succeed is given up."""
        state, seconds = await self._compute.run(self._timed_state)
        self._asked = None  # also a save of the very same state: a full disk must not hold up the steps
        await self._saved()
        self._asked = version
        self._saving = self._spawn(self._save(version, state, seconds))

    async def store(self, version: Version) -> Digest:
        """The blob of the state, which is that of `version`, once it is saved. JobError where it cannot be."""
        state = await self._compute.run(self._state_now)
        if self._saving is not None:  # the others may be waiting for it
            self._asked = version
            await self._saved()
        try:
            return await self._files.save(version, state)
        except (SwarmError, OSError) as error:
            raise JobError(f"stage {self._stage} could not store its state: {error}") from None

    async def store_index(self, data: bytes) -> Digest:
        """The blob of a snapshot's index, once this disk takes it: without that of the last one the job could not end."""
        while True:
            try:
                return await self._files.put(data)
            except SwarmError as error:
                log.warning("the index of a snapshot could not be stored: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    def hold(
        self, step: int, index: Digest, away: int = m.NEXT_STAGE, *, after: asyncio.Event | None = None
    ) -> None:
        """`replicate`, beside everything else, `after` that. What was asked for before is of no use any more, and a lead may ask for
        as many as it likes."""
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
        """Until it is done, or a newer snapshot is asked for: without the last one the job could not end."""
        self._replica = index
        said = ""
        while self._replica == index:
            try:
                await self._files.replicate(index, self._owners(), away)
            except (SwarmError, JobError) as error:
                said = self._say(f"could not hold the snapshot of step {step}: {error}", step, said)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._held = step
            self._tell(m.Held(step, index))
            return

    def _say(self, text: str, step: int, said: str) -> str:
        """What keeps the snapshot of a step from being durable, where that is not what was `said` last: the job may wait for it, and
        this peer's log is not where its author looks."""
        text = text[: m.MAX_TROUBLE]
        if text != said:
            log.warning("stage %d %s", self._stage, text)
            self._tell(m.Held(step, m.NOTHING, text))
        return text

    def begin(self) -> None:
        """A lead has told everybody to go on from one step. Until it does so again, what it asked for is durable only if it says so
        before it asks for the next."""
        if self._held is not None:
            self._doubt(self._held)
            self._held = None
        self.hold_again()

    def _doubt(self, step: int) -> None:
        """A snapshot that others may go back to, though we do not know that it is durable."""
        self._doubtful = (*(other for other in self._doubtful if other != step), step)[-KEPT:]

    def hold_again(self) -> None:
        """The owners have changed. The one that followed holds a shard of which nobody else may have a copy now, and the next
        snapshot may be far away: hold what is ours to hold of the newest one. Nobody waits for it."""
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
        """A job record has no room for the ledger of its snapshot: the snapshot itself has. Whether that was missing;
        raises BlobError, JobError."""
        if self.newest.digest is None or self.newest.sound:
            return False
        self.newest = await self._files.checkpoint(self.newest.digest)
        return True

    def has_part(self, index: Digest | None, step: int) -> bool:
        """Whether the newest snapshot that our stage has its shard in is that one, of that step."""
        return self._files.has_part(index, step)

    def saved(self, checkpoint: Checkpoint) -> None:
        """All stages hold that snapshot."""
        if checkpoint.rank > self.newest.rank:
            self.newest, self.before = checkpoint, self.newest
        before = self.before if checkpoint == self.newest else None
        self._spawn(self._files.forget_before(checkpoint, before))

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Everybody is about to `restore` it."""
        if checkpoint.rank < self.newest.rank:
            log.warning(
                "stage %d goes back beyond the newest snapshot, to step %d", self._stage, checkpoint.step
            )
        self._asked = None  # what is not saved by now is of a history that may not go on

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to `checkpoint`. JobError where nobody has it; StageFailed where our own disk does not take it, for which the
        job must not lose a snapshot that others have."""
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
        self.newest = checkpoint  # and not before: who told the lead of it may have made it up
        self.hold_again()

    async def _save(self, version: Version, state: Mapping[str, torch.Tensor], seconds: float) -> None:
        step, said, rests = version.step, "", 1
        while self._asked == version:
            try:
                # The lead counts nothing that it asked for before; and without it there may be room for this one.
                await self._files.forget_given_up(self.newest, {step, *self._doubtful})
                digest = await self._files.save(version, state)
            except (SwarmError, OSError) as error:
                said = self._say(f"could not save the snapshot of step {step}: {error}", step, said)
                rests = 1 if isinstance(error, QuotaExceeded) else min(2 * rests, MOST_RESTS)
                for _ in range(rests):  # nobody waits until it is over who has a newer one
                    if self._asked == version:
                        await asyncio.sleep(RETRY_SECONDS)
                continue
            self._tell(m.Shard(step, digest, seconds, version.history, snapshot.FURTHEST))
            return

    async def _saved(self) -> None:
        """Until no save is under way. Whoever waits may be cancelled, with the step that it is about to run: a save that ended
        with it would be the end of each later one that waits for it."""
        if self._saving is not None:
            await asyncio.wait([self._saving])

    def _timed_state(self) -> tuple[Mapping[str, torch.Tensor], float]:
        began = self._clock()
        state = self._state_now()
        return state, self._clock() - began

    def _state_now(self) -> dict[str, torch.Tensor]:
        """In the device's thread, between two steps."""
        left_out = {snapshot.CODEC + name: tensor for name, tensor in self._codecs.state().items()}
        return {**self._plane.state(), **left_out}
