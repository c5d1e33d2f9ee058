"""False records of others' jobs: that they have ended, that the stranger's weights are their newest snapshot, that its model
is the one of that name."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.honest_answers import MODEL, NEW_TOKENS, PROMPTS
from attacks.honest_answers import NAME as MODEL_NAME
from attacks.scripts.offers import Counter, open_counter
from attacks.stranger import Offer, Stranger, store_request
from attacks.verdict import Verdict
from support.directory_records import claim_record, digest, job_record

from fusion.runtime.belief.reading import read_belief
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.launch.export import export
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.swarm.authority.statements import CARRIED, seal_statement, statement_of
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.claims.votes import Vote, seal_vote
from fusion.swarm.directory.records import MAX_PROOFS, ClaimRecord, Digest, JobId, JobRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId

TERMS = (1, 7, 2**30, 2**31 - 1)
FORGED = Digest(digest("a stranger's snapshot"))
FORGED_STEP = 10**6
SAY_SECONDS = 1.0
ASK_SECONDS = 8.0
ALLIES = 3
TRIES = 256  # job ids that are tried
CROWD = 100  # identities


def forged(one: Stranger, job: JobId, stages: int, **fields: Any) -> Offer:
    """The stranger's record of another author's job, with statements of that author and its own, both signed by itself."""
    record: JobRecord = job_record(one.identity, job=job, stages=stages, **fields)
    forged = statement_of(record, one.scene.trainer, 0)
    own = statement_of(record, one.identity.peer_id, 0)
    proof = tuple(seal_statement(each, one.identity.sign) for each in (forged, own))
    return one.sealed(job_record(one.identity, **{**_fields(record), "proof": proof}), 60.0)


def _fields(record: JobRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


async def _say(one: Stranger, offers: list[Offer]) -> None:
    await one.everywhere("store", store_request(offers))


async def forged_stop(one: Stranger) -> dict[str, Any]:
    """Four identities publish again and again, under any term, that both jobs are stopped, done or failed."""
    all_of_us = [one, *one.others]
    said = 0
    while one.time_left:
        for number, ally in enumerate(all_of_us):
            state = ("stopped", "done", "failed")[(said + number) % 3]
            term = TERMS[said % len(TERMS)]
            fields = {"state": state, "term": term, "step": 2**40, "lead": ally.identity.peer_id}
            offers = [
                forged(ally, one.scene.training, 2, kind="train", name="training", **fields),
                forged(ally, one.scene.serving, 2, kind="serve", name=MODEL_NAME, **fields),
            ]
            await _say(ally, offers)
        said += 1
        await asyncio.sleep(SAY_SECONDS)
    return {"said": said}


async def forged_snapshot(one: Stranger) -> dict[str, Any]:
    """Publish the stranger's snapshot as the job's newest, at a step that no peer has reached, under a higher term."""
    all_of_us = [one, *one.others]
    said = 0
    while one.time_left:
        for ally in all_of_us:
            fields = {
                "state": "running", "term": TERMS[said % len(TERMS)], "step": FORGED_STEP, "snapshot": FORGED,
                "snapshot_step": FORGED_STEP, "lead": ally.identity.peer_id,
            }  # fmt: skip
            await _say(ally, [forged(ally, one.scene.training, 2, kind="train", name="training", **fields)])
        said += 1
        await asyncio.sleep(SAY_SECONDS)
    return {"said": said}


async def name_hijack(one: Stranger) -> dict[str, Any]:
    """Publish a model of the same name, with a lower job id and stages that the stranger claims, and a record of a higher term
    that renames the honest one. Users send requests to the two gateways that have had none."""
    counter = await open_counter(one)
    job = _first_of_all(counter, one.scene.serving)
    answers: list[list[int]] = []
    refusals: set[str] = set()
    rename = {
        "state": "running",
        "term": 2**30,
        "kind": "serve",
        "name": "mine",
        "lead": one.identity.peer_id,
    }
    publishing = asyncio.create_task(counter.keep_published())
    try:
        while one.time_left:
            claims = [claim_record(one.identity, job=job, stage=stage, ready=True) for stage in range(2)]
            running = job_record(
                one.identity,
                job=job,
                name=MODEL_NAME,
                kind="serve",
                stages=2,
                term=1,
                lead=one.identity.peer_id,
            )
            offers = [one.sealed(claim, 6.0) for claim in claims]
            offers += [one.sealed(running, 12.0), forged(one, one.scene.serving, 2, **rename)]
            await _say(one, offers)
            for gateway in one.peers[1:]:
                request = GenerateRequest(model=MODEL_NAME, prompt_ids=PROMPTS[0], max_tokens=NEW_TOKENS)
                try:
                    async with asyncio.timeout(ASK_SECONDS):
                        answers.append(list((await complete(one.transport, gateway, request)).tokens))
                except (SwarmError, TimeoutError, RuntimeError) as error:
                    refusals.add(f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(SAY_SECONDS)
    finally:
        publishing.cancel()
        with suppress(asyncio.CancelledError):
            await publishing
    return {"answers": answers, "refusals": sorted(refusals), "hijack": job}


def _first_of_all(counter: Counter, honest: JobId) -> JobId:
    """Offer a job whose id sorts before the honest one's: manifests with different salts are tried."""
    manifest = Manifest(
        name=MODEL_NAME, kind="serve", graph=Digest(digest("none")), cuts=(1,), weights=(Digest(digest("none")),) * 2,
        proposed=(counter.one.identity.peer_id,) * 2, author=PeerId(""), byte_level=True,
        serve=ServeConfig(cache="kv", max_sequence=MODEL.sequence, vocabulary=MODEL.vocabulary),
    )  # fmt: skip
    job = counter.offer(manifest)
    while job > honest and len(counter.jobs) < TRIES:
        job = counter.offer(manifest)
    counter.jobs = {job: manifest}
    return job


