"""What peers publish about themselves in the directory: frozen values, signed by their author.

(contract part: the values; the codec, signatures and checks below them)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType, Union

from fusion.swarm.transport import PeerId

Digest = NewType("Digest", str)  # lower-case hex SHA-256
JobId = NewType("JobId", str)  # the digest of the job's manifest blob: the manifest cannot change under its id

RECORD_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """Key `peers/<shard>`, one subkey per peer."""

    peer: PeerId
    name: str  # friendly, derived from the peer id ("quiet-otter-3f"): no configuration
    addresses: tuple[str, ...]
    role: Literal["peer", "client"]
    device: str  # "cpu" or "cuda", and what it is
    flops_per_second: float  # lambda * peak, measured at start
    memory_bytes: int  # what the volunteer lends, in all
    free_memory_bytes: int
    software: str  # version of fusion-peer
    opset: int
    started_at: float  # unix seconds, for show only


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Key `jobs/<shard>`, published by the launcher, then by the lead. Readers keep the highest (step, term)."""

    job: JobId
    name: str
    kind: Literal["train", "serve"]
    state: Literal["launching", "running", "done", "stopped", "failed"]
    term: int  # the lead's term; 0 from the launcher
    step: int  # committed step
    lead: PeerId | None
    stages: int
    snapshot: Digest | None  # blob naming the newest snapshot that all stages hold (runtime.snapshot)
    snapshot_step: int
    message: str = ""  # one line: what it waits for, or why it failed
    author: PeerId


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """Key `claims/<job>/<stage>`, one subkey per peer."""

    job: JobId
    stage: int
    peer: PeerId
    role: Literal["owner", "standby", "released"]
    term: int
    score: float  # proposed by the placement: 1.0, else a peer's own fitness below 1
    step: int  # replicated or committed step
    load: float  # busy share 0..1 or queue length, for routes
    ready: bool = False  # the stage is loaded and takes frames


@dataclass(frozen=True, kw_only=True)
class ProviderRecord:
    """Key `providers/<digest>`: this peer holds the whole blob."""

    digest: Digest
    peer: PeerId
    size_bytes: int


Record = Union[PeerRecord, JobRecord, ClaimRecord, ProviderRecord]
