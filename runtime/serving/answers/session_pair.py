"""The sessions of one completion: the current one, and the next, which is opened beside it and takes over with its first token."""

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
    """`route`: the peer of each stage; `events`: of both sessions."""

    def __init__(self, task: Task, sessions: GatewaySessions, random: Random) -> None:
        self.task = task
        self.known = [*task.prompt, *task.answered]  # the sequence so far, by position
        self.scored = 0  # of the `task.scored` tokens of the prompt, by one session or the other
        self.route: tuple[Hop, ...] = ()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.current: GatewaySession | None = None
        self.next: GatewaySession | None = None
        self.reuses = True  # the stages' prefix caches, without waiting for them to confirm
        self._prefixes = sessions.prefixes(task.model, task.tenant)
        self._sessions = sessions
        self._random = random

    @property
    def remaining(self) -> RemainingWork:
        """The work of a session that begins now."""
        known, task = len(self.known), self.task
        # With max_tokens 0 one token is generated all the same, and dropped.
        return RemainingWork(known, len(task.prompt) + max(1, task.max_tokens) - known)

    @property
    def left_to_score(self) -> int:
        """How many of the prompt's tokens still need log-probabilities."""
        return self.task.scored - self.scored

    def add_prompt_logprobs(self, position: int, logprobs: Sequence[Logprobs]) -> tuple[Logprobs, ...]:
        """Add log-probabilities of the prompt's tokens from `position` on; returns the new ones. Each session sends them in order, from
        the first token on."""
        new = tuple(logprobs[self.scored + 1 - position :])
        self.scored += len(new)
        return new

    async def begin(self, route: tuple[Hop, ...]) -> None:
        """Open the current session. Faulted where a stage cannot be reached."""
        self.route = route
        reuses = self.reuses and not self.left_to_score  # log-probabilities need the whole prompt to run
        self.current = await self._open(route, self._chain(self.known) if reuses else b"")
        if self.current.begins_early and self.reuses:
            self.prompt(self.current)

    def prompt(self, session: GatewaySession) -> None:
        """Send the prompt as announced: the current session may have generated more tokens since."""
        known = self.known[: session.opening.prompt_length]
        session.prompt(known, guesses=self.task.guesses, source=self.task.source)

    async def open_next(self, route: tuple[Hop, ...]) -> None:
        """Open the next session. Some stage of the new route has no cached prefix, so none is requested."""
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
            prompt_logprobs=task.prompt_logprobs if self.left_to_score else None,
            ends=task.ends,
            answered=remaining.known - len(task.prompt),
            user=task.user,
            prefix=prefix,
            schema_bytes=len(task.schema),
            source=task.source_length,
        )
        return await self._sessions.open(opening, task.model, self.events, self.known, task.schema)

    def promote(self) -> None:
        """Make the next session the current one."""
        assert self.next is not None
        self.drop_current()
        self.current, self.next = self.next, None
        self.route = self.current.route

    def drop_current(self) -> None:
        if (session := self.current) is not None:
            # Beyond what it has confirmed, its stages may have cached rejected guesses instead of the sequence.
            reached = max(session.reached, session.opening.prompt_length)
            self._sessions.close(session, self._chain(self.known[: min(reached, len(self.known) - 1)]))
            self.current = None

    def drop_next(self) -> None:
        if self.next is not None:
            self._sessions.close(self.next)
            self.next = None
