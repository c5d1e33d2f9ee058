"""A prepared job handed to the swarm: launch it, then wait until the swarm holds everything and the launcher may leave.

links = await context.directory.links()
prepared = await asyncio.to_thread(prepare_training, spec, peers, store, links=links, author=key)
job = await launch(context, prepared)
await wait_until_held(context, prepared)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from fusion.runtime.belief.reading import read_belief
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.protocol import JOB
from fusion.runtime.launch.handed_over import Held, look_held
from fusion.runtime.launch.prepared import Prepared
from fusion.swarm.authority.grants import ROLES, Grant, seal_grant
from fusion.swarm.authority.statements import seal_statement, statement_of
from fusion.swarm.authority.wallet import CLOCK_SECONDS
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import Digest, JobId, JobRecord, ProviderRecord
from fusion.swarm.errors import DaemonDied, SwarmError, TransportError
from fusion.swarm.transport import PeerId, call

log = logging.getLogger(__name__)

NUDGE_SECONDS = 5.0
LOOK_SECONDS = 0.5
OFFER_SECONDS = 60.0
INVITED_SECONDS = 90 * 86_400  # for which peers that are invited at launch may take part


async def launch(context: Context, prepared: Prepared) -> JobId:
    """Offer the blobs, publish the job, nudge the proposed peers. Does not wait for them; see `wait_until_held`."""
    context.leases.know(prepared.manifest.law(prepared.job))
    # The store announces its blobs in turn, too, but peers should not wait for that.
    await asyncio.gather(*(_offer(context, digest) for digest in prepared.blobs))
    await _publish(context, prepared)
    await asyncio.gather(
        *(
            _nudge(context, peer, prepared.job, _grants(prepared, peer))
            for peer in {*prepared.manifest.proposed, *prepared.invited}
            if peer
        )
    )
    return prepared.job


async def wait_until_held(
    context: Context, prepared: Prepared, *, on_change: Callable[[Held], None] = lambda held: None
) -> None:
    """Until every stage is claimed and loaded and every blob lies on a peer other than us: the launcher may then leave. Republishes
    the job meanwhile. Waits for ever, also while no peer can be reached: put a deadline around it. JobFailed if the job failed."""
    last: Held | None = None
    published = asyncio.get_running_loop().time()
    while True:
        try:
            held = await look_held(context, prepared)
            if held != last:
                on_change(held)
                last = held
            if held.complete or await _is_over(context, prepared):
                return
            now = asyncio.get_running_loop().time()
            if now - published >= HEARTBEAT_SECONDS:
                await _publish(context, prepared)
                published = now
        except DaemonDied:
            raise
        except (
            TransportError
        ) as error:  # our own link may be down for a while, and no other peer has the blobs
            log.debug("the swarm cannot be reached: %s", error)
        await asyncio.sleep(LOOK_SECONDS)


async def _is_over(context: Context, prepared: Prepared) -> bool:
    """Whether the job has ended already. JobFailed if it failed."""
    belief = await read_belief(context, prepared.job, manifest=prepared.manifest)
    if belief is None or not (belief.over and belief.vouched):
        return False
    if belief.record.state == "failed":
        raise JobFailed(belief.record.message or "the job failed")
    return True


async def _publish(context: Context, prepared: Prepared) -> None:
    manifest = prepared.manifest
    record = JobRecord(
        job=prepared.job,
        name=manifest.name,
        kind=manifest.kind,
        state="launching",
        term=0,
        step=0,
        lead=None,
        stages=manifest.stages,
        snapshot=None,
        snapshot_step=-1,
        author=context.peer_id,
    )
    # Signed with the key that the manifest names: the record itself has that of this process.
    statement = statement_of(record, prepared.author.peer_id, manifest.launched_at)
    proof = (seal_statement(statement, prepared.author.sign),)
    await context.directory.publish(replace(record, proof=proof))


async def _offer(context: Context, digest: Digest) -> None:
    size = context.blobs.store.size(digest)
    record = ProviderRecord(digest=digest, peer=context.peer_id, size_bytes=size)
    await context.directory.publish(record, ttl_seconds=OFFER_SECONDS)


def _grants(prepared: Prepared, peer: PeerId) -> list[bytes]:
    """For an invited peer, its grant."""
    if peer not in prepared.invited:
        return []
    since = prepared.manifest.launched_at
    grant = Grant(
        job=prepared.job, issuer=prepared.author.peer_id, subject=peer, roles=ROLES,
        valid_from=max(0, since - CLOCK_SECONDS), valid_until=since + INVITED_SECONDS, delegates=True,
    )  # fmt: skip
    return [seal_grant(grant, prepared.author)]


async def _nudge(context: Context, peer: PeerId, job: JobId, grants: list[bytes]) -> None:
    # A peer that misses the nudge sees the job at its next heartbeat.
    with suppress(SwarmError, TimeoutError):
        async with asyncio.timeout(NUDGE_SECONDS):
            header = {"job": job, "grants": grants} if grants else {"job": job}
            await call(context.transport, peer, JOB.name, "launch", header)
