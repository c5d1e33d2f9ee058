"""When a packet leaves a line on which earlier ones wait. Pure arithmetic: no clock, no sockets.

A packet passes three lines: the uplink of its source (shared by all pairs of that host), the pair's own link, and the
downlink of its target (shared). The first two it passes at once, bit by bit: what is put on both starts on each as
soon as that one is free and has left when it has left both. The third takes it when it has arrived there, `delay`
later. Each line is a queue with tail drop: what would wait longer than `queue_seconds` is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass
class Line:
    """A line with a rate. `seconds_per_byte` 0 is a line without a limit."""

    seconds_per_byte: float
    queue_seconds: float
    free_at: float = 0.0

    def full(self, now: float) -> bool:
        return self.free_at - now > self.queue_seconds

    def put(self, size: int, starts: float) -> float:
        """When a packet of `size` bytes that could start then has left the line, which is busy until that time."""
        if self.seconds_per_byte == 0.0:
            return starts
        self.free_at = max(starts, self.free_at) + size * self.seconds_per_byte
        return self.free_at


@dataclass
class Path:
    """One direction of a pair: its own line between the two shared ones."""

    up: Line
    link: Line
    down: Line
    delay: float
    loss: float
    chance: Random
    last: float = 0.0  # arrival of the last packet: none overtakes it
    carried_bytes: int = 0
    carried_packets: int = 0
    dropped_packets: int = 0

    def burst_bytes(self, seconds: float) -> float:
        """The bytes that the slowest of the three lines carries in so many seconds."""
        slowest = max(self.up.seconds_per_byte, self.link.seconds_per_byte, self.down.seconds_per_byte)
        return seconds / slowest if slowest else float("inf")

    def lost(self) -> bool:
        """Whether the next packet is lost."""
        return self.loss > 0.0 and self.chance.random() < self.loss

    def depart(self, size: int, now: float) -> tuple[float, float] | None:
        """When the first and the last byte of a packet that arrives now reach the target's downlink; None: dropped."""
        if self.up.full(now) or self.link.full(now):
            return None
        starts = max(now, self.up.free_at, self.link.free_at)
        left = max(self.up.put(size, now), self.link.put(size, now))
        self.last = max(self.last, left + self.delay)
        return min(starts + self.delay, self.last), self.last

    def arrive(self, size: int, first: float, now: float) -> float | None:
        """When a packet leaves the downlink, if its first byte reached it at `first` and its last one now; None: dropped."""
        if self.down.full(now):
            return None
        return max(now, self.down.put(size, first))
