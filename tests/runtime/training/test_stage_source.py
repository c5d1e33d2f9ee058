"""What a training stage is made of, where a peer has no room for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.runtime.job.errors import Refused
from fusion.runtime.training.stage_source import StageSource
from fusion.swarm.blobs.download import TooLarge
from fusion.swarm.directory.records import Digest, JobId

DATA = Digest("d" * 64)


class Blobs:
    """Of a peer that lends 40 MiB of its disk, where one holder has data of 80 MiB."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(largest_bytes=10 << 20)

    def of(self, job: JobId) -> Blobs:
        return self

    async def fetch(self, digest: Digest, hints: object, *, max_bytes: int) -> None:
        raise TooLarge(digest, 80 << 20, max_bytes)


def test_data_that_a_peer_has_no_room_for_are_left_to_others_and_it_says_why() -> None:
    """It claimed the stage again and again, and whoever launched the job was told that nobody has it."""
    context: Any = SimpleNamespace(blobs=Blobs(), accounts=SimpleNamespace())
    graphs: Any = None
    train = SimpleNamespace(data=SimpleNamespace(kind="arrays", train=DATA, held_out=None))
    manifest: Any = SimpleNamespace(name="digits", author="", proposed=("a",), stages=1, train=train)
    graph = SimpleNamespace(inputs=(SimpleNamespace(name="images"),))
    plan: Any = SimpleNamespace(stage=SimpleNamespace(index=0, receives=(), graph=graph))
    files: Any = None
    with pytest.raises(Refused, match=r"the data of digits are 80.0 MiB; .* takes 10.0 MiB, a quarter"):
        asyncio.run(StageSource(context, graphs).parts(JobId("a" * 64), manifest, plan, files, {}))
