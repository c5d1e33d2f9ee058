"""The sessions of one answer: the one that runs, and the next, which is opened beside it and takes over with its first
token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from fusion.runtime.serving.answers.gateway_session import Event, GatewaySession, GatewaySessions
from fusion.runtime.serving.answers.route_choice import RemainingWork
from fusion.runtime.serving.answers.task import Task
from fusion.runtime.serving.requests.request import Logprobs
from fusion.runtime.serving.ring.session import Hop, Opening, SessionId


class SessionPair:
    """`route` is who runs each stage, as far as is known; `events`, what happens to either session."""

    def __init__(self, task: Task, sessions: GatewaySessions, random: Random) -> None:
        self.task = task
        self.known = [*task.prompt, *task.answered]  # the tokens that are decided, by position
        self.told = 0  # of the `task.scored` tokens of the prompt, by one session or the other
        self.route: tuple[Hop, ...] = ()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.current: GatewaySession | None = None
        self.next: GatewaySession | None = None
        self.reuses = True  # what stages say they hold; and takes it that all goes well
        self._prefixes = sessions.prefixes(task.model, task.holder)
        self._sessions = sessions
        self._random = random

    @property
    def remaining(self) -> RemainingWork:
        """What a session that begins now would have to do."""
        known, task = len(self.known), self.task
        # Of no tokens one is chosen all the same, and not told.
        return RemainingWork(known, len(task.prompt) + max(1, task.max_tokens) - known)

    @property
    def left_to_tell(self) -> int:
        """How many of the prompt's tokens have yet to be told of."""
        return self.task.scored - self.told

    def tell(self, position: int, found: Sequence[Logprobs]) -> tuple[Logprobs, ...]:
        """What a session has told of the prompt's tokens from `position` on, without those that are told already. What one
        session tells comes in order, and each begins with the first."""
        new = tuple(found[self.told + 1 - position :])
        self.told += len(new)
        return new

    async def begin(self, route: tuple[Hop, ...]) -> None:
        """Make the current session. Faulted where a stage cannot be reached."""
        self.route = route
        reuses = self.reuses and not self.left_to_tell  # else the last stage has to run all of the prompt
        self.current = await self._open(route, self._chain(self.known) if reuses else b"")
        if self.current.begins_early and self.reuses:
            self.prompt(self.current)

    def prompt(self, session: GatewaySession) -> None:
        """Since it was announced more may have come from the session that runs beside it."""
        known = self.known[: session.opening.prompt_length]
        session.prompt(known, guesses=self.task.guesses, source=self.task.source)

    async def open_next(self, route: tuple[Hop, ...]) -> None:
        """It goes to a stage that has nothing of it, so no stage is asked what it holds."""
        self.next = await self._open(route)

    def _chain(self, tokens: Sequence[int]) -> bytes:
        return b"" if self._prefixes is None else self._prefixes.chain(tokens)

    async def _open(self, route: tuple[Hop, ...], prefix: bytes = b"") -> GatewaySession:
        task, remaining = self.task, self.remaining
        opening = Opening(
            session=SessionId(self._random.randbytes(8).hex()),
            route=route,
            prompt_length=remaining.known,
            max_tokens=remaining.tokens,
            sampling=task.sampling,
            logits=task.logits,
            top_logprobs=task.top_logprobs,
            prompt_logprobs=task.prompt_logprobs if self.left_to_tell else None,
            ends=task.ends,
            answered=remaining.known - len(task.prompt),
            user=task.user,
            prefix=prefix,
            schema_bytes=len(task.schema),
            source=task.source_length,
        )
        return await self._sessions.open(opening, task.model, self.events, self.known, task.schema)

    def promote(self) -> None:
        """The next session is the one that runs now."""
        assert self.next is not None
        self.drop_current()
        self.current, self.next = self.next, None
        self.route = self.current.route

    def drop_current(self) -> None:
        if (session := self.current) is not None:
            # Where it is behind the session before it, its stages may have run wrong guesses in place of what is known.
            reached = max(session.reached, session.opening.prompt_length)
            self._sessions.close(session, self._chain(self.known[: min(reached, len(self.known) - 1)]))
            self.current = None

    def drop_next(self) -> None:
        if self.next is not None:
            self._sessions.close(self.next)
            self.next = None
