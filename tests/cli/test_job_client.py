from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.cli import job_client
from fusion.runtime.job.progress import Progress
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId

JOBS = [JobId(f"{number:064x}") for number in range(2)]


def test_a_model_in_the_place_of_another_needs_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job_records() -> Any:
        return tuple(SimpleNamespace(job=job, kind="serve", state="running", name="n") for job in JOBS)

    async def manifest(context: Any, job: JobId, said: Any) -> Any:
        return SimpleNamespace(name="n", author=PeerId("a"), launched_at=JOBS.index(job))

    async def judge_by_claims(context: Any, job: JobId, said: Any, manifest: Any) -> Any:
        return SimpleNamespace(record=said[0], owned=True, over=False)

    monkeypatch.setattr("fusion.runtime.belief.naming.manifest_of", manifest)
    monkeypatch.setattr("fusion.runtime.belief.naming.judge_by_claims", judge_by_claims)
    context: Any = SimpleNamespace(home=tmp_path, directory=SimpleNamespace(job_records=job_records))
    for name in ("n", ""):
        found, _ = asyncio.run(job_client.find_served(context, name, "NAME"))
        assert found == JOBS[1], "the newer one"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client has waited, in no time."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    loop = SimpleNamespace(time=lambda: sum(waited))
    instant = SimpleNamespace(sleep=sleep, get_running_loop=lambda: loop)
    monkeypatch.setattr(job_client, "asyncio", instant)
    return waited


def led(monkeypatch: pytest.MonkeyPatch, says: Callable[[], Any]) -> Any:
    """What `find_led` makes of a job that is found so."""

    async def find_job(*_: Any) -> Any:
        return says()

    monkeypatch.setattr(job_client, "find_job", find_job)
    context: Any = SimpleNamespace()
    return asyncio.run(job_client.find_led(context, "n"))


def test_who_has_something_to_say_to_the_lead_waits_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    said: list[Any] = [
        SimpleNamespace(state="launching", lead=None),
        None,
        SimpleNamespace(state="running", lead="l"),
    ]

    def next_one() -> Any:
        if (found := said.pop(0)) is None:
            raise ValueError("nobody speaks of it")
        return found

    assert led(monkeypatch, next_one).lead == "l" and len(waits) == 2


@pytest.mark.parametrize(("state", "longest"), [("launching", job_client.LEAD_SECONDS), ("stopped", 0.0)])
def test_a_lead_that_never_comes_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], state: str, longest: float
) -> None:
    assert led(monkeypatch, lambda: SimpleNamespace(state=state, lead=None)).lead is None
    assert longest <= sum(waits) <= longest + job_client.RETRY_SECONDS


@pytest.mark.parametrize(
    ("state", "says"), [("stopped", "is stopped already"), ("launching", "has no lead yet")]
)
def test_a_job_that_has_ended_is_not_waited_for(state: str, says: str) -> None:
    record: Any = SimpleNamespace(job=JOBS[0], name="n", state=state, lead=None)
    context: Any = SimpleNamespace()
    with pytest.raises(SwarmError, match=says):
        asyncio.run(job_client.stop(context, record, Identity.generate()))


def test_a_job_without_news_is_not_one_that_nobody_speaks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a served model, or a step that takes minutes: the lead is there, and says nothing new for as long as one waits."""
    now = [0.0]
    asked = 0
    record: Any = SimpleNamespace(job=JOBS[0], lead=PeerId("lead"), state="running")

    async def job_records(job: JobId) -> tuple[Any, ...]:
        return () if asked > 3 else (record,)  # then it is gone

    async def manifest(*_: Any) -> None:
        return None

    async def judge_by_claims(context: Any, job: JobId, said: Any, manifest: Any) -> Any:
        return SimpleNamespace(record=said[0]) if said else None

    async def ask(*_: Any) -> AsyncIterator[Progress]:
        nonlocal asked
        asked += 1
        yield Progress(job=JOBS[0], state="running")
        now[0] += job_client.QUIET_SECONDS

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("fusion.runtime.belief.reading.manifest_of", manifest)
    monkeypatch.setattr("fusion.runtime.belief.reading.judge_by_claims", judge_by_claims)
    monkeypatch.setattr(job_client, "_progress", ask)
    monkeypatch.setattr(job_client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(job_client, "asyncio", SimpleNamespace(sleep=sleep))
    context: Any = SimpleNamespace(directory=SimpleNamespace(job_records=job_records))
    told: list[str] = []

    async def watch() -> None:
        async for progress in job_client.watch(context, JOBS[0]):
            told.append(progress.state)

    with pytest.raises(SwarmError, match="nobody speaks for the job"):
        asyncio.run(watch())
    assert (told, asked) == (["running"], 4)
    assert now[0] >= 4 * job_client.QUIET_SECONDS + job_client.SILENCE_SECONDS
