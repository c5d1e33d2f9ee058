"""A chaos run is exact only where everything that can be compared is equal; its report says what is not."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from fusion.cli.local.chaos_plan import ChaosConfig, fault_plan
from fusion.cli.local.chaos_report import ChaosReport, Run, show
from fusion.cli.local.chaos_swarm import Injected
from fusion.cli.local.chaos_timeline import Timeline
from fusion.cli.terminal.output import Output

WANTED = {
    "exact", "goodput", "kills", "recovery_p50_seconds", "recovery_p95_seconds", "discarded_steps", "seed",
}  # fmt: skip
SHARDS = ("a" * 64, "b" * 64)


def run(seconds_a_step: float, pause: float = 0.0, **last: object) -> Run:
    """Ten steps; with a pause, an owner is lost after the fifth, and the lead begins anew at step 4."""
    timeline = Timeline(job="j")
    at, count = 100.0, 1

    def tell(step: int) -> None:
        timeline.see("a", {"event": "step", "job": "j", "at": at, "attempts": count, "step": step,
                           "state": "done" if step == 10 else "running", "snapshot": None, "snapshot_step": 0, **last})  # fmt: skip

    tell(0)
    for step in range(1, 11):
        at += seconds_a_step
        tell(step)
        if step == 5 and pause:
            at, count = at + pause, 2
            tell(4)
            at += seconds_a_step
            tell(5)
    return Run(timeline=timeline, shards=SHARDS, shard_step=10)


def report(faulted: Run, quiet: Run | None = None) -> ChaosReport:
    config = ChaosConfig(peers=3, standbys=1, seed=5)
    plan = fault_plan(config, 60.0)
    done = Injected(plan[0], 100.0 + 5.2, ("peer-1",), 0, True)
    return ChaosReport(
        config=config, plan=plan, steps=10, quiet=quiet or run(1.0), faulted=faulted, injected=[done]
    )


def test_an_exact_run_and_its_figures() -> None:
    found = report(run(1.0, pause=3.0))
    record = found.record()
    assert found.exact and record["exact"] and record["differences"] == []
    assert set(record) >= WANTED
    assert record["goodput"] == pytest.approx(9 / (9 + 3.0 + 1.0), abs=1e-3)
    assert (record["kills"], record["discarded_steps"], record["replayed_steps"]) == (1, 1, 1)
    # Killed 0.2 s after step 5; the lead began again at 108.0 and committed 5 anew at 109.0, step 6 at 110.0.
    assert record["recovery_p50_seconds"] == record["recovery_p95_seconds"] == pytest.approx(3.8)
    assert record["new_step_p95_seconds"] == pytest.approx(4.8)
    assert record["faults"][0]["stall_seconds"] == pytest.approx(4.0)
    json.dumps(record)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shards": ("a" * 64, "c" * 64)}, "stage 1: the final weights differ"),
        ({"shards": None}, "no final snapshot"),
        ({"shard_step": 9}, "steps 10 and 9"),
    ],
)
def test_any_difference_is_named_with_the_way_to_repeat_it(change: dict[str, object], word: str) -> None:
    faulted = run(1.0, pause=1.0)
    for name, value in change.items():
        setattr(faulted, name, value)
    found = report(faulted)
    assert not found.exact
    assert any(word in line for line in found.record()["differences"])
    text = io.StringIO()
    found.last_lines = {"peer-1": "one line\nanother"}
    show(found, Output(stdout=text, stderr=io.StringIO()))
    said = text.getvalue()
    assert word in said and found.config.command in said and str(found.plan[0]) in said
    assert "peer-1: another" in said


def test_ledgers_are_compared_where_there_are_any() -> None:
    ledger = {"samples": 80, "ledger": "f" * 64}
    assert report(run(1.0, **ledger), run(1.0, **ledger)).exact
    assert not report(run(1.0, samples=79, ledger="f" * 64), run(1.0, **ledger)).exact
    assert not report(run(1.0), run(1.0, **ledger)).exact


def test_a_run_that_came_to_no_end_is_not_exact_and_still_reports() -> None:
    empty = ChaosReport(config=ChaosConfig(seed=1), error="peer-1 did not start: no space")
    record = empty.record()
    assert not record["exact"] and record["differences"] == ["peer-1 did not start: no space"]
    assert record["goodput"] is None and record["recovery_p95_seconds"] is None
    show(empty, Output(stdout=io.StringIO(), stderr=io.StringIO()))


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [("--peers", "1"), ("--kill-every", "soon"), ("--peers", "4", "--standbys", "4"), ("--minutes", "0")],
)
def test_bad_input_is_one_line_and_exit_code_2(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusion.cli.main", "chaos", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert words[-2] in line
