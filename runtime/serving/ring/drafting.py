"""The draft model at the first stage: it runs where the device would wait otherwise, a step at a time, and stops for good where it
fails."""

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

ONE_TOKEN = 2  # positions of a step whose time says what the next guess takes, at most


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
        self._step_seconds = Recent()  # with the wait for the device's thread
        self.running = runner.draft is not None

    def drafter(self, session: StageSession, prompt: Sequence[int]) -> Drafter:
        """Who guesses in a session that has its prompt now."""
        if not self.running or self._runner.draft is None:
            return RepeatDrafter(prompt)
        repeats = RepeatDrafter(prompt, least=LEAST_REPEATED)
        capacity = min(session.opening.capacity, self._runner.draft.positions)
        draw = partial(guess, session.opening.sampling)
        session.drafter = ModelDrafter(session.id, prompt, repeats, capacity, draw)
        return session.drafter

    def fed(self, session: StageSession, chunk: Chunk) -> None:
        """The chunk goes around the ring."""
        if session.drafter is not None and chunk.sample:
            session.drafter.trips.fed(chunk.end, self._clock())

    def returned(self, session: StageSession, position: int) -> None:
        """The token for that position has come back."""
        if session.drafter is not None:
            session.drafter.trips.returned(position, self._clock())

    async def step(self) -> Sequence[StageSession]:
        """Run the model once for some of the sessions that wait for tokens: which ones; nobody where it is not worth it."""
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
        """Who is next, of those that want it: as many as one step has positions for."""
        if not self.running:
            return []
        found: list[tuple[StageSession, DraftStep]] = []
        room = STEP_POSITIONS
        waiting = [each for each in self._schedule.sessions.values() if each.drafter is not None]
        first = self._runs % max(1, len(waiting))
        for session in (*waiting[first:], *waiting[:first]):
            if session.drafter is None or session.feed is None or session.ended or not room:
                continue
            most = session.feed.allowed(self._schedule.guesses(session))
            step = session.drafter.next_step(most, room, self._step_seconds.value)
            if step is not None:
                found.append((session, step))
                room -= len(step.ids)
        return found
