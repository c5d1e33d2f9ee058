"""Attempts to take stages from their owners: claims of higher terms, in the directory and in the first frame of a stream."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.scripts.killed_owner import goes_on_without_an_owner
from attacks.stranger import Offer, Stranger, store_request
from attacks.verdict import Verdict
from support.directory_records import claim_record

from fusion.runtime.belief.reading import read_belief
from fusion.runtime.job.fields import plain
from fusion.runtime.job.protocol import HOLD, RING, STAGE
from fusion.runtime.training.step.messages import Failed, Hello, Ready, encode
from fusion.runtime.training.step.run_statistics import NO_ATTEMPT
from fusion.swarm.claims.tenure import SPARE_TERMS, Holding
from fusion.swarm.claims.votes import Vote, seal_vote
from fusion.swarm.directory.records import MAX_TERM, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId, call

ALLIES = 3
CLAIM_SECONDS = 6.0
LONG_SECONDS = 60.0
ANSWER_SECONDS = 3.0
PAUSE_SECONDS = 0.3
AROUND = (-1, 0, 1, 2)  # the ceiling of terms
HIGH = (MAX_TERM - 2, MAX_TERM - 1, MAX_TERM)

Owner = tuple[PeerId, int]  # and its term


def owners(one: Stranger) -> Iterator[tuple[Place, Owner]]:
    for job, route in ((one.scene.training, one.scene.training_route), (one.scene.serving, one.scene.route)):
        for stage, owner in enumerate(route):
            yield (job, stage), owner


def claim(one: Stranger, place: Place, term: int, ttl_seconds: float, proof: Sequence[bytes] = ()) -> Offer:
    job, stage = place
    record = claim_record(
        one.identity, job=job, stage=stage, term=term, score=1.0, step=2**40, ready=True, proof=tuple(proof)
    )
    return one.sealed(record, ttl_seconds)


def words(one: Stranger, place: Place, owner: Owner) -> list[bytes]:
    """Votes of all the stranger's identities, none of them a voter, that the owner is gone and the first identity follows."""
    at = int(time.time())
    return [
        seal_vote(
            Vote(voter=ally.identity.peer_id, holding=Holding(*owner), at=at),
            *place,
            one.identity.peer_id,
            ally.identity.sign,
        )
        for ally in one.all_of_us
    ]


async def greet(one: Stranger, place: Place, term: int, to: tuple[int, Owner], sealed: bytes) -> str:
    """Send `hello` as the owner of `place` to the owner of a partner stage, and return the kind of its reply.

    A peer that accepts the stream gets reports that the step has failed and that its numbers are not finite.
    """
    (job, stage), (target, (peer, target_term)) = place, to
    hello = Hello(
        job=job, source=stage, target=target, term=term, target_term=target_term,
        incarnation=random.getrandbits(50), claim=sealed,
    )  # fmt: skip
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            stream = await one.transport.open(peer, STAGE.name)
            try:
                await stream.send("hello", plain(hello))
                answer = (await stream.receive()).kind
                if answer == "welcome":
                    for message in (Failed(NO_ATTEMPT, "no"), Ready(NO_ATTEMPT, 0, float("nan"))):
                        await stream.send(*encode(message, term))
                    await asyncio.sleep(PAUSE_SECONDS)
                return answer
            finally:
                stream.abort()
    except (SwarmError, TimeoutError) as error:
        return type(error).__name__


async def greet_neighbours(one: Stranger, terms: Iterable[int], ttl_seconds: float) -> Counter[str]:
    """Send `hello` as the owner of every stage of the training job, under terms above the owner's, with and without a claim."""
    answers: Counter[str] = Counter()
    route = one.scene.training_route
    for stage, (_, term) in enumerate(route):
        place = (one.scene.training, stage)
        for other in range(len(route)):
            if other == stage:
                continue
            for above in terms:
                sealed = claim(one, place, term + above, ttl_seconds).data
                await one.pace()
                for shown in (sealed, b""):
                    answers[await greet(one, place, term + above, (other, route[other]), shown)] += 1
    return answers


async def stolen_by_hello(one: Stranger) -> dict[str, Any]:
    """Send owners a `hello` that the stranger owns their neighbouring stage under a higher term, with a signed claim; also to
    the stages of the model."""
    answers: Counter[str] = Counter()
    while one.time_left:
        answers += await greet_neighbours(one, (1, 2, 9, SPARE_TERMS, 2**20), CLAIM_SECONDS)
        for stage, (peer, _) in enumerate(one.scene.route):
            with suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    stream = await one.transport.open(peer, RING.name)
                    ends = {"job": one.scene.serving, "from": 1 - stage, "to": stage}
                    await stream.send("hello", ends)
                    await stream.send("token", {"session": "x", "id": 1, "position": 1})
                    stream.abort()
        await asyncio.sleep(PAUSE_SECONDS)
    return {"answers": dict(answers)}


