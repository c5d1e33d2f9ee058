"""`fusion-peer jobs invite`, `accept` and `revoke`: who takes part in a job that is not for everybody."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.cli import client, grants
from fusion.cli.terminal import options
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.swarm.authority.grants import Role
    from fusion.swarm.directory.records import JobId
    from fusion.swarm.transport import PeerId

LONGEST_HOURS = 24.0 * 365 * 10
SEND_SECONDS = 10.0  # for an owner to accept a revocation

Who = Annotated[str, typer.Argument(metavar="PEER", help="A peer id, as `fusion-peer start` prints it.")]


@options.grouped
def invite(
    job: options.Job,
    who: Who,
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role", metavar="ROLE", help="own, stand-by, read or ask; may be repeated (default: all)."
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option("--stages", metavar="FIRST-LAST", help="Which stages, e.g. 2-5 (default: all)."),
    ] = None,
    hours: Annotated[
        float, typer.Option("--hours", min=0.01, max=LONGEST_HOURS, help="How long the invite is valid.")
    ] = 24.0 * 30,
    final: Annotated[
        bool,
        typer.Option(
            "--final", help="The peer cannot pass it on; its commands then need the peer to run beside them."
        ),
    ] = False,
    *,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Let a peer take part in a job of yours that is not open to all; prints the invite that it has to accept."""
    chosen = checked_roles(role or ())
    span = None if stages is None else checked_stages(stages)
    checked_id(who)
    if not math.isfinite(hours):
        raise ValueError(f"--hours: a number of hours, not {hours}")
    run(_invite(job, who, chosen, span, hours, not final, way, Output(as_json=json)), debug=debug)


async def _invite(
    job: str,
    who: str,
    roles: tuple[Role, ...],
    span: tuple[int, int] | None,
    hours: float,
    delegates: bool,
    way: client.JoinOptions,
    output: Output,
) -> None:
    from fusion.swarm.authority import invites
    from fusion.swarm.authority.grants import Grant, seal_grant
    from fusion.swarm.authority.wallet import CLOCK_SECONDS
    from fusion.swarm.directory.records import MAX_STAGES
    from fusion.swarm.transport import PeerId

    async with client.connect(way) as context:
        law = await grants.law_of(context, job)
        issuer = grants.issuer_in(way.home, law)
        since = int(client.swarm_clock(context)())  # our own may be wrong by more than CLOCK_SECONDS
        grant = Grant(
            job=law.job, issuer=issuer.peer_id, subject=PeerId(who), roles=roles, stages=span or (0, MAX_STAGES),
            valid_from=since - CLOCK_SECONDS, valid_until=since + int(3600 * hours), delegates=delegates,
        )  # fmt: skip
    text = invites.to_text([seal_grant(grant, issuer)])
    output.emit({"job": law.job, "name": law.name, "peer": who, "until": grant.valid_until, "invite": text})
    output.print_line(text)
    output.note(
        f"whoever runs that peer accepts it with: fusion-peer jobs accept {text[:24]}..., or start --invite"
    )


def accept(
    text: Annotated[str, typer.Argument(metavar="INVITE", help="The line that `jobs invite` printed.")],
    home: options.Home = options.DEFAULT_HOME,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Take part in a job by an invite; a peer that runs with this home reads it within seconds."""
    folder, output = options.home_folder(home), Output(as_json=json)
    grant = grants.keep(text, folder)
    output.emit({"job": grant.job, "roles": list(grant.roles), "until": grant.valid_until})
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(grant.valid_until))
    output.print_line(f"this home may {', '.join(grant.roles)} in the job {grant.job[:12]} until {day}")


@options.grouped
def revoke(
    job: options.Job,
    who: Who,
    *,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Revoke the grants of a peer in a job, and those that it passed on."""
    checked_id(who)
    run(_revoke(job, who, way, Output(as_json=json)), debug=debug)


async def _revoke(job: str, who: str, way: client.JoinOptions, output: Output) -> None:
    from fusion.swarm.authority.revocation import mark, seal_revocation
    from fusion.swarm.errors import SwarmError
    from fusion.swarm.transport import PeerId

    async with client.connect(way) as context:
        law = await grants.law_of(context, job)
        issuer = grants.issuer_in(way.home, law)
        # Only the newest list counts, and the job's records may lack the last one while its lead is away.
        known = (
            context.access.revoked_by(law.job, issuer.peer_id),
            grants.last_list(way.home, law.job, issuer),
        )
        before = [each for each in known if each is not None]
        marks = {mark(PeerId(who)), *(each for one in before for each in one.marks)}
        at = max([time.time(), *(one.at + 1 for one in before)])  # our clock may have been ahead
        data = seal_revocation(law.job, marks, at, issuer)
        try:
            grants.keep_list(way.home, law.job, issuer, data)
        except OSError as error:  # revoke all the same
            output.note(f"this home does not remember whom it revoked: {error.strerror or error}")
        owners = await asyncio.gather(*(context.leases.owner(law.job, stage) for stage in range(law.stages)))
        received = await send_revocation(
            context, {owner.peer for owner in owners if owner is not None}, law.job, data
        )
    if not received:
        raise SwarmError(f"no owner of a stage of {law.name} could be told; try again in a moment")
    output.emit({"job": law.job, "name": law.name, "revoked": who, "told": received})
    output.print_line(
        f"{who} takes no part in {law.name} any more: {received} peers have heard, and tell the others"
    )


async def send_revocation(context: Context, owners: Iterable[PeerId], job: JobId, revocation: bytes) -> int:
    """Send it to all owners at once, since the revoked peer may be one of them and not pass it on. How many have received it."""
    from fusion.runtime.job.protocol import JOB
    from fusion.swarm.errors import SwarmError
    from fusion.swarm.transport import call

    async def has_received(owner: PeerId) -> bool:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(SEND_SECONDS):
                await call(
                    context.transport, owner, JOB.name, "revoke", {"job": job, "revocation": revocation}
                )
                return True
        return False

    return sum(await asyncio.gather(*map(has_received, owners)))


def checked_roles(roles: list[str] | tuple[str, ...]) -> tuple[Role, ...]:
    """Raises ValueError for an unknown role."""
    from fusion.swarm.authority.grants import ROLES

    for role in roles:
        if role not in ROLES:
            raise ValueError(f"--role: some of {', '.join(ROLES)}, not {role!r:.40}")
    return tuple(role for role in ROLES if not roles or role in roles)


def checked_stages(text: str) -> tuple[int, int]:
    """E.g. "2-5" or "3". Raises ValueError."""
    from fusion.swarm.directory.records import MAX_STAGES

    first, _, last = text.partition("-")
    numbers = [int(part) for part in (first, last or first) if part.isdecimal() and len(part) < 10]
    if len(numbers) < 2 or not numbers[0] <= numbers[1] <= MAX_STAGES:
        raise ValueError(f"--stages: a first and a last stage, such as 2-5, not {text!r:.40}")
    return numbers[0], numbers[1]


def checked_id(text: str) -> None:
    from fusion.swarm.identity import is_peer_id

    if not is_peer_id(text):
        raise ValueError(f"PEER: a peer id, as `fusion-peer start` prints it (12D3KooW...), not {text!r:.80}")
