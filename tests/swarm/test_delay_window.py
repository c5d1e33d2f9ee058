from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.swarm import delay_window
from fusion.swarm.delay_window import LEAST_BYTES, TARGET_SECONDS, DelayWindow

CHUNK = 32 << 10


class Line:
    """That carries so many bytes a second, in order, with so long a way there and back; in simulated time."""

    def __init__(self, bytes_per_second: float, way_seconds: float) -> None:
        self.window = DelayWindow()
        self.now = self.free_at = 0.0
        self.carried = 0
        self.longest_queue = 0.0
        self._rate, self._way = bytes_per_second, way_seconds
        self._acks: list[tuple[float, int]] = []

    def run(self, until: float, settle: float = 0.0) -> None:
        """Whatever the window lets out goes out at once; queues are looked at from `settle` on."""
        while self.now < until:
            while self.window.open:
                self.window.send(CHUNK, self.now)
                self.free_at = max(self.free_at, self.now) + CHUNK / self._rate
                self.carried += CHUNK
                heapq.heappush(self._acks, (self.free_at + self._way, self.carried))
                if self.now > settle:
                    self.longest_queue = max(self.longest_queue, self.free_at - self.now)
            self.now, total = heapq.heappop(self._acks)
            self.window.ack(total, self.now)


@settings(max_examples=30)
@given(mbps=st.floats(10.0, 200.0), way_ms=st.floats(1.0, 300.0))
def test_a_line_is_used_well_and_what_comes_behind_waits_little(mbps: float, way_ms: float) -> None:
    rate, way = mbps * 125e3, way_ms / 1e3
    line = Line(rate, way)
    line.run(30.0, settle=15.0)
    assert line.longest_queue <= max(2 * TARGET_SECONDS, LEAST_BYTES / rate) + 2 * CHUNK / rate
    begun, at = line.carried, line.now
    line.run(line.now + 10.0)
    assert (line.carried - begun) / (line.now - at) >= 0.5 * rate


def test_there_is_always_something_under_way() -> None:
    window = DelayWindow()
    window.send(10 * LEAST_BYTES, 0.0)
    assert not window.open
    window.ack(10 * LEAST_BYTES, 9.0)
    assert window.open


def test_what_is_not_used_does_not_grow() -> None:
    window = DelayWindow()
    for number in range(1, 1000):
        window.send(100, float(number))
        window.ack(100 * number, number + 0.01)
    assert window.window_bytes == LEAST_BYTES


def test_a_way_that_has_become_longer_is_believed_in_time() -> None:
    line = Line(12.5e6, 0.02)
    line.run(30.0)
    line._way = 0.2
    line.run(delay_window.BASE_SECONDS + 60.0)
    begun, at = line.carried, line.now
    line.run(line.now + 20.0)
    assert (line.carried - begun) / (line.now - at) >= 0.7 * 12.5e6


@pytest.mark.parametrize("acks", [[101], [50, 49], [-1]])
def test_acks_of_what_was_not_sent_are_refused(acks: list[int]) -> None:
    window = DelayWindow()
    window.send(100, 0.0)
    with pytest.raises(ValueError, match=r"ack of -?\d+ bytes, of 100 that were sent"):
        for total in acks:
            window.ack(total, 1.0)
