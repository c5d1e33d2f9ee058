"""`fusion-peer status`: who is there, what they can do, which stages they own, and what flows between them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion.cli import ask, options
from fusion.cli.loop import run
from fusion.cli.output import Output, bytes_text, flops_text

if TYPE_CHECKING:
    from fusion.runtime.context import Context
    from fusion.swarm.records import ClaimRecord, JobRecord, PeerRecord

ASK_SECONDS = 3.0


def status(
    peer: options.PeerAddress = None,
    bootstrap: options.Bootstrap = None,
    home: options.Home = options.DEFAULT_HOME,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """The swarm now: peers and what they can do, stages and who owns them, jobs, links."""
    run(_status(peer, bootstrap, home, Output(as_json=json)), debug=debug)


async def _status(peer: str | None, bootstrap: list[str] | None, home: Path, output: Output) -> None:
    async with ask.client(home, bootstrap, peer) as context:
        peers = await ask.working_peers(context)
        jobs = await context.directory.jobs()
        claims = await _claims(context, jobs)
        links = await _links(context, peers)
    output.emit(
        {
            "peers": [asdict(each) for each in peers],
            "jobs": [asdict(job) for job in jobs],
            "stages": [asdict(claim) for claim in claims],
            "links": links,
        }
    )
    _show(output, peers, jobs, claims, links)


async def _claims(context: Context, jobs: Sequence[JobRecord]) -> list[ClaimRecord]:
    """The owner's claim of every stage of every job that has not ended."""
    from fusion.swarm.election import winner

    places = [(job.job, stage) for job in jobs if job.state not in ask.ENDED for stage in range(job.stages)]
    found = await asyncio.gather(*(context.directory.claims(job, stage) for job, stage in places))
    return [owner for owner in map(winner, found) if owner is not None]


async def _links(context: Context, peers: Sequence[PeerRecord]) -> list[dict[str, Any]]:
    """What each peer says it has exchanged with others since its start; peers that do not answer are left out."""
    answers = await asyncio.gather(*(_ask_status(context, each) for each in peers))
    return [link for links in answers for link in links]


async def _ask_status(context: Context, peer: PeerRecord) -> list[dict[str, Any]]:
    from fusion.runtime.peer import STATUS_PROTOCOL
    from fusion.swarm.errors import SwarmError
    from fusion.swarm.transport import call

    try:
        async with asyncio.timeout(ASK_SECONDS):
            frame = await call(context.transport, peer.peer, STATUS_PROTOCOL, "status")
    except (SwarmError, TimeoutError):
        return []
    return links_of(peer.peer, frame.header)


def links_of(peer: str, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The links in a peer's answer, which is checked because anybody may have written it."""
    traffic = answer.get("traffic")
    found = []
    for other, counts in traffic.items() if isinstance(traffic, dict) else ():
        match counts:
            case [int() as sent, int() as received]:
                found.append({"from": peer, "to": str(other), "sent_bytes": sent, "received_bytes": received})
    return found


def _show(
    output: Output,
    peers: Sequence[PeerRecord],
    jobs: Sequence[JobRecord],
    claims: Sequence[ClaimRecord],
    links: Sequence[dict[str, Any]],
) -> None:
    names: dict[str, str] = {each.peer: each.name for each in peers}
    titles = {job.job: job.name for job in jobs}

    def name(peer: str) -> str:
        return names.get(peer, f"…{peer[-8:]}")

    owned = {each.peer: [claim for claim in claims if claim.peer == each.peer] for each in peers}
    output.table(
        f"Peers ({len(peers)})",
        ("name", "device", "speed", "memory free/lent", "stages", "peer id"),
        [
            (
                *(each.name, each.device, flops_text(each.flops_per_second)),
                f"{bytes_text(each.free_memory_bytes)} / {bytes_text(each.memory_bytes)}",
                ", ".join(f"{titles[claim.job]}/{claim.stage}" for claim in owned[each.peer]) or "idle",
                each.peer,
            )
            for each in sorted(peers, key=lambda each: each.name)
        ],
    )
    output.table(
        "Jobs",
        ("job", "name", "kind", "state", "step", "stages and owners"),
        [
            (*(job.job[:12], job.name, job.kind, job.state, str(job.step)), _stage_line(job, claims, name))
            for job in jobs
        ],
    )
    output.table(
        "Links",
        ("from", "to", "sent", "received"),
        [
            (name(link["from"]), name(link["to"]), bytes_text(link["sent_bytes"]), bytes_text(link["received_bytes"]))
            for link in links
            if link["to"] in names  # clients that came and went are in the JSON only
        ],
    )  # fmt: skip


def _stage_line(job: JobRecord, claims: Sequence[ClaimRecord], name: Any) -> str:
    """E.g. "0 quiet-otter-3f, 1 brave-lynx-01 (loading), 2 -"."""
    if job.state in ask.ENDED:
        return str(job.stages)
    owners = {claim.stage: claim for claim in claims if claim.job == job.job}
    parts = []
    for stage in range(job.stages):
        claim = owners.get(stage)
        held = "-" if claim is None else name(claim.peer) + ("" if claim.ready else " (loading)")
        parts.append(f"{stage} {held}")
    return ", ".join(parts)
