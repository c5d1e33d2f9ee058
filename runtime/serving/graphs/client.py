"""Ask any peer for what a model makes of named arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.runtime.job.protocol import RUN
from fusion.runtime.serving.graphs.arrays import Array, described, read_arrays
from fusion.runtime.serving.requests.request import number
from fusion.swarm.errors import FrameError
from fusion.swarm.transport import PeerId, Transport, call


@dataclass(frozen=True)
class Made:
    arrays: tuple[Array, ...]  # by the names that the model gives them
    route: tuple[str, ...]  # the peers that they came through
    seconds: float


async def run_model(
    transport: Transport, peer: PeerId, model: str, arrays: Sequence[Array], grants: Sequence[bytes] = ()
) -> Made:
    """`peer` need not serve the model itself. Raises RemoteError with its one line, SwarmError where it vanished."""
    header = {"model": model, "grants": list(grants), **described(arrays)}
    answer = await call(transport, peer, RUN.name, "run", header, [a.data for a in arrays])
    if answer.kind != "done":
        raise FrameError(f"gateways send done, not {answer.kind!r:.40}")
    route = answer.header.get("route")
    return Made(
        arrays=tuple(read_arrays(answer.header, answer.payload)),
        route=tuple(str(each)[:128] for each in route) if isinstance(route, list) else (),
        seconds=number(answer.header, "seconds", 0.0),
    )
