"""The strangers, in a process of their own: eight identities, each with a p2pd, that send the traffic of `endurance.traffic`.

    python tests/sweeps/endurance/feeder.py SEED VICTIM SPARED (0 or 1)      the scene comes as a line on stdin, then orders, one a line

"feed SECONDS FRAMES" sends so many frames and records, for at most so long, and prints a line with the totals since the start.
"last" prints the last items that each identity sent. The process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

sys.path.insert(0, str(Path(__file__).parents[2]))

from attacks.stranger import ANSWERS, CALL_ERRORS, Offer, Scene, store_request
from sweeps.endurance.traffic import Targets, Traffic, identity_of, invented

from fusion.swarm.dht.values import key_id
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS
from fusion.swarm.errors import SwarmError
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.streams.peer_ids import to_hivemind
from fusion.swarm.transport import PeerId

IDENTITIES = 8
RECORDS = 64  # in one request
AT_ONCE = 16  # streams of one identity
ANSWER_SECONDS = 0.2  # for an answer, before a stream is given up
OPEN_SECONDS = 5.0
KEPT = 30  # of what was sent last, for each identity
STALL_SECONDS = 15.0  # with nothing sent, after which it is said where everything waits


@dataclass
class Fed:
    """Counts of what was sent, and of the replies."""

    frames: int = 0
    records: int = 0
    streams: int = 0
    unopened: int = 0
    silent: int = 0  # requests to the directory that had no answer
    requests_refused: int = 0
    open_seconds: float = 0.0  # that opening streams took, all together
    store_seconds: float = 0.0  # and requests to the directory
    longest_wait_seconds: float = 0.0  # with nothing sent
    records_stored: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    protocols: Counter[str] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        return self.frames + self.records


class Feeder:
    def __init__(self, transport: P2PTransport, victim: PeerId, traffic: Traffic, fed: Fed) -> None:
        self._transport = transport
        self._victim = victim
        self._traffic = traffic
        self._fed = fed
        self.last: deque[str] = deque(maxlen=KEPT)

    async def feed(self, until: float, most: int) -> None:
        """Send at most so many frames and records of this identity, spread over the time until `until` (time.monotonic)."""
        began, sent = time.monotonic(), 0
        streams: set[asyncio.Task[None]] = set()
        turn = 0
        while sent < most and time.monotonic() < until:
            owed = sent / most * (until - began) * 0.97 - (time.monotonic() - began)
            if owed > 0:
                await asyncio.sleep(owed)
            turn += 1
            if turn % 5 == 0:
                sent += await self._store()
                continue
            if len(streams) >= AT_ONCE:
                await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
            talk = self._traffic.talk()
            task = asyncio.create_task(self._say(talk))
            streams.add(task)
            task.add_done_callback(streams.discard)
            sent += len(talk.frames)
        if streams:
            await asyncio.wait(streams)

    async def _say(self, talk: Any) -> None:
        self.last.append(f"{talk.what} {talk.frames[0][:200].hex()}")
        fed = self._fed
        began = time.monotonic()
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                stream = await self._transport.open(self._victim, talk.protocol)
        except (SwarmError, TimeoutError, *CALL_ERRORS) as error:
            fed.unopened += 1
            fed.answers[f"unopened: {type(error).__name__}"] += 1
            return
        finally:
            fed.open_seconds += time.monotonic() - began
        assert isinstance(stream, FrameStream)
        fed.streams += 1
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await stream.write_message(b"".join(talk.frames))
            fed.frames += len(talk.frames)
            fed.protocols[talk.protocol] += len(talk.frames)
            async with asyncio.timeout(ANSWER_SECONDS):
                while True:
                    fed.answers[f"{talk.protocol} {(await stream.receive()).kind[:20]}"] += 1
        except (SwarmError, TimeoutError, *CALL_ERRORS):
            pass
        finally:
            stream.abort()

    async def _store(self) -> int:
        now = time.time()
        made = [self._traffic.record(now) for _ in range(RECORDS)]
        self.last.append("store " + "; ".join(each.what for each in made)[:2000])
        offers = [
            Offer(key_id(each.key), each.subkey, each.data, each.until + CLOCK_TOLERANCE_SECONDS)
            for each in made
        ]
        began = time.monotonic()
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                answer = await self._transport.p2p.call_protobuf_handler(
                    to_hivemind(self._victim),
                    "DHTProtocol.rpc_store",
                    store_request(offers),
                    ANSWERS["store"],
                )
            self._fed.records_stored += sum(answer.store_ok)
        except TimeoutError:
            self._fed.silent += 1
            return 0
        except CALL_ERRORS:
            self._fed.requests_refused += 1
        finally:
            self._fed.store_seconds += time.monotonic() - began
        self._fed.records += len(made)
        return len(made)


async def watch(fed: Fed) -> None:
    """Print to stderr where all tasks wait, whenever nothing was sent for STALL_SECONDS."""
    sent, since, told = fed.sent, time.monotonic(), False
    while True:
        await asyncio.sleep(1.0)
        if fed.sent != sent:
            sent, since, told = fed.sent, time.monotonic(), False
        waited = time.monotonic() - since
        fed.longest_wait_seconds = max(fed.longest_wait_seconds, waited)
        if waited > STALL_SECONDS and not told:
            told = True
            for task in asyncio.all_tasks():
                task.print_stack(limit=4, file=sys.stderr)


async def main(seed: int, victim: str, spared: bool) -> None:
    loop = asyncio.get_running_loop()
    scene = Scene.from_json(await asyncio.to_thread(sys.stdin.readline))
    values = [value for value in invented(seed) if _fits(value)]
    fed = Fed()
    async with AsyncExitStack() as stack:
        feeders = []
        peers: list[PeerId] = []
        for number in range(IDENTITIES):
            config = P2PConfig(identity=identity_of(number, seed), listen=("/ip4/127.0.0.1/tcp/0",))
            transport = await stack.enter_async_context(P2PTransport.start(config))
            peers = [await transport.connect(address) for address in scene.addresses]
            jobs = (scene.training, scene.serving)
            targets = Targets(jobs, tuple(peers), scene.trainer, spared)
            traffic = Traffic(seed, number, targets, values)
            feeders.append(Feeder(transport, PeerId(victim), traffic, fed))
        print("{}", flush=True)
        while order := (await loop.run_in_executor(None, sys.stdin.readline)).split():
            if order[0] == "feed":
                until = time.monotonic() + float(order[1])
                share = max(1, int(order[2]) // IDENTITIES)
                watching = asyncio.create_task(watch(fed))
                await asyncio.gather(*(feeder.feed(until, share) for feeder in feeders))
                watching.cancel()
                print(json.dumps({**fed.__dict__, "sent": fed.sent}), flush=True)
            else:
                print(json.dumps([list(feeder.last) for feeder in feeders]), flush=True)


def _fits(value: Any) -> bool:
    try:
        return len(msgpack.packb(value)) < 1 << 14
    except (ValueError, TypeError, OverflowError):
        return False


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"))
