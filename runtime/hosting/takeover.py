"""Who follows an owner that vanished or leaves, without waiting for the directory to notice.

Whoever sees an owner vanish asks the stage's standbys, best first. A standby believes nobody's word: it looks for itself
whether the owner is there. Where it is gone, and a majority of the stage's jurors have seen so for themselves and say it
in favour of this standby (`fusion.swarm.claims.tenure`), it takes the stage over. The answer carries the new owner's
signed claim.

A standby with stages of its own asks those without first (`yours`): whoever is asked so asks nobody else.

/fusion/hold/2   suspect {job, stage, peer, term, yours, word} -> owner {claim} | alive {term} | frozen {} | no {message}
                 holds   {job, stage}             -> holds {term}, 0 where the stage is not held
                 gone    {job, stage, peer, term} -> gone {word}, empty where we see otherwise; from who would follow
                 take    {job, stage, term, handover, word} -> taking {claim} | no {message}; from the stage's owner, who leaves

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
from fusion.swarm.claims.tenure import NEVER, Holding
from fusion.swarm.directory.records import MAX_PROOFS, ClaimRecord, JobId, Place
from fusion.swarm.errors import PeerUnreachable, StreamBroken, StreamClosed, SwarmError
from fusion.swarm.printable import one_line
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, call

log = logging.getLogger(__name__)

MAX_HANDOVER_BYTES = 16 * 1024
ANSWER_SECONDS = 4.0  # for a standby to look, claim and answer
CHECK_SECONDS = 1.0  # for an owner that is there to say so
HEDGE_SECONDS = 1.5  # until the next standby is asked as well
PATIENCE_SECONDS = 0.3  # for the directory, where what it said a heartbeat ago may do
WORD_SECONDS = 0.1  # for our own look at an owner, before we report it without our word
LOOKS = 2  # at an owner, before it is gone

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
        self._running: dict[tuple[Any, ...], asyncio.Future[Any]] = {}
        leases.testimonies = self._testimonies

    async def start(self, holder: StageHolder) -> None:
        """As in `Takeover`."""
        self._holder = holder
        await self._transport.serve(HOLD.name, self._handle)

    # --- whoever sees an owner vanish

    async def suspect(self, job: JobId, stage: int, peer: PeerId, term: int) -> ClaimRecord | None:
        """As in `Takeover`. Asked several times at once, it happens once."""
        place = (job, stage)
        key = ("suspect", place, peer, term)
        return await self._once(key, lambda: self._find_successor(place, peer, term))

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
                header["word"] = await self._word_soon(place, Holding(peer, term), heir)
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

    async def _succeed(
        self, place: Place, peer: PeerId, term: int, words: Sequence[bytes] = (), *, yours: bool = False
    ) -> SuspectReply:
        # Apart, or two that ask each other would both wait.
        key = ("take" if yours else "succeed", place, peer, term)
        return await self._once(key, lambda: self._look_and_take(place, peer, term, words, yours=yours))

    async def _look_and_take(
        self, place: Place, peer: PeerId, term: int, words: Sequence[bytes], *, yours: bool
    ) -> SuspectReply:
        holder, leases = self._holder, self._leases
        if (own := self._own(place)) is not None and own.term > term:
            return own
        if holder is None or not any(
            (claim.job, claim.stage) == place for claim in leases.standbys.standing()
        ):
            return SuspectReply("no", message="not a standby of that stage")
        owner = winner(leases.recent(*place))
        suspected = {peer, *(() if owner is None else (owner.peer,))}
        holding = Holding(peer, term) if owner is None else Holding(owner.peer, owner.term)
        asking = asyncio.ensure_future(self._testimonies(place, holding, words))
        try:
            reported = Holding(peer, term)
            return await self._judge_and_take(place, reported, suspected, holding, asking, yours=yours)
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _judge_and_take(
        self,
        place: Place,
        reported: Holding,
        suspected: set[PeerId],
        asked: Holding,
        asking: asyncio.Future[tuple[bytes, ...]],
        *,
        yours: bool,
    ) -> SuspectReply:
        """`asking`: for the testimonies that we need, should the owner be gone, against the one of `asked`."""
        assert self._holder is not None
        holder, leases, (peer, term) = self._holder, self._leases, reported
        signs, claims = await asyncio.gather(self._look_at(suspected, place), self._soon(place))
        owner = winner(claims)
        if owner is not None and owner.peer not in signs and owner.peer != leases.peer_id:
            signs |= await self._look_at({owner.peer}, place)
        verdict = judge(claims, peer, term, signs)
        if verdict == "take":
            log.info("stage %d of job %.8s: its owner %s is gone", place[1], place[0], peer)
            if holder.occupied and not yours:
                taken = await self._ask_the_idle(place, peer, term, claims, signs)
                if taken is not None:
                    return taken
            words: tuple[bytes, ...] = ()
            if owner is not None:
                holding = Holding(owner.peer, owner.term)
                words = await (asking if holding == asked else self._testimonies(place, holding))
                if not leases.is_proof(*place, holding, leases.peer_id, words):
                    log.info("stage %d of job %.8s: its neighbours do not say so", *place[::-1])
                    return SuspectReply("frozen")
            await holder.take_over(*place, leases.known_term(*place), None, words)
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

    # --- the words of the jurors

    async def _testimonies(
        self, place: Place, holding: Holding, given: Sequence[bytes] = ()
    ) -> tuple[bytes, ...]:
        """What the jurors say against the holder of a stage, in our favour, and `given`; no more than prove it, and what
        came soon where they do not."""
        us, leases = self._leases.peer_id, self._leases
        words = [word for word in given if word][:1]
        jurors = leases.jurors(*place, holding.peer)
        asking = {asyncio.ensure_future(self._ask_juror(juror, place, holding)) for juror in jurors}
        deadline = asyncio.get_running_loop().time() + 2 * self._check_seconds
        try:
            while asking and not leases.is_proof(*place, holding, us, words):
                left = max(0.0, deadline - asyncio.get_running_loop().time())
                done, asking = await asyncio.wait(asking, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                words += [word for task in done if (word := task.result())]
                if not done:
                    break
            return tuple(words[:MAX_PROOFS])
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask_juror(self, juror: PeerId, place: Place, holding: Holding) -> bytes:
        us = self._leases.peer_id
        if juror == us:
            return await self._word(place, holding, us)
        header = {"job": place[0], "stage": place[1], "peer": holding.peer, "term": holding.term}
        try:
            async with asyncio.timeout(2 * self._check_seconds):
                reply = await call(self._transport, juror, HOLD.name, "gone", header)
            word = _bytes(reply.header.get("word"))
        except (SwarmError, ValueError, TimeoutError) as error:
            log.debug("%s has no word on stage %d of job %.8s: %s", juror, place[1], place[0], error)
            return b""
        return word if self._leases.is_word(*place, holding, us, juror, word) else b""

    async def _word_soon(self, place: Place, holding: Holding, heir: PeerId) -> bytes:
        """Our word for a report, if we have seen soon enough that the holder is gone."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WORD_SECONDS):
                return await self._word(place, holding, heir)
        return b""

    async def _word(self, place: Place, holding: Holding, heir: PeerId) -> bytes:
        """Our testimony that the holder of the stage is gone and `heir` is to follow, if ours counts and we see that; else
        nothing."""
        leases = self._leases
        if leases.peer_id not in leases.jurors(*place, holding.peer):
            return b""
        held = leases.tenure(*place)
        if held is None or held.holding != holding:
            await self._soon(place)  # it may be that we have not heard of it yet
            held = leases.tenure(*place)
        owner = winner(leases.recent(*place))
        if held is None:
            return b""
        if held.holding == holding:
            if held.until != NEVER:  # it has not said so itself
                sign = await self._once(("look", place, holding), lambda: self.look(holding.peer, *place))
                if sign.kind == "holds" or (sign.kind == "silent" and owner is not None):
                    return b""
        elif held.claim.peer != heir or held.claim.term < holding.term:
            return b""
        return leases.testify(*place, holding, heir)

    # --- an owner that leaves, or gives a stage away, and its successor

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """As in `Takeover`."""
        if self._holder is not None:
            self._holder.give_away(job, stage, peer)

    async def hand_over(
        self, job: JobId, stage: int, term: int, handover: Mapping[str, Any], order: Sequence[PeerId]
    ) -> ClaimRecord | None:
        """Give the stage, which we own under `term`, to the first of these peers that takes it; its claim."""
        leases = self._leases
        header: dict[str, Any] = {"job": job, "stage": stage, "term": term, "handover": dict(handover)}
        if len(msgpack.packb(header)) > MAX_HANDOVER_BYTES:
            log.warning("stage %d of job %.8s: too much to hand over", stage, job)
            return None
        for peer in order:
            try:
                header["word"] = leases.testify(job, stage, Holding(leases.peer_id, term), peer)
                async with asyncio.timeout(ANSWER_SECONDS):
                    reply = await call(self._transport, peer, HOLD.name, "take", header)
                if reply.kind == "taking":
                    return self._leases.credit(_bytes(reply.header.get("claim")))
                reason = str(reply.header.get("message", "refused"))
            except (SwarmError, ValueError, TimeoutError) as error:
                reason = str(error) or "no answer"
            log.info("stage %d of job %.8s not handed to %s: %s", stage, job, peer, one_line(reason))
        return None

    async def _take(
        self, remote: PeerId, place: Place, term: int, handover: object, word: bytes
    ) -> SuspectReply:
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
        if not self._leases.is_proof(*place, Holding(remote, term), self._leases.peer_id, (word,)):
            return SuspectReply("no", message=f"{remote} has not released the stage")
        await self._holder.take_over(*place, term, handover, (word,))
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
        word = _bytes(frame.header.get("word", b""))
        if frame.kind in ("suspect", "gone"):
            peer = PeerId(str(frame.header.get("peer", ""))[:128])
        if frame.kind == "gone":
            await stream.send("gone", {"word": await self._word(place, Holding(peer, term), stream.remote)})
            return
        if frame.kind == "suspect":
            yours = frame.header.get("yours") is True
            answer = await self._succeed(place, peer, term, [word], yours=yours)
            kind: str = answer.kind
        elif frame.kind == "take":
            answer = await self._take(stream.remote, place, term, frame.header.get("handover"), word)
            kind = "taking" if answer.kind == "owner" else answer.kind
        else:
            raise ValueError(f"{HOLD.name} knows suspect, holds, gone and take, not {frame.kind[:40]!r}")
        if answer.kind == "owner":
            await stream.send(kind, {"claim": answer.sealed})
        elif answer.kind == "alive":
            await stream.send(kind, {"term": answer.term})
        else:
            await stream.send(kind, {"message": answer.message} if answer.message else {})

    async def _once(self, key: tuple[Any, ...], work: Callable[[], Awaitable[R]]) -> R:
        """`work`, shared by all who want the same at the same time. Where whoever does it is cancelled, another does
        it anew."""
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
