"""The check that a served model works: one token through all of its stages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import NotAdmitted, SwarmError
from fusion.swarm.printable import error_line
from fusion.swarm.transport import PeerId

RETRY_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    token: int
    seconds: float  # from the request to the answer
    route: tuple[str, ...]  # the peers of its stages


async def first_token(context: Context, prepared: Prepared, patience_seconds: float) -> FirstToken | None:
    """Request one token of the model, after token 0 or, of an audio model, after silence, from the owner of its first stage, until
    there is one. None where we are not admitted. JobFailed, with the last reason, after `patience_seconds`."""
    is_open = prepared.manifest.admission.kind == "open"
    grants = () if is_open else tuple(context.access.chain(prepared.job))
    source = prepared.manifest.serve.source if prepared.manifest.serve is not None else None
    given: dict[str, Any] = {"prompt_ids": (0,)}
    if source is not None and source.channels:
        given = {"features": bytes(source.length * source.unit_bytes)}
    request = GenerateRequest(model=prepared.job, max_tokens=1, grants=grants, **given)
    reason = "no answer"
    try:
        async with asyncio.timeout(patience_seconds):
            while True:
                owner = await _first_owner(context, prepared.job)
                if owner is not None and owner.ready:
                    found = await _one(context, owner.peer, request)
                    if isinstance(found, FirstToken):
                        return found
                    reason = found
                await asyncio.sleep(RETRY_SECONDS)
    except NotAdmitted:
        return None
    except TimeoutError:
        raise JobFailed(
            f"the swarm holds {prepared.manifest.name}, and no token came around in {patience_seconds:.0f} s: {reason}"
        ) from None


async def _one(context: Context, owner: PeerId, request: GenerateRequest) -> FirstToken | str:
    """A token, or the reason why there is none, in one line. NotAdmitted where we may not prompt the model."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        answer = await complete(context.transport, owner, request)
    except NotAdmitted:
        raise
    except (SwarmError, JobError, JobFailed) as error:
        return error_line(error)
    if not answer.tokens:
        return "an answer without a token"
    return FirstToken(token=answer.tokens[0], seconds=loop.time() - began, route=answer.route)


async def _first_owner(context: Context, job: JobId) -> ClaimRecord | None:
    """The winner of the claims to the first stage."""
    return winner(await context.leases.claims_or_recent(job, 0))
