from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fusion.runtime.hosting.jobs.files import (
    MAX_AGE_SECONDS,
    MAX_BYTES,
    REFRESH_SECONDS,
    JobFiles,
    KeptJobRecords,
)
from fusion.swarm.authority.revocation import mark, seal_revocation
from fusion.swarm.directory.records import Digest, JobId, JobRecord
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock

SNAPSHOT = Digest("5" * 64)
PEER = Identity.generate().peer_id


def record(letter: str = "a", **changes: object) -> JobRecord:
    made = JobRecord(
        job=JobId(letter * 64), name="work", kind="train", state="running", term=3, step=45, lead=PEER, stages=2,
        snapshot=Digest("5" * 64), snapshot_step=40, message="", author=PEER,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_what_was_saved_is_loaded_with_the_step_that_can_be_gone_back_to(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "jobs")
    assert files.load() == ()
    files.save(record("a"))
    files.save(record("b", snapshot=None, snapshot_step=-1, lead=None))
    files.save(record("a", term=4, snapshot_step=50))
    again = JobFiles(tmp_path / "jobs").load()
    assert again == (record("a", term=4, step=50, snapshot_step=50), record("b", step=0, snapshot=None, snapshot_step=-1, lead=None))  # fmt: skip
    files.remove(JobId("a" * 64))
    files.remove(JobId("c" * 64))
    assert [each.job[0] for each in files.load()] == ["b"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "[" * 10_000, "x" * (MAX_BYTES + 1), json.dumps({"version": 2, "record": {}}),
        json.dumps({"version": 1}), json.dumps({"version": 1, "record": {"job": "a" * 64}}), "\x00\xff",
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_one_line_in_the_log(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = JobFiles(tmp_path)
    files.save(record("b"))
    (tmp_path / f"{'a' * 64}.json").write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert [each.job[0] for each in files.load()] == ["b"]
    assert len(caplog.records) == 1 and "\n" not in caplog.text.rstrip()


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "../../etc"}, {"job": "b" * 64}, {"snapshot": "nonsense"}, {"term": -1}, {"term": True}, {"stages": 10**9},
        {"author": "nobody"}, {"kind": "mine"}, {"message": "two\nlines"}, {"extra": 1}, {"step": 2**60},
    ],
)  # fmt: skip
def test_a_file_with_a_value_that_no_record_carries_is_left_alone(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    files = JobFiles(tmp_path)
    files.save(record())
    path = tmp_path / f"{'a' * 64}.json"
    value = json.loads(path.read_text())
    value["record"].update(changes)
    path.write_text(json.dumps(value))
    assert files.load() == ()


def test_a_crash_while_writing_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = JobFiles(tmp_path)
    files.save(record())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.save(record(term=9))
    (tmp_path / "half.new").write_text("{")
    assert [each.term for each in JobFiles(tmp_path).load()] == [3]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_job_that_nobody_has_spoken_of_for_weeks_is_not_brought_back(tmp_path: Path) -> None:
    JobFiles(tmp_path).save(record())
    later = time.time() + MAX_AGE_SECONDS
    assert len(JobFiles(tmp_path, lambda: later - 60).load()) == 1
    assert JobFiles(tmp_path, lambda: later + 60).load() == ()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_when_the_snapshot_changes_and_now_and_then(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        files = JobFiles(tmp_path)
        kept = KeptJobRecords(files, clock)
        running = record(step=0, snapshot=None, snapshot_step=0)
        path = tmp_path / f"{running.job}.json"

        def gone(job: JobId) -> bool:
            return False

        await kept.keep([running], gone)
        path.unlink()
        await kept.keep([replace(running, step=5, message="busy")], gone)  # the file would say the same
        assert not path.exists()
        await kept.keep([replace(running, snapshot=SNAPSHOT, snapshot_step=5)], gone)
        assert [each.step for each in files.load()] == [5]
        path.unlink()
        clock.advance(REFRESH_SECONDS)
        await kept.keep([replace(running, snapshot=SNAPSHOT, snapshot_step=5)], gone)
        assert path.exists()
        await kept.keep([], lambda job: True)
        assert not path.exists()

    asyncio.run(main())


def test_a_file_is_written_when_somebody_is_revoked(tmp_path: Path) -> None:
    async def main() -> None:
        files = JobFiles(tmp_path)
        kept = KeptJobRecords(files, ManualClock())
        issuer = Identity.generate()
        for at in (1, 2):
            gone = seal_revocation(record().job, [mark(PEER)], at, issuer)
            listed = record(proof=(b"a statement", gone))
            await kept.keep([record()], lambda job: False)
            await kept.keep([listed], lambda job: False)
            assert [each.proof for each in files.load()] == [listed.proof]

    asyncio.run(main())
