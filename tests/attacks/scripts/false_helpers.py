"""Attacks as a false helper: a standby that never takes a stage over, a partner that reports failures of stages that it does
not own."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.scripts.killed_owner import goes_on_without_an_owner
from attacks.scripts.lying_owner import goes_on_with_a_lying_owner
from attacks.scripts.stolen_stages import greet, nobody_was_deposed, owners
from attacks.stranger import Offer, Stranger, store_request, stranger
from attacks.verdict import Verdict
from support.directory_records import claim_record, job_record

from fusion.runtime.job.protocol import HOLD, STAGE
from fusion.runtime.training.step.messages import Failed, Lack, Ready, Suspect, encode
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import Stream, call

ALLIES = 3
CLAIM_SECONDS = 6.0
RENEWED_SECONDS = 1.0
REPORT_SECONDS = 0.3
ANSWER_SECONDS = 3.0
HANGING_SECONDS = 30.0
RECOVERED_SECONDS = 120.0  # how long the false standbys stay after an owner was killed


def standbys(one: Stranger) -> list[Offer]:
    """Claim to stand by for every stage: best score, newest step, ready and idle. One identity claims to be a replica."""
    offers = []
    for (job, stage), (_, term) in owners(one):
        for ally in one.all_of_us:
            role = "replica" if ally is one else "standby"
            record = claim_record(
                ally.identity, job=job, stage=stage, role=role, term=term, score=1.0, step=2**53, ready=True
            )
            offers.append(ally.sealed(record, CLAIM_SECONDS))
    return offers


async def _hang(stream: Stream) -> None:
    await stream.receive()
    await asyncio.sleep(HANGING_SECONDS)


async def _renew(one: Stranger) -> int:
    offers = standbys(one)
    await one.everywhere("store", store_request(offers))
    return len(offers)


async def fake_standbys(one: Stranger) -> dict[str, Any]:
    """Four identities stand by for every stage with the best score and the newest step, and never answer a request to take
    one over. Then an owner is killed."""
    said = 0
    for ally in one.all_of_us:
        await ally.transport.serve(HOLD.name, _hang)
    while one.time_left:
        said += await _renew(one)
        await asyncio.sleep(RENEWED_SECONDS)
    return {"said": said}


async def go_on_among_false_standbys(ground: Ground, verdict: Verdict) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(stranger(ground.scene, RECOVERED_SECONDS, 1 + ALLIES))
        one.begin()
        for ally in one.all_of_us:
            await ally.transport.serve(HOLD.name, _hang)
        await _renew(one)

        async def renew() -> None:
            while True:
                await asyncio.sleep(RENEWED_SECONDS)
                await _renew(one)

        renewing = asyncio.create_task(renew())
        try:
            await goes_on_without_an_owner(ground, verdict)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


async def _report(one: Stranger, nan: bool) -> Counter[str]:
    """Report failures to the owner of every stage of the job, as the owner of each other one, on a stream without a welcome."""
    answers: Counter[str] = Counter()
    route = one.scene.training_route
    for stage, (_, term) in enumerate(route):
        place = (one.scene.training, stage)
        for other, (peer, _) in enumerate(route):
            if other == stage:
                continue
            await one.pace()
            answers[await greet(one, place, term, (other, route[other]), b"")] += 1
            with suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    stream = await one.transport.open(peer, STAGE.name)
                    bad = [Ready((term, 1), step, float("nan"), float("inf")) for step in range(4)]
                    failures = [
                        Failed((term, 1), "no memory"),
                        Lack((term, 1), "nothing"),
                        Suspect((term, 0, 0), "gone"),
                    ]
                    for message in bad if nan else failures:
                        await stream.send(*encode(message, term))
                    answers[(await stream.receive()).kind] += 1
                    stream.abort()
    return answers


async def failure_reports(one: Stranger) -> dict[str, Any]:
    """A peer that owns no stage reports failed steps, missing shards and owners that are gone: on streams of stages, to
    standbys, and in records. Then an owner of a stage reports every step as failed."""
    answers: Counter[str] = Counter()
    while one.time_left:
        answers += await _report(one, nan=False)
        for (job, stage), (peer, term) in owners(one):
            for victim in one.peers:
                await one.pace()
                about = {"job": job, "stage": stage, "peer": peer, "term": term, "word": b"", "yours": True}
                with suppress(SwarmError, TimeoutError):
                    async with asyncio.timeout(ANSWER_SECONDS):
                        answers[(await call(one.transport, victim, HOLD.name, "suspect", about)).kind] += 1
        failed = job_record(
            one.identity, job=one.scene.training, name="training", stages=2, state="failed", term=99, step=2**40,
            message="no memory",
        )  # fmt: skip
        await one.everywhere("store", store_request([one.sealed(failed, CLAIM_SECONDS)]))
        await asyncio.sleep(REPORT_SECONDS)
    return {"answers": {("believed" if kind == "owner" else kind): n for kind, n in answers.items()}}


async def nan_reports(one: Stranger) -> dict[str, Any]:
    """A peer that owns no stage reports, as the owner of each, numbers that are not finite. Then an owner of a stage does so
    at every step."""
    answers: Counter[str] = Counter()
    while one.time_left:
        answers += await _report(one, nan=True)
        await asyncio.sleep(REPORT_SECONDS)
    return {"answers": dict(answers)}


async def survives_failures(ground: Ground, verdict: Verdict) -> None:
    await nobody_was_deposed(ground, verdict)
    await goes_on_with_a_lying_owner(ground, verdict, "failed")


async def survives_numbers(ground: Ground, verdict: Verdict) -> None:
    await nobody_was_deposed(ground, verdict)
    await goes_on_with_a_lying_owner(ground, verdict, "nan")


ATTACKS = {
    "fake_standbys": Attack(
        fake_standbys, seconds=15.0, identities=1 + ALLIES, check=go_on_among_false_standbys, alone=True
    ),
    "failure_reports": Attack(failure_reports, seconds=12.0, check=survives_failures, alone=True),
    "nan_reports": Attack(nan_reports, seconds=10.0, check=survives_numbers, alone=True),
}