async def stolen_by_claim(one: Stranger) -> dict[str, Any]:
    """Claim every stage one and more terms above its owner's, with votes of four strangers that it is gone; report owners as
    gone to standbys, and order them to take the stage."""
    said: Counter[str] = Counter()
    while one.time_left:
        offers = []
        for place, owner in owners(one):
            proof = words(one, place, owner)
            for number, ally in enumerate(one.all_of_us):
                term = owner[1] + 1 + number
                offers.append(claim(ally, place, term, CLAIM_SECONDS, proof if ally is one else ()))
        await one.everywhere("store", store_request(offers))
        said["claims"] += len(offers)
        for (job, stage), (peer, term) in owners(one):
            word = words(one, (job, stage), (peer, term))[0]
            about = {"job": job, "stage": stage, "peer": peer, "term": term, "word": word}
            for victim in one.peers:
                for kind, more in (("suspect", {"yours": False}), ("take", {"handover": {}}), ("gone", {})):
                    await one.pace()
                    with suppress(SwarmError, TimeoutError):
                        async with asyncio.timeout(ANSWER_SECONDS):
                            reply = await call(one.transport, victim, HOLD.name, kind, {**about, **more})
                            said[f"{kind}: {reply.kind}"] += 1
                            if reply.kind in ("taking", "owner") or reply.header.get("word"):
                                said["believed"] += 1
        await asyncio.sleep(PAUSE_SECONDS)
    return {"answers": dict(said)}


async def inflated_term(one: Stranger) -> dict[str, Any]:
    """Claim stages under the highest possible terms, and under terms around the ceiling, in the directory and with a `hello`."""
    answers: Counter[str] = Counter()
    began = time.time()
    while one.time_left:
        highest = SPARE_TERMS + int(time.time() - began) + 60  # the job is about a minute old
        terms = [*HIGH, *(highest + around for around in AROUND), SPARE_TERMS]
        for ally, term in zip(one.all_of_us * len(terms), terms, strict=False):
            offers = [claim(ally, place, term, CLAIM_SECONDS) for place, _ in owners(one)]
            await ally.everywhere("store", store_request(offers))
            answers["claims"] += len(offers)
        answers += await greet_neighbours(one, (*HIGH, SPARE_TERMS), CLAIM_SECONDS)
        await asyncio.sleep(PAUSE_SECONDS)
    return {"answers": dict(answers)}


async def used_up_terms(one: Stranger) -> dict[str, Any]:
    """Four identities claim stages under rising terms. Then an owner is killed, and an honest successor must be able to claim
    its stage."""
    answers: Counter[str] = Counter()
    above = 0
    while one.time_left:
        offers = []
        for ally in one.all_of_us:
            above += 1
            offers += [claim(ally, place, owner[1] + above, CLAIM_SECONDS) for place, owner in owners(one)]
        await one.everywhere("store", store_request(offers))
        answers["claims"] += len(offers)
        if above % 20 == 0:
            answers += await greet_neighbours(one, (above,), CLAIM_SECONDS)
        await asyncio.sleep(0.05)
    return {"answers": dict(answers), "terms": above}


# --- Checks


async def nobody_was_deposed(ground: Ground, verdict: Verdict) -> None:
    """Check that every stage has the same owner and term as before, also in the output of `status`, that no stream or claim of
    the stranger was accepted, and that a new client sees both jobs as running."""
    before = dict(ground.held)
    printed = await ground.fleet.run("status", "status", "--home", str(ground.peers[0].home))
    shown = {(each["job"], each["stage"]): (each["peer"], each["term"]) for each in printed[-1]["stages"]}
    if shown != before:
        verdict.notes["fault: status"] = f"shows {shown}, and not {before}"
    after = await ground.look()
    for place, owner in before.items():
        if after.get(place) != owner:
            verdict.notes[f"fault: stage {place[1]}"] = f"held by {owner}, and now by {after.get(place)}"
    for kind in ("welcome", "believed"):
        if verdict.notes["answers"].get(kind):
            verdict.notes[f"fault: {kind}"] = f"{verdict.notes['answers'][kind]} times"
    if not set(verdict.notes["answers"]) - {"claims", "TimeoutError"}:
        verdict.notes["fault: reach"] = f"nobody was reached: {verdict.notes['answers']}"
    for prepared in (ground.training, ground.serving):
        belief = await read_belief(ground.user, prepared.job, manifest=prepared.manifest)
        if belief is None or belief.over or belief.record.lead is None:
            verdict.notes[f"fault: {prepared.manifest.name}"] = f"a client that looks now believes {belief}"


async def heirs_can_claim(ground: Ground, verdict: Verdict) -> None:
    await nobody_was_deposed(ground, verdict)
    await goes_on_without_an_owner(ground, verdict)


ATTACKS = {
    "stolen_by_hello": Attack(stolen_by_hello, seconds=12.0, check=nobody_was_deposed),
    "stolen_by_claim": Attack(stolen_by_claim, seconds=15.0, identities=1 + ALLIES, check=nobody_was_deposed),
    "inflated_term": Attack(inflated_term, seconds=15.0, identities=1 + ALLIES, check=nobody_was_deposed),
    "used_up_terms": Attack(
        used_up_terms, seconds=20.0, identities=1 + ALLIES, check=heirs_can_claim, alone=True
    ),
}
