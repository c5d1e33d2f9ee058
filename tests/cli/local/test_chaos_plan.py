"""The faults of a chaos run follow from its seed alone; its history from what the leads said alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.cli.local.chaos_plan import (
    JITTER,
    PARTITION_SECONDS,
    STOP_SECONDS,
    ChaosConfig,
    fault_plan,
    parse_seconds,
)
from fusion.cli.local.chaos_timeline import Timeline

CONFIG = ChaosConfig(peers=6, standbys=2, kill_every_seconds=15.0, minutes=5.0, seed=7)
JOB = "a" * 64


def test_the_same_seed_gives_the_same_faults_and_a_longer_run_begins_with_the_shorter_one() -> None:
    plan = fault_plan(CONFIG, 300.0)
    assert plan == fault_plan(CONFIG, 300.0)
    assert plan == fault_plan(CONFIG, 900.0)[: len(plan)]
    assert plan != fault_plan(ChaosConfig(peers=6, standbys=2, kill_every_seconds=15.0, seed=8), 300.0)


@given(
    seed=st.integers(0, 2**31),
    peers=st.integers(2, 20),
    every=st.floats(1.0, 60.0),
    stop=st.booleans(),
    partition=st.booleans(),
)
def test_faults_are_in_order_in_bounds_and_as_many_as_asked(
    seed: int, peers: int, every: float, stop: bool, partition: bool
) -> None:
    config = ChaosConfig(peers=peers, kill_every_seconds=every, seed=seed, stop=stop, partition=partition)
    until = 20 * every
    plan = fault_plan(config, until)
    assert [fault.at_seconds for fault in plan] == sorted(fault.at_seconds for fault in plan)
    kills = [fault for fault in plan if fault.kind == "kill"]
    assert abs(len(kills) - 20) <= 1
    quiet = ChaosConfig(peers=peers, kill_every_seconds=every, seed=seed)
    assert tuple(kills) == fault_plan(quiet, until)  # other kinds of fault do not change the kills
    for i, fault in enumerate(kills):
        assert abs(fault.at_seconds - (i + 1) * every) <= JITTER * every + 0.01
    for fault in plan:
        kind, _, number = fault.role.partition(" ")
        assert int(number) < {"stage": config.stages, "standby": config.standby_count}[kind]
        low, high = {"kill": (0.0, 0.0), "stop": STOP_SECONDS, "partition": PARTITION_SECONDS}[fault.kind]
        assert low <= fault.seconds <= high
        assert fault.group <= max(1, peers // 2)
    assert any(fault.kind == "stop" for fault in plan) == stop
    assert any(fault.kind == "partition" for fault in plan) == partition


def test_every_peer_is_hit_as_often_as_any_other() -> None:
    hits: dict[str, int] = {}
    for fault in fault_plan(CONFIG, 15.0 * 6000):
        hits[fault.role] = hits.get(fault.role, 0) + 1
    assert set(hits) == {"stage 0", "stage 1", "stage 2", "stage 3", "standby 0", "standby 1"}
    assert max(hits.values()) < 1.2 * min(hits.values())


def test_the_command_repeats_the_run() -> None:
    assert CONFIG.command == (
        "fusion-peer chaos --peers 6 --standbys 2 --kill-every 15s --minutes 5 --seed 7"
    )
    assert ChaosConfig(peers=4, stop=True, partition=True).command.endswith("--stop --partition --seed 0")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"peers": 1}, "--peers"),
        ({"peers": 3, "standbys": 3}, "--standbys"),
        ({"standbys": -1}, "--standbys"),
        ({"kill_every_seconds": 0.5}, "--kill-every"),
        ({"minutes": 0.0}, "--minutes"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_a_setting_out_of_range_is_named(fields: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ChaosConfig(**fields)  # type: ignore[arg-type]


def test_times_are_read() -> None:
    assert [parse_seconds(text, "--x") for text in ("15s", "500ms", "1.5m", " 2 min", "20", "1h")] == [
        15.0, 0.5, 90.0, 120.0, 20.0, 3600.0,
    ]  # fmt: skip
    for text in ("", "s", "-1s", "15 seconds", "1e3", "nan"):
        with pytest.raises(ValueError, match="--x"):
            parse_seconds(text, "--x")


# --- the history


def told(timeline: Timeline, lead: str, at: float, attempts: int, step: int, **more: object) -> None:
    record = {"event": "step", "job": JOB, "at": at, "attempts": attempts, "step": step, "state": "running",
              "snapshot": None, "snapshot_step": 0, **more}  # fmt: skip
    assert timeline.see(lead, record)


@pytest.fixture
def history() -> Timeline:
    """Steps 1 to 3, a kill at 13.5 during step 4; a new lead goes on from step 2, repeats step 3 and makes 4 and 5."""
    timeline = Timeline(job=JOB)
    told(timeline, "a", 9.0, 0, 0)
    told(timeline, "a", 10.0, 1, 0)
    for i in (1, 2, 3):
        told(
            timeline,
            "a",
            10.0 + i,
            1,
            i,
            snapshot="b" * 64 if i > 1 else None,
            snapshot_step=2 if i > 1 else 0,
        )
    told(timeline, "b", 15.0, 0, 2, message="waiting for stage 1")
    told(timeline, "b", 16.0, 1, 2)
    told(timeline, "b", 17.0, 1, 3)
    told(timeline, "b", 18.0, 1, 4)
    told(timeline, "b", 18.5, 1, 4, message="a word that commits nothing")
    told(timeline, "b", 19.0, 1, 5, state="done")
    return timeline


def test_commits_are_told_from_beginnings(history: Timeline) -> None:
    assert [(commit.step, commit.at) for commit in history.commits] == [
        (1, 11.0), (2, 12.0), (3, 13.0), (3, 17.0), (4, 18.0), (5, 19.0),
    ]  # fmt: skip
    assert [(attempt.lead, attempt.step) for attempt in history.attempts] == [("a", 0), ("b", 2)]
    assert (history.step, history.lead, history.ended_at) == (5, "b", 19.0)
    assert (history.discarded, history.replayed) == (1, 1)
    assert history.snapshots == {2: "b" * 64}


def test_a_recovery_ends_with_a_commit_of_an_attempt_that_began_after_the_loss(history: Timeline) -> None:
    assert history.recovery(13.5) == (3.5, 4.5)
    # Step 3 was complete already when the peer died: its commit at 13.0 is no recovery, though it is the next one.
    assert history.recovery(12.5) == (4.5, 4.5)
    assert history.recovery(16.5) == (None, None)
    assert history.stall(13.5, 20.0) == 4.0
    assert history.waits(13.5, 16.0) == ["+1.5 s b: waiting for stage 1"]


def test_speed_counts_each_step_once(history: Timeline) -> None:
    assert history.rate() == pytest.approx((5 - 1) / (19.0 - 11.0))
    assert Timeline(job=JOB).rate() == 0.0


def test_an_end_is_known_from_whoever_outlives_the_lead(history: Timeline) -> None:
    before = history.attempts, history.commits
    told(history, "c", 19.2, 1, 5, state="done", samples=7)
    assert history.ended_at == 19.0 and "samples" not in history.last  # the lead has said so itself
    history.ended_at = None
    told(history, "c", 19.5, 1, 5, state="done", samples=7)
    assert (history.ended_at, history.last["samples"]) == (19.5, 7)
    assert (history.attempts, history.commits) == before  # it began and committed nothing itself


def test_words_on_other_jobs_are_left_alone(history: Timeline) -> None:
    before = len(history.commits)
    assert not history.see("a", {"event": "step", "job": "c" * 64, "at": 30.0, "attempts": 1, "step": 9})
    assert not history.see("a", {"event": "status", "job": JOB})
    assert len(history.commits) == before
