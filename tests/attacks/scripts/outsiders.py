"""Attacks on a closed swarm by a stranger without its key: it must get no answer on any protocol."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.stranger import Stranger, store_request
from attacks.verdict import Verdict
from hivemind.proto import dht_pb2
from support.directory_records import claim_record, digest, job_record

from fusion.runtime.job.protocol import PROTOCOLS
from fusion.swarm.dht.values import key_id
from fusion.swarm.directory.api import JOB_KEYS, PEER_KEYS
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.protocol import CONTROL
from fusion.swarm.transport import PeerId

ANSWER_SECONDS = 3.0
RECORD_SECONDS = 60.0
TOKENS = (b"", b"\x92\xce\x7f\xff\xff\xff\xc4\x40" + bytes(64), b"\x00" * 96)
ALLIES = 3


async def non_member(one: Stranger) -> dict[str, Any]:
    """Four identities dial, open every protocol with its first frame and forged tokens, and ping, store and find; none may get
    an answer."""
    tried = 0
    answered: dict[str, str] = {}
    job, weights = one.scene.serving, one.scene.weights
    first = (
        ("hello", {"job": job, "from": -1, "to": 0}),
        ("generate", {"model": "answers", "prompt": "text", "max_tokens": 4}),
        ("index", {"digest": weights[0]}),
        ("holds", {"job": job, "stage": 0}),
        ("watch", {"job": job}),
        ("status", {}),
        ("ping", {}),
    )

    async def ask(
        each: Stranger, peer: PeerId, protocol: str, kind: str, header: dict[str, Any], token: bytes
    ) -> None:
        nonlocal tried
        tried += 1
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                stream = await each.transport.open(peer, protocol)
                try:
                    if token:
                        await stream.send("member", {"token": token})
                    await stream.send(kind, header)
                    answered[f"{protocol} {kind}"] = (await stream.receive()).kind
                finally:
                    stream.abort()
        except (SwarmError, TimeoutError):
            pass

    number = 0
    while one.time_left:
        for each in one.all_of_us:
            token, number = TOKENS[number % len(TOKENS)], number + 1
            for peer in each.peers:
                await each.pace()
                await asyncio.gather(
                    *(
                        ask(each, peer, protocol.name, kind, header, token)
                        for protocol in PROTOCOLS
                        if protocol is not CONTROL
                        for kind, header in first
                    )
                )
                keys = [key_id(key).to_bytes(20, "big") for key in (*PEER_KEYS, *JOB_KEYS)]
                record = job_record(each.identity, job=JobId(digest("an outsider's job")))
                owner = claim_record(each.identity, job=one.scene.training, term=2)
                offers = [each.sealed(record, RECORD_SECONDS), each.sealed(owner, 6.0)]
                for method, request in (
                    ("ping", dht_pb2.PingRequest(peer=each.node_info)),
                    ("find", dht_pb2.FindRequest(keys=keys, peer=each.node_info)),
                    ("store", store_request(offers)),
                ):
                    reply = await each.call(peer, method, request)
                    tried += 1
                    if reply is not None and reply.ByteSize():
                        answered[method] = str(reply)[:200]
        await asyncio.sleep(0.1)
    return {"tried": tried, "answered": answered, "seconds_used": round(time.monotonic() - one.began, 1)}


async def nothing_was_said(ground: Ground, verdict: Verdict) -> None:
    """Check that the outsider got no answer, and that neither its records nor its identities are in the directory."""
    for what, answer in verdict.notes["answered"].items():
        verdict.notes[f"fault: {what}"] = f"answered {answer}"
    if not verdict.notes["tried"]:
        verdict.notes["fault: reach"] = "nothing was tried"
    jobs = {record.job for record in await ground.reader.job_records()}
    if not jobs <= {ground.training.job, ground.serving.job}:
        verdict.notes["fault: stored"] = f"{len(jobs)} jobs are listed"
    members = {peer.peer_id for peer in ground.peers}
    strangers = {record.peer for record in await ground.reader.peers()} - members
    if strangers:
        verdict.notes["fault: peers"] = f"{sorted(strangers)} are listed"


ATTACKS = {
    "non_member": Attack(non_member, seconds=12.0, identities=1 + ALLIES, check=nothing_was_said, closed=True)
}
