"""The streams of one hosted stage: one to and one from each stage that it works with.

Every stage dials all its partners and is dialled by them, for as long as it is hosted: a link that breaks is dialled
again, at whoever owns the other stage then. The stage is *linked* while all of them are up.

Fencing: a `hello` is welcomed only from the peer that the directory names as the owner of the stage it speaks for,
at the term it names; a term below the highest one seen, or another peer's at that one, is refused with `stale` {term},
and a higher one ends the streams of the owner before it. An owner that knew no better, because it joined after the
claims of the one before had run out, gives the stage up and claims it anew above that term.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fusion.runtime.context import Context
from fusion.runtime.fields import plain
from fusion.runtime.training.messages import PROTOCOL, Hello
from fusion.swarm.errors import FrameError, StaleTerm, SwarmError
from fusion.swarm.records import ClaimRecord, JobId
from fusion.swarm.transport import Buffer, Frame, PeerId, Stream, checked

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.1  # doubled up to the longest, from one failed dial to the next
LONGEST_RETRY_SECONDS = 1.6
HELLO_SECONDS = 10.0

Deliver = Callable[[int, Frame], None]


@dataclass
class _Outgoing:
    """Frames for one partner, sent in order by one task while its stream is up."""

    stream: Stream
    claim: ClaimRecord
    frames: deque[tuple[str, Mapping[str, Any], Sequence[Buffer]]] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Incoming:
    stream: Stream
    term: int


class Overtaken(StaleTerm):
    """The stage was held under a term that ours does not exceed, as its neighbours remember."""

    def __init__(self, stage: int, ours: int, term: int) -> None:
        super().__init__(f"stage {stage} was held under term {term}, not {ours}")
        self.term = term


class Neighbours:
    """`deliver(stage, frame)` gets every frame whose term is right; a ValueError or SwarmError from it ends that
    stream. `changed(linked)` is called, in the loop, whenever the stage becomes linked or unlinked."""

    def __init__(
        self,
        context: Context,
        job: JobId,
        stage: int,
        term: int,
        partners: Iterable[int],
        deliver: Deliver,
        changed: Callable[[bool], None],
    ) -> None:
        self.job, self.stage, self.term = job, stage, term
        self.partners = tuple(sorted(set(partners) - {stage}))
        self.sent_bytes = 0
        self.received_bytes = 0
        self._context = context
        self._deliver = deliver
        self._changed = changed
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        # The highest term that each partner has spoken under, and who it was then.
        self._terms: dict[int, tuple[int, PeerId]] = {}
        self._linked = False
        self._finished = False
        self._waits: dict[int, str] = {}  # partner -> why it is not linked, for people

    @property
    def owners(self) -> dict[int, PeerId]:
        """The peer at the other end, of each partner that we are linked to."""
        return {stage: out.claim.peer for stage, out in self._outgoing.items() if stage in self._incoming}

    @property
    def waiting_for(self) -> str:
        """One line for people: what is missing; empty while linked."""
        missing = [s for s in self.partners if s not in self._outgoing or s not in self._incoming]
        return "; ".join(f"stage {s}: {self._waits.get(s, 'not linked yet')}" for s in missing[:4])

    def post(self, target: int, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Queue a frame for a partner and return at once. While the link is down the frame is dropped: whatever was
        under way is void then, and both sides start anew when the link is back."""
        out = self._outgoing.get(target)
        if out is not None:
            out.frames.append((kind, header, payload))
            out.idle.clear()
            out.wake.set()

    async def flush(self, seconds: float) -> None:
        """Wait, at most so long, until what was posted has been handed to the transport."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for out in list(self._outgoing.values()):
                    await out.idle.wait()

    async def finish(self, seconds: float) -> None:
        """Send what was posted, then end our streams cleanly, so that the last frames arrive; no link comes back."""
        self._finished = True
        await self.flush(seconds)
        for out in list(self._outgoing.values()):
            await out.stream.aclose()

    async def run(self) -> None:
        """Keep every stream up until cancelled. Raises Overtaken."""
        self._update()
        try:
            async with asyncio.TaskGroup() as group:
                for partner in self.partners:
                    group.create_task(self._keep(partner), name=f"link {self.stage}->{partner}")
        finally:
            for incoming in self._incoming.values():
                incoming.stream.abort()

    # --- our side: dial, say hello, send

    async def _keep(self, target: int) -> None:
        retry = RETRY_SECONDS
        while not self._finished:
            try:
                stream, claim = await self._dial(target)
            except Overtaken:
                raise
            except (SwarmError, ValueError, TimeoutError) as error:
                self._waits[target] = str(error) or "no answer"
                await asyncio.sleep(retry)
                retry = min(2 * retry, LONGEST_RETRY_SECONDS)
                continue
            retry = RETRY_SECONDS
            await self._use(target, _Outgoing(stream, claim))
            await asyncio.sleep(
                RETRY_SECONDS
            )  # a partner that welcomes and then refuses is not dialled in a spin

    async def _dial(self, target: int) -> tuple[Stream, ClaimRecord]:
        claim = await self._context.leases.owner(self.job, target)
        if claim is None:
            raise SwarmError("no peer holds it")
        if claim.term < self._highest(target):
            raise StaleTerm(f"term {claim.term} is over")
        stream = await self._context.transport.open(claim.peer, PROTOCOL)
        hello = Hello(job=self.job, source=self.stage, target=target, term=self.term, target_term=claim.term)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await stream.send("hello", plain(hello))
                reply = checked(await stream.receive())
            term = reply.header.get("term")
            if reply.kind == "stale" and isinstance(term, int):
                self._context.leases.observe(self.job, self.stage, term)
                raise Overtaken(self.stage, self.term, term)
            if reply.kind != "welcome":
                raise SwarmError(str(reply.header.get("message", "refused"))[:200])
        except BaseException:
            stream.abort()
            raise
        return stream, claim

    async def _use(self, target: int, out: _Outgoing) -> None:
        self._outgoing[target] = out
        self._waits.pop(target, None)
        out.idle.set()
        self._update()
        watch = asyncio.ensure_future(out.stream.receive())  # says nothing more: ends when the stream does
        send = asyncio.ensure_future(self._send(out))
        try:
            done, _ = await asyncio.wait((watch, send), return_when=asyncio.FIRST_COMPLETED)
            self._waits[target] = _reason(done)
            log.info("stage %d lost stage %d: %s", self.stage, target, self._waits[target])
        finally:
            for task in (watch, send):
                task.cancel()
            if not self._finished:
                out.stream.abort()
            out.idle.set()
            if self._outgoing.get(target) is out:
                del self._outgoing[target]
            self._update()
            await asyncio.wait((watch, send))

    async def _send(self, out: _Outgoing) -> None:
        while True:
            while out.frames:
                kind, header, payload = out.frames.popleft()
                await out.stream.send(kind, header, payload)
                self.sent_bytes += sum(memoryview(buffer).nbytes for buffer in payload)
            out.idle.set()
            out.wake.clear()
            await out.wake.wait()

    # --- the other side: welcome, check, receive

    async def accept(self, stream: Stream, hello: Hello) -> None:
        """Serve an incoming stream whose first frame was `hello`, until it ends. Raises StaleTerm, FrameError and
        what `deliver` raises: the transport tells the other end."""
        try:
            refusal = await self._refusal(stream, hello)
        except Overtaken as error:
            await stream.send("stale", {"term": error.term})
            raise
        if refusal:
            await stream.send("later", {"message": refusal})
            await stream.aclose()
            return
        await stream.send("welcome", {"term": self.term})
        self._admit(hello, stream)
        try:
            while True:
                frame = checked(await stream.receive())
                self._check_term(stream.remote, hello, frame)
                self.received_bytes += frame.payload.nbytes
                self._deliver(hello.source, frame)
        finally:
            current = self._incoming.get(hello.source)
            if current is not None and current.stream is stream:
                del self._incoming[hello.source]
                self._waits.setdefault(hello.source, "its stream ended")
                self._update()

    async def _refusal(self, stream: Stream, hello: Hello) -> str:
        """Why the other end should try again later; empty to welcome it. StaleTerm where it never will be."""
        if hello.source not in self.partners:
            raise FrameError(f"stage {hello.source} has nothing to say to stage {self.stage}")
        if hello.target_term < self.term:
            raise StaleTerm(f"stage {self.stage} is under term {self.term}, not {hello.target_term}")
        if hello.target_term > self.term:
            return f"stage {self.stage} is here under term {self.term}"
        self._fence(stream.remote, hello)
        owner = await self._context.leases.owner(self.job, hello.source)
        self._fence(stream.remote, hello)  # somebody may have said hello under a higher term while we looked
        if owner is not None and owner.term > hello.term:
            raise StaleTerm(f"stage {hello.source} is under term {owner.term}, not {hello.term}")
        if owner is None or (owner.peer, owner.term) != (stream.remote, hello.term):
            return f"no claim of stage {hello.source} at term {hello.term} seen yet"
        return ""

    def _highest(self, stage: int) -> int:
        return self._terms[stage][0] if stage in self._terms else 0

    def _fence(self, peer: PeerId, hello: Hello) -> None:
        highest, holder = self._terms.get(hello.source, (0, peer))
        if hello.term < highest or (hello.term == highest and peer != holder):
            raise Overtaken(hello.source, hello.term, highest)

    def _admit(self, hello: Hello, stream: Stream) -> None:
        source = hello.source
        self._terms[source] = (hello.term, stream.remote)
        before = self._incoming.pop(source, None)
        if before is not None:
            before.stream.abort()
            self._update()  # whatever was under way on the old stream is lost
        out = self._outgoing.get(source)
        if out is not None and out.claim.term < hello.term:
            out.stream.abort()  # it leads to an owner that another has followed
        self._incoming[source] = _Incoming(stream, hello.term)
        self._update()

    def _check_term(self, peer: PeerId, hello: Hello, frame: Frame) -> None:
        term = frame.header.get("term")
        if term != hello.term:
            raise StaleTerm(f"a frame of term {term!r:.20} on a stream of term {hello.term}")
        self._fence(peer, hello)

    def _update(self) -> None:
        linked = all(s in self._outgoing and s in self._incoming for s in self.partners)
        if linked != self._linked:
            self._linked = linked
            self._changed(linked)


def _reason(done: Iterable[asyncio.Future[Any]]) -> str:
    for task in done:
        if task.cancelled():
            continue
        error = task.exception()
        if error is None:
            frame = task.result()  # the receiver speaks only to refuse what we sent
            return str(frame.header.get("message", "refused"))[:200]
        if not isinstance(error, SwarmError):
            raise error
        return str(error)
    return "ended"
