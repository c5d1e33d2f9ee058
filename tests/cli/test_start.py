"""`fusion-peer start` around the peer: what it does when p2pd dies, with a peer that is none."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.cli import start
from fusion.cli.terminal.output import Output
from fusion.runtime.peer import peer as peers
from fusion.runtime.peer.config import PeerConfig
from fusion.swarm.errors import DaemonDied, IdentityError, TransportError
from fusion.swarm.swarm_key import new_key

LISTEN = ("/ip4/0.0.0.0/tcp/0",)
ADDRESSES = ("/ip4/192.0.2.1/tcp/9999/p2p/x", "/ip4/127.0.0.1/tcp/4001/p2p/x")


@pytest.mark.parametrize(
    ("listen", "addresses", "expected"),
    [
        (LISTEN, ADDRESSES, ("/ip4/0.0.0.0/tcp/4001",)),
        (("/ip4/0.0.0.0/tcp/5000",), ADDRESSES, ("/ip4/0.0.0.0/tcp/5000",)),
        (
            ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic"),
            (*ADDRESSES, "/ip4/127.0.0.1/udp/4002/quic/p2p/x"),
            ("/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/4002/quic"),
        ),
        (LISTEN * 2, ADDRESSES, ("/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/tcp/9999")),
        (("/ip6/::/tcp/0",), ADDRESSES, ("/ip6/::/tcp/0",)),
        (LISTEN, (), LISTEN),
        (LISTEN, ("/ip4", "nonsense", ""), LISTEN),
    ],
)
def test_ports_that_the_system_chose_are_kept(
    listen: tuple[str, ...], addresses: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert start.same_ports(listen, addresses) == expected


class Script:
    """Peers that end one after another, each as it is told to, and the pauses between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: BaseException | None) -> None:
        self.ends = list(ends)
        self.configs: list[PeerConfig] = []
        self.pauses: list[float] = []
        monkeypatch.setattr(peers, "open_peer", self.open)
        monkeypatch.setattr(start.Lending, "_attend", self.attend)
        monkeypatch.setattr(start, "asyncio", SimpleNamespace(
            get_running_loop=asyncio.get_running_loop, sleep=self.sleep))  # fmt: skip

    @asynccontextmanager
    async def open(self, config: PeerConfig) -> AsyncIterator[Any]:
        self.configs.append(config)
        end = self.ends.pop(0)
        if end is not None and not isinstance(end, DaemonDied):
            raise end
        self.end = end
        yield SimpleNamespace(
            network=SimpleNamespace(transport=SimpleNamespace(all_addresses=ADDRESSES)),
            hosting=SimpleNamespace(hosted=(("job", 0),)),
            http=None,
        )

    async def attend(self, peer: Any) -> None:
        raise self.end or asyncio.CancelledError

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def run(self, home: Path) -> start.Lending:
        lending = start.Lending(PeerConfig(home=home, listen=LISTEN), Output(as_json=True))
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(self._run(lending))
        return lending

    async def _run(self, lending: start.Lending) -> None:
        await lending.run()


@pytest.mark.slow
def test_a_dead_p2pd_is_started_again_at_the_same_port_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    script = Script(monkeypatch, *[DaemonDied(f"p2pd ended: {i}") for i in range(12)], None)
    with caplog.at_level(logging.WARNING):
        lending = script.run(tmp_path)
    assert script.configs[0].listen == LISTEN
    assert {config.listen for config in script.configs[1:]} == {("/ip4/0.0.0.0/tcp/4001",)}
    assert script.pauses[:4] == [0.2, 0.4, 0.8, 1.6] and script.pauses[-1] == 60.0
    assert caplog.records[0].message == "p2pd ended: 0; starting it again in 0.2 s"
    assert len(caplog.records) == 12
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[0] == {"event": "restarting", "reason": "p2pd ended: 0", "seconds": 0.2}
    assert lending.hand_over_seconds == 0.0


