"""The last record of each job that this peer holds or stands by for, on its disk. A job survives the stop of all its peers:
one that starts again publishes the record, and the job goes on from the newest snapshot.

FOLDER/<job>.json    version and fields of the job's record; its `step` is that of the snapshot, which is what can be
                     gone back to
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fusion.runtime.job.fields import build
from fusion.swarm.authority.revocation import lists_in
from fusion.swarm.directory.job_order import ENDED
from fusion.swarm.directory.records import Digest, JobId, JobRecord, check_fields, is_digest
from fusion.swarm.errors import RecordError

log = logging.getLogger(__name__)

VERSION = 1
MAX_BYTES = 16 << 10
MAX_FILES = 1000
MAX_AGE_SECONDS = 14 * 86400.0
REFRESH_SECONDS = 6 * 3600.0  # the job of a file that is much older may have ended long ago

T = TypeVar("T")
Version = tuple[int, Digest | None, frozenset[bytes]]  # term, snapshot and lists of revoked grants


class JobFiles:
    """Blocking: the event loop calls it through threads. One per folder and process. `now` gives unix seconds."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now = now

    def load(self) -> tuple[JobRecord, ...]:
        """All valid records; logs one line for each file that is not. Deletes files older than MAX_AGE_SECONDS: the job has
        probably ended without us. Never raises."""
        found = []
        try:
            paths = sorted(self._folder.glob("*.json"))[:MAX_FILES]
            for left in self._folder.glob("*.new"):
                left.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot read %s: %s", self._folder, error.strerror or error)
            return ()
        for path in paths:
            try:
                if self._now() - path.stat().st_mtime > MAX_AGE_SECONDS:
                    path.unlink()
                else:
                    found.append(_read(path))
            except (OSError, ValueError, RecordError) as error:
                log.warning("%s is left alone: %s", path, error)
        return tuple(found)

    def save(self, record: JobRecord) -> None:
        """Replace the job's record atomically. Raises OSError."""
        values = fields_of(record)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(record.job)
        scratch = path.with_suffix(".new")
        try:
            with scratch.open("w") as file:
                json.dump({"version": VERSION, "record": values}, file)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise

    def remove(self, job: JobId) -> None:
        """The job has ended. Raises OSError."""
        self._path(job).unlink(missing_ok=True)

    def _path(self, job: JobId) -> Path:
        assert is_digest(job), "a job's id names a file"
        return self._folder / f"{job}.json"


class KeptJobRecords:
    """Which of the board's records are on the disk. `clock`: monotonic seconds."""

    def __init__(self, files: JobFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self._kept: dict[JobId, tuple[Version, float]] = {}  # what is on disk, and since when
        self._writing = asyncio.Lock()  # so that the later of two writes is the one that stays

    async def load(self) -> tuple[JobRecord, ...]:
        records = await asyncio.to_thread(self._files.load)
        for record in records:
            self._kept[record.job] = (_version(record), -math.inf)  # due for a refresh: the job lives
        return records

    async def keep(self, records: Iterable[JobRecord], gone: Callable[[JobId], bool]) -> None:
        """Bring the files up to date: `records` are those of the jobs that concern us; `gone` is whether the file of any other
        job is needed no more."""
        async with self._writing:
            live = {record.job: record for record in records if record.state not in ENDED}
            for job, record in live.items():
                version, since = self._kept.get(job, (None, 0.0))
                if version != _version(record) or self._clock() - since >= REFRESH_SECONDS:
                    # Before the write: a disk that refuses it is logged once.
                    self._kept[job] = (_version(record), self._clock())
                    await self._write(self._files.save, record, record.name)
            for job in [job for job in self._kept if job not in live and gone(job)]:
                del self._kept[job]
                await self._write(self._files.remove, job, job[:12])

    async def _write(self, change: Callable[[T], None], what: T, name: str) -> None:
        try:
            await asyncio.to_thread(change, what)
        except OSError as error:
            log.warning("the file of job %s: %s", name, error.strerror or error)


def fields_of(record: JobRecord) -> dict[str, Any]:
    """The record as JSON values; its step is that of the snapshot, from which the job would resume."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    proof = [data.hex() for data in record.proof]
    return {**values, "step": max(record.snapshot_step, 0), "proof": proof}


def record_of(values: object) -> JobRecord:
    """The inverse of `fields_of`. Raises ValueError."""
    if isinstance(values, dict) and isinstance(values.get("proof"), list):
        values = {**values, "proof": [bytes.fromhex(str(data)) for data in values["proof"]]}
    return build(JobRecord, values, "record")


def _version(record: JobRecord) -> Version:
    return record.term, record.snapshot, lists_in(record.proof)


def _read(path: Path) -> JobRecord:
    """Raises OSError, ValueError, RecordError."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES} bytes")
    try:
        value: Any = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise ValueError(f"not a job file of version {VERSION}")
    record = record_of(value.get("record"))
    check_fields(record)
    if path.name != f"{record.job}.json":
        raise ValueError("it speaks of another job than its name")
    return record
