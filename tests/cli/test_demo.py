"""The demo's decisions; that it runs is the end-to-end tests' business."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fusion.cli import demo
from fusion.cli.local.fleet import FleetError
from fusion.cli.terminal.output import Output
from fusion.runtime.job import spec
from fusion.runtime.placing import swarm_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SWARMS = [EXAMPLES / f"{name}.toml" for name in ("swarm", "50x-rtx3080", "4x-h100")]
JOBS = sorted(set(EXAMPLES.glob("*.toml")) - set(SWARMS))


def test_the_job_is_one_that_train_takes(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text("def f(): ...")
    job = spec.parse(demo.job_text(["peer-a", "peer-b", "peer-c"], 120, tmp_path), tmp_path)
    assert job.train.steps == 120
    assert job.placement.stages == 3 and job.placement.peers == ("peer-a", "peer-b", "peer-c")
    assert len(job.data.held_out) == 1 and len(job.data.files) == 2


@pytest.mark.parametrize("steps", [1, 5, 1000])
def test_any_number_of_steps_makes_a_job(steps: int, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("pass")
    assert spec.parse(demo.job_text(["p"], steps, tmp_path), tmp_path).train.evaluate_every >= 1


def test_the_library_may_lie_in_a_folder_of_any_name(tmp_path: Path) -> None:
    library = tmp_path / "o'brien" / 'a "[3]" \\ é'
    library.mkdir(parents=True)
    for name in ("a.py", "b.py"):
        (library / name).touch()
    job = spec.parse(demo.job_text(["p"], 10, library), tmp_path)
    assert {*job.data.files, *job.data.held_out} == {library / "a.py", library / "b.py"}


def test_this_machine_has_the_text(tmp_path: Path) -> None:
    job = spec.parse(demo.job_text(["p"], 10), tmp_path)
    assert len(job.data.files) > 50


def test_the_figures_are_those_promised() -> None:
    figures = demo.Figures(peers=4, stages=3, started=0.0)
    out = Output(as_json=True)
    record = {
        "step": 2, "steps": 9, "losses": [[1, 5.5], [2, 5.0]], "validation_loss": 5.2, "validation_step": 2, "loss": 5.0,
        "tokens_per_second": 10.0, "busy": [0.5], "sent_bytes": 1,
    }  # fmt: skip
    demo.learn(record, figures, out)
    demo.learn({**record, "step": 3, "losses": [[3, 4.5]], "loss": 4.5}, figures, out)
    found = figures.record()
    assert list(found) == [
        *(
            "peers",
            "stages",
            "steps",
            "loss_first",
            "loss_last",
            "val_loss",
            "text",
            "tokens_per_s",
            "seconds",
        )
    ]
    assert (found["steps"], found["loss_first"], found["loss_last"], found["val_loss"]) == (3, 5.5, 4.5, 5.2)


def test_the_demo_ends_with_its_parent() -> None:
    cleared: list[bool] = []

    async def work() -> demo.Figures:
        try:
            await asyncio.sleep(600)
        finally:
            cleared.append(True)
        raise AssertionError("not reached")

    not_our_parent = os.getpid()
    with pytest.raises(FleetError, match="is gone"):
        asyncio.run(demo.while_parent_lives(not_our_parent, work()))
    assert cleared == [True]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_examples_are_jobs(path: Path) -> None:
    """Each example says what it needs from the machine; where that is missing, it is the only thing wrong."""
    try:
        job = spec.load(path)
    except ValueError as error:
        assert "no file matches" in str(error) or "has no config.json" in str(error)
    else:
        assert job.train.steps > 0


def test_there_are_examples() -> None:
    assert len(JOBS) >= 2
    assert all(len(swarm_file.load(path).peers) >= 2 for path in SWARMS)
