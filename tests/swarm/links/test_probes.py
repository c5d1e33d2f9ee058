"""How the one train at a time is shared out among those who ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fusion.swarm.coordinates import Coordinate
from fusion.swarm.links.probes import FIRST_BYTES_SECONDS, GRANT_SECONDS, UNUSED_SECONDS, ProbeHost
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.receive_log import ReceiveLog
from fusion.swarm.transport import PeerId


class Host:
    """A host of probes at a clock of ours."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log = ReceiveLog(self._clock)
        self.host = ProbeHost(self.log, Coordinate, lambda *_: None, lambda *_: None, clock=self._clock)

    def _clock(self) -> float:
        return self.now

    def wants(self, stream: Any) -> bool:
        """Whether it may send a train; by then others' payloads are over."""
        return self.host._grant(stream, {"bytes": 100_000, "pressed": True}) > 0


def stream_of(peer: str, subnet: str | None = None) -> Any:
    if subnet is None:
        return SimpleNamespace(remote=PeerId(peer))
    made = FrameStream.__new__(FrameStream)
    made.remote, made.subnet = PeerId(peer), subnet
    return made


def test_who_sends_no_train_loses_its_place_to_the_next_and_does_not_get_it_back_at_once() -> None:
    host, idle, honest = Host(), stream_of("idle"), stream_of("honest")
    assert host.wants(idle) and not host.wants(honest)
    host.now += 0.9 * FIRST_BYTES_SECONDS
    assert not host.wants(honest)
    host.now += 0.2 * FIRST_BYTES_SECONDS
    assert host.wants(honest) and not host.wants(idle)
    host.host._end_grant(honest, used=True)
    assert not host.wants(idle) and not host.wants(stream_of("idle"))
    assert host.wants(honest)
    host.host._end_grant(honest, used=True)
    host.now += UNUSED_SECONDS
    assert host.wants(idle)


def test_a_train_that_has_begun_keeps_its_place() -> None:
    host, slow, other = Host(), stream_of("slow"), stream_of("other")
    assert host.wants(slow)
    host.now += 0.5 * FIRST_BYTES_SECONDS
    host.log.read(slow.remote, 1000, began=True, ended=False)
    host.now += FIRST_BYTES_SECONDS
    assert not host.wants(other)
    host.now += GRANT_SECONDS
    assert host.wants(other)


def test_asking_again_without_a_train_keeps_no_place() -> None:
    host, idle, honest = Host(), stream_of("idle"), stream_of("honest")
    assert host.wants(idle)
    host.now += 0.9 * FIRST_BYTES_SECONDS
    assert not host.wants(idle) and host.wants(honest)


def test_peers_of_a_network_do_not_take_turns_at_sending_nothing() -> None:
    host, (one, two) = Host(), [stream_of(peer, "198.51.100.0/24") for peer in ("one", "two")]
    assert host.wants(one)
    host.now += 1.1 * FIRST_BYTES_SECONDS
    assert not host.wants(two)
    assert host.wants(stream_of("three", "203.0.113.0/24"))
