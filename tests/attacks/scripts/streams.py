"""Attacks with streams alone, before a peer checks who opened them."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.processor import SHARE
from attacks.stranger import Stranger
from attacks.verdict import Verdict

from fusion.runtime.job.protocol import GENERATE, HOLD, JOB, RING, STAGE, STATUS
from fusion.runtime.peer.network import allow_more_files
from fusion.swarm.errors import TransportError
from fusion.swarm.protocol import BLOB, PROBE
from fusion.swarm.transport import PeerId, Stream

IDENTITIES = 8
STREAMS = 250  # of each identity, all to one peer
PROTOCOLS = [each.name for each in (STAGE, RING, GENERATE, JOB, HOLD, STATUS, BLOB, PROBE)]
AT_ONCE = 50
BLOB_SECONDS = 20.0  # for an honest reader
LOG_LINES = 400  # some kinds of line, twenty each at once and then one in three seconds
LINE_CHARACTERS = 700
CROWD = 4000  # connections, if there is time for so many
KEPT = 640  # the most that a peer may keep: its limit of 512, and a few of which it has not noticed the end
EMPTIES = 260_000  # bytes of a header, an empty map each


async def silent_streams(one: Stranger) -> dict[str, Any]:
    """Eight identities hold two thousand silent streams to one peer, and open those that it closes again."""
    victim, opened = one.peers[0], 0
    held: list[Stream] = []

    async def open_one(each: Stranger, number: int) -> None:
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(5.0):
                held.append(await each.transport.open(victim, PROTOCOLS[number % len(PROTOCOLS)]))

    while one.time_left:
        for each in one.all_of_us:
            await one.pace()
            await asyncio.gather(*(open_one(each, number) for number in range(AT_ONCE)))
            opened = len(held)
        for stream in held[: -IDENTITIES * STREAMS]:
            stream.abort()
    for stream in held:
        stream.abort()
    return {"opened": opened}


async def idle_connections(one: Stranger) -> dict[str, Any]:
    """Open silent connections to one peer from as many identities as there is time for."""
    allow_more_files()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).parents[1] / "idle_crowd.py"), one.scene.addresses[0]),
        *(str(CROWD), str(one.until - asyncio.get_running_loop().time()), str(SHARE)),
        stdin=asyncio.subprocess.PIPE,  # its end tells the process to end
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    counts: dict[str, Any] = json.loads(await process.stdout.readline())
    return counts


async def few_are_kept(ground: Ground, verdict: Verdict) -> None:
    taken, kept = verdict.notes["taken"], verdict.notes["kept"]
    if taken <= KEPT:
        verdict.notes["not tried"] = f"the attacker got only {taken} connections"
    if kept > KEPT:
        verdict.notes["fault: connections"] = f"{kept} of {taken} are kept, and say nothing"


async def empties(one: Stranger) -> dict[str, Any]:
    """Send headers of a quarter of a million empty maps: each byte on the wire takes 64 bytes of memory."""
    sent = 0
    while one.time_left:
        for protocol in PROTOCOLS:
            await one.pace()
            with suppress(TransportError, TimeoutError):
                async with asyncio.timeout(5.0):
                    stream = await one.transport.open(one.peers[0], protocol)
                    for _ in range(4):
                        await stream.send("hello", {"a": [{}] * EMPTIES})
                        sent += 1
    return {"sent": sent}


async def slow_blob_readers(one: Stranger) -> dict[str, Any]:
    """Eight identities request the model's weights from each peer, sixty-four times on a stream, and read nothing."""
    asked = 0
    held: list[Stream] = []

    async def ask(each: Stranger, peer: PeerId, digest: str) -> int:
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(5.0):
                stream = await each.transport.open(peer, BLOB.name)
                held.append(stream)
                for _ in range(4):
                    await stream.send("get", {"digest": digest, "chunks": [0] * 64})
                return 4 * 64
        return 0

    while one.time_left:
        for each in one.all_of_us:
            await one.pace()
            asks = [ask(each, peer, digest) for peer in one.peers for digest in one.scene.weights]
            asked += sum(await asyncio.gather(*asks))
        for stream in held[:-512]:
            stream.abort()
        del held[:-512]
    for stream in held:
        stream.abort()
    return {"asked": asked}


async def blobs_are_given(ground: Ground, verdict: Verdict) -> None:
    """Check that an honest reader gets every chunk of the model's weights from each peer that has them."""
    for digest in ground.serving.manifest.weights:
        given = 0
        for peer in ground.peers:
            stream = await ground.user.transport.open(PeerId(peer.peer_id), BLOB.name)
            try:
                async with asyncio.timeout(BLOB_SECONDS):
                    await stream.send("get", {"digest": digest, "chunks": [0]})
                    frame = await stream.receive()
                    while frame.kind == "wait":
                        frame = await stream.receive()
                    given += frame.kind == "chunk"
            except (TransportError, TimeoutError) as error:
                verdict.notes["fault: blob"] = f"{peer.name} gives nothing of a blob: {error!r}"
            finally:
                stream.abort()
        if not given:
            verdict.notes["fault: blob"] = f"nobody gives {digest[:8]}"


async def refused_streams(one: Stranger) -> dict[str, Any]:
    """Open streams on every protocol with an invalid first frame, as many as there is time for: each is refused with an error
    that a peer could log."""
    refused = 0

    async def say(peer: PeerId, protocol: str) -> int:
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(5.0):
                stream = await one.transport.open(peer, protocol)
                try:
                    await stream.send(f"nonsense {random.random()}", {"message": "\x1b]0;owned\x07"})
                    await stream.receive()
                    return 1
                finally:
                    stream.abort()
        return 0

    while one.time_left:
        await one.pace()
        asks = [say(peer, protocol) for peer in one.peers for protocol in PROTOCOLS]
        refused += sum(await asyncio.gather(*asks))
    return {"refused_streams": refused}


async def logs_stay_short(ground: Ground, verdict: Verdict) -> None:
    """Check that each peer logged few lines, all of them harmless and of bounded length."""
    for peer in ground.peers:
        lines = ground.log(peer).splitlines()
        verdict.notes[f"{peer.name}_lines"] = len(lines)
        if len(lines) > LOG_LINES:
            verdict.notes["fault: log"] = f"{peer.name} wrote {len(lines)} lines"
        wild = [line for line in lines if not line.isprintable() or len(line) > LINE_CHARACTERS]
        if wild:
            verdict.notes["fault: line"] = f"{peer.name} wrote {wild[0]!r:.200}"


ATTACKS = {
    "slow_blob_readers": Attack(
        slow_blob_readers, seconds=15.0, identities=IDENTITIES, check=blobs_are_given
    ),
    "refused_streams": Attack(refused_streams, seconds=10.0, check=logs_stay_short),
    "silent_streams": Attack(silent_streams, seconds=20.0, identities=IDENTITIES),
    "idle_connections": Attack(idle_connections, seconds=30.0, check=few_are_kept),
    "empties": Attack(empties, seconds=15.0),
}
