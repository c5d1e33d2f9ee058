"""`fusion-peer status`: peers and their resources, the stages that they own or are standbys of, and the traffic between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.cli import client
from fusion.cli.jobs import shown
from fusion.cli.terminal import options
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output, bytes_text, flops_text, number_text

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.swarm.directory.records import ClaimRecord, JobRecord, PeerRecord
    from fusion.swarm.links.view import LinkView
    from fusion.swarm.transport import PeerId

# For all peers together to answer; a client that has just joined has to dial them first.
ASK_SECONDS, DIAL_SECONDS = 1.0, 3.0
ASKED_AT_ONCE = 32  # peers: half of the connections that a running peer accepts from commands

MOST_ESTIMATED = 16  # peers, up to which the table shows estimated links, too

Links = Annotated[bool, typer.Option("--links", help="Show round trips and rates between the peers instead.")]


@options.grouped
def status(
    way: client.JoinOptions,
    links: Links = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show the swarm now: peers and their resources, stages with their owners and standbys, jobs, links."""
    show = link_status if links else _status
    run(show(way, Output(as_json=json)), debug=debug)


async def _status(way: client.JoinOptions, output: Output) -> None:
    from fusion.runtime.belief.reading import overview

    async with client.connect(way) as context:
        peers, seen = await asyncio.gather(client.working_peers(context), overview(context))
        answers = await _answers(context, peers)
        http = client.http_url(context, way)
    jobs = tuple(each.belief.record for each in seen)
    stages = [
        stage_of(each.belief.record, number, claims)
        for each in seen
        if not each.belief.over
        for number, claims in each.claims.items()
    ]
    answered = {peer: answer for peer, answer in answers.items() if answer is not None}
    links = [link for peer, answer in answered.items() for link in links_of(peer, answer)]
    loading = [entry for peer, answer in answered.items() for entry in loading_of(peer, answer, jobs)]
    failed = [entry for peer, answer in answered.items() for entry in failures_of(peer, answer, jobs)]
    holdings = [held for peer, answer in answered.items() for held in holdings_of(peer, answer, jobs)]
    output.emit(
        {
            "peers": [asdict(each) for each in peers],
            "jobs": [shown(job) for job in jobs],
            "stages": [claim_fields(stage.owner) for stage in stages if stage.owner is not None],
            "replicas": [claim_fields(claim) for stage in stages for claim in stage.replicas],
            "standbys": [
                {**claim_fields(claim), "behind": stage.behind(claim)}
                for stage in stages
                for claim in stage.standbys
            ],
            "links": links,
            "holdings": holdings,
            "loading": loading,
            "failed": failed,
            "http": http,
        }
    )
    _show(output, peers, jobs, stages, links)
    _show_stages(output, peers, "On their way into memory", "state", [(e, e["line"]) for e in loading])
    _show_stages(output, peers, "Stages that did not work out", "why", [(e, e["reason"]) for e in failed])
    _show_holdings(output, peers, holdings)
    if http:
        output.note(f"the peer of this home answers programs at {http}")
    silent = sorted(each.name for each in peers if answers[each.peer] is None)
    if silent:
        output.note(f"no answer about links from {', '.join(silent)}")


def claim_fields(claim: ClaimRecord) -> dict[str, Any]:
    """A claim for `--json`, without its proofs."""
    return {
        name: value for name, value in asdict(claim).items() if name not in ("grants", "proof", "expires_at")
    }


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a live job, with its owner, replicas and standbys."""

    job: JobRecord
    number: int
    owner: ClaimRecord | None
    replicas: tuple[ClaimRecord, ...]  # run it beside its owner
    standbys: tuple[ClaimRecord, ...]  # the one that would take over first, first

    def behind(self, standby: ClaimRecord) -> int:
        """How many committed steps a standby's state is behind."""
        return max(0, self.job.step - standby.step) if self.job.kind == "train" else 0


def stage_of(job: JobRecord, number: int, claims: Sequence[ClaimRecord]) -> Stage:
    """From the live claims of a stage."""
    from fusion.swarm.claims.election import winner

    owner = winner(claims)
    standbys = [claim for claim in claims if claim.role == "standby"]
    standbys.sort(key=lambda claim: (not claim.ready, -claim.step, -claim.score, claim.peer))
    return Stage(
        job=job,
        number=number,
        owner=owner,
        replicas=tuple(claim for claim in claims if claim.role == "replica"),
        standbys=tuple(standbys),
    )


async def _answers(context: Context, peers: Sequence[PeerRecord]) -> dict[PeerId, Mapping[str, Any] | None]:
    """Each peer's answer to `status`; None for one that does not answer in time."""
    turns = asyncio.Semaphore(ASKED_AT_ONCE)

    async def in_turn(peer: PeerId) -> Mapping[str, Any] | None:
        async with turns:
            return await _ask_status(context, peer)

    tasks = {each.peer: asyncio.create_task(in_turn(each.peer)) for each in peers}
    seconds = ASK_SECONDS if client.is_attached(context) else DIAL_SECONDS
    if tasks:
        await asyncio.wait(tasks.values(), timeout=seconds)
    for task in tasks.values():
        task.cancel()
    answers = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for error in answers:
        if isinstance(error, Exception):
            raise error
    return {peer: None if isinstance(answer, BaseException) else answer
            for peer, answer in zip(tasks, answers, strict=True)}  # fmt: skip


