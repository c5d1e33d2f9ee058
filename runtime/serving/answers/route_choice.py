"""The route of a session: one holder for each stage, chosen by claims and links. Pure.

A token makes one trip around the ring, so a route costs for each token: every stage's compute and queue, every link between them, and
the way back to the first stage. Before the first token everything known so far has to be prefilled: the prompt of a new session, or
the whole sequence of one that moves.
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

TOKEN_FRAME_BYTES = 64.0  # a token frame on its way back, or the request to the first stage
LEAST_STAGE_SECONDS = 0.0005  # of compute for a token, however small the stage
UNKNOWN_HOP_BYTES = 16 * 1024  # where the manifest does not have it
PREFILL_SHARE = 0.1  # compute of a position in prefill, which is batched, as a share of one in decoding
GAIN = 0.2  # share of the remaining time that a move has to save
LEAST_GAIN_SECONDS = 0.5

Layers = Sequence[Sequence[ClaimRecord]]  # the holders of each stage


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Cost of one position: `stage_seconds` of compute by stage, `hop_bytes` over each cut. Not `cached`: without a KV cache every token
    needs the whole sequence."""

    stage_seconds: tuple[float, ...]
    hop_bytes: tuple[float, ...]
    cached: bool = True


@dataclass(frozen=True)
class RemainingWork:
    """Work of a session: prefill `known` positions, then decode `tokens`."""

    known: int
    tokens: int


def costs_of(manifest: Manifest) -> Costs:
    """Decoding is bound by memory bandwidth: each token reads a stage's weights once."""
    assert manifest.serve is not None, "only served models have routes"
    held = manifest.memory_bytes or (0,) * manifest.stages
    return Costs(
        stage_seconds=tuple(max(LEAST_STAGE_SECONDS, b / Device.memory_bytes_per_second) for b in held),
        hop_bytes=manifest.serve.hop_bytes or (UNKNOWN_HOP_BYTES,) * (manifest.stages - 1),
        cached=manifest.serve.cache == "kv",
    )


def holders(claims: Sequence[ClaimRecord]) -> tuple[ClaimRecord, ...]:
    """The holders of a stage: its owner first, then replicas that are ready."""
    owner = winner(claims)
    replicas = [claim for claim in claims if claim.role == "replica" and claim.ready]
    by_peer = {claim.peer: claim for claim in reversed(replicas)}
    if owner is not None:
        by_peer.pop(owner.peer, None)
        return (owner, *by_peer.values())
    return tuple(by_peer.values())


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """The possible routes: holders of each stage (at least one each), links, and `own_sessions`: how many sessions of this `gateway` run
    at a stage's holder, whose claim may not count them yet."""

    stages: Layers
    links: LinkView
    gateway: PeerId
    costs: Costs
    own_sessions: Mapping[tuple[int, PeerId], int]

    def choose(self, work: RemainingWork) -> tuple[Hop, ...]:
        """The cheapest route for a new session."""
        cheapest = routes.cheapest(self._layers(work, ()), self._demand(work), self._link)
        return self._hops(cheapest.peers)

    def better(self, work: RemainingWork, current: Sequence[Hop]) -> tuple[Hop, ...] | None:
        """The route to which a session on `current` should move: None unless that saves clearly more than the new prefill costs."""
        peers = tuple(hop.peer for hop in current)
        held = [{claim.peer for claim in layer} for layer in self.stages]
        if not all(peer in there for peer, there in zip(peers, held, strict=True)):
            return None  # a claim has expired: the session itself will notice
        cheapest = routes.cheapest(self._layers(work, peers), self._demand(work), self._link)
        if cheapest.peers == peers:
            return None
        goes_on = RemainingWork(0, work.tokens) if self.costs.cached else work
        layers = self._layers(goes_on, peers)
        stays = routes.seconds(
            [next(r for r in layer if r.peer == peer) for layer, peer in zip(layers, peers, strict=True)],
            self._demand(goes_on),
            self._link,
        )
        saved = work.tokens * (stays - cheapest.seconds)
        if saved > LEAST_GAIN_SECONDS and saved > GAIN * work.tokens * stays:
            return self._hops(cheapest.peers)
        return None

    def _hops(self, peers: Sequence[PeerId]) -> tuple[Hop, ...]:
        terms = [{claim.peer: claim.term for claim in layer} for layer in self.stages]
        return tuple(Hop(peer, held[peer]) for peer, held in zip(peers, terms, strict=True))

    def _demand(self, work: RemainingWork) -> Demand:
        """Bytes for each token, with its share of the prefill."""
        positions = 1.0 + work.known / max(work.tokens, 1) if self.costs.cached else float(work.known)
        return Demand(
            hop_bytes=tuple(size * positions for size in self.costs.hop_bytes),
            start=self.gateway,
            start_bytes=TOKEN_FRAME_BYTES,
            answer_bytes=TOKEN_FRAME_BYTES,
            ring=True,
            ring_bytes=TOKEN_FRAME_BYTES,
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
        others = max(claim.load, self.own_sessions.get((stage, claim.peer), 0)) - own
        seconds = self.costs.stage_seconds[stage]
        # Each of the other sessions occupies this stage for one stage's share of its trip.
        queue = seconds * max(others, 0.0) / len(self.stages)
        return Holder(peer=claim.peer, compute_seconds=seconds * share, queue_seconds=queue)
