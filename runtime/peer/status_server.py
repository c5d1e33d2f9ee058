"""Serves a peer's status, beyond its record, and the directory to clients without the DHT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import MAX_FAILURES, MAX_LOADING, StageFailure, StageLoading
from fusion.runtime.job.protocol import STATUS
from fusion.swarm.directory.records import Place
from fusion.swarm.identity import friendly_name
from fusion.swarm.protocol import DIRECTORY
from fusion.swarm.thin.directory_server import DirectoryServer, SealedDirectory
from fusion.swarm.transport import Stream

MAX_PEERS = 256  # in one reply, which has to fit into a header
MAX_PLACES = 512


@dataclass(frozen=True, kw_only=True)
class StagesNow:
    """The stages of this peer: those that run, those that are being loaded, and those that failed."""

    hosted: Sequence[Place]
    loading: Sequence[StageLoading] = ()
    failed: Sequence[StageFailure] = ()


async def serve_status(context: Context, directory: SealedDirectory, stages: Callable[[], StagesNow]) -> None:
    """Serve STATUS and DIRECTORY from now on."""
    await context.transport.serve(STATUS.name, lambda stream: answer_status(stream, context, stages()))
    await context.transport.serve(DIRECTORY.name, DirectoryServer(directory).serve_stream)


async def answer_status(stream: Stream, context: Context, stages: StagesNow) -> None:
    """Send what `fusion-peer status` shows of one peer beyond its record."""
    frame = await stream.receive()
    if frame.kind != "status":
        raise ValueError(f"{STATUS.name} knows status, not {frame.kind[:40]!r}")
    counts = context.transport.traffic().items()
    most = sorted(counts, key=lambda each: each[1].sent_bytes + each[1].received_bytes, reverse=True)
    traffic = {other: [count.sent_bytes, count.received_bytes] for other, count in most[:MAX_PEERS]}
    places = [[job, stage] for job, stage in stages.hosted]
    held = sorted(context.memory.by_place.items(), key=lambda each: -each[1])[:MAX_PLACES]
    header = {
        "name": friendly_name(context.peer_id),
        "hosted": places,
        "holds": [[job, stage, memory_bytes] for (job, stage), memory_bytes in held],
        "loading": [each.to_list() for each in stages.loading[:MAX_LOADING]],
        "failed": [each.to_list() for each in stages.failed[:MAX_FAILURES]],
        "traffic": traffic,
    }
    await stream.send("status", header)
