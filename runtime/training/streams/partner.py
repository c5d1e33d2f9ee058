"""One partner of a hosted stage: the stream to it, the stream from it, and whom we know to own it.

A stream that breaks is dialled again at once, first at the same peer. Where that does not answer, whoever may replace
the owner is asked to look at it (`Takeover.suspect`), while the dialling goes on; what works first wins. A new owner
says hello with its sealed claim, and one that we are told of is dialled at once, so nobody waits for the directory.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.fields import plain
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.job.size_text import needs
from fusion.runtime.training.step.messages import Hello
from fusion.runtime.training.streams.fence import Fence, Overtaken
from fusion.runtime.training.streams.suspicion import Suspicion
from fusion.swarm.claims.election import winner
from fusion.swarm.claims.tenure import Tenure
from fusion.swarm.directory.api import GLANCE_SECONDS, RECORD_TTL_SECONDS
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import FrameError, SwarmError, TransportError
from fusion.swarm.streams.queued_stream import HELLO_SECONDS, QueuedStream, dial
from fusion.swarm.transport import Stream, checked

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.1  # doubled up to the longest, from one failed dial to the next
LONGEST_RETRY_SECONDS = 1.6
REFUSED_SECONDS = RECORD_TTL_SECONDS
PASSED_OVER_SECONDS = 3 * RECORD_TTL_SECONDS
PATIENCE_SECONDS = 0.1  # for a peer whose stream broke to answer once more, before it is suspected


@dataclass(frozen=True, kw_only=True)
class Held:
    """The stage that is hosted here. `incarnation`: drawn anew whenever a peer begins the stage, to tell it from an
    earlier time under the same term. `memory_bytes`: what each stage of the job needs, for people; or nothing."""

    job: JobId
    stage: int
    term: int
    incarnation: int = 0
    memory_bytes: tuple[int, ...] = ()


class Partner:
    """Stage `stage`, which the one held here works with. `changed` is called whenever a stream to or from it has come up
    or ended."""

    def __init__(self, context: Context, here: Held, stage: int, changed: Callable[[], None]) -> None:
        self.stage = stage
        self.fence = Fence(context.leases, here.job, here.stage, here.term, stage)
        self.outgoing: QueuedStream | None = None
        self.incoming: Stream | None = None
        self.closed = False  # our stage is not hosted here any more, or about not to be
        self._waits = ""  # why it is not linked, for people, where we know
        self._context = context
        self._here = here
        self._changed = changed
        self._shown: ClaimRecord | None = None  # the owner to dial next, as it or another peer told us
        # The owner that we dialled last, who is at the other end of `outgoing`.
        self._last: ClaimRecord | None = None
        self._news = asyncio.Event()  # set when somebody tells us of an owner
        self._suspicion = Suspicion(context, here.job, here.stage, stage, self._succeeded)
        self._refused_since = math.inf  # it says that our own stage is over
        self._passed_over_since = math.inf  # it goes by another owner of our own stage, whom we see as well
        self._sent_bytes = 0  # on links that are no more

    @property
    def linked(self) -> bool:
        return self.outgoing is not None and self.incoming is not None

    @property
    def owner(self) -> ClaimRecord | None:
        """Who is at the other end while we are linked."""
        return self._last if self.linked else None

    @property
    def waiting_for(self) -> str:
        """One line for people: why it is not linked."""
        return self._waits or f"stage {self.stage}: not linked yet"

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes + (0 if self.outgoing is None else self.outgoing.sent_bytes)

    # --- our side: dial, say hello, send

    async def keep(self, group: asyncio.TaskGroup) -> None:
        """Keep the stream to it up until `closed`; whom we ask about its owner runs in `group`. Raises Overtaken."""
        loop, pause, broke = asyncio.get_running_loop(), RETRY_SECONDS, False
        while not self.closed:
            self._news.clear()
            try:
                stream = await self._dial(broke, group)
            except Overtaken:
                raise
            except (SwarmError, ValueError, TimeoutError) as error:
                said = str(error) or "no answer"
                self._waits = said if isinstance(error, _Vacant) else f"stage {self.stage}: {said}"
                self._shown = None
                told = await self._wait_for_news(pause)
                pause = RETRY_SECONDS if told else min(2 * pause, LONGEST_RETRY_SECONDS)
                continue
            if stream is None:  # another peer owns the stage now
                continue
            began, pause = loop.time(), RETRY_SECONDS
            broke = await self._use(stream)
            if loop.time() - began < RETRY_SECONDS:
                # Whoever welcomes and then refuses is not dialled in a spin.
                await self._wait_for_news(RETRY_SECONDS)

    async def _wait_for_news(self, seconds: float) -> bool:
        """Wait so long, or until somebody tells us of an owner of the stage."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        return self._news.is_set()

    async def _dial(self, broke: bool, group: asyncio.TaskGroup) -> Stream | None:
        """A stream to the owner of the stage; None where we hear of another owner meanwhile. `broke`: whether a stream
        to it was lost, not closed."""
        claim = await self._owner(group)
        last = self._last
        suspect = broke and last is not None and (last.peer, last.term) == (claim.peer, claim.term)
        self._last = claim
        stream: Stream | None = None
        dialling = asyncio.ensure_future(self._greet(claim))
        news = asyncio.ensure_future(self._overtaken(claim))
        try:
            done, _ = await asyncio.wait(
                (dialling, news),
                timeout=PATIENCE_SECONDS if suspect else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                self.suspect(claim, group)
                done, _ = await asyncio.wait((dialling, news), return_when=asyncio.FIRST_COMPLETED)
            if not news.done():
                stream = await dialling
            return stream
        except (TransportError, TimeoutError) as error:
            if not isinstance(error, FrameError):
                self.suspect(claim, group)
            raise
        finally:
            for task in (dialling, news):
                task.cancel()
            await asyncio.wait((dialling, news))
            if stream is None and not dialling.cancelled() and dialling.exception() is None:
                dialling.result().abort()

    async def _overtaken(self, claim: ClaimRecord) -> None:
        """Until we are told of an owner that follows the one of `claim`."""
        while self._shown is None or not self.fence.follows(self._shown, claim):
            self._news.clear()
            await self._news.wait()

    async def _owner(self, group: asyncio.TaskGroup) -> ClaimRecord:
        """Whom to dial: the owner that was shown to us, or the directory's. Raises SwarmError where there is none."""
        leases, job = self._context.leases, self._here.job
        claim, held = self._shown, leases.tenure(job, self.stage)
        if claim is not None and held is not None and self._replaced(claim, held):
            # Whoever welcomes us and hangs up, again and again, is not the owner for that.
            claim = self._shown = None
        elif claim is None and self._last is None:
            claim = winner(leases.recent(job, self.stage))
        lapsed = claim if held is not None and not held.lives(self._context.directory.now()) else None
        if lapsed is not None:
            self._shown = None  # whom we dial instead does not follow it
        elif claim is not None and not self.fence.is_over(claim):
            return claim
        if lapsed is None:
            claims = await leases.claims(job, self.stage)
        else:
            claims = await leases.claims_or_recent(job, self.stage, GLANCE_SECONDS)
        claim = winner(claims)
        if claim is None and (behind := leases.behind(job, self.stage)) is not None:
            # It is dialled all the same: one of us will be told that it was overtaken, and claim its stage above that. If
            # neither dialled, both would wait for ever.
            return behind
        if claim is None and lapsed is not None:
            return lapsed  # its claims may not come through to us, and nobody else's do
        if claim is None:
            if self._last is not None:
                self.suspect(self._last, group)
            if not any(other.role == "standby" for other in claims):
                raise _Vacant(needs(self.stage, self._here.memory_bytes))
            raise SwarmError("no peer holds it; a standby is about to")
        # One whose term is over for our fence had the stage taken from it while it was cut off from us, and has it back. It is
        # dialled all the same, and dials us: either will be told that it was overtaken, and claim its stage above that.
        return claim

    def _replaced(self, claim: ClaimRecord, held: Tenure) -> bool:
        """Whether another owner follows the one of `claim`, or has the stage back from it."""
        back = held.holding != (claim.peer, claim.term) and held.used >= claim.term
        return self.fence.follows(held.claim, claim) or (back and held.lives(self._context.directory.now()))

    def _follows(self, claim: ClaimRecord, before: ClaimRecord) -> bool:
        """Whether the owner of `claim` is to be linked to in place of the one of `before`, by its term or as the one who has
        the stage back."""
        if self.fence.follows(claim, before):
            return True
        held = self._context.leases.known_tenure(self._here.job, self.stage)
        return held is not None and held.holding == (claim.peer, claim.term) and self._replaced(before, held)

    async def _greet(self, claim: ClaimRecord) -> Stream:
        leases, here = self._context.leases, self._here
        async with asyncio.timeout(HELLO_SECONDS):
            hello = Hello(
                job=here.job, source=here.stage, target=self.stage, term=here.term, target_term=claim.term,
                incarnation=here.incarnation, claim=leases.sealed(here.job, here.stage) or b"",
            )  # fmt: skip
            stream = await dial(self._context.transport, claim.peer, STAGE, plain(hello))
            try:
                reply = checked(await stream.receive())
                term = reply.header.get("term")
                if reply.kind == "stale" and isinstance(term, int):
                    self._refused(claim, term, reply.header)
                if reply.kind == "later":
                    self._passed_over(reply.header.get("peer"), term)
                if reply.kind != "welcome":
                    raise SwarmError(str(reply.header.get("message", "refused"))[:200])
            except BaseException:
                stream.abort()
                raise
        return stream

    def _refused(self, claim: ClaimRecord, term: int, refusal: Mapping[str, Any]) -> None:
        """The other end says that our stage was held under a higher term. One neighbour may be wrong about that, or lie:
        a majority of them may not, nor one that goes on with it for as long as a lease lasts, for nobody can work then.
        Raises Overtaken, or SwarmError where it is to be asked again."""
        leases, here, now = self._context.leases, self._here, asyncio.get_running_loop().time()
        self._refused_since = min(now, self._refused_since)
        disowned = leases.voting.disowned(here.job, here.stage, claim.peer, refusal)
        if disowned or now - self._refused_since >= REFUSED_SECONDS:
            leases.observe(here.job, here.stage, term)
            raise Overtaken(here.stage, here.term, term)
        raise SwarmError(f"says that stage {here.stage} was held under term {term}")

    def _passed_over(self, peer: object, term: object) -> None:
        """The other end goes by that holder of our own stage. We see its claim as well, which may be older than ours, and have nothing
        to show that it is gone: two parts of a swarm that was divided have an owner each, who has the words of its own part.
        The later one gives way, after three leases. Raises Overtaken."""
        leases, here, now = self._context.leases, self._here, asyncio.get_running_loop().time()
        rival = next((each for each in leases.rivals(here.job, here.stage) if each == (peer, term)), None)
        if rival is None:
            self._passed_over_since = math.inf
            return
        self._passed_over_since = min(now, self._passed_over_since)
        if now - self._passed_over_since >= PASSED_OVER_SECONDS:
            raise Overtaken(here.stage, here.term, rival.term, rival.peer)

    async def _use(self, stream: Stream) -> bool:
        """Until the stream ends: whether the other end vanished, rather than closed or refused it."""
        # What the other end says there can only be why not.
        link = QueuedStream(
            stream, on_frame=lambda frame: link.end(str(frame.header.get("message", "refused"))[:200])
        )
        self._suspicion.end()
        self.outgoing, self._shown = link, self._last
        self._waits = ""
        self._refused_since = self._passed_over_since = math.inf
        self._changed()
        try:
            ended = await link.wait()
            self._waits = f"stage {self.stage}: {ended.reason}"
            log.info("stage %d lost stage %d: %s", self._here.stage, self.stage, ended.reason)
            return ended.vanished
        finally:
            if not self.closed:
                link.abort()
            self._sent_bytes += link.sent_bytes
            self.outgoing = None
            self._changed()

    def suspect(self, claim: ClaimRecord, group: asyncio.TaskGroup) -> None:
        """Have others look at the owner of `claim`, in `group`."""
        if not self.closed:
            self._suspicion.begin(claim, group)

    # --- the other side, and who owns the stage

    def admit(self, claim: ClaimRecord, stream: Stream) -> None:
        """The owner of `claim` speaks on `stream` from now on, and nobody else."""
        before, self.incoming = self.incoming, None
        if before is not None:
            before.abort()
            self._changed()  # whatever was under way on the old stream is lost
        self.incoming = stream
        self._record_owner(claim)
        self._changed()

    def dismiss(self, stream: Stream) -> None:
        """The stream that `admit` got has ended."""
        if self.incoming is stream:
            self.incoming = None
            self._waits = self._waits or f"stage {self.stage}: its stream ended"
            self._changed()

    def _succeeded(self, claim: ClaimRecord, term: int) -> None:
        """The owner under `term` was replaced, as those say who were asked to look at it."""
        if claim.term > max(term, self.fence.highest):
            self._record_owner(claim)

    def _record_owner(self, claim: ClaimRecord) -> None:
        """That peer owns the stage, not one whose time is over: link to it now."""
        link, shown = self.outgoing, self._shown
        if link is not None:
            assert self._last is not None, "we dialled it"
            if not self._follows(claim, self._last):
                return
            link.end("another peer owns it now")
        if shown is None or shown.term <= claim.term or self._follows(claim, shown):
            self._shown = claim
            self._news.set()


class _Vacant(SwarmError):
    """Nobody holds a stage, and nobody is about to."""
