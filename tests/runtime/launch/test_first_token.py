"""The first token of a model that was put on the swarm is requested of the owner of its first stage only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hosting import Swarm, swarm
from support.instant_loop import run

from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.launch import first_token as tokens
from fusion.runtime.launch.first_token import first_token
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.serving.requests.request import Answer
from fusion.runtime.serving.requests.silence import PING_SECONDS, SILENT_SECONDS
from fusion.swarm.blobs.index import digest_of
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, ProviderRecord
from fusion.swarm.errors import StreamBroken
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.transport import PeerId


@dataclass
class Offered:
    """A job of one stage that a launcher offers to its owner."""

    made: Swarm
    owner: Identity
    context: Context  # the launcher's
    prepared: Prepared

    async def claims(self, who: Identity, term: int, *, ready: bool) -> None:
        """That it owns the stage; and where it is ready that it has every blob."""
        directory = MemoryDirectory(self.made.network, who, self.made.clock)
        await directory.publish(
            ClaimRecord(
                job=self.prepared.job, stage=0, peer=who.peer_id, role="owner", term=term, score=1.0, step=0, load=0.0,
                ready=ready,
            )
        )  # fmt: skip
        for digest in self.prepared.blobs if ready else ():
            await directory.publish(ProviderRecord(digest=digest, peer=who.peer_id, size_bytes=1))


@asynccontextmanager
async def offered(root: Path) -> AsyncIterator[Offered]:
    """Its owner has claimed the stage, and a stranger under a higher term, who says that it is ready."""
    async with swarm(root) as made:
        stranger, owner = sorted((Identity.generate() for _ in range(2)), key=lambda each: each.peer_id)
        manifest = made.manifest(None, proposed=(owner.peer_id,))
        job = JobId(digest_of(manifests.encode(manifest)))
        prepared = Prepared(
            job=job, manifest=manifest, author=made.trainer, blobs=(Digest(job),), predicted_seconds=0.0, parameters=0,
        )  # fmt: skip
        found = Offered(made, owner, (await made.join()).context, prepared)
        found.context.leases.know(manifest.law(job))
        await found.claims(owner, 1, ready=False)
        await found.claims(stranger, 7, ready=True)
        yield found


def test_the_first_token_is_asked_of_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[PeerId] = []

    async def complete(transport: Any, peer: PeerId, request: Any) -> Answer:
        requested.append(peer)
        return Answer(text="", tokens=(3,), finish="length", prompt_tokens=1, route=(peer,), seconds=0.1)

    async def main() -> None:
        async with offered(tmp_path) as job:
            await job.claims(job.owner, 1, ready=True)
            found = await first_token(job.context, job.prepared, 10.0)
            assert found is not None and requested == [job.owner.peer_id]

    monkeypatch.setattr(tokens, "complete", complete)
    asyncio.run(main())


def test_who_takes_over_from_a_silent_owner_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def complete(transport: Any, peer: PeerId, request: Any) -> Answer:
        if peer == "frozen":  # as tests/runtime/serving/requests/test_silence.py has it
            await asyncio.sleep(SILENT_SECONDS + PING_SECONDS)
            raise StreamBroken(f"{peer} is silent, and does not say whether it is there")
        return Answer(text="", tokens=(3,), finish="length", prompt_tokens=1, route=(peer,), seconds=0.1)

    def context(*owners: str) -> Any:
        left = list(owners)

        async def claims(job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
            peer = PeerId(left.pop(0) if len(left) > 1 else left[0])
            return (
                ClaimRecord(
                    job=job, stage=stage, peer=peer, role="owner", term=1, score=1.0, step=0, load=0.0, ready=True,
                ),
            )  # fmt: skip

        return SimpleNamespace(transport=None, leases=SimpleNamespace(claims_or_recent=claims))

    manifest = SimpleNamespace(name="gpt", serve=None, admission=SimpleNamespace(kind="open"))
    prepared: Any = SimpleNamespace(job=JobId("ab" * 32), manifest=manifest)
    monkeypatch.setattr(tokens, "complete", complete)
    found = run(first_token(context("frozen", "frozen", "successor"), prepared, 180.0))
    assert found is not None and found.route == ("successor",)
    with pytest.raises(JobFailed, match="no token came around in 180 s"):
        run(first_token(context("frozen"), prepared, 180.0))