async def _ask_status(context: Context, peer: PeerId) -> Mapping[str, Any] | None:
    from fusion.runtime.job.protocol import STATUS
    from fusion.swarm.errors import SwarmError
    from fusion.swarm.transport import call

    try:
        frame = await call(context.transport, peer, STATUS.name, "status")
    except SwarmError:
        return None
    return frame.header


def links_of(peer: str, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The links in a peer's answer, which is checked: any peer may have written it."""
    traffic = answer.get("traffic")
    found = []
    for other, counts in traffic.items() if isinstance(traffic, dict) else ():
        match counts:
            case [int() as sent, int() as received] if other != peer:  # between two of its stages
                found.append({"from": peer, "to": str(other), "sent_bytes": sent, "received_bytes": received})
    return found


def holdings_of(peer: str, answer: Mapping[str, Any], jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """The memory that a peer reports as reserved, by job, the largest first. Checked as `links_of`."""
    holds = answer.get("holds")
    known = {str(job.job): job for job in jobs}
    found: dict[str, dict[str, Any]] = {}
    for held in holds if isinstance(holds, list) else ():
        match held:
            case [str() as job, int() as stage, int() as memory_bytes] if memory_bytes >= 0:
                record = known.get(job)
                author, name = ("", job[:12]) if record is None else (record.author, record.name)
                new = {
                    "peer": peer,
                    "job": job,
                    "name": name,
                    "author": author,
                    "stages": [],
                    "memory_bytes": 0,
                }
                entry = found.setdefault(job, new)
                entry["stages"].append(stage)
                entry["memory_bytes"] += memory_bytes
    return sorted(found.values(), key=lambda entry: -entry["memory_bytes"])


def loading_of(peer: str, answer: Mapping[str, Any], jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """The stages that a peer reports as loading. Checked as `links_of`."""
    from fusion.runtime.job.progress import stages_loading

    names = {job.job: job.name for job in jobs}
    return [
        {**asdict(each), "peer": peer, "name": names.get(each.job, each.job[:12]), "line": each.line()}
        for each in stages_loading(answer)
    ]


def failures_of(peer: str, answer: Mapping[str, Any], jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """The stages that a peer reports as failed. Checked as `links_of`."""
    from fusion.runtime.job.progress import stages_failed

    names = {job.job: job.name for job in jobs}
    return [
        {**asdict(each), "peer": peer, "name": names[each.job]}
        for each in stages_failed(answer)
        if each.job in names
    ]


def _show_stages(
    output: Output,
    peers: Sequence[PeerRecord],
    title: str,
    what: str,
    reported: Sequence[tuple[dict[str, Any], str]],
) -> None:
    """A table of stages and what peers reported of them; nothing where there are none."""
    names: dict[str, str] = {each.peer: each.name for each in peers}
    if reported:
        rows = [(each["name"], str(each["stage"]), names[each["peer"]], text) for each, text in reported]
        output.table(title, ("job", "stage", "peer", what), rows)


def _show_holdings(output: Output, peers: Sequence[PeerRecord], holdings: Sequence[dict[str, Any]]) -> None:
    names: dict[str, str] = {each.peer: each.name for each in peers}
    output.table(
        "Memory set aside",
        ("peer", "for", "stages", "memory", "launched by"),
        [
            (
                names[held["peer"]],
                held["name"],
                ", ".join(map(str, sorted(held["stages"]))),
                bytes_text(held["memory_bytes"]),
                held["author"][-12:] or "?",
            )
            for held in holdings
        ],
    )


def _show(
    output: Output,
    peers: Sequence[PeerRecord],
    jobs: Sequence[JobRecord],
    stages: Sequence[Stage],
    links: Sequence[dict[str, Any]],
) -> None:
    names: dict[str, str] = {each.peer: each.name for each in peers}

    def name(peer: str) -> str:
        return names.get(peer, f"…{peer[-8:]}")

    _show_peers(output, peers, stages)
    _show_jobs(output, jobs, stages, name)
    output.table(
        "Links",
        ("from", "to", "sent", "received"),
        [
            (name(link["from"]), name(link["to"]), bytes_text(link["sent_bytes"]), bytes_text(link["received_bytes"]))
            for link in links
            if link["to"] in names  # clients that came and went are in the JSON only
        ],
    )  # fmt: skip


def _show_peers(output: Output, peers: Sequence[PeerRecord], stages: Sequence[Stage]) -> None:
    output.table(
        f"Peers ({len(peers)})",
        ("name", "device", "speed", "memory free/lent", "stages", "stands by for", "peer id"),
        [
            (
                *(each.name, each.device, flops_text(each.flops_per_second)),
                f"{bytes_text(each.free_memory_bytes)} / {bytes_text(each.memory_bytes)}",
                _places(
                    stage for stage in stages if stage.owner is not None and stage.owner.peer == each.peer
                )
                or "idle",
                _places(stage for stage in stages if any(c.peer == each.peer for c in stage.standbys)) or "-",
                each.peer,
            )
            for each in sorted(peers, key=lambda each: each.name)
        ],
    )


def _show_jobs(
    output: Output, jobs: Sequence[JobRecord], stages: Sequence[Stage], name: Callable[[str], str]
) -> None:
    """The jobs, and who runs their stages beside the owners."""
    output.table(
        "Jobs",
        ("job", "name", "kind", "state", "step", "stages and owners", "message"),
        [
            (
                *(job.job[:12], job.name, job.kind, job.state, str(job.step)),
                stage_line([stage for stage in stages if stage.job.job == job.job], name) or str(job.stages),
                job.message,
            )
            for job in jobs
        ],
    )
    output.table(
        "Replicas and standbys",
        ("job", "stage", "peer", "state"),
        [
            (stage.job.name, str(stage.number), name(claim.peer), standby_text(stage, claim))
            for stage in stages
            for claim in (*stage.replicas, *stage.standbys)
        ],
    )


def _places(stages: Iterable[Stage]) -> str:
    return ", ".join(f"{stage.job.name}/{stage.number}" for stage in stages)


def stage_line(stages: Sequence[Stage], name: Callable[[str], str]) -> str:
    """E.g. "0 quiet-otter-3f +2, 1 brave-lynx-01 (loading) +0, 2 - +1": the owners, and how many others are ready to
    take over."""
    parts = []
    for stage in stages:
        held = (
            "-"
            if stage.owner is None
            else name(stage.owner.peer) + ("" if stage.owner.ready else " (loading)")
        )
        ready = sum(claim.ready for claim in (*stage.replicas, *stage.standbys))
        parts.append(f"{stage.number} {held} +{ready}")
    return ", ".join(parts)


def standby_text(stage: Stage, standby: ClaimRecord) -> str:
    """E.g. "ready", "ready, 12 steps behind", "loading", "serves it too, 2 sessions"."""
    if standby.role == "replica":
        return f"serves it too, {standby.load:.0f} session{'' if standby.load == 1 else 's'}"
    if not standby.ready:
        return "loading"
    behind = stage.behind(standby)
    return f"ready, {behind} step{'' if behind == 1 else 's'} behind" if behind else "ready"


# --- links: round trip and rate of every pair of peers, measured or estimated


async def link_status(way: client.JoinOptions, output: Output) -> None:
    from fusion.swarm.links.view import link_view

    async with client.connect(way) as context:
        found = await client.working_peers(context)
        records = await context.directory.links()
    peers = sorted(found, key=lambda each: each.name)
    view = link_view(peers, records)
    pairs = list(rows(peers, view))
    output.emit({"links": pairs, "peers": [_own_line(each) for each in peers]})
    names: dict[str, str] = {each.peer: each.name for each in peers}
    output.table(
        "Peers",
        ("name", "up Mbps", "down Mbps"),
        [
            (each.name, number_text(each.up_mbps or None), number_text(each.down_mbps or None))
            for each in peers
        ],
    )
    output.table(
        "Links",
        ("from", "to", "RTT ms", "Mbps", "rate is", "age"),
        [
            (
                *(
                    names[pair["from"]],
                    names[pair["to"]],
                    number_text(pair["rtt_ms"]),
                    number_text(pair["mbps"]),
                ),
                *(pair["rate"], "-" if pair["age_seconds"] is None else f"{pair['age_seconds']:.0f} s"),
            )
            for pair in pairs
            if len(peers) <= MOST_ESTIMATED or "measured" in (pair["rtt"], pair["rate"])
        ],
    )


def rows(peers: Sequence[PeerRecord], view: LinkView) -> Iterator[dict[str, Any]]:
    """Every ordered pair as JSON has it: `rtt` and `rate` say "measured", "estimated" or "unknown", a rate of which no
    more is known than that it is so fast "at least"."""
    for one, two in permutations(peers, 2):
        link = view.link(one.peer, two.peer)
        rtt, rate = link.rtt_seconds, link.bytes_per_second
        yield {
            "from": one.peer,
            "to": two.peer,
            "rtt_ms": None if rtt is None else round(1e3 * rtt, 3),
            "mbps": None if rate is None else round(8e-6 * rate, 3),
            "rtt": _origin(rtt, link.rtt_measured),
            "rate": "at least" if link.at_least else _origin(rate, link.rate_measured),
            "age_seconds": None if link.age_seconds is None else round(link.age_seconds, 1),
        }


def _own_line(peer: PeerRecord) -> dict[str, Any]:
    return {
        "peer": peer.peer,
        "name": peer.name,
        "up_mbps": peer.up_mbps or None,
        "down_mbps": peer.down_mbps or None,
        "coordinate": peer.coordinate,
        "coordinate_error": peer.coordinate_error,
    }


def _origin(value: float | None, measured: bool) -> str:
    return "unknown" if value is None else "measured" if measured else "estimated"
