"""Failover: which peer takes over from an owner that vanished or leaves, before its lease expires in the directory.

A peer that sees an owner vanish reports it to the stage's standbys, best first. A standby does not trust a report: it probes the
owner itself. If the owner is gone, and a majority of the stage's voters have probed it, too, and vote for this standby
(`fusion.swarm.claims.tenure`), it takes the stage over. The reply carries the new owner's signed claim.

A standby with stages of its own forwards the report to standbys without any first (`yours`); they forward it no further.

An owner that cannot be dialled, or whose stream breaks, twice in a row, is gone. One that does not answer in time is frozen or
asleep, and keeps its stage until its claim has expired in the directory: then it is gone as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from fusion.runtime.hosting.hold_frames import (
    SuspectReply,
    claim_bytes,
    credited,
    peer_of,
    place_of,
    refused,
    whole,
)
from fusion.runtime.hosting.idle_owners import IdleOwners
from fusion.runtime.hosting.owner_probe import GONE, OwnerProbe, Sign
from fusion.runtime.hosting.single_flight import SingleFlight
from fusion.runtime.hosting.transfer import ANSWER_SECONDS, Transfer
from fusion.runtime.hosting.vote_requests import PATIENCE_SECONDS, VoteRequests
from fusion.runtime.job.context import StageHolder
from fusion.runtime.job.protocol import HOLD
from fusion.swarm.claims.election import is_idle, successors, winner
from fusion.swarm.claims.leases import Leases
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import ClaimRecord, JobId, Place
from fusion.swarm.errors import RecordError, SwarmError
from fusion.swarm.printable import one_line
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, call

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0  # for an owner that is there to answer
HEDGE_SECONDS = 1.5  # until the report goes to the next standby as well


def verdict_on(
    claims: Sequence[ClaimRecord], signs: Mapping[PeerId, Sign]
) -> Literal["take", "alive", "frozen"]:
    """What a standby does about a report that the holder of a stage has vanished. `claims` are those of the stage,
    `signs` the probes of the reported peer and of the owner by the claims.

    A report may be wrong or a lie: the owner by the claims must be gone, or silent with its claim expired.
    """
    owner = winner(claims)
    if any(sign.kind == "holds" for sign in signs.values()):
        return "alive"
    if owner is not None and signs.get(owner.peer) != GONE:
        return "frozen" if owner.peer in signs else "alive"
    return "take"


@dataclass(frozen=True, kw_only=True)
class Report:
    """To a standby: the holder of a stage is gone."""

    place: Place
    holding: Holding  # of the peer that is reported gone
    votes: tuple[bytes, ...] = ()  # that were sent with it
    yours: bool = False  # take the stage although you have others: idle standbys did not


def _alive(signs: Mapping[PeerId, Sign], owner: ClaimRecord | None) -> SuspectReply:
    return SuspectReply(
        "alive", max([*(sign.term for sign in signs.values()), 0 if owner is None else owner.term])
    )


class Takeovers:
    """Implements `fusion.runtime.job.context.Takeover`. Before `start` it only sends requests."""

    def __init__(self, transport: Transport, leases: Leases, check_seconds: float = CHECK_SECONDS) -> None:
        self._transport = transport
        self._leases = leases
        self._holder: StageHolder | None = None
        self._probe = OwnerProbe(transport, check_seconds)
        self._idle = IdleOwners(lambda: asyncio.get_running_loop().time())
        self._votes = VoteRequests(transport, leases, self._probe, check_seconds, self._idle)
        self._transfer = Transfer(transport, leases, self._votes.read)
        self._flights = SingleFlight()
        leases.request_votes = self._votes.collect

    async def start(self, holder: StageHolder) -> None:
        """As in `Takeover`."""
        self._holder = holder
        await self._transport.serve(HOLD.name, self._handle)

    async def _read(self, place: Place) -> tuple[ClaimRecord, ...]:
        """The claims of a stage now, with one read at a time for all reports of it, whatever peers and terms these name; the
        known ones where the directory does not answer within PATIENCE_SECONDS."""
        read = partial(self._leases.claims_or_recent, *place, PATIENCE_SECONDS)
        return await self._flights.once(("read", place), read)

    # --- a peer that sees an owner vanish, or do nothing

    def vote_against(self, job: JobId, stage: int, peer: PeerId, term: int, seconds: float) -> None:
        """As in `Takeover`."""
        self._idle.add((job, stage), Holding(peer, term), seconds)

    def needs_us(self, job: JobId, stage: int) -> bool:
        """As in `Takeover`."""
        return self._idle.stays((job, stage))

    def withdraw_votes(self, job: JobId) -> None:
        """As in `Takeover`."""
        self._idle.forget(job)

    async def suspect(self, job: JobId, stage: int, peer: PeerId, term: int) -> ClaimRecord | None:
        """As in `Takeover`. Concurrent calls share one run."""
        report = Report(place=(job, stage), holding=Holding(peer, term))
        return await self._flights.once(("suspect", report), lambda: self._find_successor(report))

    async def _find_successor(self, report: Report) -> ClaimRecord | None:
        place, (peer, term) = report.place, report.holding
        known = winner(self._leases.recent(*place))
        if known is not None and known.term > term:
            return known
        reported_to: set[PeerId] = {peer}
        reply = await self._report_to_standbys(report, self._leases.recent(*place), reported_to)
        if reply is None or reply.claim is None:
            # Our claims of the stage may be old, or there is a new owner already.
            fresh = await self._leases.claims_or_recent(*place)
            reply = reply or await self._report_to_standbys(report, fresh, reported_to)
        if reply is not None and reply.claim is not None:
            log.info("stage %d of job %.8s goes on at %s", place[1], place[0], reply.claim.peer)
            return reply.claim
        known = winner(self._leases.recent(*place))
        return known if known is not None and known.term > term else None

    async def _report_to_standbys(
        self, report: Report, claims: Sequence[ClaimRecord], reported_to: set[PeerId]
    ) -> SuspectReply | None:
        """The first reply that settles the report, of standbys to which it goes one by one, HEDGE_SECONDS apart. None where none
        does."""
        us = self._leases.peer_id if self._idle.has(report.place, report.holding) else None

        def rank(standby: PeerId) -> tuple[bool, bool]:
            """The best standbys of an idle owner may be its allies: we are first, and avoided peers last."""
            return self._idle.avoids(report.place[0], standby), standby != us

        standbys = [standby.peer for standby in successors(claims) if standby.peer not in reported_to]
        order = deque(sorted(standbys, key=rank))
        pending: set[asyncio.Future[SuspectReply]] = set()
        try:
            while order or pending:
                if order:
                    reported_to.add(order[0])
                    pending.add(asyncio.ensure_future(self._report_to(order.popleft(), report)))
                done, pending = await asyncio.wait(
                    pending,
                    timeout=HEDGE_SECONDS if order else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    if (reply := task.result()).settles:
                        return reply
            return None
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _report_to(self, standby: PeerId, report: Report) -> SuspectReply:
        if standby == self._leases.peer_id:
            return await self._handle_report(report)
        place, (peer, term) = report.place, report.holding
        header = {"job": place[0], "stage": place[1], "peer": peer, "term": term, "yours": report.yours}
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                header["word"] = await self._votes.vote_soon(place, report.holding, standby)
                reply = await call(self._transport, standby, HOLD.name, "suspect", header)
            return await self._read_reply(place, reply)
        except (SwarmError, ValueError, TimeoutError) as error:
            return refused(one_line(str(error)) or "no answer")

    async def _read_reply(self, place: Place, reply: Frame) -> SuspectReply:
        if reply.kind == "owner":
            sealed = claim_bytes(reply.header.get("claim"))
            try:
                claim = credited(self._leases, place, sealed)
            except RecordError:
                if not await self._votes.look_at_voters(place):
                    raise
                claim = credited(self._leases, place, sealed)
            return SuspectReply("owner", claim.term, claim, sealed)
        if reply.kind == "alive":
            return SuspectReply("alive", whole(reply.header.get("term")))
        if reply.kind == "frozen":
            return SuspectReply("frozen")
        return refused(one_line(str(reply.header.get("message", ""))))

    # --- a standby

    async def _handle_report(self, report: Report) -> SuspectReply:
        place, leases = report.place, self._leases
        if (own := self._own(place)) is not None and own.term > report.holding.term:
            return own
        # Anybody may report anything: votes are verified only for stages that we stand by for.
        stands_by = any((claim.job, claim.stage) == place for claim in leases.standbys.claims())
        if self._holder is None or not stands_by:
            return refused("not a standby of that stage")
        owner = winner(leases.recent(*place))
        known = report.holding if owner is None else Holding(owner.peer, owner.term)
        outvoted = self._votes.is_voted_against(place, known, report.votes)
        # Keys apart, or two standbys that forward to each other would deadlock; and a report without votes must not replace
        # one with them.
        key = ("take" if report.yours else "succeed", place, report.holding, outvoted)
        return await self._flights.once(key, lambda: self._collect_and_take(report, known, outvoted=outvoted))

    async def _collect_and_take(self, report: Report, known: Holding, *, outvoted: bool) -> SuspectReply:
        """`known`: the owner that we know of, or else the reported one. `outvoted`: a voter votes against it, even if it answers."""
        collecting = asyncio.ensure_future(self._votes.collect(report.place, known, report.votes))
        try:
            return await self._judge_and_take(report, known, collecting, outvoted=outvoted)
        finally:
            collecting.cancel()
            await asyncio.wait([collecting])

    async def _judge_and_take(
        self, report: Report, known: Holding, collecting: asyncio.Future[tuple[bytes, ...]], *, outvoted: bool
    ) -> SuspectReply:
        """`collecting`: the votes against `known`, for the case that it is gone."""
        assert self._holder is not None
        place, peer, leases = report.place, report.holding.peer, self._leases
        # A report may name any peer: those that do not claim the stage are probed only where nobody owns it.
        suspected = {known.peer} | ({peer} & {claim.peer for claim in leases.recent(*place)})
        signs, claims = await asyncio.gather(self._probe_all(suspected, place), self._read(place))
        owner = winner(claims)
        claimed = {claim.peer for claim in claims} & {peer} | (set() if owner is None else {owner.peer})
        signs |= await self._probe_all((claimed or {peer}) - signs.keys(), place)
        verdict = verdict_on(claims, signs)
        held = None if owner is None else Holding(owner.peer, owner.term)
        stays = _alive(signs, owner) if verdict == "alive" else SuspectReply("frozen")
        if verdict != "take" and not (outvoted and held == known):
            return stays
        log.info("stage %d of job %.8s: its owner %s is gone", place[1], place[0], peer)
        if self._holder.occupied and not report.yours:
            taken = await self._forward_to_idle(report, claims, signs)
            if taken is not None:
                return taken
        if held is None:
            # Its lease has expired, and a new standby may never have read it and would use its term again.
            leases.observe(*place, report.holding.term)
            return await self._take_over(place, ())
        votes = await (collecting if held == known else self._votes.collect(place, held))
        if not leases.voting.is_proof_to_all(*place, held, leases.peer_id, votes):
            votes = await self._votes.collect_from_new_voters(place, held, votes)
        if not leases.voting.is_proof(*place, held, leases.peer_id, votes):
            log.info("stage %d of job %.8s: its neighbours do not say so", *place[::-1])
            return stays
        if verdict == "alive":
            self._idle.avoid(place[0], held.peer)
        return await self._take_over(place, votes)

    async def _take_over(self, place: Place, votes: tuple[bytes, ...]) -> SuspectReply:
        """With these votes that its owner is gone. Several reports may arrive here at once."""
        assert self._holder is not None
        take = partial(self._holder.take_over, *place, self._leases.known_term(*place), None, votes)
        await self._flights.once(("taken over", place), take)
        return self._own(place) or refused("the stage could not be taken over here")

    async def _forward_to_idle(
        self, report: Report, claims: Sequence[ClaimRecord], gone: Collection[PeerId]
    ) -> SuspectReply | None:
        """The claim of a standby without stages of its own that takes this one; None where none does in HEDGE_SECONDS."""
        passed = {self._leases.peer_id, *gone}
        idle = [claim.peer for claim in successors(claims) if is_idle(claim) and claim.peer not in passed]
        with suppress(TimeoutError):
            async with asyncio.timeout(HEDGE_SECONDS):
                for peer in idle:
                    reply = await self._report_to(peer, replace(report, yours=True))
                    if reply.claim is not None:
                        return reply
        return None

    def _own(self, place: Place) -> SuspectReply | None:
        held, sealed = self._leases.holds(*place), self._leases.sealed(*place)
        if held is None or sealed is None:
            return None
        return SuspectReply("owner", held.term, held, sealed)

    async def _probe_all(self, peers: set[PeerId], place: Place) -> dict[PeerId, Sign]:
        others = sorted(peers - {self._leases.peer_id})
        probes = (self._flights.once((place, p), partial(self._probe.look, p, *place)) for p in others)
        return dict(zip(others, await asyncio.gather(*probes), strict=True))

    # --- an owner that leaves, or gives a stage away

    async def holds(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """As in `Takeover`."""
        return (await self._probe.look(peer, job, stage)).kind == "holds"

    async def attends(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """As in `Takeover`."""
        return not self._idle.avoids(job, peer) and await self._probe.answers(peer, job, stage)

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """As in `Takeover`."""
        if self._holder is not None:
            self._holder.give_away(job, stage, peer)

    async def hand_over(
        self, job: JobId, stage: int, term: int, handover: Mapping[str, Any], order: Sequence[PeerId]
    ) -> ClaimRecord | None:
        """As in `Takeover`."""
        return await self._transfer.give(job, stage, term, handover, order)

    # --- requests of other peers

    async def _handle(self, stream: Stream) -> None:
        frame = await stream.receive()
        header, place = frame.header, place_of(frame.header)
        if frame.kind == "holds":
            held = self._holder.holds(*place) if self._holder is not None else 0
            await stream.send("holds", {"term": held})
            return
        term, vote = whole(header.get("term")), claim_bytes(header.get("word", b""))
        if frame.kind == "gone":
            gone = Holding(peer_of(header), term)
            await stream.send("gone", {"word": await self._votes.vote(place, gone, stream.remote)})
        elif frame.kind == "suspect":
            gone = Holding(peer_of(header), term)
            yours = header.get("yours") is True
            report = Report(place=place, holding=gone, votes=(vote,), yours=yours)
            reply = await self._handle_report(report)
            await stream.send(reply.kind, reply.header())
        elif frame.kind == "take":
            reply = await self._take(stream.remote, place, term, header.get("handover"), vote)
            await stream.send("taking" if reply.kind == "owner" else reply.kind, reply.header())
        else:
            raise ValueError(f"{HOLD.name} knows suspect, holds, gone and take, not {frame.kind[:40]!r}")

    async def _take(
        self, remote: PeerId, place: Place, term: int, handover: object, vote: bytes
    ) -> SuspectReply:
        refusal = await self._transfer.take(self._holder, remote, place, term, handover, vote)
        if refusal is not None:
            return refused(refusal)
        return self._own(place) or refused("the stage could not be taken over here")
