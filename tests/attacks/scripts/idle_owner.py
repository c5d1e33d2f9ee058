"""A stranger that owns a stage of an honest job, answers and computes nothing: the job has to go on without it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.scripts.lying_owner import goes_on_with_a_lying_owner
from attacks.scripts.stolen_stages import nobody_was_deposed, owners
from attacks.stranger import Stranger, store_request, stranger
from attacks.verdict import Verdict
from support.directory_records import claim_record

from fusion.runtime.job.protocol import HOLD
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.claims.votes import Vote, seal_vote
from fusion.swarm.directory.records import Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import Stream, call

REPORT_SECONDS = 0.3
ANSWER_SECONDS = 3.0
# For the last stage; with allies of its owner; for the first stage. The first one's owner is the lead, for which stages wait longer.
FOLLOWED_SECONDS, ALLIED_SECONDS, LED_SECONDS = 150.0, 270.0, 330.0
ALLIES = 4
CLAIM_SECONDS, RENEWED_SECONDS, HANGING_SECONDS = 6.0, 1.0, 30.0


async def idle_owner(one: Stranger) -> dict[str, Any]:
    """A peer that is no voter votes that working owners are idle. Then three owners stop computing after five steps, but
    answer, renew their claims and do not leave: one of a job's last stage, one with allies that stand by, and a lead."""
    answers: Counter[str] = Counter()
    while one.time_left:
        for (job, stage), (peer, term) in owners(one):
            for victim in one.peers:
                await one.pace()
                said = Vote(voter=one.identity.peer_id, holding=Holding(peer, term), at=int(time.time()))
                word = seal_vote(said, job, stage, victim, one.identity.sign)
                about = {"job": job, "stage": stage, "peer": peer, "term": term, "word": word, "yours": True}
                for kind in ("suspect", "gone"):
                    with suppress(SwarmError, TimeoutError):
                        async with asyncio.timeout(ANSWER_SECONDS):
                            reply = await call(one.transport, victim, HOLD.name, kind, about)
                            voted = kind == "gone" and bool(reply.header.get("word"))
                            answers["voted" if voted else reply.kind] += 1
        await asyncio.sleep(REPORT_SECONDS)
    return {"answers": {("believed" if kind == "owner" else kind): n for kind, n in answers.items()}}


@asynccontextmanager
async def allies(ground: Ground, place: Place) -> AsyncIterator[None]:
    """Peers that claim to be the best standbys of a stage, and never answer a request to take it over."""
    job, stage = place
    async with stranger(ground.scene, ALLIED_SECONDS, ALLIES) as one:
        for ally in one.all_of_us:
            await ally.transport.serve(HOLD.name, hang)

        async def renew() -> None:
            while True:
                records = [
                    claim_record(
                        ally.identity, job=job, stage=stage, role="standby", term=1, score=1.0, step=2**40, ready=True
                    )
                    for ally in one.all_of_us
                ]  # fmt: skip
                offers = [
                    ally.sealed(record, CLAIM_SECONDS)
                    for ally, record in zip(one.all_of_us, records, strict=True)
                ]
                await one.everywhere("store", store_request(offers))
                await asyncio.sleep(RENEWED_SECONDS)

        one.begin()
        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


async def hang(stream: Stream) -> None:
    await stream.receive()
    await asyncio.sleep(HANGING_SECONDS)


async def goes_on_without_idle_owners(ground: Ground, verdict: Verdict) -> None:
    await nobody_was_deposed(ground, verdict)
    goes_on = partial(goes_on_with_a_lying_owner, ground, verdict, "idle")
    await goes_on(moved_seconds=FOLLOWED_SECONDS)
    await goes_on(moved_seconds=ALLIED_SECONDS, beside=partial(allies, ground))
    await goes_on(stage=0, moved_seconds=LED_SECONDS)


ATTACKS = {"idle_owner": Attack(idle_owner, seconds=10.0, check=goes_on_without_idle_owners, alone=True)}