async def forged_proofs(one: Stranger) -> dict[str, Any]:
    """A hundred identities publish both jobs and claim all stages, with as many forged statements and votes of the author and
    the owners as fit. They are new every second, so that no cache has them."""
    scene, crowd = one.scene, [Identity.generate() for _ in range(CROWD)]
    rounds = 0
    while one.time_left:
        rounds += 1
        for identity in crowd:
            for job, route in ((scene.training, scene.training_route), (scene.serving, scene.route)):
                signers = [scene.trainer, *(peer for peer, _ in route)]
                offers = [one.sealed(_lying_record(identity, job, signers), 12.0, identity)]
                offers += [
                    one.sealed(_lying_claim(identity, job, route, stage), 6.0, identity)
                    for stage in range(len(route))
                ]
                await _say(one, offers)
                if not one.time_left:
                    break
    return {"rounds": rounds}


def _lying_record(identity: Identity, job: JobId, signers: list[PeerId]) -> JobRecord:
    record: JobRecord = job_record(identity, job=job, stages=2, state="running", term=2**30, step=FORGED_STEP)
    lies = [
        replace(statement_of(record, PeerId(signers[i % len(signers)]), 0), step=i) for i in range(CARRIED)
    ]
    return replace(record, proof=tuple(seal_statement(lie, _any_signature) for lie in lies))


def _lying_claim(
    identity: Identity, job: JobId, route: Sequence[tuple[PeerId, int]], stage: int
) -> ClaimRecord:
    (owner, term), now = route[stage], int(time.time())
    voters = [PeerId(peer) for other, (peer, _) in enumerate(route) if other != stage]
    words = [
        Vote(voter=voters[i % len(voters)], holding=Holding(PeerId(owner), term), at=now - i)
        for i in range(MAX_PROOFS)
    ]
    proof = tuple(seal_vote(word, job, stage, identity.peer_id, _any_signature) for word in words)
    claim: ClaimRecord = claim_record(identity, job=job, stage=stage, term=term + 1, proof=proof)
    return claim


def _any_signature(data: bytes) -> bytes:
    return os.urandom(64)


# --- Checks


async def both_go_on(ground: Ground, verdict: Verdict) -> None:
    for prepared in (ground.training, ground.serving):
        belief = await read_belief(ground.user, prepared.job, manifest=prepared.manifest)
        if belief is None or belief.over or belief.record.lead is None:
            verdict.notes[f"fault: {prepared.manifest.name}"] = f"a client that looks now believes {belief}"
    for peer in ground.peers[:2]:
        if not list(peer.home.rglob(f"{ground.training.job}.json")):
            verdict.notes["fault: file"] = f"{peer.name} has forgotten the job"


async def own_snapshots_alone(ground: Ground, verdict: Verdict) -> None:
    belief = await read_belief(ground.user, ground.training.job, manifest=ground.training.manifest)
    if belief is None or belief.record.snapshot == FORGED or belief.record.step >= FORGED_STEP:
        verdict.notes["fault: snapshot"] = f"a client that looks now believes {belief}"
    with tempfile.TemporaryDirectory() as folder:
        step = await export(ground.user, ground.training.job, Path(folder) / "model")
    verdict.notes["exported_step"] = step
    if step >= FORGED_STEP:
        verdict.notes["fault: export"] = f"the export is of step {step}"
    for stage in range(2):
        for claim in await ground.reader.claims(ground.training.job, stage):
            if claim.step >= FORGED_STEP:
                verdict.notes["fault: standby"] = f"{claim.peer} says that it has step {claim.step}"


async def the_name_is_the_authors(ground: Ground, verdict: Verdict) -> None:
    """Check that every answer for the name is the honest model's, and that a refusal lists the models."""
    truth = list(ground.answers.truth[PROMPTS[0]])
    wrong = [tokens for tokens in verdict.notes.pop("answers") if tokens != truth]
    if wrong:
        verdict.notes["fault: answers"] = f"a user got {wrong[0]}"
    full = f"{MODEL_NAME}@{ground.scene.trainer[:16]}"
    other = [line for line in verdict.notes["refusals"] if full not in line]
    if other:
        verdict.notes["fault: refusals"] = other[0]
    for peer in ground.peers:
        request = GenerateRequest(model=full, prompt_ids=PROMPTS[0], max_tokens=NEW_TOKENS)
        answer = await complete(ground.user.transport, PeerId(peer.peer_id), request)
        if list(answer.tokens) != truth:
            verdict.notes["fault: author"] = f"{peer.name} answered {answer.tokens}"


ATTACKS = {
    "forged_stop": Attack(forged_stop, seconds=15.0, identities=1 + ALLIES, check=both_go_on),
    "forged_snapshot": Attack(
        forged_snapshot, seconds=12.0, identities=1 + ALLIES, check=own_snapshots_alone
    ),
    "forged_proofs": Attack(forged_proofs, seconds=20.0, check=both_go_on),
    "name_hijack": Attack(name_hijack, seconds=15.0, check=the_name_is_the_authors),
}
