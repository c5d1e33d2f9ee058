"""Where the directory keeps a record: a key of the DHT, and a subkey for each author. Pure."""

from __future__ import annotations

import hashlib

from fusion.swarm.directory.records import (
    ClaimRecord,
    Digest,
    JobId,
    JobRecord,
    LinkRecord,
    PeerRecord,
    ProviderRecord,
    Record,
)

SHARDS = 16  # keys over which the peers, and the jobs, of the whole swarm are spread


def key_of(record: Record) -> str:
    """Where the directory keeps the record. Jobs and peers are spread over SHARDS keys by hash."""
    match record:
        case PeerRecord():
            return peers_key(shard(record.peer))
        case JobRecord():
            return jobs_key(shard(record.job))
        case ClaimRecord():
            return claims_key(record.job, record.stage)
        case ProviderRecord():
            return providers_key(record.digest)
        case LinkRecord():
            return links_key(shard(record.peer))


def subkey_of(record: Record) -> str:
    """One slot per author under a key; a job's records share their key with other jobs', hence the longer form."""
    return f"{record.author}/{record.job}" if isinstance(record, JobRecord) else record.peer


def shard(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0] % SHARDS


def peers_key(shard: int) -> str:
    return f"peers/{shard}"


def jobs_key(shard: int) -> str:
    return f"jobs/{shard}"


def claims_key(job: JobId, stage: int) -> str:
    return f"claims/{job}/{stage}"


def links_key(shard: int) -> str:
    return f"links/{shard}"


def providers_key(digest: Digest) -> str:
    return f"providers/{digest}"


def subject_of(key: str) -> str:
    """A name that is the same for keys read together: of one job's claims, or of all records of a kind."""
    kind, _, rest = key.partition("/")
    return "/".join((kind, rest.split("/")[0])) if kind == "claims" else kind
