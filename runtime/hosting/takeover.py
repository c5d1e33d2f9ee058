"""Who follows an owner that vanished or leaves, without waiting for the directory to notice.

Whoever sees an owner vanish asks the stage's standbys, best first. A standby believes nobody's word: it looks for itself
whether the owner is there. Where it is gone, and a majority of the stage's voters have seen so for themselves and say it
in favour of this standby (`fusion.swarm.claims.tenure`), it takes the stage over. The answer carries the new owner's
signed claim.

A standby with stages of its own asks those without first (`yours`): whoever is asked so asks nobody else.

An owner that cannot be dialled, or whose stream breaks, twice in a row, is gone. One that says nothing is frozen or asleep,
and keeps its stage until its claim has run out in the directory: then it is gone as well.
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

CHECK_SECONDS = 1.0  # for an owner that is there to say so
HEDGE_SECONDS = 1.5  # until the next standby is asked as well


def verdict_on(
    claims: Sequence[ClaimRecord], signs: Mapping[PeerId, Sign]
) -> Literal["take", "alive", "frozen"]:
    """What a standby does about the report that whoever held the stage has vanished. `claims` are those of the stage,
    `signs` what we saw of that peer and of the owner that the claims name.

    A report may be wrong or a lie: whoever owns the stage as far as anybody knows must be gone, or be silent with its
    claim run out.
    """
    owner = winner(claims)
    if any(sign.kind == "holds" for sign in signs.values()):
        return "alive"
    if owner is not None and signs.get(owner.peer) != GONE:
        return "frozen" if owner.peer in signs else "alive"
    return "take"


@dataclass(frozen=True, kw_only=True)
class Report:
    """That whoever held a stage is gone, as it came to a standby."""

    place: Place
    holding: Holding  # of whoever is said to be gone
    votes: tuple[bytes, ...] = ()  # that came with it
    yours: bool = False  # we are meant, though we may have stages: those without were asked


def _alive(signs: Mapping[PeerId, Sign], owner: ClaimRecord | None) -> SuspectReply:
    return SuspectReply(
        "alive", max([*(sign.term for sign in signs.values()), 0 if owner is None else owner.term])
    )


class Takeovers:
    """Implements `fusion.runtime.job.context.Takeover`. Before it is started it only asks others."""

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
        """The claims of a stage now, read once at a time however many tell us of it, with any peer and term that they like; what
        we knew of them where the directory does not answer soon."""
        read = partial(self._leases.claims_or_recent, *place, PATIENCE_SECONDS)
        return await self._flights.once(("read", place), read)

    # --- whoever sees an owner vanish, or do nothing

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
        """As in `Takeover`. Asked several times at once, it happens once."""
        report = Report(place=(job, stage), holding=Holding(peer, term))
        return await self._flights.once(("suspect", report), lambda: self._find_successor(report))

    async def _find_successor(self, report: Report) -> ClaimRecord | None:
        place, (peer, term) = report.place, report.holding
        known = winner(self._leases.recent(*place))
        if known is not None and known.term > term:
            return known
        asked: set[PeerId] = {peer}
        answer = await self._ask_successors(report, self._leases.recent(*place), asked)
        if answer is None or answer.claim is None:
            # What we knew of the stage is old, or somebody may have followed already.
            fresh = await self._leases.claims_or_recent(*place)
            answer = answer or await self._ask_successors(report, fresh, asked)
        if answer is not None and answer.claim is not None:
            log.info("stage %d of job %.8s goes on at %s", place[1], place[0], answer.claim.peer)
            return answer.claim
        known = winner(self._leases.recent(*place))
        return known if known is not None and known.term > term else None

    async def _ask_successors(
        self, report: Report, claims: Sequence[ClaimRecord], asked: set[PeerId]
    ) -> SuspectReply | None:
        """What the first standby says that settles it, the next one asked when one has no answer for a while."""
        us = self._leases.peer_id if self._idle.has(report.place, report.holding) else None

        def turn(standby: PeerId) -> tuple[bool, bool]:
            """Of an owner that does nothing the best standbys may be allies: we know that we are none, and ask the idle ones."""
            return self._idle.avoids(report.place[0], standby), standby != us

        standbys = [standby.peer for standby in successors(claims) if standby.peer not in asked]
        order = deque(sorted(standbys, key=turn))
        pending: set[asyncio.Future[SuspectReply]] = set()
        try:
            while order or pending:
                if order:
                    asked.add(order[0])
                    pending.add(asyncio.ensure_future(self._ask(order.popleft(), report)))
                done, pending = await asyncio.wait(
                    pending,
                    timeout=HEDGE_SECONDS if order else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    if (answer := task.result()).settles:
                        return answer
            return None
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _ask(self, successor: PeerId, report: Report) -> SuspectReply:
        if successor == self._leases.peer_id:
            return await self._succeed(report)
        place, (peer, term) = report.place, report.holding
        header = {"job": place[0], "stage": place[1], "peer": peer, "term": term, "yours": report.yours}
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                header["word"] = await self._votes.vote_soon(place, report.holding, successor)
                reply = await call(self._transport, successor, HOLD.name, "suspect", header)
            return await self._answer(place, reply)
        except (SwarmError, ValueError, TimeoutError) as error:
            return refused(one_line(str(error)) or "no answer")

    async def _answer(self, place: Place, reply: Frame) -> SuspectReply:
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

    async def _succeed(self, report: Report) -> SuspectReply:
        place, leases = report.place, self._leases
        if (own := self._own(place)) is not None and own.term > report.holding.term:
            return own
        # Anybody may report anything: no vote is checked for a stage that we would not take.
        stands_by = any((claim.job, claim.stage) == place for claim in leases.standbys.claims())
        if self._holder is None or not stands_by:
            return refused("not a standby of that stage")
        owner = winner(leases.recent(*place))
        known = report.holding if owner is None else Holding(owner.peer, owner.term)
        outvoted = self._votes.is_voted_against(place, known, report.votes)
        # Apart, or two that ask each other would both wait; and anybody may report without a vote.
        key = ("take" if report.yours else "succeed", place, report.holding, outvoted)
        return await self._flights.once(key, lambda: self._look_and_take(report, known, outvoted=outvoted))

    async def _look_and_take(self, report: Report, known: Holding, *, outvoted: bool) -> SuspectReply:
        """`known`: who owns the stage as far as we know; who is reported, where nobody does. `outvoted`: one of the voters says that
        this one is gone, whatever it answers."""
        asking = asyncio.ensure_future(self._votes.collect(report.place, known, report.votes))
        try:
            return await self._judge_and_take(report, known, asking, outvoted=outvoted)
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _judge_and_take(
        self, report: Report, known: Holding, asking: asyncio.Future[tuple[bytes, ...]], *, outvoted: bool
    ) -> SuspectReply:
        """`asking`: for the votes that we need, should the owner be gone, against the one of `known`."""
        assert self._holder is not None
        place, peer, leases = report.place, report.holding.peer, self._leases
        # Whoever reports may name anybody: others are looked at only if they claim the stage.
        suspected = {known.peer} | ({peer} & {claim.peer for claim in leases.recent(*place)})
        signs, claims = await asyncio.gather(self._look_at(suspected, place), self._read(place))
        owner = winner(claims)
        claimed = {claim.peer for claim in claims} & {peer} | (set() if owner is None else {owner.peer})
        signs |= await self._look_at((claimed or {peer}) - signs.keys(), place)
        verdict = verdict_on(claims, signs)
        held = None if owner is None else Holding(owner.peer, owner.term)
        stays = _alive(signs, owner) if verdict == "alive" else SuspectReply("frozen")
        if verdict != "take" and not (outvoted and held == known):
            return stays
        log.info("stage %d of job %.8s: its owner %s is gone", place[1], place[0], peer)
        if self._holder.occupied and not report.yours:
            taken = await self._ask_the_idle(report, claims, signs)
            if taken is not None:
                return taken
        if held is None:
            # Its lease is over, and we may never have read it: who has just begun to stand by would use its term again.
            leases.observe(*place, report.holding.term)
            return await self._take_over(place, ())
        votes = await (asking if held == known else self._votes.collect(place, held))
        if not leases.voting.is_proof_to_all(*place, held, leases.peer_id, votes):
            votes = await self._votes.collect_after_a_look(place, held, votes)
        if not leases.voting.is_proof(*place, held, leases.peer_id, votes):
            log.info("stage %d of job %.8s: its neighbours do not say so", *place[::-1])
            return stays
        if verdict == "alive":
            self._idle.avoid(place[0], held.peer)
        return await self._take_over(place, votes)

    async def _take_over(self, place: Place, votes: tuple[bytes, ...]) -> SuspectReply:
        """With these votes that its owner is gone. Reports of several kinds may come to this at once."""
        assert self._holder is not None
        take = partial(self._holder.take_over, *place, self._leases.known_term(*place), None, votes)
        await self._flights.once(("taken over", place), take)
        return self._own(place) or refused("the stage could not be taken over here")

    async def _ask_the_idle(
        self, report: Report, claims: Sequence[ClaimRecord], gone: Collection[PeerId]
    ) -> SuspectReply | None:
        """The claim of a standby without stages of its own that takes this one; None where none does soon."""
        passed = {self._leases.peer_id, *gone}
        idle = [claim.peer for claim in successors(claims) if is_idle(claim) and claim.peer not in passed]
        with suppress(TimeoutError):
            async with asyncio.timeout(HEDGE_SECONDS):
                for peer in idle:
                    answer = await self._ask(peer, replace(report, yours=True))
                    if answer.claim is not None:
                        return answer
        return None

    def _own(self, place: Place) -> SuspectReply | None:
        held, sealed = self._leases.holds(*place), self._leases.sealed(*place)
        if held is None or sealed is None:
            return None
        return SuspectReply("owner", held.term, held, sealed)

    async def _look_at(self, peers: set[PeerId], place: Place) -> dict[PeerId, Sign]:
        others = sorted(peers - {self._leases.peer_id})
        looks = (self._flights.once((place, p), partial(self._probe.look, p, *place)) for p in others)
        return dict(zip(others, await asyncio.gather(*looks), strict=True))

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

    # --- what others ask

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
            answer = await self._succeed(Report(place=place, holding=gone, votes=(vote,), yours=yours))
            await stream.send(answer.kind, answer.header())
        elif frame.kind == "take":
            answer = await self._take(stream.remote, place, term, header.get("handover"), vote)
            await stream.send("taking" if answer.kind == "owner" else answer.kind, answer.header())
        else:
            raise ValueError(f"{HOLD.name} knows suspect, holds, gone and take, not {frame.kind[:40]!r}")

    async def _take(
        self, remote: PeerId, place: Place, term: int, handover: object, vote: bytes
    ) -> SuspectReply:
        why_not = await self._transfer.take(self._holder, remote, place, term, handover, vote)
        if why_not is not None:
            return refused(why_not)
        return self._own(place) or refused("the stage could not be taken over here")
