"""The streams of one hosted stage: one to and one from each stage that it works with.

Every stage dials all its partners and is dialled by them, for as long as it is hosted. The stage is *linked* while all
of them are up.

A stream that breaks is dialled again at once, first at the same peer. Where that does not answer, whoever may replace
the owner is asked to look at it (`TakeoverReports.suspect`), while the dialling goes on; what works first wins. A new owner
says hello with its sealed claim, and one that we are told of is dialled at once, so nobody waits for the directory. A
stream that is merely silent is left alone, and so is a peer that answers, whatever went wrong on our side: it takes
the owner's own silence towards a standby to replace it.

Who is welcome here, and who no longer is, `fusion.runtime.training.streams.fence` says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.fields import plain
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.job.shortage import needs
from fusion.runtime.training.step.messages import Hello
from fusion.runtime.training.streams.fence import Fence, Later, Overtaken
from fusion.runtime.training.streams.partner_link import Ended, PartnerLink
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import FrameError, StaleTerm, SwarmError, TransportError
from fusion.swarm.transport import Buffer, Frame, PeerId, Stream, checked

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.1  # doubled up to the longest, from one failed dial to the next
LONGEST_RETRY_SECONDS = 1.6
HELLO_SECONDS = 10.0
PATIENCE_SECONDS = 0.1  # for a peer whose stream broke to answer once more, before it is suspected
SUSPECT_SECONDS = 6.0  # for the answer of those who may replace it
SUSPECT_AGAIN_SECONDS = 2.0

Deliver = Callable[[int, Frame], Awaitable[None] | None]


class Partners:
    """`deliver(stage, frame)` gets every frame whose term is right; what it returns, if anything, is awaited before the
    next frame of that stream is read; a ValueError or SwarmError from it ends that stream. `changed(linked)` is called, in the loop, whenever the stage becomes linked or unlinked. `largest_bytes`: of
    the payloads that a partner may send. `memory_bytes`: what each stage of the job needs, for people; or nothing.
    `host`: drawn anew whenever a peer begins the stage, to tell it from an earlier time under the same term."""

    def __init__(
        self,
        context: Context,
        job: JobId,
        stage: int,
        term: int,
        partners: Iterable[int],
        deliver: Deliver,
        changed: Callable[[bool], None],
        *,
        largest_bytes: int,
        memory_bytes: Sequence[int] = (),
        host: int = 0,
    ) -> None:
        self.job, self.stage, self.term = job, stage, term
        self.partners = tuple(sorted(set(partners) - {stage}))
        self.received_bytes = 0
        self._context = context
        self._host = host
        self._fence = Fence(context.leases, job, stage, term, self.partners)
        self._deliver = deliver
        self._changed = changed
        self._largest_bytes = largest_bytes
        self._memory_bytes = tuple(memory_bytes)
        self._outgoing: dict[int, PartnerLink] = {}
        self._incoming: dict[int, Stream] = {}
        self._shown: dict[int, ClaimRecord] = {}  # the owner to dial next, as it or another peer told us
        self._last: dict[int, ClaimRecord] = {}  # the owner that we dialled last
        self._news = {partner: asyncio.Event() for partner in self.partners}
        self._suspicions: dict[int, asyncio.Task[None]] = {}
        # Who of each stage was suspected last, under which term, and when.
        self._suspected: dict[int, tuple[tuple[PeerId, int], float]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._linked = False
        self._finished = False
        self._sent_bytes = 0  # on links that are no more
        self._waits: dict[int, str] = {}  # partner -> why it is not linked, for people

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes + sum(link.sent_bytes for link in self._outgoing.values())

    @property
    def owners(self) -> dict[int, PeerId]:
        """The peer at the other end, of each partner that we are linked to."""
        return {stage: out.claim.peer for stage, out in self._outgoing.items() if stage in self._incoming}

    @property
    def linked_terms(self) -> dict[int, int]:
        """The term of the owner at the other end, of each partner that we are linked to; the lower one where a stream
        of the owner before has not ended yet."""
        return {s: min(self._outgoing[s].claim.term, self._fence.highest(s)) for s in self.owners}

    @property
    def waiting_for(self) -> str:
        """One line for people: what is missing; empty while linked."""
        missing = [s for s in self.partners if s not in self._outgoing or s not in self._incoming]
        return "; ".join(self._waits.get(s, f"stage {s}: not linked yet") for s in missing[:4])

    def post(self, target: int, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Queue a frame for a partner and return at once. While the link is down the frame is dropped: whatever was
        under way is void then, and both sides start anew when the link is back."""
        link = self._outgoing.get(target)
        if link is not None:
            link.post(kind, header, payload)

    async def flush(self, seconds: float) -> None:
        """Wait, at most so long, until what was posted has been handed to the transport."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for link in list(self._outgoing.values()):
                    await link.idle.wait()

    async def finish(self, seconds: float) -> None:
        """Send what was posted, then end our streams cleanly, so that the last frames arrive; no link comes back."""
        self._finished = True
        await self.flush(seconds)
        for link in list(self._outgoing.values()):
            await link.stream.aclose()

    async def run(self) -> None:
        """Keep every stream up until cancelled. Raises Overtaken."""
        self._update()
        try:
            async with asyncio.TaskGroup() as self._group:
                for partner in self.partners:
                    self._group.create_task(self._keep(partner), name=f"link {self.stage}->{partner}")
        finally:
            self._group = None
            self.close()

    def close(self) -> None:
        """The stage is not hosted here any more: nobody is to believe it linked, nor to be welcomed from now on."""
        self._finished = True
        for stream in self._incoming.values():
            stream.abort()

    # --- our side: dial, say hello, send

    async def _keep(self, target: int) -> None:
        loop, pause, broke = asyncio.get_running_loop(), RETRY_SECONDS, False
        while not self._finished:
            self._news[target].clear()
            try:
                link = await self._dial(target, broke)
            except Overtaken:
                raise
            except (SwarmError, ValueError, TimeoutError) as error:
                said = str(error) or "no answer"
                self._waits[target] = said if isinstance(error, _Vacant) else f"stage {target}: {said}"
                self._shown.pop(target, None)
                told = await self._told(target, pause)
                pause = RETRY_SECONDS if told else min(2 * pause, LONGEST_RETRY_SECONDS)
                continue
            if link is None:  # another peer owns the stage now
                continue
            began, pause = loop.time(), RETRY_SECONDS
            broke = await self._use(target, link)
            if loop.time() - began < RETRY_SECONDS:
                await self._told(
                    target, RETRY_SECONDS
                )  # whoever welcomes and then refuses is not dialled in a spin

    async def _told(self, target: int, seconds: float) -> bool:
        """Wait so long, or until somebody tells us of an owner of the stage."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news[target].wait()
        return self._news[target].is_set()

    async def _dial(self, target: int, broke: bool) -> PartnerLink | None:
        """A link to the owner of the stage; None where we hear of another owner meanwhile. `broke`: whether a stream
        to it was lost, not closed."""
        claim = await self._owner(target)
        last = self._last.get(target)
        suspect = broke and last is not None and (last.peer, last.term) == (claim.peer, claim.term)
        self._last[target] = claim
        link: PartnerLink | None = None
        dialling = asyncio.ensure_future(self._greet(target, claim))
        news = asyncio.ensure_future(self._overtaken(target, claim))
        try:
            done, _ = await asyncio.wait(
                (dialling, news),
                timeout=PATIENCE_SECONDS if suspect else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                self._suspect(target, claim)
                done, _ = await asyncio.wait((dialling, news), return_when=asyncio.FIRST_COMPLETED)
            if not news.done():
                link = PartnerLink(await dialling, claim)
            return link
        except (TransportError, TimeoutError) as error:
            if not isinstance(error, FrameError):
                self._suspect(target, claim)
            raise
        finally:
            for task in (dialling, news):
                task.cancel()
            await asyncio.wait((dialling, news))
            if link is None and not dialling.cancelled() and dialling.exception() is None:
                dialling.result().abort()

    async def _overtaken(self, target: int, claim: ClaimRecord) -> None:
        """Until we are told of an owner that follows the one of `claim`."""
        while (shown := self._shown.get(target)) is None or not self._fence.follows(shown, claim):
            self._news[target].clear()
            await self._news[target].wait()

    async def _owner(self, target: int) -> ClaimRecord:
        """Whom to dial: the owner that was shown to us, or the directory's. Raises SwarmError where there is none."""
        leases, last = self._context.leases, self._last.get(target)
        claim = self._shown.get(target)
        if claim is None and last is None:
            claim = winner(leases.recent(self.job, target))
        if claim is not None and not self._fence.is_over(claim):
            return claim
        claims = await leases.claims(self.job, target)
        claim = winner(claims)
        if claim is None:
            if last is not None:
                self._suspect(target, last)
            if not any(other.role == "standby" for other in claims):
                raise _Vacant(needs(target, self._memory_bytes))
            raise SwarmError("no peer holds it; a standby is about to")
        # Another peer's than spoke to us under the same term is dialled all the same: one of us will be told that it was
        # overtaken, and claim its stage above that. If neither dialled, both would wait for ever.
        if claim.term < self._fence.highest(target):
            raise StaleTerm(f"term {claim.term} is over")
        return claim

    async def _greet(self, target: int, claim: ClaimRecord) -> Stream:
        leases = self._context.leases
        async with asyncio.timeout(HELLO_SECONDS):
            stream = await self._context.transport.open(claim.peer, STAGE.name, stripes=STAGE.stripes)
            try:
                hello = Hello(
                    job=self.job, source=self.stage, target=target, term=self.term, target_term=claim.term,
                    host=self._host, claim=leases.sealed(self.job, self.stage) or b"",
                )  # fmt: skip
                await stream.send("hello", plain(hello))
                reply = checked(await stream.receive())
                term = reply.header.get("term")
                if reply.kind == "stale" and isinstance(term, int):
                    leases.observe(self.job, self.stage, term)
                    raise Overtaken(self.stage, self.term, term)
                if reply.kind != "welcome":
                    raise SwarmError(str(reply.header.get("message", "refused"))[:200])
            except BaseException:
                stream.abort()
                raise
        return stream

    async def _use(self, target: int, link: PartnerLink) -> bool:
        """Until the link ends: whether the other end vanished, rather than closed or refused it."""
        self._trust(target)
        self._outgoing[target] = link
        self._shown[target] = link.claim
        self._waits.pop(target, None)
        self._update()
        ended = Ended("ended")
        try:
            ended = await link.run()
            self._waits[target] = f"stage {target}: {ended.reason}"
            log.info("stage %d lost stage %d: %s", self.stage, target, ended.reason)
        finally:
            if not self._finished:
                link.stream.abort()
            link.idle.set()
            self._sent_bytes += link.sent_bytes
            if self._outgoing.get(target) is link:
                del self._outgoing[target]
            self._update()
        return ended.vanished

    # --- who may be gone

    def _suspect(self, target: int, claim: ClaimRecord) -> None:
        """Have others look at the owner of `claim`, which does not answer us, unless that is under way."""
        if self._context.succession is None or self._group is None or self._finished:
            return
        now = asyncio.get_running_loop().time()
        who = (claim.peer, claim.term)
        before, at = self._suspected.get(target, ((PeerId(""), 0), 0.0))
        if who == before and (target in self._suspicions or now - at < SUSPECT_AGAIN_SECONDS):
            return
        self._trust(target)
        self._suspected[target] = (who, now)
        task = self._group.create_task(self._ask(target, claim), name=f"suspecting stage {target}")
        self._suspicions[target] = task
        task.add_done_callback(lambda done: self._asked(target, done))

    async def _ask(self, target: int, claim: ClaimRecord) -> None:
        succession = self._context.succession
        assert succession is not None
        try:
            async with asyncio.timeout(SUSPECT_SECONDS):
                heir = await succession.suspect(self.job, target, claim.peer, claim.term)
        except (SwarmError, ValueError, TimeoutError) as error:
            log.debug("stage %d: nobody to replace the owner of stage %d: %s", self.stage, target, error)
            return
        if heir is not None and heir.term > max(claim.term, self._fence.highest(target)):
            self._hear(target, heir)

    def _asked(self, target: int, task: asyncio.Task[None]) -> None:
        if self._suspicions.get(target) is task:
            del self._suspicions[target]

    def _trust(self, target: int) -> None:
        """The owner answers after all, or is not the one that we thought of."""
        task = self._suspicions.pop(target, None)
        if task is not None:
            task.cancel()

    def _hear(self, target: int, claim: ClaimRecord) -> None:
        """That peer owns the stage, not one whose time is over: link to it now."""
        link, shown = self._outgoing.get(target), self._shown.get(target)
        if link is not None:
            if not self._fence.follows(claim, link.claim):
                return
            link.stream.abort()  # it leads to an owner that another has followed
        if shown is None or shown.term <= claim.term:
            self._shown[target] = claim
            self._news[target].set()

    # --- the other side: welcome, check, receive

    async def accept(self, stream: Stream, hello: Hello) -> None:
        """Serve an incoming stream whose first frame was `hello`, until it ends. Raises StaleTerm, FrameError and
        what `deliver` raises: the transport tells the other end."""
        try:
            claim = await self._fence.claim_of(stream.remote, hello)
            self._check_open()
        except Overtaken as error:
            await stream.send("stale", {"term": error.term})
            raise
        except Later as error:
            await stream.send("later", {"message": str(error)})
            await stream.aclose()
            return
        stream.allow(self._largest_bytes)
        await stream.send("welcome", {"term": self.term})
        self._check_open()
        self._fence.admit(stream.remote, hello)  # another may have said hello while our welcome went out
        self._admit(claim, stream)
        try:
            while True:
                frame = checked(await stream.receive())
                self._check_term(stream.remote, hello, frame)
                self.received_bytes += frame.payload.nbytes
                work = self._deliver(hello.source, frame)
                if work is not None:
                    await work
        finally:
            if self._incoming.get(hello.source) is stream:
                del self._incoming[hello.source]
                self._waits.setdefault(hello.source, f"stage {hello.source}: its stream ended")
                self._update()

    def _check_open(self) -> None:
        """Raises Later once the stage is not hosted here any more, or about not to be."""
        if self._finished:
            raise Later(f"stage {self.stage} is over here")

    def _admit(self, claim: ClaimRecord, stream: Stream) -> None:
        source = claim.stage
        before = self._incoming.pop(source, None)
        if before is not None:
            before.abort()
            self._update()  # whatever was under way on the old stream is lost
        self._incoming[source] = stream
        self._hear(source, claim)
        self._update()

    def _check_term(self, peer: PeerId, hello: Hello, frame: Frame) -> None:
        term = frame.header.get("term")
        if term != hello.term:
            raise StaleTerm(f"a frame of term {term!r:.20} on a stream of term {hello.term}")
        self._fence.check(peer, hello)

    def _update(self) -> None:
        linked = all(s in self._outgoing and s in self._incoming for s in self.partners)
        if linked != self._linked:
            self._linked = linked
            self._changed(linked)


class _Vacant(SwarmError):
    """Nobody holds a stage, and nobody is about to."""
