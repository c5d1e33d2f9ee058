"""The model of a job that still trains stays where its newest snapshot cannot be served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from support.known_job import Known

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

    monkeypatch.setattr(served_snapshots, "export_newest", fails)
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


def believed(step: int, *, over: bool) -> Any:
    record = SimpleNamespace(name="gpt", job="j", state="running", snapshot="d", snapshot_step=step)
    return SimpleNamespace(over=over, record=record)


class Following:
    """`serve JOB`, of a job of which `looks` are what is believed one after the other; handing a step over fails as often as `fails`
    says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: Iterable[Any], fails: dict[int, int]) -> None:
        self.served: list[int] = []
        self.notes: list[str] = []
        self._looks, self._fails = list(looks), fails
        for name in ("LOOK_SECONDS", "DRAIN_SECONDS", "LAST_PAUSE_SECONDS"):
            monkeypatch.setattr(served_snapshots, name, 0.0)
        monkeypatch.setattr(served_snapshots, "_read", self._belief)
        monkeypatch.setattr(served_snapshots, "export_newest", self._fetch)
        monkeypatch.setattr(served_snapshots, "read_belief", self._belief)

    async def run(self) -> None:
        store = SimpleNamespace(held=dict, delete=dict)
        time = SimpleNamespace(monotonic=lambda: 0.0)
        context: Any = SimpleNamespace(clock=time, blobs=SimpleNamespace(store=store))
        hands: Any = SimpleNamespace(
            hand_over=self._hand_over, status=lambda _: None, note=self.notes.append, replaced=lambda _: None, stop=_stop
        )  # fmt: skip
        known: Any = Known(self._looks.pop(0))
        await served_snapshots.serve_snapshots(context, known, hands)

    async def _belief(self, *_: object, **__: object) -> Any:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    async def _fetch(self, context: Any, known: Any, folder: object) -> int:
        step: int = known.record.snapshot_step
        return step

    async def _hand_over(self, folder: object, step: int) -> Any:
        if self._fails.get(step, 0) > 0:
            self._fails[step] -= 1
            raise PlacementError("no peer has 1.2 GiB free")
        self.served.append(step)
        return SimpleNamespace(blobs=(), job=f"model of step {step}", manifest=None)


async def _stop(record: object) -> None:
    return


@pytest.mark.parametrize("over", [False, True])
def test_the_last_snapshot_is_tried_again_where_it_could_not_be_served(
    over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`over`: whether the job was when it was tried first."""
    looks = [believed(10, over=False), believed(20, over=over), believed(20, over=True)]
    following = Following(monkeypatch, looks, {20: 1})
    asyncio.run(following.run())
    assert following.served == [10, 20]


def test_a_last_snapshot_that_cannot_be_served_is_an_error_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    following = Following(monkeypatch, [believed(10, over=False), believed(20, over=True)], {20: 99})
    with pytest.raises(
        JobFailed, match="the last snapshot of gpt, of step 20, cannot be served; that of step 10 stays"
    ):
        asyncio.run(following.run())
    assert following.served == [10] and len(following.notes) == served_snapshots.LAST_TRIES
