"""A volunteer's options for a peer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fusion.runtime.peer.client_context import BLOB_QUOTA_BYTES
from fusion.runtime.serving.http.config import HttpConfig
from fusion.swarm.machine import usable_cores


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    home: Path
    bootstrap: tuple[str, ...] = ()  # multiaddrs; none of them has to answer
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    threads: int | None = None  # None: one per core that this process may run on
    memory_bytes: int | None = None  # None: half of what is free
    device: str = "cpu"
    plane: str = "torch"  # a name of `fusion.runtime.peer.plane_choice`
    blob_quota_bytes: int = BLOB_QUOTA_BYTES  # of the disk, for weights, data and snapshots of jobs
    swarm_key: Path | None = None  # of a closed swarm; default: that in the home, where there is one
    upload_mbps: float | None = None  # for blobs that others fetch; None: unlimited
    # Of the API for programs of this machine, or others with a key.
    http: HttpConfig | None = None

    @property
    def compute_threads(self) -> int:
        return self.threads or usable_cores()

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory must be positive, not {self.memory_bytes}")
        if self.blob_quota_bytes < 1:
            raise ValueError(f"disk must be positive, not {self.blob_quota_bytes}")
        if self.upload_mbps is not None and not self.upload_mbps > 0:
            raise ValueError(f"upload_mbps must be positive, not {self.upload_mbps}")