@pytest.mark.parametrize(
    "taken", [TransportError("port 4001 is taken"), OSError("--http: 127.0.0.1:8080: Address already in use")]
)
def test_a_port_taken_meanwhile_is_given_up(
    taken: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = Script(monkeypatch, DaemonDied("p2pd ended"), taken, None)
    script.run(tmp_path)
    assert [config.listen for config in script.configs] == [LISTEN, ("/ip4/0.0.0.0/tcp/4001",), LISTEN]


@pytest.mark.parametrize("error", [TransportError("port 4001 is taken"), IdentityError("broken")])
def test_a_peer_that_never_ran_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    script = Script(monkeypatch, error)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(script._run(start.Lending(PeerConfig(home=tmp_path), Output(as_json=True))))
    assert script.pauses == []


NOT_OVER_IPV4 = (
    "others cannot join yet: this machine has no IPv4 address that they could reach; "
    "where it has one of IPv6, start with --listen /ip6/::/tcp/0"
)


def tcp(*hosts: str) -> tuple[str, ...]:
    return tuple(f"/ip4/{host}/tcp/4001/p2p/x" for host in hosts)


@pytest.mark.parametrize(
    ("addresses", "listen", "lines"),
    [
        (
            tcp("192.168.1.5", "10.0.0.7"),
            LISTEN,
            ["others in the same network join with", "192.168.1.5"],
        ),
        (tcp("8.8.4.4"), LISTEN, ["others join with", "8.8.4.4"]),
        (
            tcp("192.168.1.5", "8.8.4.4"),
            LISTEN,
            ["others in the same network join with", "192.168.1.5", "others elsewhere join with", "8.8.4.4"],
        ),
        (
            tcp("127.0.0.1"),
            ("/ip4/127.0.0.1/tcp/0",),
            ["only peers on this machine can join, as it listens on loopback:", "127.0.0.1"],
        ),
        (tcp("127.0.0.1"), LISTEN, [NOT_OVER_IPV4]),
        ((), LISTEN, [NOT_OVER_IPV4]),
        (
            (),
            (*LISTEN, "/ip6/::/tcp/0"),
            ["others cannot join yet: this machine has no address that they could reach"],
        ),
    ],
)
def test_others_are_told_an_address_that_they_can_reach(
    addresses: tuple[str, ...], listen: tuple[str, ...], lines: list[str]
) -> None:
    expected = [
        f"  fusion-peer start --bootstrap {tcp(line)[0]}" if line[0].isdigit() else line for line in lines
    ]
    assert list(start.invitation(addresses, listen)) == expected


@pytest.mark.parametrize("gpu", [False, True])
def test_a_volunteer_hears_of_a_gpu_that_is_not_lent(
    gpu: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = SimpleNamespace(
        name="peer",
        peer="p",
        addresses=(),
        device="cpu: 1 thread",
        flops_per_second=1e9,
        memory_bytes=1 << 30,
    )
    announcement = SimpleNamespace(record=lambda: record)
    peer = SimpleNamespace(announcement=announcement, http=None, unused_gpu=gpu)
    start._introduce(peer, SimpleNamespace(home=tmp_path), Output())  # type: ignore[arg-type]
    assert ("GPU: `fusion-peer start --device cuda`" in capsys.readouterr().out) == gpu


def test_a_key_that_cannot_be_kept_leaves_the_peer_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A home on a full disk: whoever waits for the word that the swarm knows the peer would wait for ever."""
    key, home = tmp_path / "ours.key", tmp_path / "file"
    new_key(key)
    home.touch()
    done = asyncio.Event()
    done.set()
    peer: Any = SimpleNamespace(announcement=SimpleNamespace(done=done), context=SimpleNamespace(peer_id="p"))
    config = PeerConfig(home=home, swarm_key=key)
    with caplog.at_level(logging.WARNING):
        asyncio.run(start._report_announced(peer, config, Output(as_json=True)))
    assert json.loads(capsys.readouterr().out) == {"event": "announced", "peer_id": "p"}
    assert caplog.records[0].message.endswith("the next start needs --swarm-key again")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system keeps a process to no cores")
def test_a_thread_for_each_core_that_the_peer_may_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with two cores of a machine with 64 would compute with 64 threads on them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert PeerConfig(home=tmp_path).compute_threads == 2
    assert PeerConfig(home=tmp_path, threads=3).compute_threads == 3
