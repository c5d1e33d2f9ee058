"""Who follows an owner that vanished or leaves, without waiting for the directory to notice.

Whoever sees an owner vanish asks the stage's standbys, best first. A standby believes nobody's word: it looks for itself
whether the owner is there, and takes the stage over only if it is gone. The answer carries the new owner's signed claim.

A standby with stages of its own asks those without first (`yours`): whoever is asked so asks nobody else.

/fusion/hold/2   suspect {job, stage, peer, term, yours} -> owner {claim} | alive {term} | frozen {} | no {message}
                 holds   {job, stage}             -> holds {term}, 0 where the stage is not held
                 take    {job, stage, term, handover} -> taking {claim} | no {message}; from the stage's owner, who leaves

An owner that cannot be dialled, or whose stream breaks, twice in a row, is gone. One that says nothing is frozen or asleep,
and keeps its stage until its claim has run out in the directory: then it is gone as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgpack

from fusion.runtime.job.context import StageHolder
from fusion.runtime.job.protocol import HOLD
from fusion.swarm.claims.election import is_idle, successors, winner
from fusion.swarm.claims.leases import Leases
from fusion.swarm.directory.records import ClaimRecord, JobId, Place
from fusion.swarm.errors import PeerUnreachable, StreamBroken, StreamClosed, SwarmError
from fusion.swarm.printable import one_line
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, call

log = logging.getLogger(__name__)

MAX_HANDOVER_BYTES = 16 * 1024
ANSWER_SECONDS = 4.0  # for a standby to look, claim and answer
CHECK_SECONDS = 1.0  # for an owner that is there to say so
HEDGE_SECONDS = 1.5  # until the next standby is asked as well
PATIENCE_SECONDS = 0.3  # for the directory, where what it said a heartbeat ago may do
LOOKS = 2  # at an owner, before it is gone
TERM_LEAP = 1024  # how far above the terms that we know a report's may lie: nobody may use them up

R = TypeVar("R")


@dataclass(frozen=True)
class Sign:
    """What we saw of an owner: it holds the stage (under `term`), it is gone, or it is silent."""

    kind: Literal["holds", "gone", "silent"]
    term: int = 0


GONE = Sign("gone")
SILENT = Sign("silent")


@dataclass(frozen=True)
class SuspectReply:
    """What came of a report. `claim` and `sealed` where there is a new owner."""

    kind: Literal["owner", "alive", "frozen", "no"]
    term: int = 0
    claim: ClaimRecord | None = None
    sealed: bytes = b""
    message: str = ""

    @property
    def settles(self) -> bool:
        """Whether other standbys need not be asked."""
        return self.kind != "no"


def judge(
    claims: Sequence[ClaimRecord], peer: PeerId, term: int, signs: Mapping[PeerId, Sign]
) -> Literal["take", "alive", "frozen"]:
    """What a standby does about the report that `peer`, who held the stage under `term`, has vanished. `claims` are
    those of the stage, `signs` what we saw of `peer` and of the owner that the claims name.

    A report may be wrong or a lie: whoever owns the stage as far as anybody knows must be gone, or be silent with its
    claim run out.
    """
    owner = winner(claims)
    if any(sign.kind == "holds" for sign in signs.values()):
        return "alive"
    if owner is not None and signs.get(owner.peer) != GONE:
        return "frozen" if owner.peer in signs else "alive"
    return "take"


class Takeovers:
    """Implements `fusion.runtime.job.context.Takeover`. Before it is started it only asks others."""

    def __init__(self, transport: Transport, leases: Leases, check_seconds: float = CHECK_SECONDS) -> None:
        self._transport = transport
        self._leases = leases
        self._check_seconds = check_seconds
        self._holder: StageHolder | None = None
        self._running: dict[tuple[str, Place, int], asyncio.Future[Any]] = {}

    async def start(self, holder: StageHolder) -> None:
        """As in `Takeover`."""
        self._holder = holder
        await self._transport.serve(HOLD.name, self._handle)

    # --- whoever sees an owner vanish

    async def suspect(self, job: JobId, stage: int, peer: PeerId, term: int) -> ClaimRecord | None:
        """As in `Takeover`. Asked several times at once, it happens once."""
        place = (job, stage)
        return await self._once("suspect", place, term, lambda: self._find_successor(place, peer, term))

    async def _find_successor(self, place: Place, peer: PeerId, term: int) -> ClaimRecord | None:
        known = winner(self._leases.recent(*place))
        if known is not None and known.term > term:
            return known
        fresh = asyncio.ensure_future(self._claims(place))
        try:
            asked: set[PeerId] = {peer}
            answer = await self._ask_successors(place, peer, term, self._leases.recent(*place), asked)
            if answer is None:  # what we knew of the stage is old
                answer = await self._ask_successors(place, peer, term, await fresh, asked)
            if answer is not None and answer.claim is not None:
                log.info("stage %d of job %.8s goes on at %s", place[1], place[0], answer.claim.peer)
                return answer.claim
            # Somebody may have followed already.
            known = winner(await fresh)
            return known if known is not None and known.term > term else None
        finally:
            fresh.cancel()
            await asyncio.gather(fresh, return_exceptions=True)

    async def _ask_successors(
        self, place: Place, peer: PeerId, term: int, claims: Sequence[ClaimRecord], asked: set[PeerId]
    ) -> SuspectReply | None:
        """What the first standby says that settles it, the next one asked when one has no answer for a while."""
        order = deque(heir.peer for heir in successors(claims) if heir.peer not in asked)
        pending: set[asyncio.Future[SuspectReply]] = set()
        try:
            while order or pending:
                if order:
                    asked.add(order[0])
                    pending.add(asyncio.ensure_future(self._ask(order.popleft(), place, peer, term)))
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

    async def _ask(
        self, heir: PeerId, place: Place, peer: PeerId, term: int, *, yours: bool = False
    ) -> SuspectReply:
        if heir == self._leases.peer_id:
            return await self._succeed(place, peer, term)
        header = {"job": place[0], "stage": place[1], "peer": peer, "term": term, "yours": yours}
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reply = await call(self._transport, heir, HOLD.name, "suspect", header)
            return self._answer(reply)
        except (SwarmError, ValueError, TimeoutError) as error:
            return SuspectReply("no", message=one_line(str(error)) or "no answer")

    def _answer(self, reply: Frame) -> SuspectReply:
        if reply.kind == "owner":
            sealed = _bytes(reply.header.get("claim"))
            claim = self._leases.credit(sealed)
            return SuspectReply("owner", claim.term, claim, sealed)
        if reply.kind == "alive":
            return SuspectReply("alive", _whole(reply.header.get("term")))
        if reply.kind == "frozen":
            return SuspectReply("frozen")
        return SuspectReply("no", message=one_line(str(reply.header.get("message", ""))))

    # --- looking for oneself

    async def look(self, peer: PeerId, job: JobId, stage: int) -> Sign:
        """Whether `peer` holds the stage, by asking it. A connection may break although both ends live, on a machine that
        is too busy to keep it: only a peer that is not there over a new one either is gone."""
        for _ in range(LOOKS):
            try:
                term = await self._ask_term(peer, job, stage)
            except (PeerUnreachable, StreamBroken, StreamClosed) as error:
                log.debug("%s is gone: %s", peer, error)
                continue
            except (SwarmError, ValueError, TimeoutError):
                return SILENT
            return Sign("holds", term) if term > 0 else GONE
        return GONE

    async def holds(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """As in `Takeover`."""
        return (await self.look(peer, job, stage)).kind == "holds"

    async def attends(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """As in `Takeover`."""
        try:
            await self._ask_term(peer, job, stage)
        except (SwarmError, ValueError, TimeoutError):
            return False
        return True

    async def _ask_term(self, peer: PeerId, job: JobId, stage: int) -> int:
        async with asyncio.timeout(self._check_seconds):
            reply = await call(self._transport, peer, HOLD.name, "holds", {"job": job, "stage": stage})
        return _whole(reply.header.get("term"))

    # --- a standby

    async def _succeed(self, place: Place, peer: PeerId, term: int, *, yours: bool = False) -> SuspectReply:
        # Apart, or two that ask each other would both wait.
        what = "take" if yours else "succeed"
        return await self._once(
            what, place, term, lambda: self._look_and_take(place, peer, term, yours=yours)
        )

    async def _look_and_take(self, place: Place, peer: PeerId, term: int, *, yours: bool) -> SuspectReply:
        holder, leases = self._holder, self._leases
        if (own := self._own(place)) is not None and own.term > term:
            return own
        if holder is None or not any(
            (claim.job, claim.stage) == place for claim in leases.standbys.standing()
        ):
            return SuspectReply("no", message="not a standby of that stage")
        if term > leases.known_term(*place) + TERM_LEAP:
            return SuspectReply("no", message="no such term")
        suspected = {peer, *(owner.peer for owner in [winner(leases.recent(*place))] if owner is not None)}
        signs, claims = await asyncio.gather(self._look_at(suspected, place), self._soon(place))
        owner = winner(claims)
        if owner is not None and owner.peer not in signs and owner.peer != leases.peer_id:
            signs |= await self._look_at({owner.peer}, place)
        verdict = judge(claims, peer, term, signs)
        if verdict == "take":
            over = max([term, *(claim.term for claim in claims if claim.role == "owner")])
            log.info("stage %d of job %.8s: its owner %s is gone", place[1], place[0], peer)
            if holder.occupied and not yours:
                taken = await self._ask_the_idle(place, peer, term, claims, signs)
                if taken is not None:
                    return taken
            await holder.take_over(*place, over, None)
            if (own := self._own(place)) is not None:
                return own
            return SuspectReply("no", message="the stage could not be taken over here")
        if verdict == "alive":
            terms = [sign.term for sign in signs.values()]
            return SuspectReply("alive", max([*terms, owner.term if owner is not None else 0]))
        return SuspectReply("frozen")

    async def _ask_the_idle(
        self,
        place: Place,
        peer: PeerId,
        term: int,
        claims: Sequence[ClaimRecord],
        gone: Collection[PeerId],
    ) -> SuspectReply | None:
        """The claim of a standby without stages of its own that takes this one; None where none does soon."""
        us = self._leases.peer_id
        with suppress(TimeoutError):
            async with asyncio.timeout(HEDGE_SECONDS):
                for heir in successors(claims):
                    if is_idle(heir) and heir.peer != us and heir.peer not in gone:
                        answer = await self._ask(heir.peer, place, peer, term, yours=True)
                        if answer.claim is not None:
                            return answer
        return None

    def _own(self, place: Place) -> SuspectReply | None:
        held, sealed = self._leases.holds(*place), self._leases.sealed(*place)
        return (
            SuspectReply("owner", held.term, held, sealed)
            if held is not None and sealed is not None
            else None
        )

    async def _look_at(self, peers: set[PeerId], place: Place) -> dict[PeerId, Sign]:
        others = sorted(peers - {self._leases.peer_id})
        return dict(zip(others, await asyncio.gather(*(self.look(p, *place) for p in others)), strict=True))

    async def _claims(self, place: Place) -> tuple[ClaimRecord, ...]:
        try:
            return await self._leases.claims(*place)
        except SwarmError as error:
            log.debug("claims of stage %d of job %.8s not read: %s", place[1], place[0], error)
            return self._leases.recent(*place)

    async def _soon(self, place: Place) -> tuple[ClaimRecord, ...]:
        """The claims of a stage, those of the last look if the directory takes its time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._claims(place)
        return self._leases.recent(*place)

    # --- an owner that leaves, or gives a stage away, and its successor

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """As in `Takeover`."""
        if self._holder is not None:
            self._holder.give_away(job, stage, peer)

    async def hand_over(
        self, job: JobId, stage: int, term: int, handover: Mapping[str, Any], order: Sequence[PeerId]
    ) -> ClaimRecord | None:
        """As in `Takeover`."""
        header = {"job": job, "stage": stage, "term": term, "handover": dict(handover)}
        if len(msgpack.packb(header)) > MAX_HANDOVER_BYTES:
            log.warning("stage %d of job %.8s: too much to hand over", stage, job)
            return None
        for peer in order:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    reply = await call(self._transport, peer, HOLD.name, "take", header)
                if reply.kind == "taking":
                    return self._leases.credit(_bytes(reply.header.get("claim")))
                reason = str(reply.header.get("message", "refused"))
            except (SwarmError, ValueError, TimeoutError) as error:
                reason = str(error) or "no answer"
            log.info("stage %d of job %.8s not handed to %s: %s", stage, job, peer, one_line(reason))
        return None

    async def _take(self, remote: PeerId, place: Place, term: int, handover: object) -> SuspectReply:
        if self._holder is None or not isinstance(handover, dict):
            return SuspectReply("no", message="nothing is taken over here")
        if len(msgpack.packb(handover)) > MAX_HANDOVER_BYTES:
            return SuspectReply("no", message=f"a handover is at most {MAX_HANDOVER_BYTES} bytes")
        for claims in (self._leases.recent(*place), await self._claims(place)):
            owner = winner(claims)
            if owner is not None and (owner.peer, owner.term) == (remote, term):
                break
        else:
            return SuspectReply("no", message=f"{remote} does not own the stage under term {term}")
        await self._holder.take_over(*place, term, handover)
        return self._own(place) or SuspectReply("no", message="the stage could not be taken over here")

    # --- what others ask

    async def _handle(self, stream: Stream) -> None:
        frame = await stream.receive()
        place = (JobId(str(frame.header.get("job", ""))[:64]), _whole(frame.header.get("stage")))
        if frame.kind == "holds":
            term = self._holder.holds(*place) if self._holder is not None else 0
            await stream.send("holds", {"term": term})
            return
        term = _whole(frame.header.get("term"))
        if frame.kind == "suspect":
            peer = PeerId(str(frame.header.get("peer", ""))[:128])
            answer = await self._succeed(place, peer, term, yours=frame.header.get("yours") is True)
            kind: str = answer.kind
        elif frame.kind == "take":
            answer = await self._take(stream.remote, place, term, frame.header.get("handover"))
            kind = "taking" if answer.kind == "owner" else answer.kind
        else:
            raise ValueError(f"{HOLD.name} knows suspect, holds and take, not {frame.kind[:40]!r}")
        if answer.kind == "owner":
            await stream.send(kind, {"claim": answer.sealed})
        elif answer.kind == "alive":
            await stream.send(kind, {"term": answer.term})
        else:
            await stream.send(kind, {"message": answer.message} if answer.message else {})

    async def _once(self, what: str, place: Place, term: int, work: Callable[[], Awaitable[R]]) -> R:
        """`work`, shared by all who want the same at the same time. Where whoever does it is cancelled, another does
        it anew."""
        key = (what, place, term)
        while (running := self._running.get(key)) is not None:
            await asyncio.wait([running])
            if not running.cancelled():
                shared: R = running.result()
                return shared
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._running[key] = future
        try:
            result = await work()
            future.set_result(result)
            return result
        finally:
            del self._running[key]
            future.cancel()


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"a stage or a term is a number below 2**31, not {value!r:.20}")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a claim is bytes")
    return value
