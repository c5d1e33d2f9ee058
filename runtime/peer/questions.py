"""What a peer tells whoever asks: its status, beyond its record, and to clients without the DHT what the directory holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import TOLD_LOADING, StageLoading
from fusion.runtime.job.protocol import STATUS
from fusion.swarm.directory.records import Place
from fusion.swarm.identity import friendly_name
from fusion.swarm.protocol import DIRECTORY
from fusion.swarm.thin.directory_server import DirectoryServer, SealedDirectory
from fusion.swarm.transport import Stream

TOLD_PEERS = 256  # in one answer, which has to fit into a header
TOLD_PLACES = 512


async def serve_questions(
    context: Context,
    directory: SealedDirectory,
    hosted: Callable[[], Sequence[Place]],
    loading: Callable[[], Sequence[StageLoading]],
) -> None:
    """Answer from now on. `hosted`: the stages that run here; `loading`: those that are on their way into memory."""
    await context.transport.serve(
        STATUS.name, lambda stream: answer_status(stream, context, hosted(), loading())
    )
    await context.transport.serve(DIRECTORY.name, DirectoryServer(directory).attend)


async def answer_status(
    stream: Stream,
    context: Context,
    hosted: Sequence[Place],
    loading: Sequence[StageLoading] = (),
) -> None:
    """What `fusion-peer status` shows of one peer beyond its record."""
    frame = await stream.receive()
    if frame.kind != "status":
        raise ValueError(f"{STATUS.name} knows status, not {frame.kind[:40]!r}")
    counts = context.transport.traffic().items()
    most = sorted(counts, key=lambda each: each[1].sent_bytes + each[1].received_bytes, reverse=True)
    traffic = {other: [count.sent_bytes, count.received_bytes] for other, count in most[:TOLD_PEERS]}
    places = [[job, stage] for job, stage in hosted]
    held = sorted(context.memory.by_place.items(), key=lambda each: -each[1])[:TOLD_PLACES]
    header = {
        "name": friendly_name(context.peer_id),
        "hosted": places,
        "holds": [[job, stage, memory_bytes] for (job, stage), memory_bytes in held],
        "loading": [each.to_list() for each in loading[:TOLD_LOADING]],
        "traffic": traffic,
    }
    await stream.send("status", header)
