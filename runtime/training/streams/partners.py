"""The streams of one hosted stage: one to and one from each of its partner stages.

Every stage dials all its partners and is dialled by them, for as long as it is hosted. The stage is *linked* while all
streams are open. A silent stream is left alone, and so is a peer that answers, whatever failed on our side: an owner is
replaced only if it does not answer its standbys.

`fusion.runtime.training.streams.partner` dials one partner; `fence` decides whose streams are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.training.step.messages import (
    TENSOR_KINDS,
    Begin,
    Commit,
    Discard,
    Hello,
    Hold,
    Join,
    Message,
    Restore,
    decode,
    encode,
)
from fusion.runtime.training.streams.fence import Later, Overtaken
from fusion.runtime.training.streams.partner import Held, Partner
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.errors import FrameError, StaleTerm
from fusion.swarm.transport import Buffer, Frame, PeerId, Stream, checked

FLUSH_SECONDS = 5.0

OfferTensor = Callable[[int, Frame], Awaitable[None] | None]
Receive = Callable[[int, Message], None]


class Partners:
    """Frames of the current term go to `tensor(stage, frame)` if they carry one (`Inbox.offer`), whose result, if any, is
    awaited before the next frame of that stream is read, else to `receive(stage, message)`. A ValueError or SwarmError from
    either ends the stream. `changed(linked)` is called in the loop whenever the stage becomes linked or unlinked.
    `largest_bytes`: the largest payload that a partner may send."""

    def __init__(
        self,
        context: Context,
        here: Held,
        partners: Iterable[int],
        tensor: OfferTensor,
        receive: Receive,
        changed: Callable[[bool], None],
        *,
        largest_bytes: int,
    ) -> None:
        self.stage, self.term = here.stage, here.term
        self.received_bytes = 0
        self._context = context
        self._incarnation = here.incarnation
        self._tensor = tensor
        self._receive = receive
        self._changed = changed
        self._largest_bytes = largest_bytes
        stages = sorted({*partners} - {here.stage})
        self._partners = {stage: Partner(context, here, stage, self._update) for stage in stages}
        self._linked = False

    @property
    def sent_bytes(self) -> int:
        return sum(partner.sent_bytes for partner in self._partners.values())

    @property
    def owners(self) -> dict[int, PeerId]:
        """Partner stage -> its owner, of the partners that we are linked to."""
        owners = {stage: partner.owner for stage, partner in self._partners.items()}
        return {stage: owner.peer for stage, owner in owners.items() if owner is not None}

    def holders(self) -> dict[int, PeerId]:
        """`owners`, and this peer."""
        return {**self.owners, self.stage: self._context.peer_id}

    @property
    def linked_terms(self) -> dict[int, int]:
        """Partner stage -> its owner's term, of the partners that we are linked to; the lower one while a stream of the previous
        owner is still open."""
        owners = {stage: partner.owner for stage, partner in self._partners.items()}
        return {s: min(o.term, self._partners[s].fence.highest) for s, o in owners.items() if o is not None}

    @property
    def missing(self) -> int | None:
        """The first stage that we are not linked to."""
        return next((stage for stage, partner in self._partners.items() if not partner.linked), None)

    @property
    def waiting_for(self) -> str:
        """Why the stage is not linked, in one line; empty while it is."""
        missing = [partner for partner in self._partners.values() if not partner.linked]
        return "; ".join(partner.waiting_for for partner in missing[:4])

    def post(self, target: int, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Queue a tensor for a partner, under our term, and return at once. While the link is down it is dropped: the step is
        discarded then, and both sides begin again once the link is back."""
        link = self._partners[target].outgoing
        if link is not None:
            link.post(kind, {**header, "term": self.term}, payload)

    def send(self, target: int, message: Message) -> None:
        """As `post`, for a control message."""
        link = self._partners[target].outgoing
        if link is not None:
            link.post(*encode(message, self.term))

    def replace(self, claim: ClaimRecord, group: asyncio.TaskGroup) -> None:
        """Ask, in `group`, the standbys of the stage of `claim` to replace its owner, which is alive but idle."""
        partner = self._partners.get(claim.stage)
        if partner is not None:
            partner.suspect(claim, group)

    async def room(self) -> None:
        """Backpressure: wait until few frames are queued for any partner."""
        for partner in self._partners.values():
            link = partner.outgoing
            if link is not None:
                await link.room()

    async def flush(self) -> None:
        """Wait, at most FLUSH_SECONDS, until what was posted has been handed to the transport."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                for partner in self._partners.values():
                    if partner.outgoing is not None:
                        await partner.outgoing.flush()

    async def finish(self) -> None:
        """Send what was posted, then close our streams so that the last frames arrive. No link is opened again."""
        for partner in self._partners.values():
            partner.closed = True
        await self.flush()
        for partner in self._partners.values():
            if partner.outgoing is not None:
                await partner.outgoing.aclose()

    async def run(self) -> None:
        """Keep every stream open until cancelled. Raises Overtaken."""
        self._update()
        try:
            async with asyncio.TaskGroup() as group:
                for stage, partner in self._partners.items():
                    group.create_task(partner.keep(group), name=f"link {self.stage}->{stage}")
        finally:
            self.close()

    def close(self) -> None:
        """The stage is not hosted here any more: end incoming streams and accept no others."""
        for partner in self._partners.values():
            partner.closed = True
            if partner.incoming is not None:
                partner.incoming.abort()

    async def accept(self, stream: Stream, hello: Hello) -> None:
        """Serve an incoming stream whose first frame was `hello`, until it ends. Raises StaleTerm, FrameError and what `tensor`
        and `receive` raise; the transport reports them to the other end."""
        partner = self._partners.get(hello.source)
        if partner is None:
            raise FrameError(f"stage {hello.source} has nothing to say to stage {self.stage}")
        try:
            claim = await partner.fence.claim_of(stream.remote, hello)
            self._check_open(partner)
        except Overtaken as error:
            holding = Holding(stream.remote, hello.term)
            refusal = self._context.leases.voting.refusal_vote(hello.job, hello.source, holding)
            await stream.send("stale", {"term": error.term, **refusal})
            raise
        except Later as error:
            holder = {} if error.holder is None else error.holder._asdict()
            await stream.send("later", {"message": str(error), **holder})
            await stream.aclose()
            return
        stream.allow(self._largest_bytes)
        await stream.send("welcome", {"term": self.term})
        self._check_open(partner)
        partner.fence.admit(stream.remote, hello)  # another hello may have been accepted meanwhile
        partner.admit(claim, stream)
        try:
            while True:
                frame = checked(await stream.receive())
                self._check_term(partner, stream.remote, hello, frame)
                self._context.watch.takes(self.stage, self.term, self._incarnation, hello.source, frame)
                self.received_bytes += frame.payload.nbytes
                work = self._deliver(hello, frame)
                if work is not None:
                    await work
        finally:
            partner.dismiss(stream)

    def _deliver(self, hello: Hello, frame: Frame) -> Awaitable[None] | None:
        if frame.kind in TENSOR_KINDS:
            return self._tensor(hello.source, frame)
        message = decode(frame)
        if (
            isinstance(message, Begin | Commit | Discard | Hold | Restore)
            and message.attempt[0] != hello.term
        ):
            # Were a higher term accepted, the attempts of later leads would be ignored.
            raise StaleTerm(f"an attempt of term {message.attempt[0]} on a stream of term {hello.term}")
        if isinstance(message, Join) and message.join_id[0] != hello.term:
            # Were a higher term accepted, the joins of later owners would be ignored.
            raise StaleTerm(f"a join of term {message.join_id[0]} on a stream of term {hello.term}")
        self._receive(hello.source, message)
        return None

    def _check_open(self, partner: Partner) -> None:
        """Raises Later once the stage is leaving this peer, or has left."""
        if partner.closed:
            raise Later(f"stage {self.stage} is over here")

    def _check_term(self, partner: Partner, peer: PeerId, hello: Hello, frame: Frame) -> None:
        term = frame.header.get("term")
        if term != hello.term:
            raise StaleTerm(f"a frame of term {term!r:.20} on a stream of term {hello.term}")
        partner.fence.check(peer, hello)

    def _update(self) -> None:
        linked = all(partner.linked for partner in self._partners.values())
        if linked != self._linked:
            self._linked = linked
            self._changed(linked)
