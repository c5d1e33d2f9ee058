"""Bounds that no software can beat on given links and cores. Pure. Units are in the names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RingBound:
    """The bound of a token that waits for the one before it: once around the ring, through every stage."""

    stages: int
    delay_ms: float  # one way, of each link
    compute_seconds: float  # of all stages together

    @property
    def seconds(self) -> float:
        return self.stages * self.delay_ms / 1e3 + self.compute_seconds


@dataclass(frozen=True, kw_only=True)
class FirstTokenBound:
    """The bound of a prompt in arbitrarily small chunks.

    The slowest link or core is busy all the time, and everything else overlaps with it. Before it the request travels to the
    first stage; after it the last position travels through the stages, and the token to the gateway. A gateway that runs
    the first stage sends itself nothing.
    """

    stages: int
    delay_ms: float
    rate_mbps: float
    prompt_tokens: int
    position_bytes: int  # that cross a link between two stages for each position
    compute_seconds: float  # of the prompt, all stages together, one core
    cores: int

    @property
    def link_seconds(self) -> float:
        """The seconds of the busiest link."""
        return (
            8 * self.prompt_tokens * self.position_bytes / (1e6 * self.rate_mbps) if self.stages > 1 else 0.0
        )

    @property
    def busy_seconds(self) -> float:
        """The seconds of the busiest core; each stage runs on one core."""
        return self.compute_seconds / max(1, min(self.cores, self.stages))

    @property
    def delay_seconds(self) -> float:
        """The seconds through the stages and back to the gateway."""
        return self.stages * self.delay_ms / 1e3 if self.stages > 1 else 0.0

    @property
    def seconds(self) -> float:
        return self.delay_seconds + max(self.link_seconds, self.busy_seconds)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.3f} s = {self.delay_seconds:.3f} of delays around the ring + the slower of "
            f"{self.link_seconds:.3f} for {self.prompt_tokens} x {self.position_bytes} bytes over {self.rate_mbps:g} Mbps and "
            f"{self.busy_seconds:.3f} of compute ({self.compute_seconds:.3f} over {min(self.cores, self.stages)} cores)"
        )
