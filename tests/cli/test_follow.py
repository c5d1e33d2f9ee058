"""Watching a job: each loss is told once, from whichever peer leads it, until it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.cli import job_client
from fusion.cli.follow import Shown, progress_line
from fusion.runtime.belief import reading
from fusion.runtime.belief.naming import Known
from fusion.runtime.job.progress import Progress
from fusion.swarm.authority.belief import Belief, Standing
from fusion.swarm.directory.job_order import JOB_TTL_SECONDS
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.errors import PeerUnreachable, StreamClosed, SwarmError
from fusion.swarm.transport import Frame, PeerId

JOB = JobId("ab" * 32)
RUNNING = Progress(
    job=JOB, state="running", step=3, steps=9, loss=2.0, recent=((2, 2.5), (3, 2.0)), tokens_per_second=12_300.0,
    busy=(0.81, 0.79), sent_bytes=3 << 20,
)  # fmt: skip
DONE = replace(RUNNING, state="done", step=9, recent=((8, 1.2), (9, 1.0)))


def record(name: str = "gpt", job: str = JOB, **changes: Any) -> JobRecord:
    fields: dict[str, Any] = {
        "job": JobId(job), "name": name, "kind": "train", "state": "running", "term": 1, "step": 3,
        "lead": PeerId("lead-1"), "stages": 2, "snapshot": None, "snapshot_step": 0, "author": PeerId("lead-1"),
    }  # fmt: skip
    return JobRecord(**{**fields, **changes})


def test_each_loss_is_told_once() -> None:
    shown = Shown()
    assert shown.record(replace(RUNNING, recent=((0, 5.5),)))["losses"] == [[0, 5.5]]
    assert shown.record(RUNNING)["losses"] == [[2, 2.5], [3, 2.0]]
    assert shown.record(RUNNING)["losses"] == []
    later = replace(RUNNING, step=4, recent=((3, 2.0), (4, 1.9)))
    assert shown.record(later)["losses"] == [[4, 1.9]]


def test_each_validation_is_told_once() -> None:
    shown = Shown()
    assert shown.new_validation(RUNNING) is None
    validated = replace(RUNNING, validation_loss=2.2, validation_step=3)
    assert "2.2000" in str(shown.new_validation(validated))
    assert shown.new_validation(validated) is None


def test_the_line_says_what_matters() -> None:
    line = progress_line(RUNNING)
    for part in ("running", "3/9", "2.000", "12.3k tokens/s", "81% 79%", "3.0 MiB"):
        assert part in line
    assert "lost" not in line and "discarded" not in line
    shaken = progress_line(replace(RUNNING, losses=1, discarded=2, replayed=3))
    assert "lost 1 owner" in shaken and "discarded 2, replayed 3" in shaken


def test_one_job_is_meant_or_it_is_said_which_there_are() -> None:
    jobs = [record("gpt", "aa" * 32), record("bert", "ab" * 32)]
    found = [Known(Belief(record=job, standing=Standing.PROVEN, owned=True), None) for job in jobs]
    assert job_client.pick(found[:1], jobs, "gpt") is found[0]
    with pytest.raises(ValueError, match="names 2 jobs; say which: aaaaaaaaaaaa, abab"):
        job_client.pick(found, jobs, "a")
    with pytest.raises(ValueError, match=r"no job is called 'llama' \(jobs: bert, gpt\)"):
        job_client.pick([], jobs, "llama")
    assert job_client.unproven(found[0]) is None
    bare = Known(replace(found[0].belief, standing=Standing.BARE), None)
    assert "stranger" in str(job_client.unproven(bare))


class Lead:
    """A stream to a peer that says its frames and then ends, or is `silent`."""

    def __init__(self, frames: list[Frame], *, silent: bool = False) -> None:
        self._frames = iter(frames)
        self._silent = silent
        self.aborted = False

    async def send(self, kind: str, header: dict[str, Any]) -> None:
        assert (kind, header) == ("watch", {"job": JOB})

    async def receive(self) -> Frame:
        for frame in self._frames:
            return frame
        if self._silent:
            await asyncio.Event().wait()
        raise StreamClosed("it ended")

    def abort(self) -> None:
        self.aborted = True


class Swarm:
    """A directory that gives its records one after another (the last for ever), and leads by peer id."""

    def __init__(self, records: list[JobRecord | None], leads: dict[str, Iterator[Lead]]) -> None:
        self._records = records
        self._leads = leads
        self.transport = SimpleNamespace(open=self.open)
        self.directory = SimpleNamespace(job_records=self.job_records, claims=self.claims)

    async def job_records(self, job: JobId) -> tuple[JobRecord, ...]:
        found = self._records.pop(0) if len(self._records) > 1 else self._records[0]
        return () if found is None else (found,)

    async def claims(self, job: JobId, stage: int) -> tuple[SimpleNamespace, ...]:
        held = {peer: "owner" if peer.startswith("lead") else "released" for peer in self._leads}
        return tuple(SimpleNamespace(peer=peer, role=role) for peer, role in held.items())

    async def open(self, peer: str, protocol: str) -> Lead:
        lead = next(self._leads.get(peer, iter(())), None)
        if lead is None:
            raise PeerUnreachable(f"{peer} is gone")
        return lead


def watched(swarm: Swarm) -> list[Progress]:
    async def collect() -> list[Progress]:
        return [progress async for progress in job_client.watch(swarm, JOB)]  # type: ignore[arg-type]

    return run(collect())


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "RETRY_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _all_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def manifest_of(*_: Any) -> None:
        return None

    async def judge_by_claims(
        context: Any, job: JobId, words: tuple[JobRecord, ...], manifest: None
    ) -> Belief | None:
        return Belief(record=words[0], standing=Standing.PROVEN, owned=True) if words else None

    monkeypatch.setattr(reading, "manifest_of", manifest_of)
    monkeypatch.setattr(reading, "judge_by_claims", judge_by_claims)


def said(progress: Progress) -> Frame:
    return Frame("progress", progress.to_header())


def test_watch_until_done() -> None:
    lead = Lead([said(RUNNING), said(DONE)])
    assert watched(Swarm([record()], {"lead-1": iter([lead])})) == [RUNNING, DONE]
    assert lead.aborted


def test_watch_goes_with_the_lead() -> None:
    """The first lead dies in mid-stream; the directory then names another; a third only redirects."""
    leads = {
        "lead-1": iter([Lead([said(RUNNING)])]),
        "lead-2": iter([Lead([Frame("redirect", {"lead": "lead-3"})])]),
        "lead-3": iter([Lead([said(DONE)])]),
    }
    records = [record(), record(lead=PeerId("lead-2")), record(lead=PeerId("lead-3"))]
    assert watched(Swarm([None, record(lead=None), *records], leads)) == [RUNNING, DONE]


def test_watch_a_job_whose_lead_ended_and_left() -> None:
    [last] = watched(Swarm([record(state="failed", message="stage 1: out of memory", step=7)], {}))
    assert (last.state, last.message, last.step) == ("failed", "stage 1: out of memory", 7)


def test_watch_keeps_what_it_heard_of_a_job_that_ended_out_of_sight() -> None:
    """The lead dies at the very end; another owner says that the job is done."""
    swarm = Swarm(
        [record(), record(state="done", step=9, lead=None)], {"lead-1": iter([Lead([said(RUNNING)])])}
    )
    assert watched(swarm) == [RUNNING, replace(RUNNING, state="done", step=9)]


def test_watch_asks_the_lead_of_a_job_that_ended_before_anybody_asked() -> None:
    swarm = Swarm([record(state="done", step=9)], {"lead-1": iter([Lead([said(DONE)])])})
    assert watched(swarm) == [DONE]


def test_watch_hears_how_a_job_went_from_who_outlived_its_lead() -> None:
    """The lead said that it is done before it died: nobody else says it yet."""
    stages = {
        "owner-1": iter([Lead([Frame("redirect", {"lead": None})])]),
        "owner-2": iter([Lead([said(DONE)])]),
    }
    swarm = Swarm(
        [record(), record(state="done", step=9)], {"lead-1": iter([Lead([said(RUNNING)])]), **stages}
    )
    assert watched(swarm) == [RUNNING, DONE]


def test_watch_goes_on_where_a_lead_says_nothing_any_more() -> None:
    """It is frozen, or means to hold us up; the directory names another one meanwhile. A slow step is no end."""
    frozen = Lead([said(RUNNING)], silent=True)
    leads = {
        "lead-1": iter([frozen, Lead([said(RUNNING)], silent=True), Lead([], silent=True)]),
        "lead-2": iter([Lead([said(DONE)])]),
    }
    records: list[JobRecord | None] = [record(), record(), record(), record(lead=PeerId("lead-2"))]
    assert watched(Swarm(records, leads)) == [RUNNING, DONE] and frozen.aborted


def test_watch_takes_nonsense_for_no_word() -> None:
    leads = {
        "lead-1": iter([Lead([Frame("progress", {"job": JOB, "state": "running", "step": "many"})])]),
        "lead-2": iter([Lead([said(DONE)])]),
    }
    assert watched(Swarm([record(), record(lead=PeerId("lead-2"))], leads)) == [DONE]


def test_watch_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "SILENCE_SECONDS", 0.0)
    with pytest.raises(SwarmError, match="nobody speaks"):
        watched(Swarm([None], {}))


def test_the_record_of_a_lead_that_has_died_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have ended the job since; the dead one's claim of the first stage may live."""
    stale = Known(Belief(record=record(), standing=Standing.PROVEN, owned=True), None)
    ended = Known(Belief(record=record(state="done"), standing=Standing.BARE, owned=False), None)
    looked: list[float] = []

    async def main(found: list[Known | None], *, answers: bool = False) -> Known:
        clock = asyncio.get_running_loop().time

        async def find(context: Any, wanted: str) -> Known:
            looked.append(clock())
            known = found.pop(0) if len(found) > 1 else found[0]
            if known is None:
                raise ValueError("no job is called so")
            return known

        async def ask(context: Any, peer: PeerId, job: JobId) -> Any:
            if not answers:
                raise PeerUnreachable("connection refused")
            yield RUNNING

        monkeypatch.setattr(job_client, "find_known", find)
        monkeypatch.setattr(job_client, "_progress", ask)
        monkeypatch.setattr(job_client, "RETRY_SECONDS", 0.5)
        return await job_client.find_current(SimpleNamespace(), "gpt")  # type: ignore[arg-type]

    assert run(main([stale, stale, ended])) is ended and len(looked) == 3
    assert run(main([stale, ended], answers=True)) is stale
    began = len(looked)
    assert run(main([stale, None])) is stale  # nobody speaks of it then
    assert JOB_TTL_SECONDS <= looked[-1] - looked[began] + 1.0 <= 2 * JOB_TTL_SECONDS
