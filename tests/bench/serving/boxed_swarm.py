"""Peers in a network in a box, one stage of a model on each, and a client in the box."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from bench.serving.answer_times import Timed
from box.network import Box
from box.spec import Host, Link, NetworkSpec

from fusion.cli.local.fleet import Fleet, LocalPeer, open_fleet
from fusion.runtime.job.context import Context
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.swarm.transport import PeerId

CLIENT = "client"
NEAR_MS, NEAR_MBPS = 0.1, 400.0  # of the client, whose way is not what is measured
SETTLE_SECONDS = 5.0  # for new peers to look at their links
HAS_GUESSES = "guesses" in {field.name for field in dataclasses.fields(GenerateRequest)}


def network(stages: int, delay_ms: float, rate_mbps: float) -> NetworkSpec:
    """A host for each stage, all at the same distance from each other, and one for the client."""
    names = [f"stage-{i}" for i in range(stages)]
    far = Link(delay_ms=delay_ms, rate_mbps=rate_mbps)
    return NetworkSpec(
        hosts=tuple(Host(name=name) for name in (*names, CLIENT)),
        links=dict.fromkeys(permutations(names, 2), far),
        default=Link(delay_ms=NEAR_MS, rate_mbps=NEAR_MBPS),
    )


@dataclass
class BoxedSwarm:
    box: Box
    fleet: Fleet
    context: Context
    peers: list[LocalPeer]
    gateway: PeerId | None = None  # the first stage's, so that no prompt crosses a link

    async def serve(self, path: Path, name: str, draft: Path | None = None) -> None:
        """Serve a model with one stage on each peer, and a draft model beside the first."""
        drafted = () if draft is None else ("--draft", str(draft))
        await self.fleet.run(
            f"serve-{name}", "serve", str(path), "--name", name, "--stages", str(len(self.peers)),
            "--home", str(self.fleet.root / "launcher"), "--peer", self.peers[0].address, *drafted,
            prefix=self.box.prefix(CLIENT),
        )  # fmt: skip
        answer = await self.ask(name, [1, 2, 3], 2)
        if len(set(answer.route)) < len(self.peers):
            raise RuntimeError(f"{name} runs on {len(set(answer.route))} of {len(self.peers)} peers")
        self.gateway = answer.route[0]

    async def ask(
        self,
        model: str,
        prompt: list[int],
        tokens: int,
        guesses: bool | None = None,
        seen: Callable[[float], None] = lambda now: None,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    ) -> Asked:
        """Request an answer. `guesses`: whether the ring may guess tokens; None: the default. `seen` is called with the time of
        each token."""
        more: dict[str, Any] = {} if guesses is None or not HAS_GUESSES else {"guesses": guesses}
        request = GenerateRequest(
            model=model, prompt_ids=tuple(prompt), max_tokens=tokens, sampling=sampling, **more
        )
        found = Asked(Timed(time.perf_counter()), ())
        peer = self.gateway or PeerId(self.peers[0].peer_id)
        async for piece in generate(self.context.transport, peer, request):
            if isinstance(piece, Piece):
                found.timed.add(piece.id, time.perf_counter())
                seen(found.timed.at[-1])
            elif isinstance(piece, Answer):
                found.route = piece.route
        return found


@dataclass
class Asked:
    timed: Timed
    route: tuple[PeerId, ...]


@asynccontextmanager
async def boxed_swarm(box: Box, stages: int) -> AsyncIterator[BoxedSwarm]:
    """The running swarm. The calling thread is on the client's host."""
    async with open_fleet("fusion-serving-") as fleet:

        async def start(host: str, known: tuple[str, ...]) -> LocalPeer:
            return await fleet.start_peer(
                host, "--http", "off", bootstrap=known, listen=box.listen(host), prefix=box.prefix(host)
            )

        first = await start("stage-0", ())
        others = [start(f"stage-{i}", (first.address,)) for i in range(1, stages)]
        peers = [first, *await asyncio.gather(*others)]
        config = ClientConfig(home=fleet.root / "asking", peer=first.address)
        async with open_client(config) as context:
            await asyncio.sleep(SETTLE_SECONDS)
            yield BoxedSwarm(box, fleet, context, peers)
