"""One answer, whatever happens to the peers that run its stages: tokens in order, over as many sessions as it takes.

Positions and sampling are absolute, so a session that starts with the prompt and the tokens so far goes on with the
very tokens that the lost one would have given. Three ways from one session to the next:

    a stage dies     its owner is reported, the session is opened anew on another route; the user sees a pause
    a stage leaves   it says so while it still serves: the next session is opened beside the one that runs, and takes
                     over with its first token; the user sees nothing
    a way is better  a link has become slow, a stage busy, a replica has come: the same, as far as it pays

The rules (whom to report, when to give up) are in `fusion.runtime.serving.answers.failover`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed, NoRoute
from fusion.runtime.serving.answers.catalog import Catalog, NoOwner, ServedModel
from fusion.runtime.serving.answers.failover import (
    FailoverConfig,
    Fault,
    Faulted,
    Pulse,
    Trouble,
    explain,
    respond,
)
from fusion.runtime.serving.answers.gateway_session import Event, GatewaySession, GatewaySessions, token_of
from fusion.runtime.serving.answers.pace import Pace
from fusion.runtime.serving.answers.route_choice import RemainingWork
from fusion.runtime.serving.requests.request import Finish, Sampling
from fusion.runtime.serving.ring.session import Hop, Opening, SessionId
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.printable import error_line
from fusion.swarm.transport import Frame

log = logging.getLogger(__name__)

FLOWING = Trouble(answered=True)  # tokens come
WAKING_SECONDS = 0.05  # how often we look whether a silent stage has woken up while others look into it
MOVE_TRIES = 10  # looks for the peer that follows one that leaves; its claim may not have come round yet
MOVE_PAUSE_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two looks for a better way
CHOICELESS_LOOKS = 5  # of these one is taken while no stage has a replica
SETTLE_SECONDS = 5.0  # from one move to a better way to the next

# Reports that the owner of a stage seems to have vanished: who owns it now, None where nobody else does.
Suspect = Callable[[ServedModel, int, Hop], Awaitable[Hop | None]]


@dataclass(frozen=True)
class Chosen:
    """One token of the answer."""

    id: int
    logits: bytes


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be answered."""

    model: ServedModel
    prompt: Sequence[int]
    answered: Sequence[int]  # tokens that the user has already, from another gateway
    max_tokens: int  # those included
    sampling: Sampling
    logits: bool


