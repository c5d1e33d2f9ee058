"""Which jobs are inspected for a name that strangers use too."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.runtime.belief import naming
from fusion.runtime.belief.naming import CANDIDATES, CHECKS, find
from fusion.runtime.belief.reading import UNKNOWN_STAGES, by_job
from fusion.swarm.authority.statements import seal_statement, statement_of
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.identity import Identity, verify
from fusion.swarm.transport import PeerId

ALICE, MALLORY = Identity.generate(), Identity.generate()


def launched(number: int, author: Identity) -> JobRecord:
    record = JobRecord(
        job=JobId(f"{number:064x}"), name="tiny", kind="serve", state="running", term=1, step=0, lead=None,
        stages=1, snapshot=None, snapshot_step=-1, author=author.peer_id,
    )  # fmt: skip
    statement = statement_of(replace(record, state="launching"), author.peer_id, 0)
    return replace(record, proof=(seal_statement(statement, author.sign),))


@pytest.mark.parametrize("requested", ["its author", "known", "nobody's"])
def test_a_stranger_who_calls_hundreds_of_jobs_so_hides_nobodys(
    monkeypatch: pytest.MonkeyPatch, requested: str
) -> None:
    """Ids are inspected in their order, and a stranger chooses how those of its jobs begin."""
    honest = launched(1 << 200, ALICE)
    records = [*(launched(number, MALLORY) for number in range(3 * CANDIDATES)), honest]
    inspected: list[JobId] = []

    async def inspect(context: Any, job: JobId, records: Any) -> Any:
        inspected.append(job)
        author = ALICE.peer_id if job == honest.job else MALLORY.peer_id
        named = naming.Named(job=job, name="tiny", author=author, owned=True)
        return SimpleNamespace(record=records[0], named=named)

    monkeypatch.setattr(naming, "inspect", inspect)
    context: Any = SimpleNamespace(directory=SimpleNamespace(verify=verify), random=Random(7))
    wanted = f"tiny@{ALICE.peer_id}" if requested == "its author" else "tiny"
    known: tuple[PeerId, ...] = (ALICE.peer_id,) if requested == "known" else ()

    async def main() -> None:
        if requested == "nobody's":
            with pytest.raises(ValueError, match="2 authors"):
                await find(context, wanted, known, records)
        else:
            (found,) = await find(context, wanted, known, records)
            assert found.record.job == honest.job
        assert honest.job in inspected and len(inspected) == CANDIDATES

    run(main())


def test_a_leads_word_counts_for_the_author_that_launched_the_job_and_forgeries_cost_no_more_than_a_bound() -> (
    None
):
    checked = 0

    def counted(peer: str, signature: bytes, data: bytes) -> bool:
        nonlocal checked
        checked += 1
        return verify(peer, signature, data)

    lead, forger = Identity.generate().peer_id, Identity.generate().peer_id
    honest = replace(launched(1 << 200, ALICE), author=lead)
    forged = [replace(launched(number, MALLORY), author=forger) for number in range(2 * CHECKS)]
    statements = [statement_of(replace(each, state="launching"), ALICE.peer_id, 0) for each in forged]
    records = [
        honest,
        *(
            replace(each, proof=(seal_statement(statement, MALLORY.sign),))
            for each, statement in zip(forged, statements, strict=True)
        ),
    ]
    context: Any = SimpleNamespace(directory=SimpleNamespace(verify=counted), random=Random(7))
    found = naming._likely(context, by_job(records), "tiny", (ALICE.peer_id,))
    assert found[0] == honest.job and len(found) == len(records)
    assert 0 < checked <= CHECKS


def test_of_a_job_whose_manifest_nobody_gives_few_stages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever speaks of it says how many it has, and each costs a look into the directory."""
    read: list[int] = []

    async def none(*_: object) -> None:
        return None

    async def claims_of(_: JobId, stages: range) -> tuple[tuple[()], ...]:
        read.extend(stages)
        return tuple(() for _ in stages)

    monkeypatch.setattr(naming, "manifest_of", none)
    monkeypatch.setattr("fusion.runtime.belief.reading.judged", lambda *_: SimpleNamespace())
    context: Any = SimpleNamespace(leases=SimpleNamespace(claims_of=claims_of))
    record = replace(launched(1, MALLORY), stages=4096)
    assert run(naming.inspect(context, record.job, [record])).manifest is None
    assert len(read) == UNKNOWN_STAGES


def test_of_all_jobs_that_are_spoken_of_a_stranger_s_hide_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are inspected in their order, and a stranger chooses how those of its jobs begin."""
    honest, known = launched(1 << 200, ALICE), launched(1 << 201, MALLORY)
    records = [*(launched(number, MALLORY) for number in range(3 * CANDIDATES)), honest, known]

    async def inspect(context: Any, job: JobId, records: Any) -> Any:
        return SimpleNamespace(record=records[0])

    monkeypatch.setattr(naming, "inspect", inspect)
    context: Any = SimpleNamespace(random=Random(7))

    async def main() -> None:
        found: Any = await naming.candidates(context, records)
        jobs = [each.record.job for each in found]
        assert honest.job in jobs and len(jobs) == CANDIDATES and jobs == sorted(jobs)
        found = await naming.candidates(context, records, known={known.job, JobId("f" * 64)})
        jobs = [each.record.job for each in found]
        assert {honest.job, known.job} <= {*jobs} and len(jobs) == CANDIDATES + 1

    run(main())
