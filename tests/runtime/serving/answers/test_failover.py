from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.size_text import needs
from fusion.runtime.serving.answers.failover import (
    LONGEST_PAUSE_SECONDS,
    FailoverConfig,
    Fault,
    FaultHistory,
    FaultKind,
    Retry,
    SilenceTimeout,
    explain,
    respond,
)

CONFIG = FailoverConfig()
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


def fault(kind: FaultKind, *stages: int) -> Fault:
    return Fault(kind, f"stage {stages} is {kind}", stages)


def after(kind: FaultKind, faults: int, **options: Any) -> Retry | None:
    """What the last of so many faults of one kind leads to."""
    history = FaultHistory(answered=options.pop("answered", False))
    for _ in range(faults):
        history = history.with_fault(fault(kind, 1))
    return respond(history, fault(kind, 1), options.pop("stalled_seconds", 0.0), CONFIG)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_vanished_or_is_silent_is_reported(kind: FaultKind) -> None:
    retry = after(kind, 1, answered=True)
    suspects = retry.suspects if retry is not None else ()
    assert suspects == ((1,) if kind in ("vanished", "silent") else ())
    assert retry is None or retry.keep == (kind == "silent")


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_is_gone_is_missed_at_every_stage_that_it_ran(kind: FaultKind) -> None:
    found = fault(kind, 2).on(["a", "b", "a"])
    assert found.stages == ((0, 2) if kind in ("vanished", "silent") else (2,))
    assert fault(kind, 2).on([]) == fault(kind, 2)  # on no route yet


@pytest.mark.parametrize("kind", ["vanished", "silent", "moved", "absent"])
def test_missing_peers_are_waited_for_until_the_patience_ends(kind: FaultKind) -> None:
    assert after(kind, 100, stalled_seconds=29.9) is not None
    assert after(kind, 1, stalled_seconds=30.0) is None


@pytest.mark.parametrize("kind", ["broken", "grammar", "stuck"])
def test_what_waiting_does_not_mend_is_tried_a_few_times(kind: FaultKind) -> None:
    assert after(kind, 2, stalled_seconds=1000.0) is not None
    assert after(kind, 3) is None


def test_a_new_request_is_told_at_once_that_there_is_no_room_and_an_answer_under_way_waits() -> None:
    assert after("full", 1) is None
    assert after("full", 1, answered=True) is not None
    # Whoever was interrupted waits for others' answers to end, longer than for a stage that is gone.
    begun = FaultHistory(answered=True).with_fault(fault("full", 1))
    late = (CONFIG.recover_seconds, CONFIG.full_seconds - 1.0, CONFIG.full_seconds)
    assert [respond(begun, fault("full", 1), seconds, CONFIG) is None for seconds in late] == [
        False,
        False,
        True,
    ]
    assert respond(begun, fault("vanished", 1), CONFIG.recover_seconds, CONFIG) is None
    # The session was there when a stage died: its memory is being freed.
    history = FaultHistory().with_fault(fault("vanished", 0)).with_fault(fault("full", 1))
    assert respond(history, fault("full", 1), 1.0, CONFIG) is not None


def test_a_request_that_cannot_work_is_not_tried_again() -> None:
    assert after("refused", 1, answered=True) is None


@given(kind=st.sampled_from(KINDS), faults=st.integers(1, 2000), answered=st.booleans())
def test_the_first_try_is_at_once_and_no_pause_is_long(kind: FaultKind, faults: int, answered: bool) -> None:
    retry = after(kind, faults, answered=answered)
    if retry is not None:
        assert 0.0 <= retry.pause_seconds <= LONGEST_PAUSE_SECONDS
        assert (retry.pause_seconds == 0.0) == (faults == 1)


# --- silence


@given(gaps=st.lists(st.floats(0.001, 10.0), max_size=100))
def test_the_silence_that_is_worth_a_question_follows_from_the_answers_own_history(
    gaps: list[float],
) -> None:
    now = 5.0
    timeout = SilenceTimeout(CONFIG, now)
    for gap in gaps:
        now += gap
        timeout.token(now)
    quiet = timeout.quiet_seconds()
    assert quiet >= CONFIG.quiet_seconds
    if gaps:
        assert quiet <= max(CONFIG.quiet_seconds, 20.001 * max(gaps))
        assert quiet >= 19.999 * min(gaps)


def test_questions_that_bring_nothing_come_ever_later_and_end() -> None:
    timeout = SilenceTimeout(CONFIG, 0.0)
    waits = []
    while not timeout.no_progress():
        waits.append(timeout.quiet_seconds())
    assert waits == [4.0, 8.0, 16.0, 32.0]
    timeout.token(70.0)
    timeout.begin(80.0)
    timeout.token(80.01)
    assert timeout.quiet_seconds() >= 2.0 and not timeout.no_progress()


# --- what stages report


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"message": "m", "reason": "vanished", "stage": 2}, Fault("vanished", "m", (2,))),
        ({"message": "m", "reason": "moved"}, Fault("moved", "m", (1,))),
        ({"message": "m", "reason": "vanished", "stage": 3}, Fault("vanished", "m", (1,))),
        ({"message": "m", "reason": "vanished", "stage": True}, Fault("vanished", "m", (1,))),
        ({"message": "m", "reason": "silent", "stage": 0}, Fault("broken", "m", (0,))),
        ({"message": 7, "reason": ["full"]}, Fault("broken", "stage 1 failed", (1,))),
        ({}, Fault("broken", "stage 1 failed", (1,))),
        ({"message": "x" * 1000, "reason": "full"}, Fault("full", "x" * 300, (1,))),
    ],
)
def test_a_failed_frame_is_believed_only_as_far_as_it_makes_sense(
    header: dict[str, Any], expected: Fault
) -> None:
    assert Fault.from_failed(header, 1, 3) == expected


# --- what the user is told


def test_the_last_line_says_what_is_missing() -> None:
    assert needs(2, (1, 2, 1288490189), "demo") == "stage 2 of demo needs a peer with 1.2 GiB free"
    assert needs(0, (1, 2), "demo") == "stage 0 of demo needs a peer with 1 MiB free"
    assert needs(0, (), "demo") == "stage 0 of demo needs a peer"
    gone = Fault("vanished", "stage 1 of demo on quiet-otter vanished", (1,))
    assert explain(gone, "demo", (0, 300 << 20), 30.2) == (
        "stage 1 of demo on quiet-otter vanished; stage 1 of demo needs a peer with 0.3 GiB free "
        "(gave up after 30 s)"
    )
    broken = Fault("broken", "stage 1 of demo on quiet-otter: no", (1,))
    assert explain(broken, "demo", (), 30.2) == broken.message


def test_settings_that_cannot_work_are_refused() -> None:
    for field in (
        "recover_seconds",
        "full_seconds",
        "reach_seconds",
        "quiet_seconds",
        "ping_seconds",
        "rounds",
        "tries",
    ):
        with pytest.raises(ValueError, match=field.split("_")[0]):
            FailoverConfig(**{field: 0})
