"""Connects new identities to a peer and sends nothing, within a share of a core. A process of its own, since hivemind and
py-libp2p must not be loaded together.

    python idle_crowd.py ADDRESS MOST SECONDS SHARE

After SECONDS it prints how many connections the peer accepted, and how many of them it kept. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys
import time

import trio

from fusion.swarm.errors import PeerUnreachable
from fusion.swarm.identity import Identity
from fusion.swarm.thin.addresses import parse
from fusion.swarm.thin.libp2p import keep_quiet, lean_libp2p

keep_quiet()
with lean_libp2p():
    from fusion.swarm.thin.connection import Connection

AT_ONCE = 16
LAST_SECONDS = 5.0  # without new connections at the end: the peer closes those over its limit meanwhile


async def main(address: str, most: int, seconds: float, share: float) -> None:
    target, began, spent = parse(address), time.monotonic(), time.process_time()
    ended = trio.current_time() + seconds
    taken: list[Connection] = []
    refused = 0

    async def connect(nursery: trio.Nursery) -> None:
        nonlocal refused
        while len(taken) + refused < most:
            owed = (time.process_time() - spent) / share - (time.monotonic() - began)
            await trio.sleep(max(0.0, owed))
            try:
                taken.append(await Connection.dial(target, Identity.generate(), nursery))
            except PeerUnreachable:
                refused += 1
                await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(seconds - LAST_SECONDS):
            async with trio.open_nursery() as dialling:
                for _ in range(AT_ONCE):
                    dialling.start_soon(connect, nursery)
        await trio.sleep_until(ended)
        kept = sum(connection.alive for connection in taken)
        print(json.dumps({"taken": len(taken), "kept": kept, "not_taken": refused}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
