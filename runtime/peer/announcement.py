"""What a peer says about itself: its record in the directory, and more to whoever asks for its status."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.job.context import Context
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.peer.capability import Capability
from fusion.swarm.directory.records import JobId, PeerRecord
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import Stream

SOFTWARE = version("fusion-peer")  # read from its files once: a record names it every heartbeat


def record_of(context: Context, capability: Capability, started_at: float) -> PeerRecord:
    """What this peer says about itself now; `started_at` in unix seconds."""
    links = context.links
    return PeerRecord(
        peer=context.peer_id,
        name=friendly_name(context.peer_id),
        addresses=context.transport.addresses,
        role="peer",
        device=capability.device,
        flops_per_second=capability.flops_per_second,
        memory_bytes=capability.memory_bytes,
        free_memory_bytes=context.memory.free_bytes,
        software=SOFTWARE,
        opset=OPSET_VERSION,
        started_at=started_at,
        up_mbps=0.0 if links is None else links.up_mbps,
        down_mbps=0.0 if links is None else links.down_mbps,
        coordinate=() if links is None else links.coordinate.parts,
        coordinate_error=0.0 if links is None else links.coordinate.error,
    )


TOLD_PEERS = 256  # in one answer, which has to fit into a header


async def tell_status(stream: Stream, context: Context, hosted: Sequence[tuple[JobId, int]]) -> None:
    """What `fusion-peer status` shows of one peer beyond its record."""
    frame = await stream.receive()
    if frame.kind != "status":
        raise ValueError(f"{STATUS.name} knows status, not {frame.kind[:40]!r}")
    counts = context.transport.traffic().items()
    most = sorted(counts, key=lambda each: each[1].sent_bytes + each[1].received_bytes, reverse=True)
    traffic = {other: [count.sent_bytes, count.received_bytes] for other, count in most[:TOLD_PEERS]}
    places = [[job, stage] for job, stage in hosted]
    header = {"name": friendly_name(context.peer_id), "hosted": places, "traffic": traffic}
    await stream.send("status", header)
