"""Attacks on a served model: sessions that hold memory and do nothing, prompts that never arrive whole."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import Any

import msgpack
from attacks.ground import Ground
from attacks.hold import Attack
from attacks.stranger import Stranger
from attacks.verdict import Verdict

from fusion.runtime.job.protocol import GENERATE, RING
from fusion.swarm.errors import TransportError
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.transport import Stream

IDENTITIES = 8
SESSIONS = 200  # on each stream, opened and opened again
POSITIONS = 64  # all of the model's positions, for which each session requests memory
ARRIVING_BYTES = 8 << 20  # the largest prompt that a gateway takes
GATEWAY_STREAMS = 40


async def session_squatting(one: Stranger) -> dict[str, Any]:
    """Eight identities open sessions of the greatest length on every stage of the honest model and never send a prompt. They
    also send gateways the beginnings of prompts of 8 MiB."""
    opened = arriving = full = 0
    held: list[Stream] = []

    async def squat(each: Stranger, stage: int, round_: int) -> None:
        nonlocal opened, full
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(5.0):
                stream = await each.transport.open(one.scene.route[stage][0], RING.name)
                held.append(stream)
                await stream.send("hello", {"job": one.scene.serving, "from": -1, "to": stage})
                for number in range(SESSIONS):
                    await stream.send("open", _opening(one, f"{round_}-{stage}-{number}"))
                for _ in range(SESSIONS):
                    frame = await stream.receive()
                    opened += frame.kind == "opened"
                    full += frame.header.get("reason") == "full"

    async def arrive(each: Stranger) -> None:
        nonlocal arriving
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(5.0):
                stream = await each.transport.open(one.peers[0], GENERATE.name)
                assert isinstance(stream, FrameStream)
                held.append(stream)
                header = msgpack.packb(["generate", {"model": "answers", "prompt": "text", "max_tokens": 9}])
                await stream.write_message(struct.pack(">IQ", len(header), ARRIVING_BYTES) + header)
                await stream.write_message(bytes(1 << 15))
                arriving += 1

    round_ = 0
    while one.time_left:
        round_ += 1
        for each in one.all_of_us:
            await one.pace()
            await asyncio.gather(*(squat(each, stage, round_) for stage in range(len(one.scene.route))))
            await one.pace()
            await asyncio.gather(*(arrive(each) for _ in range(GATEWAY_STREAMS // IDENTITIES)))
        for stream in held[:-400]:
            stream.abort()
        del held[:-400]
    for stream in held:
        stream.abort()
    return {"opened": opened, "told_full": full, "arriving": arriving}


def _opening(one: Stranger, session: str) -> dict[str, Any]:
    return {
        "session": session,
        "route": [[peer, term] for peer, term in one.scene.route],
        "prompt_length": 1,
        "max_tokens": POSITIONS - 1,
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0},
        "logits": False,
    }


async def it_was_tried(ground: Ground, verdict: Verdict) -> None:
    for what in ("opened", "arriving"):
        if not verdict.notes[what]:
            verdict.notes[f"fault: {what}"] = "none: the attack did not reach anybody"


ATTACKS = {
    "session_squatting": Attack(session_squatting, seconds=15.0, identities=IDENTITIES, check=it_was_tried)
}
