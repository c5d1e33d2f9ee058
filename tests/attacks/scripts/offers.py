"""Jobs that a stranger offers: manifests, the blobs that they name, and records that make peers read them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
from attacks.stranger import CALL_SECONDS, Offer, Stranger, store_request
from support.directory_records import job_record, provider_record

from fusion.runtime.job.fields import plain
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.protocol import JOB
from fusion.swarm.authority.statements import seal_statement, stop_statement
from fusion.swarm.blobs.index import CHUNK_BYTES, BlobIndex, index_of
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.protocol import BLOB
from fusion.swarm.transport import PeerId, Stream, call

RENEWED_SECONDS = 4.0
RECORD_SECONDS = 12.0
BATCH = 64  # records in one request


@dataclass
class Counter:
    """The jobs and blobs that a stranger offers, and what peers fetched of them."""

    one: Stranger
    jobs: dict[JobId, Manifest] = field(default_factory=dict)
    authors: dict[JobId, Identity] = field(default_factory=dict)
    manifests_read: set[str] = field(default_factory=set)
    sent_bytes: int = 0  # bytes of blobs that peers fetched
    _indices: dict[str, bytes] = field(default_factory=dict)
    _chunks: dict[str, Callable[[int], bytes]] = field(default_factory=dict)

    def put(self, data: bytes) -> Digest:
        parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        return self._keep(index_of(parts), parts.__getitem__)

    def put_zeros(self, size_bytes: int) -> Digest:
        """Offer a blob of `size_bytes` zeros, with little memory."""
        chunk, last = bytes(CHUNK_BYTES), bytes(size_bytes % CHUNK_BYTES)
        hashes = [hashlib.sha256(chunk).digest()] * (size_bytes // CHUNK_BYTES)
        if last:
            hashes.append(hashlib.sha256(last).digest())
        return self._keep(
            BlobIndex(size_bytes, tuple(hashes)), lambda n: chunk if n < size_bytes // CHUNK_BYTES else last
        )

    def offer(self, manifest: Manifest, author: Identity | None = None, named: PeerId | None = None) -> JobId:
        """Offer a job of the stranger, or of another identity that it has. `named` is the author in the manifest, if it differs.
        The manifest need not be valid."""
        author = author or self.one.identity
        manifest = replace(manifest, author=named or author.peer_id, salt=f"{len(self.jobs)}")
        data = msgpack.packb(
            plain(manifest), use_bin_type=True
        )  # `manifest_wire.encode` would refuse an unsound one
        job = JobId(self.put(data))
        self.jobs[job], self.authors[job] = manifest, author
        return job

    async def publish(self) -> None:
        """Publish the jobs' records and the providers of their blobs once, then send the jobs to each peer. Call it again before
        the records expire."""
        offers: list[Offer] = []
        for job, manifest in self.jobs.items():
            author = self.authors[job]
            record = job_record(
                author, job=job, name=manifest.name, kind=manifest.kind, state="launching", term=0,
                step=0, lead=None, stages=manifest.stages, snapshot_step=-1,
            )  # fmt: skip
            offers.append(self.one.sealed(record, RECORD_SECONDS, author))
        for digest in self._indices:
            record_ = provider_record(self.one.identity, digest=Digest(digest), size_bytes=1)
            offers.append(self.one.sealed(record_, RECORD_SECONDS))
        for at in range(0, len(offers), BATCH):
            await self.one.everywhere("store", store_request(offers[at : at + BATCH]))
        for job in list(self.jobs)[-4:]:
            for peer in self.one.peers:
                with suppress(SwarmError, TimeoutError):
                    async with asyncio.timeout(2.0):
                        await call(self.one.transport, peer, JOB.name, "launch", {"job": job})

    async def keep_published(self) -> None:
        while self.one.time_left:
            began = time.monotonic()
            await self.publish()
            await asyncio.sleep(max(0.1, RENEWED_SECONDS - (time.monotonic() - began)))

    async def stop(self) -> None:
        """Stop the stranger's training jobs, so that the seconds after the attack are quiet."""

        async def end(job: JobId, peer: PeerId) -> None:
            author = self.authors[job]
            statement = seal_statement(stop_statement(job, author.peer_id, time.time()), author.sign)
            with suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(CALL_SECONDS):
                    await call(
                        self.one.transport, peer, JOB.name, "stop", {"job": job, "statement": statement}
                    )

        await asyncio.gather(*(end(job, manifest.proposed[0]) for job, manifest in self.jobs.items()))

    @property
    def notes(self) -> dict[str, Any]:
        return {
            "offered": len(self.jobs),
            "manifests_read": len(self.manifests_read),
            "sent_bytes": self.sent_bytes,
        }

    async def serve(self, stream: Stream) -> None:
        while True:
            frame = await stream.receive()
            digest = str(frame.header.get("digest"))
            if digest not in self._indices:
                await stream.send("error", {"message": "not here"})
            elif frame.kind == "index":
                if digest in self.jobs:
                    self.manifests_read.add(digest)
                await stream.send("index", {}, [self._indices[digest]])
            else:
                for chunk in frame.header["chunks"]:
                    data = self._chunks[digest](chunk)
                    self.sent_bytes += len(data)
                    await stream.send("chunk", {"index": chunk}, [data])

    def _keep(self, index: BlobIndex, chunk: Callable[[int], bytes]) -> Digest:
        digest = index.digest
        self._indices[digest] = index.encode()
        self._chunks[digest] = chunk
        return digest


async def open_counter(one: Stranger) -> Counter:
    counter = Counter(one)
    await one.transport.serve(BLOB.name, counter.serve)
    return counter