class Generation:
    """`tokens` runs it. `route` is who runs each stage, as far as is known; `finish` whether it has ended, and why."""

    def __init__(
        self,
        context: Context,
        task: Task,
        sessions: GatewaySessions,
        catalog: Catalog,
        suspect: Suspect,
        config: FailoverConfig,
    ) -> None:
        self.route: tuple[Hop, ...] = ()
        self.finish = _ended(task)
        self._clock, self._random = context.clock.monotonic, context.random
        self._task = task
        self._sessions = sessions
        self._catalog = catalog
        self._suspect = suspect
        self._config = config
        self._known = [*task.prompt, *task.answered]  # the tokens that are decided, by position
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._current: GatewaySession | None = None
        # Opened beside the current one, which a peer is about to leave; and what opens it.
        self._next: GatewaySession | None = None
        self._moving: asyncio.Task[None] | None = None
        self._since = self._clock()  # of the last progress
        self._trouble = Trouble(answered=bool(task.answered))
        self._pulse = Pulse(config, self._since)
        self._pace = Pace()
        self._settled_at = self._since  # when the session may move to a better way again
        self._beside: set[asyncio.Task[None]] = set()  # what nobody waits for
        # When the stages were asked whether they are there, 0 if not since anything was heard; how far they were then.
        self._pinged = 0.0
        self._ran: dict[int, int] = {}

    async def tokens(self) -> AsyncGenerator[Chosen, None]:
        """The tokens that the user does not have yet. NoRoute or JobFailed, in one line, when it is given up."""
        self._spawn(self._watch())
        try:
            while not self.finish:
                try:
                    if self._current is None:
                        await self._begin()
                    event = await self._event()
                    chosen = None if event is None else self._take(event)
                except Faulted as error:
                    await self._recover(error.fault)
                    continue
                if chosen is not None:
                    yield chosen
        finally:
            for task in self._beside:
                task.cancel()
            await asyncio.gather(*self._beside, return_exceptions=True)
            for session in (self._current, self._next):
                if session is not None:
                    self._sessions.close(session)

    # --- what the stages say

    async def _event(self) -> Event | None:
        """What happens next. None after a silence: the stages were asked whether they are there."""
        with suppress(asyncio.QueueEmpty):
            return self._events.get_nowait()
        wait = self._config.ping_seconds if self._pinged else self._pulse.quiet_seconds()
        try:
            async with asyncio.timeout(wait):
                return await self._events.get()
        except TimeoutError:
            self._ask()
            return None

    def _ask(self) -> None:
        """Nothing came for too long: ask every stage, or see who has not answered. Faulted with what that shows."""
        session, now = self._current, self._clock()
        assert session is not None
        if not self._pinged:
            self._pinged, self._ran = now, dict(session.ran)
            session.ping()
            return
        silent = tuple(stage for stage, heard in session.heard.items() if heard < self._pinged)
        self._pinged = 0.0
        if silent:
            raise Faulted(Fault("silent", f"{session.where(silent[0])} does not answer", silent))
        if session.waiting:
            stage = min(session.waiting)
            if now - self._since >= self._config.recover_seconds:
                raise Faulted(Fault("absent", f"{session.where(stage)} is still being loaded", (stage,)))
        elif session.ran != self._ran:
            self._since = now  # slow, which is no fault
        elif self._pulse.asked():
            name = self._task.model.manifest.name
            raise Faulted(Fault("stuck", f"{name}: its stages answer, but no token comes"))

    def _take(self, event: Event) -> Chosen | None:
        """Act on what happened. Faulted where the session that runs has ended."""
        session, what = event.session, event.what
        if session is not self._current and session is not self._next:
            return None  # closed since
        if isinstance(what, Fault):
            self._lose(session, what)
            return None
        self._pinged = 0.0
        match what.kind:
            case "opened":
                session.waiting.discard(event.stage)
                if not session.waiting:
                    # Since it was announced more may have come from the session that runs beside it.
                    session.prompt(self._known[: session.opening.prompt_length])
            case "leaving" if session is self._current and not self._moves:
                self._catalog.avoid(session.model.job, event.stage, session.route[event.stage].peer)
                self._moving = self._spawn(self._move(session))
            case "token":
                return self._token(session, what)
        return None

    def _token(self, session: GatewaySession, frame: Frame) -> Chosen | None:
        if session is self._next:
            self._promote()
        position, token = token_of(frame)
        if position < len(self._known):
            return None  # the session before gave it
        if position > len(self._known):
            raise Faulted(Fault("broken", f"{session.where(len(session.route) - 1)} left a token out"))
        self._known.append(token)
        self._since = self._clock()
        self._pulse.token(self._since)
        if self._pace.token(self._since):
            log.debug("%s: tokens come slower", self._task.model.manifest.name)
            session.slow()
        self._trouble = FLOWING
        self.finish = _finish(frame)
        return Chosen(token, bytes(frame.payload))

    # --- from one session to the next

    async def _begin(self) -> None:
        """Make `_current`. Faulted where a stage is missing or cannot be reached."""
        if self._next is not None:
            self._promote()
            return
        try:
            self.route = await self._catalog.route(self._task.model, self._errand)
        except NoOwner as error:
            raise Faulted(Fault("absent", str(error), (error.stage,))) from None
        except SwarmError as error:  # the directory is out of reach for now
            raise Faulted(Fault("absent", error_line(error))) from None
        self._current = await self._open(self.route)
        self._pinged = 0.0
        self._pulse.begin(self._clock())
        self._pace.begin()

    @property
    def _errand(self) -> RemainingWork:
        """What a session that begins now would have to do."""
        task = self._task
        return RemainingWork(len(self._known), len(task.prompt) + task.max_tokens - len(self._known))

    async def _open(self, route: tuple[Hop, ...]) -> GatewaySession:
        task = self._task
        opening = Opening(
            session=SessionId(self._random.randbytes(8).hex()),
            route=route,
            prompt_length=len(self._known),
            max_tokens=self._errand.tokens,
            sampling=task.sampling,
            logits=task.logits,
        )
        return await self._sessions.open(opening, task.model, self._events)

    async def _recover(self, fault: Fault) -> None:
        """Find out who runs the stages now; NoRoute or JobFailed where that has taken too long."""
        name = self._task.model.manifest.name
        self._trouble = self._trouble.with_fault(fault)
        stalled = self._clock() - self._since
        job, before = self._task.model.job, self.route
        # All of them: the other stages of a route may be reached from nowhere else.
        left = [self._catalog.avoid(job, stage, before[stage].peer) for stage in fault.stages if before]
        elsewhere = bool(left) and all(left)
        retry = respond(self._trouble, fault, stalled, self._config, elsewhere=elsewhere)
        if retry is None:
            line = explain(fault, name, self._task.model.manifest.memory_bytes, stalled)
            raise NoRoute(line) if fault.kind == "absent" else JobFailed(line)
        log.info("%s: %s (%s); looking for another way", name, fault.message, fault.kind)
        if retry.suspects and elsewhere:
            self._spawn(self._report(retry.suspects, keep=False))
        elif retry.suspects:
            await self._report(retry.suspects, keep=retry.keep)
        if retry.keep and self._current is not None:
            if not self._events.empty():
                return  # it has woken up
            with suppress(NoRoute, SwarmError):
                if await self._catalog.route(self._task.model, self._errand) == before:
                    return  # nobody has taken over: it may yet wake up
        if self._current is not None:
            self._sessions.close(self._current)
            self._current = None
        if not retry.suspects:
            self._catalog.forget_route(job)
        await asyncio.sleep(retry.pause_seconds)

    async def _report(self, stages: Sequence[int], *, keep: bool) -> None:
        """Report the owners of these stages. Afterwards the catalog knows the new ones, or that it has to look."""
        model, route = self._task.model, self.route
        stages = [stage for stage in stages if self._catalog.owns(model.job, stage, route[stage].peer)]
        reports = asyncio.gather(*(self._suspect(model, stage, route[stage]) for stage in stages))
        try:
            while not reports.done():
                await asyncio.wait([reports], timeout=WAKING_SECONDS)
                if keep and not self._events.empty():
                    return
            hops = reports.result()
        finally:
            reports.cancel()
        self._catalog.replace(model.job, route, {s: hop for s, hop in zip(stages, hops, strict=True) if hop})

    def _lose(self, session: GatewaySession, fault: Fault) -> None:
        if session is self._next:
            log.debug("the session opened meanwhile was lost: %s", fault.message)
            self._sessions.close(session)
            self._next = None
            for stage in fault.stages:
                self._catalog.avoid(session.model.job, stage, session.route[stage].peer)
        elif self._next is not None:
            self._promote()
        else:
            raise Faulted(fault)

    async def _move(self, session: GatewaySession) -> None:
        """A peer of `session` is about to leave: open the next one while this one runs. Where that fails the end of
        this one is a fault like any other."""
        for _ in range(MOVE_TRIES):
            self._catalog.forget_route(session.model.job)
            try:
                route = await self._catalog.route(session.model, self._errand)
                if route != session.route:
                    self._next = await self._open(route)
                    return
            except (NoRoute, SwarmError, Faulted) as error:
                log.debug("no other way yet: %s", error)
            await asyncio.sleep(MOVE_PAUSE_SECONDS)

    async def _watch(self) -> None:
        """Move to a better way whenever there is one, for as long as the answer lasts."""
        model, looks = self._task.model, 0
        while True:
            await asyncio.sleep(LOOK_SECONDS * self._random.uniform(0.8, 1.2))
            looks += 1
            session = self._current
            runs = session is not None and not session.waiting and self._trouble is FLOWING
            if not runs or session is None or self._moves or self._clock() < self._settled_at:
                continue
            if looks % CHOICELESS_LOOKS and not self._catalog.has_choice(model.job):
                continue
            try:
                route = await self._catalog.better(model, self._errand, session.route)
                if route is None or session is not self._current or self._moves:
                    continue
                self._settled_at = self._clock() + SETTLE_SECONDS
                names = ", ".join(friendly_name(hop.peer) for hop in route)
                log.info("%s: the way over %s is better", model.manifest.name, names)
                self._moving = self._spawn(self._open_next(route))
            except (NoRoute, JobFailed, SwarmError) as error:
                log.debug("no better way: %s", error_line(error))

    async def _open_next(self, route: tuple[Hop, ...]) -> None:
        try:
            self._next = await self._open(route)
        except Faulted as error:
            log.debug("no way over there: %s", error)
            for stage in error.fault.stages:
                self._catalog.avoid(self._task.model.job, stage, route[stage].peer)

    @property
    def _moves(self) -> bool:
        """Whether the next session is open, or being opened."""
        return self._next is not None or (self._moving is not None and not self._moving.done())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it beside the answer, at most as long."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    def _promote(self) -> None:
        assert self._next is not None
        if self._current is not None:
            self._sessions.close(self._current)
        self._current, self._next, self._moving = self._next, None, None
        self._pace.begin()
        self.route = self._current.route
        self._pinged = 0.0


def _ended(task: Task) -> Finish:
    """Whether what the user has already is the whole answer."""
    if task.answered and task.answered[-1] in task.model.serve.end_tokens:
        return "stop"
    return "length" if len(task.answered) >= task.max_tokens else ""


def _finish(frame: Frame) -> Finish:
    match frame.header.get("finish"):
        case "stop":
            return "stop"
        case "length":
            return "length"
    return ""
