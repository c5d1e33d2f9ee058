"""One completion: its tokens in order, over as many sessions as it takes, whatever happens to the peers of its stages.

Sampling depends on absolute positions, so a session that starts with the prompt and the tokens so far generates the very tokens that
the lost one would have. Three ways from one session to the next:

    a stage fails    its owner is reported, and a new session is opened on another route; the client sees a pause
    a stage leaves   it announces that while it still serves: the next session is opened beside the current one, and takes
                     over with its first token; the client notices nothing
    better route     a link has become slow, a stage busy, a replica was added: the same, where it pays

The first is `recovery`, by the policy in `failover`; the other two are `moves`; `liveness` detects silent stages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

from fusion.runtime.job.context import Context
from fusion.runtime.serving.answers.failover import FailoverConfig, Fault, Faulted
from fusion.runtime.serving.answers.gateway_session import (
    Event,
    GatewaySession,
    GatewaySessions,
    prompt_logprobs_of,
    token_of,
    unread_bytes,
)
from fusion.runtime.serving.answers.liveness import Liveness
from fusion.runtime.serving.answers.moves import Moves
from fusion.runtime.serving.answers.recovery import Recovery, Suspect
from fusion.runtime.serving.answers.routes import NoOwner, Routes
from fusion.runtime.serving.answers.session_pair import SessionPair
from fusion.runtime.serving.answers.slowdown import Slowdown
from fusion.runtime.serving.answers.task import Task
from fusion.runtime.serving.requests.request import Finish, Logprobs, Piece
from fusion.runtime.serving.ring.session import Hop
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import error_line
from fusion.swarm.transport import Frame, PeerId

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """One token of the completion."""

    id: int
    logits: bytes
    logprobs: Logprobs | None = None

    def piece(self, index: int, text: str, begins: int = 0, route: tuple[PeerId, ...] = ()) -> Piece:
        logprobs = self.logprobs
        return Piece(
            index=index,
            id=self.id,
            text=text,
            begins=begins,
            logits=self.logits,
            logprob=None if logprobs is None else logprobs.chosen,
            top_logprobs=() if logprobs is None else logprobs.top,
            route=route,
        )


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the next tokens of the prompt."""

    logprobs: tuple[Logprobs, ...]


