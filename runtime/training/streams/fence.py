"""Fencing: which peer may send for a partner stage, by the term of its claim.

A `hello` is accepted only from the owner of the sending stage at the term that it names, as its sealed claim or the
directory shows (`fusion.swarm.claims.tenure`). Of several peers under one term the first accepted is the owner: another
peer's hello at that term, or a later start of the same peer (a restart may forget which terms were used), is refused like a
lower term, with `stale` {term}. A higher term ends the streams of the previous owner. An owner that did not know of that
term, because it joined after the previous claims had expired, gives the stage up and claims it again above it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from fusion.runtime.belief.shared_work import SharedWork
from fusion.runtime.training.step.messages import Hello
from fusion.swarm.claims.election import winner
from fusion.swarm.claims.leases import Leases
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import RecordError, StaleTerm, SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

NEAR_SECONDS = 0.5  # for which a read of the claims next to the partner's stage serves all hellos


class Overtaken(StaleTerm):
    """The stage was held under a term that the new claim does not exceed, as its partners remember. `holder`: the peer that held it, where
    the terms are equal."""

    def __init__(self, stage: int, own_term: int, term: int, holder: str = "somebody before us") -> None:
        what = f"term {term} by {holder}" if term == own_term else f"term {term}, not {own_term}"
        super().__init__(f"stage {stage} was held under {what}")
        self.term = term


class Later(SwarmError):
    """The other end is not accepted yet and should retry. `holder`: the owner that we follow meanwhile, where it is another peer
    with a live lease."""

    def __init__(self, message: str, holder: Holding | None = None) -> None:
        super().__init__(message)
        self.holder = holder


@dataclass(frozen=True)
class _Holder:
    """The sender for a partner under the highest term that was accepted."""

    term: int
    peer: PeerId
    incarnation: int  # of the peer's starts of the stage


class Fence:
    """Fences streams from stage `partner` to stage `stage`, which is held here under `term`."""

    def __init__(self, leases: Leases, job: JobId, stage: int, term: int, partner: int) -> None:
        self._leases = leases
        self._job, self._stage, self._term = job, stage, term
        self._partner = partner
        # Strangers may send any number of hellos: one read of the directory at a time serves all that arrived before it began.
        self._reads: SharedWork[int, ClaimRecord | None] = SharedWork(_now, 0.0)
        self._near: SharedWork[int, tuple[ClaimRecord, ...]] = SharedWork(_now, NEAR_SECONDS)
        self._holder: _Holder | None = None

    @property
    def highest(self) -> int:
        """The highest term accepted from the partner; 0 for none."""
        return 0 if self._holder is None else self._holder.term

    def is_over(self, claim: ClaimRecord) -> bool:
        """Whether another peer was accepted for the partner under the claim's term, or any under a higher one."""
        holder = self._holder
        return holder is not None and (
            claim.term < holder.term or (claim.term == holder.term and claim.peer != holder.peer)
        )

    def follows(self, claim: ClaimRecord, before: ClaimRecord) -> bool:
        """Whether the owner of `claim` replaces that of `before` as our partner."""
        return claim.term > before.term or (
            claim.term == before.term and self.is_over(before) and not self.is_over(claim)
        )

    def check(self, peer: PeerId, hello: Hello) -> None:
        """Raises Overtaken where another sender was accepted for the partner under a higher term, or the same one."""
        holder = self._holder
        if holder is None or hello.term > holder.term:
            return
        if _Holder(hello.term, peer, hello.incarnation) != holder:
            other = f"another start of {peer}" if peer == holder.peer else holder.peer
            raise Overtaken(self._partner, hello.term, holder.term, other)
        self._check_grant(peer)

    def _check_grant(self, peer: PeerId) -> None:
        """Raises StaleTerm where the grant in the peer's claim has expired or was revoked."""
        law = self._leases.access.law(self._job)
        if law is None or law.admission.kind != "granted":
            return
        held = self._leases.known_tenure(self._job, self._partner)
        if held is not None and held.claim.peer == peer:
            refused = self._leases.access.refusal(self._job, peer, "own", self._partner, held.claim.grants)
            if refused is not None:
                raise StaleTerm(f"stage {self._partner} is not {peer}'s any more: {refused}")

    def admit(self, peer: PeerId, hello: Hello) -> None:
        """Accept only this peer for the partner, until a higher term. Raises Overtaken."""
        self.check(peer, hello)
        self._holder = _Holder(hello.term, peer, hello.incarnation)

    async def claim_of(self, peer: PeerId, hello: Hello) -> ClaimRecord:
        """The claim under which the other end sends. Raises Later where it is not accepted yet, StaleTerm where it never will be."""
        if hello.target_term < self._term:
            raise StaleTerm(f"stage {self._stage} is under term {self._term}, not {hello.target_term}")
        if hello.target_term > self._term:
            raise Later(f"stage {self._stage} is here under term {self._term}")
        self.check(peer, hello)
        proof = self._proof(peer, hello)
        if proof is not None:
            return proof
        owner = await self._reads.get(self._partner, self._owner, _now())
        self.check(peer, hello)  # a hello under a higher term may have been accepted meanwhile
        held = self._leases.tenure(self._job, self._partner)
        # A peer that was killed may have forgotten its own term, and learns it only here.
        lowest = 0 if held is None else held.claim.term + (held.claim.peer != peer)
        if held is not None and hello.term < lowest:
            raise Overtaken(self._partner, hello.term, held.claim.term, held.claim.peer)
        if owner is None or (owner.peer, owner.term) != (peer, hello.term):
            other = None if owner is None or owner.peer == peer else Holding(owner.peer, owner.term)
            raise Later(f"no claim of stage {self._partner} at term {hello.term} seen yet", other)
        return owner

    async def _owner(self) -> ClaimRecord | None:
        leases, job = self._leases, self._job
        owner = await leases.owner(job, self._partner)
        in_doubt = leases.voting.stages_to_reread(job, self._partner)
        if not in_doubt:
            return owner
        read = leases.claims_or_recent
        await asyncio.gather(*(self._near.get(stage, partial(read, job, stage)) for stage in in_doubt))
        return winner(leases.recent(job, self._partner))

    def _proof(self, peer: PeerId, hello: Hello) -> ClaimRecord | None:
        """The claim that came with the hello, if it shows that `peer` owns its stage."""
        if not hello.claim:
            return None
        try:
            claim = self._leases.accept_claim(hello.claim)
        except (
            RecordError
        ) as error:  # of a clock too far from ours, for example: the directory may still know it
            log.debug("stage %d: the claim of stage %d: %s", self._stage, self._partner, error)
            return None
        wanted = (self._job, self._partner, peer, hello.term, "owner")
        return claim if (claim.job, claim.stage, claim.peer, claim.term, claim.role) == wanted else None


def _now() -> float:
    return asyncio.get_running_loop().time()
