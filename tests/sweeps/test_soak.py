"""p2pd accepts the clients of the soak as peers; and a short run of the soak."""

from __future__ import annotations

import argparse
import asyncio

import pytest
from sweeps.endurance.light_peer import LightPeer
from sweeps.soak import frame, run

from fusion.swarm.errors import StreamBroken
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.transport import Stream


def test_p2pd_takes_each_for_the_peer_whose_key_it_has() -> None:
    async def main() -> None:
        config = P2PConfig(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))
        async with P2PTransport.start(config) as transport:

            async def answer(stream: Stream) -> None:
                asked = await stream.receive()
                await stream.send(f"{asked.kind} {stream.remote}", {}, [bytes(100_000)])
                await stream.send("end")

            await transport.serve("/fusion/echo/1", answer)

            def visit(identity: Identity) -> list[str]:
                with LightPeer(identity, transport.addresses[0]) as peer:
                    with pytest.raises(StreamBroken):
                        peer.ask("/fusion/nothing/1", [frame("hello")])
                    return peer.ask("/fusion/echo/1", [frame("hello")], 2) + peer.ask(
                        "/fusion/echo/1", [frame("again")]
                    )

            for identity in (Identity.generate(), Identity.generate()):
                us = identity.peer_id
                said = await asyncio.to_thread(visit, identity)
                assert said == [f"hello {us}", "end", f"again {us}"]

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.alone
def test_jobs_clients_and_restarts_leave_nothing_with_the_peers() -> None:
    options = argparse.Namespace(jobs=14, clients=60, restarts=2, at_once=4)
    report = asyncio.run(run(options))
    assert report["done"] == {"jobs": 14, "clients": 60, "restarts": 2}
    # So short a run says nothing of memory.
    assert not [fault for fault in report["faults"] if "memory" not in fault]
