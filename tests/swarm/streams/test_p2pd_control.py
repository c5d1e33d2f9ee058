from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from fusion.swarm.idle_connections import ConnectionLimits, Connections
from fusion.swarm.streams import p2pd_control
from fusion.swarm.streams.p2pd_control import _Waiting, framed, hang_up_on_idle, public_network


def test_a_call_that_was_given_up_takes_no_answer() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls = _Waiting()
        calls["asked"], calls["given up"] = loop.create_future(), loop.create_future()
        calls["given up"].cancel()  # and its caller, who would take it away, has not had a turn yet
        assert [name for name in ("asked", "given up", "never asked") if name in calls] == ["asked"]
        assert calls.pop("given up", None) is not None

    asyncio.run(main())


def test_who_says_nothing_is_hung_up_on_over_one_connection(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2pd_control, "_LIST_SECONDS", 0.001)
    monkeypatch.setattr(p2pd_control, "_NEXT_LIST_SECONDS", 0.001)
    connected = {b"busy", *(b"peer %d" % n for n in range(300))}
    controls, done = [], asyncio.Event()
    where = Multiaddr("/ip4/127.0.0.1/tcp/4001").to_bytes()

    async def p2pd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        controls.append(writer)
        while True:
            request = p2pd_pb2.Request()
            try:
                await read_pbmsg_safe(reader, request)
            except asyncio.IncompleteReadError:
                return
            response = p2pd_pb2.Response(type=p2pd_pb2.Response.OK)
            if request.type == p2pd_pb2.Request.DISCONNECT:
                connected.discard(request.disconnect.peer)
            else:
                response.peers.extend(p2pd_pb2.PeerInfo(id=peer, addrs=[where]) for peer in connected)
            writer.write(framed(response))

    async def main() -> None:
        daemon = SimpleNamespace(
            control_path=place / "d.sock", connections=Connections(ConnectionLimits(in_all=100))
        )
        async with await asyncio.start_unix_server(p2pd, str(daemon.control_path)):
            looking = asyncio.create_task(hang_up_on_idle(daemon, lambda: {b"busy"}, done.set))  # type: ignore[arg-type]
            async with asyncio.timeout(20):
                await done.wait()
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            controls[0].close()

    asyncio.run(main())
    assert len(connected) == 101 and b"busy" in connected and len(controls) == 1


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("/ip4/8.8.4.4/tcp/4001", "8.8.4.0/24"),
        ("/ip4/8.8.4.4/tcp/4002", "8.8.4.0/24"),
        ("/ip6/2600::1/tcp/4001", "2600::/48"),
        ("/ip4/8.8.4.4/udp/4001/quic", "8.8.4.0/24"),
        ("/ip4/192.168.1.5/tcp/4001", None),
    ],
)
def test_the_network_of_an_address_as_p2pd_has_it(address: str, network: str | None) -> None:
    assert public_network(Multiaddr(address).to_bytes()) == network
