"""The configuration of a P2PTransport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fusion.swarm.identity import Identity
from fusion.swarm.streams.frames import FrameLimits
from fusion.swarm.swarm_key import Authorizer


@dataclass(frozen=True, kw_only=True)
class P2PConfig:
    identity: Identity
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)  # port 0: a free one
    runtime_dir: Path | None = None  # in which the private directory for sockets is made; None: the system's
    announce: tuple[str, ...] = ()  # multiaddrs to publish instead of those that we listen on
    limits: FrameLimits = FrameLimits()  # noqa: RUF009 - frozen
    streams_per_peer: int = 256
    idle_seconds: Mapping[str, float] = field(default_factory=dict)  # by protocol (`fusion.swarm.protocol`)
    # By protocol, the largest payload accepted at first on a stream that we open; of other protocols, that of `limits`.
    answer_bytes: Mapping[str, int] = field(default_factory=dict)
    dial_seconds: float = 10.0
    authorizer: Authorizer | None = None  # of a closed swarm
    start_seconds: float = 60.0  # p2pd's death is noticed at once, so this only bounds a very slow machine

    def __post_init__(self) -> None:
        if not self.listen:
            raise ValueError("listen needs at least one multiaddr such as /ip4/0.0.0.0/tcp/0")
        for name in ("dial_seconds", "start_seconds", "streams_per_peer"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
