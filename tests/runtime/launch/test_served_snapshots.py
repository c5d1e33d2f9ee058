"""The model of a job that still trains stays where its newest snapshot cannot be served."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.dag.ir.errors import PlacementError
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.launch import served_snapshots
from fusion.swarm.errors import BlobError

KNOWN: Any = SimpleNamespace(record=SimpleNamespace(name="gpt", snapshot_step=40))


@pytest.mark.parametrize("error", [JobError, JobFailed, PlacementError, BlobError, OSError])
def test_a_snapshot_that_cannot_be_had_leaves_the_model_before(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> int:
        raise error("a shard lacks a variable")

    monkeypatch.setattr(served_snapshots, "_fetch", fails)
    notes: list[str] = []
    hands: Any = SimpleNamespace(status=lambda _: None, note=notes.append)
    held = {"the model before": 1, "half of the snapshot": 2}
    store = SimpleNamespace(held=lambda: dict(held), delete=held.pop)
    context: Any = SimpleNamespace(blobs=SimpleNamespace(store=store))
    before: Any = SimpleNamespace(blobs=("the model before",))
    assert asyncio.run(served_snapshots._serve(context, KNOWN, hands, before)) == (40, before)
    assert [*held] == ["the model before"]
    assert notes == ["the model before stays: a shard lacks a variable"]
    with pytest.raises(error):
        asyncio.run(served_snapshots._serve(context, KNOWN, hands, None))


def test_who_is_interrupted_before_the_model_before_has_ended_is_told_how_to_end_it() -> None:
    async def main() -> None:
        ending = asyncio.create_task(served_snapshots._end(context, before, hands))
        await asyncio.sleep(0)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending

    notes: list[str] = []
    hands: Any = SimpleNamespace(status=lambda _: None, note=notes.append)
    context: Any = None
    before: Any = SimpleNamespace(job="0123456789abcdef")
    asyncio.run(main())
    assert notes == ["the model before goes on as well; fusion-peer jobs stop 0123456789ab ends it"]
