from __future__ import annotations

from dataclasses import replace

from fusion.cli.status import Stage, holdings_of, links_of, stage_line, stage_of, standby_text
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord
from fusion.swarm.transport import PeerId

JOB = JobRecord(
    job=JobId("a" * 64), name="demo", kind="train", state="running", term=1, step=42, lead=None, stages=2,
    snapshot=Digest("5" * 64), snapshot_step=40, author=PeerId("author"),
)  # fmt: skip


def claim(peer: str, **changes: object) -> ClaimRecord:
    made = ClaimRecord(
        job=JOB.job,
        stage=0,
        peer=PeerId(peer),
        role="standby",
        term=1,
        score=0.5,
        step=40,
        load=0.0,
        ready=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_whoever_would_take_over_first_comes_first() -> None:
    owner, beside = claim("owner", role="owner", term=3), claim("beside", role="replica")
    late, loading, best = claim("late", step=30), claim("loading", step=42, ready=False), claim("best")
    gone = claim("gone", role="released")
    stage = stage_of(JOB, 0, [loading, beside, late, gone, owner, best])
    assert (stage.owner, stage.replicas, stage.standbys) == (owner, (beside,), (best, late, loading))
    assert [stage.behind(each) for each in stage.standbys] == [2, 12, 0]
    texts = [standby_text(stage, each) for each in stage.standbys]
    assert texts == ["ready, 2 steps behind", "ready, 12 steps behind", "loading"]


def test_a_served_stage_is_never_behind() -> None:
    stage = stage_of(replace(JOB, kind="serve", step=0), 0, [claim("a", step=0)])
    assert standby_text(stage, stage.standbys[0]) == "ready"


def test_a_replica_says_how_many_sessions_it_has() -> None:
    stage = stage_of(
        replace(JOB, kind="serve"), 0, [claim("a", role="owner"), claim("b", role="replica", load=1.0)]
    )
    assert [each.peer for each in stage.replicas] == ["b"] and not stage.standbys
    assert standby_text(stage, stage.replicas[0]) == "serves it too, 1 session"


def test_a_line_of_owners_says_how_many_could_take_over() -> None:
    owned = stage_of(JOB, 0, [claim("one", role="owner"), claim("two"), claim("three", ready=False)])
    loading = stage_of(JOB, 1, [claim("four", role="owner", ready=False)])
    empty = Stage(job=JOB, number=2, owner=None, replicas=(), standbys=())
    assert stage_line([owned, loading, empty], str.upper) == "0 ONE +1, 1 FOUR (loading) +0, 2 - +0"


def test_what_a_peer_holds_is_told_by_job_and_author() -> None:
    other = "b" * 64
    said = {"holds": [[JOB.job, 0, 100], [other, 3, 500], [JOB.job, 1, 200], ["x"], [1, 2, 3], ["y", 0, -1]]}
    assert holdings_of("peer", said, [JOB]) == [
        {"peer": "peer", "job": other, "name": other[:12], "author": "", "stages": [3], "memory_bytes": 500},
        {
            "peer": "peer", "job": JOB.job, "name": "demo", "author": "author", "stages": [0, 1], "memory_bytes": 300,
        },
    ]  # fmt: skip
    for nonsense in ({}, {"holds": None}, {"holds": {"a": 1}}, {"holds": "text"}):
        assert holdings_of("peer", nonsense, [JOB]) == []


def test_links_are_to_other_peers_and_what_is_none_is_left_out() -> None:
    said = {"traffic": {"b": [10, 20], "a": [5, 5], "c": ["many", 1], "d": 7}}
    assert links_of("a", said) == [{"from": "a", "to": "b", "sent_bytes": 10, "received_bytes": 20}]
    assert links_of("a", {"traffic": 3}) == links_of("a", {}) == []
