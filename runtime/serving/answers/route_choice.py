"""Which holder of each stage a session goes through, by what the claims and the links say. Pure.

A token goes once around the ring, so that is what a route costs for each token: every stage's compute and queue, every
link between them, and the way back to the first stage. Before the first token all that is known so far has to go
through as well: the prompt of a new session, or all of a session that moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion.dag.placement.network import UNKNOWN_LINK, Device
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.serving.ring.session import Hop
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.links import routes
from fusion.swarm.links.routes import Demand, Holder, LinkTime
from fusion.swarm.links.view import LinkView
from fusion.swarm.transport import PeerId

TOKEN_BYTES = 64.0  # a token on its way back, and the question in front of it
LEAST_STAGE_SECONDS = 0.0005  # a token's, however small the stage
UNKNOWN_HOP_BYTES = 16 * 1024  # where a manifest does not say
PREFILL_SHARE = 0.1  # of a token's compute is a position's of a prompt, which is computed by the hundred
GAIN = 0.2  # of the time that is left is what moving has to save
LEAST_GAIN_SECONDS = 0.5

Layers = Sequence[Sequence[ClaimRecord]]  # by stage: who runs it


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one position costs: `stage_seconds` of computing by stage, `hop_bytes` over each cut. Without a KV cache the
    whole sequence goes through for each token."""

    stage_seconds: tuple[float, ...]
    hop_bytes: tuple[float, ...]
    cached: bool = True


@dataclass(frozen=True)
class RemainingWork:
    """What a session has to do: read `known` positions, then make `tokens`."""

    known: int
    tokens: int


def costs_of(manifest: Manifest) -> Costs:
    """Decoding reads a stage's weights once for a token, and that is what takes its time."""
    assert manifest.serve is not None, "only served models have routes"
    held = manifest.memory_bytes or (0,) * manifest.stages
    return Costs(
        stage_seconds=tuple(max(LEAST_STAGE_SECONDS, b / Device.memory_bytes_per_second) for b in held),
        hop_bytes=manifest.serve.hop_bytes or (UNKNOWN_HOP_BYTES,) * (manifest.stages - 1),
        cached=manifest.serve.cache == "kv",
    )


def holders(claims: Sequence[ClaimRecord]) -> tuple[ClaimRecord, ...]:
    """Who runs the stage: its owner first, then the replicas that are ready. Empty where nobody does."""
    owner = winner(claims)
    replicas = [claim for claim in claims if claim.role == "replica" and claim.ready]
    found = {claim.peer: claim for claim in reversed(replicas)}
    if owner is not None:
        found.pop(owner.peer, None)
        return (owner, *found.values())
    return tuple(found.values())


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """The routes that there are: holders of each stage (none may be without), links, and `ours`: how many sessions of
    this `gateway` run at a stage's holder, which its claim may not know of yet."""

    stages: Layers
    links: LinkView
    gateway: PeerId
    costs: Costs
    ours: Mapping[tuple[int, PeerId], int]

    def choose(self, work: RemainingWork) -> tuple[Hop, ...]:
        """For a new session."""
        found = routes.cheapest(self._layers(work, ()), self._demand(work), self._link)
        return self._hops(found.peers)

    def better(self, work: RemainingWork, current: Sequence[Hop]) -> tuple[Hop, ...] | None:
        """Where a session that runs on `current` should go on: None unless that saves clearly more than it costs to
        read all that is known anew."""
        peers = tuple(hop.peer for hop in current)
        held = [{claim.peer for claim in layer} for layer in self.stages]
        if not all(peer in there for peer, there in zip(peers, held, strict=True)):
            return None  # a claim has run out: the session itself will tell
        found = routes.cheapest(self._layers(work, peers), self._demand(work), self._link)
        if found.peers == peers:
            return None
        goes_on = RemainingWork(0, work.tokens) if self.costs.cached else work
        layers = self._layers(goes_on, peers)
        stays = routes.seconds(
            [next(r for r in layer if r.peer == peer) for layer, peer in zip(layers, peers, strict=True)],
            self._demand(goes_on),
            self._link,
        )
        saved = work.tokens * (stays - found.seconds)
        if saved > LEAST_GAIN_SECONDS and saved > GAIN * work.tokens * stays:
            return self._hops(found.peers)
        return None

    def _hops(self, peers: Sequence[PeerId]) -> tuple[Hop, ...]:
        terms = [{claim.peer: claim.term for claim in layer} for layer in self.stages]
        return tuple(Hop(peer, held[peer]) for peer, held in zip(peers, terms, strict=True))

    def _demand(self, work: RemainingWork) -> Demand:
        """For each token, with its share of what goes before the first."""
        positions = 1.0 + work.known / max(work.tokens, 1) if self.costs.cached else float(work.known)
        return Demand(
            hop_bytes=tuple(size * positions for size in self.costs.hop_bytes),
            start=self.gateway,
            start_bytes=TOKEN_BYTES,
            answer_bytes=TOKEN_BYTES,
            ring=True,
            ring_bytes=TOKEN_BYTES,
        )

    def _link(self, one: PeerId, two: PeerId) -> LinkTime:
        known = self.links.link(one, two)
        alpha = UNKNOWN_LINK.alpha_seconds if known.rtt_seconds is None else known.rtt_seconds / 2
        return LinkTime(alpha, 1.0 / (known.bytes_per_second or UNKNOWN_LINK.bytes_per_second))

    def _layers(self, work: RemainingWork, current: Sequence[PeerId]) -> list[list[Holder]]:
        read = PREFILL_SHARE * work.known
        share = 1.0 + read / max(work.tokens, 1) if self.costs.cached else max(1.0, read)
        return [
            [self._holder(stage, claim, share, current) for claim in layer]
            for stage, layer in enumerate(self.stages)
        ]

    def _holder(self, stage: int, claim: ClaimRecord, share: float, current: Sequence[PeerId]) -> Holder:
        own = bool(current) and current[stage] == claim.peer
        others = max(claim.load, self.ours.get((stage, claim.peer), 0)) - own
        seconds = self.costs.stage_seconds[stage]
        # Each of the other sessions is at this stage, and in the way, for one stage's share of its round.
        queue = seconds * max(others, 0.0) / len(self.stages)
        return Holder(peer=claim.peer, compute_seconds=seconds * share, queue_seconds=queue)
