"""One partner of a hosted stage: the streams to and from it, and its owner as far as we know.

A broken stream is dialled again at once, first at the same peer. If that peer does not answer, its standbys are asked to
probe it (`Takeover.suspect`) while dialling goes on; whichever succeeds first wins. A new owner sends its sealed claim in
`hello`, and an owner that another peer announces is dialled at once, so nothing waits for the directory.
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
PATIENCE_SECONDS = 0.1  # for a peer whose stream broke to accept a new one, before it is suspected


@dataclass(frozen=True, kw_only=True)
class Held:
    """The stage that is hosted here. `incarnation`: drawn at random whenever a peer starts the stage, to distinguish runs under
    the same term. `memory_bytes`: what each stage of the job needs, for messages; may be empty."""

    job: JobId
    stage: int
    term: int
    incarnation: int = 0
    memory_bytes: tuple[int, ...] = ()


class Partner:
    """Stage `stage`, which exchanges tensors with the one held here. `changed` is called whenever a stream to or from it opens
    or ends."""

    def __init__(self, context: Context, here: Held, stage: int, changed: Callable[[], None]) -> None:
        self.stage = stage
        self.fence = Fence(context.leases, here.job, here.stage, here.term, stage)
        self.outgoing: QueuedStream | None = None
        self.incoming: Stream | None = None
        self.closed = False  # our stage is leaving this peer, or has left
        self._waits = ""  # why it is not linked, for messages; "" where unknown
        self._context = context
        self._here = here
        self._changed = changed
        self._announced: ClaimRecord | None = (
            None  # the owner to dial next, by its own claim or another peer's report
        )
        # The owner dialled last: the other end of `outgoing`.
        self._last: ClaimRecord | None = None
        self._new_owner = asyncio.Event()  # an owner was announced
        self._suspicion = Suspicion(context, here.job, here.stage, stage, self._succeeded)
        self._refused_since = math.inf  # it reports a higher term of our own stage
        self._passed_over_since = (
            math.inf
        )  # it follows another owner of our own stage, whose claim we see as well
        self._sent_bytes = 0  # on links that have ended

    @property
    def linked(self) -> bool:
        return self.outgoing is not None and self.incoming is not None

    @property
    def owner(self) -> ClaimRecord | None:
        """The owner at the other end; None while not linked."""
        return self._last if self.linked else None

    @property
    def waiting_for(self) -> str:
        """Why it is not linked, in one line."""
        return self._waits or f"stage {self.stage}: not linked yet"

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes + (0 if self.outgoing is None else self.outgoing.sent_bytes)

    # --- outgoing: dial, hello, send

    async def keep(self, group: asyncio.TaskGroup) -> None:
        """Keep the stream to it open until `closed`; probes of its owner run in `group`. Raises Overtaken."""
        loop, pause, broke = asyncio.get_running_loop(), RETRY_SECONDS, False
        while not self.closed:
            self._new_owner.clear()
            try:
                stream = await self._dial(broke, group)
            except Overtaken:
                raise
            except (SwarmError, ValueError, TimeoutError) as error:
                reason = str(error) or "no answer"
                self._waits = reason if isinstance(error, _Vacant) else f"stage {self.stage}: {reason}"
                self._announced = None
                announced = await self._wait_for_owner(pause)
                pause = RETRY_SECONDS if announced else min(2 * pause, LONGEST_RETRY_SECONDS)
                continue
            if stream is None:  # another peer owns the stage now
                continue
            began, pause = loop.time(), RETRY_SECONDS
            broke = await self._use(stream)
            if loop.time() - began < RETRY_SECONDS:
                # No busy loop on a peer that welcomes and then refuses.
                await self._wait_for_owner(RETRY_SECONDS)

    async def _wait_for_owner(self, seconds: float) -> bool:
        """Wait until an owner of the stage is announced, at most `seconds`. Whether one was."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._new_owner.wait()
        return self._new_owner.is_set()

    async def _dial(self, broke: bool, group: asyncio.TaskGroup) -> Stream | None:
        """A stream to the owner of the stage; None where another owner is announced meanwhile. `broke`: whether the last stream
        to it was lost, not closed."""
        claim = await self._owner(group)
        last = self._last
        suspect = broke and last is not None and (last.peer, last.term) == (claim.peer, claim.term)
        self._last = claim
        stream: Stream | None = None
        dialling = asyncio.ensure_future(self._greet(claim))
        overtaken = asyncio.ensure_future(self._overtaken(claim))
        try:
            done, _ = await asyncio.wait(
                (dialling, overtaken),
                timeout=PATIENCE_SECONDS if suspect else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                self.suspect(claim, group)
                done, _ = await asyncio.wait((dialling, overtaken), return_when=asyncio.FIRST_COMPLETED)
            if not overtaken.done():
                stream = await dialling
            return stream
        except (TransportError, TimeoutError) as error:
            if not isinstance(error, FrameError):
                self.suspect(claim, group)
            raise
        finally:
            for task in (dialling, overtaken):
                task.cancel()
            await asyncio.wait((dialling, overtaken))
            if stream is None and not dialling.cancelled() and dialling.exception() is None:
                dialling.result().abort()

    async def _overtaken(self, claim: ClaimRecord) -> None:
        """Wait until an owner that follows that of `claim` is announced."""
        while self._announced is None or not self.fence.follows(self._announced, claim):
            self._new_owner.clear()
            await self._new_owner.wait()

    async def _owner(self, group: asyncio.TaskGroup) -> ClaimRecord:
        """The owner to dial: the announced one, else the directory's. Raises SwarmError where there is none."""
        leases, job = self._context.leases, self._here.job
        claim, held = self._announced, leases.tenure(job, self.stage)
        if claim is not None and held is not None and self._replaced(claim, held):
            # An announced owner that keeps welcoming us and hanging up does not win over its successor.
            claim = self._announced = None
        elif claim is None and self._last is None:
            claim = winner(leases.recent(job, self.stage))
        lapsed = claim if held is not None and not held.lives(self._context.directory.now()) else None
        if lapsed is not None:
            self._announced = None  # the owner we dial instead does not follow it
        elif claim is not None and not self.fence.is_over(claim):
            return claim
        if lapsed is None:
            claims = await leases.claims(job, self.stage)
        else:
            claims = await leases.claims_or_recent(job, self.stage, GLANCE_SECONDS)
        claim = winner(claims)
        if claim is None and (behind := leases.stale_claim(job, self.stage)) is not None:
            # Dialled all the same: either side learns that it was overtaken and claims its stage under a higher term. If neither
            # dialled, both would wait forever.
            return behind
        if claim is None and lapsed is not None:
            return lapsed  # its renewals may not reach us, and no other claim does
        if claim is None:
            if self._last is not None:
                self.suspect(self._last, group)
            if not any(other.role == "standby" for other in claims):
                raise _Vacant(needs(self.stage, self._here.memory_bytes))
            raise SwarmError("no peer holds it; a standby is about to")
        # An owner whose term is over for our fence lost the stage while partitioned from us, and has it back. Both sides dial:
        # either learns that it was overtaken and claims its stage under a higher term.
        return claim

    def _replaced(self, claim: ClaimRecord, held: Tenure) -> bool:
        """Whether another owner follows that of `claim`, or has taken the stage back from it."""
        back = held.holding != (claim.peer, claim.term) and held.highest_used >= claim.term
        return self.fence.follows(held.claim, claim) or (back and held.lives(self._context.directory.now()))

    def _follows(self, claim: ClaimRecord, before: ClaimRecord) -> bool:
        """Whether the owner of `claim` replaces that of `before` as our partner, by its term or because it has taken the stage
        back."""
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
        """The other end reports that our stage was held under a higher term. A single partner may be wrong or lie, so the term is
        accepted from a majority, or from one that insists for the length of a lease, since no step can run meanwhile.
        Raises Overtaken, or SwarmError to be dialled again."""
        leases, here, now = self._context.leases, self._here, asyncio.get_running_loop().time()
        self._refused_since = min(now, self._refused_since)
        disowned = leases.voting.is_outvoted(here.job, here.stage, claim.peer, refusal)
        if disowned or now - self._refused_since >= REFUSED_SECONDS:
            leases.observe(here.job, here.stage, term)
            raise Overtaken(here.stage, here.term, term)
        raise SwarmError(f"says that stage {here.stage} was held under term {term}")

    def _passed_over(self, peer: object, term: object) -> None:
        """The other end follows another owner of our own stage, whose claim we see as well. After a partition each side of the swarm
        may have an owner, vouched for by that side; the later one gives way after PASSED_OVER_SECONDS. Raises Overtaken."""
        leases, here, now = self._context.leases, self._here, asyncio.get_running_loop().time()
        rival = next((each for each in leases.rivals(here.job, here.stage) if each == (peer, term)), None)
        if rival is None:
            self._passed_over_since = math.inf
            return
        self._passed_over_since = min(now, self._passed_over_since)
        if now - self._passed_over_since >= PASSED_OVER_SECONDS:
            raise Overtaken(here.stage, here.term, rival.term, rival.peer)

    async def _use(self, stream: Stream) -> bool:
        """Wait until the stream ends. Whether the other end vanished, rather than closed or refused it."""
        # The only frame that the other end may send on it is a refusal.
        link = QueuedStream(
            stream, on_frame=lambda frame: link.end(str(frame.header.get("message", "refused"))[:200])
        )
        self._suspicion.end()
        self.outgoing, self._announced = link, self._last
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
        """Ask standbys to probe the owner of `claim`, in `group`."""
        if not self.closed:
            self._suspicion.begin(claim, group)

    # --- incoming, and the owner of the stage

    def admit(self, claim: ClaimRecord, stream: Stream) -> None:
        """Receive from `stream`, of the owner of `claim`, in place of any earlier stream."""
        before, self.incoming = self.incoming, None
        if before is not None:
            before.abort()
            self._changed()  # frames in flight on the old stream are lost
        self.incoming = stream
        self._record_owner(claim)
        self._changed()

    def dismiss(self, stream: Stream) -> None:
        """`stream`, given to `admit`, has ended."""
        if self.incoming is stream:
            self.incoming = None
            self._waits = self._waits or f"stage {self.stage}: its stream ended"
            self._changed()

    def _succeeded(self, claim: ClaimRecord, term: int) -> None:
        """The peers that probed the owner under `term` report its successor."""
        if claim.term > max(term, self.fence.highest):
            self._record_owner(claim)

    def _record_owner(self, claim: ClaimRecord) -> None:
        """Link to the owner of `claim` now, unless its term is over."""
        link, shown = self.outgoing, self._announced
        if link is not None:
            assert self._last is not None, "we dialled it"
            if not self._follows(claim, self._last):
                return
            link.end("another peer owns it now")
        if shown is None or shown.term <= claim.term or self._follows(claim, shown):
            self._announced = claim
            self._new_owner.set()


class _Vacant(SwarmError):
    """A stage has neither an owner nor a standby."""