class Generation:
    """`tokens` runs it. `finish`: "" until it has ended, then why."""

    def __init__(
        self,
        context: Context,
        task: Task,
        sessions: GatewaySessions,
        routes: Routes,
        suspect: Suspect,
        config: FailoverConfig,
    ) -> None:
        self.finish = _ended(task)
        self.cached_tokens = 0  # of the prompt, cached at every stage
        self._clock = context.clock.monotonic
        self._routes = routes
        self._pair = SessionPair(task, sessions, context.random)
        self._liveness = Liveness(config, self._clock)
        self._recovery = Recovery(self._pair, routes, suspect, config)
        self._moves = Moves(self._pair, routes, lambda: self._recovery.flows, self._clock, context.random)
        self._slowdown = Slowdown()

    @property
    def route(self) -> tuple[Hop, ...]:
        """The peer of each stage."""
        return self._pair.route

    async def tokens(self) -> AsyncGenerator[Chosen | PromptLogprobs, None]:
        """Log-probabilities of an echoed prompt, from its second token on, then the tokens that the client does not have yet. NoRoute or
        JobFailed, in one line, when the completion fails."""
        watching = asyncio.create_task(self._moves.watch())
        try:
            while not self.finish:
                try:
                    if self._pair.current is None:
                        await self._begin()
                    event = await self._event()
                    chosen = None if event is None else await self._take(event)
                except Faulted as error:
                    await self._recovery.after(error.fault, self._liveness.stalled_seconds)
                    continue
                if chosen is not None:
                    yield chosen
        finally:
            watching.cancel()
            try:
                await asyncio.gather(
                    watching, self._moves.aclose(), self._recovery.aclose(), return_exceptions=True
                )
            finally:  # also if cancelled again during this cleanup
                self._pair.drop_current()
                self._pair.drop_next()

    async def _begin(self) -> None:
        """Begin a session. Faulted where a stage has no holder or cannot be reached."""
        pair = self._pair
        if pair.next is not None:
            self._promote()
            return
        try:
            route = await self._routes.route(pair.task.model, pair.remaining)
        except NoOwner as error:
            raise Faulted(Fault("absent", str(error), (error.stage,))) from None
        except SwarmError as error:  # the directory cannot be reached now
            raise Faulted(Fault("absent", error_line(error))) from None
        await pair.begin(route)
        assert pair.current is not None
        if pair.current.prompted:
            self._count_cached(pair.current)
        self._liveness.begin()
        self._slowdown.begin()

    def _promote(self) -> None:
        self._pair.promote()
        self._liveness.received()
        self._slowdown.begin()

    async def _event(self) -> Event | None:
        """The next event. None after a silence, when the stages were pinged."""
        events = self._pair.events
        with suppress(asyncio.QueueEmpty):
            return events.get_nowait()
        try:
            async with asyncio.timeout(self._liveness.patience_seconds):
                return await events.get()
        except TimeoutError:
            assert self._pair.current is not None
            self._liveness.silence(self._pair.current)
            return None

    async def _take(self, event: Event) -> Chosen | PromptLogprobs | None:
        """Handle an event. Faulted where the current session has ended."""
        session, what, pair = event.session, event.what, self._pair
        if session is not pair.current and session is not pair.next:
            return None  # it has been closed
        if isinstance(what, Fault):
            self._lose(session, what)
            return None
        self._liveness.received()
        match what.kind:
            case "opened":
                session.waiting.discard(event.stage)
                if not session.waiting and not session.prompted:
                    pair.prompt(session)
                    self._count_cached(session)
            case "leaving" if session is pair.current:
                self._moves.leave(session, event.stage)
            case "token":
                session.unread_bytes -= unread_bytes(what)
                return await self._token(session, what)
            case "prompt_logprobs":
                session.unread_bytes -= unread_bytes(what)
                return self._prompt_logprobs(session, what)
        return None

    def _prompt_logprobs(self, session: GatewaySession, frame: Frame) -> PromptLogprobs | None:
        pair = self._pair
        new = pair.add_prompt_logprobs(frame.header["position"], prompt_logprobs_of(session, frame))
        if not pair.left_to_score and not pair.task.max_tokens:
            self.finish = "length"
        return PromptLogprobs(new) if new else None

    def _count_cached(self, session: GatewaySession) -> None:
        """Called once the prompt of `session` has been sent."""
        if not self._begun:
            self.cached_tokens = min(session.reused, len(self._pair.task.prompt))

    @property
    def _begun(self) -> bool:
        """Whether a new token has been generated."""
        task = self._pair.task
        return len(self._pair.known) > len(task.prompt) + len(task.answered)

    async def _token(self, session: GatewaySession, frame: Frame) -> Chosen | None:
        known = self._pair.known
        if session is self._pair.next:
            self._promote()
        position, token = token_of(frame)
        if self._pair.left_to_score:
            raise Faulted(
                Fault("broken", f"{session.where(len(session.route) - 1)} left log-probabilities out")
            )
        if position < len(known):
            return None  # the previous session generated it
        if position > len(known):
            raise Faulted(Fault("broken", f"{session.where(len(session.route) - 1)} left a token out"))
        finish = await self._finish(session, frame, token)
        known.append(token)
        now, guessed = self._clock(), frame.header.get("guessed") is True
        self._liveness.token(now, guessed)
        self._recovery.token()
        if self._slowdown.token(now, guessed):
            log.debug("%s: tokens come slower", session.model.manifest.name)
            session.slow()
        self.finish = finish
        logprobs = session.opening.logprobs_of(frame.header, session.model.serve.vocabulary)
        return Chosen(token, bytes(frame.payload), logprobs)

    async def _finish(self, session: GatewaySession, frame: Frame, token: int) -> Finish:
        """Whether the completion ends with the token, and why, even where the last stage does not say so. Faulted where the token
        violates the schema, which the last stage has to enforce."""
        grammar, ends = self._pair.task.grammar, session.model.serve.end_tokens
        reason = _finish(frame) or session.opening.finish(token, frame.header["position"], ends)
        if grammar is None:
            return reason
        fits = grammar.accepts if token in ends else await grammar.push_soon((token,))
        if fits and (grammar.complete or token in ends or token in session.opening.ends.stop_token_ids):
            return "stop"
        last = len(session.route) - 1
        fault = Fault("broken", f"{session.where(last)} does not follow response_format", (last,))
        if not fits:
            raise Faulted(fault)
        if reason == "stop":
            session.put_event(
                last, fault
            )  # it has stopped too early; the tokens so far are valid, and the grammar has them
            return ""
        return reason

    def _lose(self, session: GatewaySession, fault: Fault) -> None:
        if session is self._pair.next:
            self._moves.lost(session, fault)
        elif self._pair.next is not None:
            self._promote()
        else:
            raise Faulted(fault)


def _ended(task: Task) -> Finish:
    """Whether the tokens that the client has already are the whole completion, and why."""
    if task.answered and task.ends_with(task.answered[-1], len(task.answered) - 1):
        return "stop"
    if task.grammar is not None and task.grammar.complete:
        return "stop"
    return "length" if len(task.answered) >= task.max_tokens and not task.scored else ""


def _finish(frame: Frame) -> Finish:
    match frame.header.get("finish"):
        case "stop":
            return "stop"
        case "length":
            return "length"
    return ""
