"""The draft model at the first stage: it runs a step at a time while the device is idle otherwise, and is switched off if it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from fusion.runtime.job.worker import Worker
from fusion.runtime.serving.drafts.draft_length import Recent
from fusion.runtime.serving.drafts.drafter import LEAST_REPEATED, STEP_POSITIONS, DraftStep, ModelDrafter
from fusion.runtime.serving.ring.guesses import Drafter, RepeatDrafter
from fusion.runtime.serving.ring.sampling import guess
from fusion.runtime.serving.ring.schedule import Schedule
from fusion.runtime.serving.ring.session import Chunk
from fusion.runtime.serving.ring.stage_session import PLANE_ERRORS, StageRunner, StageSession
from fusion.swarm.printable import error_line

log = logging.getLogger(__name__)

ONE_TOKEN = 2  # positions, at most, of a step whose time estimates that of one guess


class Drafting:
    """`running`: whether there is a draft model that has not failed."""

    def __init__(
        self,
        worker: Worker,
        runner: StageRunner,
        schedule: Schedule[StageSession],
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._runner = runner
        self._schedule = schedule
        self._clock = clock
        self._runs = 0
        self._step_seconds = Recent()  # including the wait for the device's thread
        self.running = runner.draft is not None

    def drafter(self, session: StageSession, prompt: Sequence[int]) -> Drafter:
        """The drafter of a session that has received its prompt."""
        if not self.running or self._runner.draft is None:
            return RepeatDrafter(prompt)
        repeats = RepeatDrafter(prompt, least=LEAST_REPEATED)
        capacity = min(session.opening.capacity, self._runner.draft.positions)
        draw = partial(guess, session.opening.sampling)
        session.drafter = ModelDrafter(session.id, prompt, repeats, capacity, draw)
        return session.drafter

    def fed(self, session: StageSession, chunk: Chunk) -> None:
        """A chunk was fed to the ring."""
        if session.drafter is not None and chunk.sample:
            session.drafter.trips.fed(chunk.end, self._clock())

    def returned(self, session: StageSession, position: int) -> None:
        """The token for that position has returned."""
        if session.drafter is not None:
            session.drafter.trips.returned(position, self._clock())

    async def step(self) -> Sequence[StageSession]:
        """Run the draft model once, for some of the sessions that wait for tokens. Returns these; empty where it is not worth it."""
        chosen = self._choose()
        if not chosen:
            return ()
        self._runs += 1
        steps = [step for _, step in chosen]
        began = self._clock()
        try:
            tokens = await self._worker.run(self._runner.run_draft, steps)
        except PLANE_ERRORS as error:
            self.running = False
            log.warning("the draft model guesses no more: %s", error_line(error))
            return ()
        if all(len(step.ids) <= ONE_TOKEN for step in steps):
            self._step_seconds.add(self._clock() - began)
        for (session, step), token in zip(chosen, tokens, strict=True):
            if session.drafter is None:
                continue
            if token is None:
                session.drafter.stop()
            else:
                session.drafter.drafted(step, token)
        return [session for session, _ in chosen]

    def _choose(self) -> list[tuple[StageSession, DraftStep]]:
        """The next sessions in rotation that want a step, as many as fit into one run."""
        if not self.running:
            return []
        chosen: list[tuple[StageSession, DraftStep]] = []
        room = STEP_POSITIONS
        waiting = [each for each in self._schedule.sessions.values() if each.drafter is not None]
        first = self._runs % max(1, len(waiting))
        for session in (*waiting[first:], *waiting[:first]):
            if session.drafter is None or session.feed is None or session.ended or not room:
                continue
            most = session.feed.allowed(self._schedule.guesses(session))
            step = session.drafter.next_step(most, room, self._step_seconds.value)
            if step is not None:
                chosen.append((session, step))
                room -= len(step.ids)
        return chosen
