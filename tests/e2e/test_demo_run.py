"""The demo itself, short: it tells its figures, and it clears up even where it is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fusion.cli import demo
from fusion.cli.main import main
from fusion.cli.terminal import loop

pytestmark = pytest.mark.e2e
DEMO = (sys.executable, "-m", "fusion.cli.main", "demo", "--json")
FIGURES = [
    "peers",
    "stages",
    "steps",
    "loss_first",
    "loss_last",
    "val_loss",
    "text",
    "tokens_per_s",
    "seconds",
]


@pytest.mark.usefixtures("traces")
def test_it_trains_and_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        loop, "_new_loop", asyncio.new_event_loop
    )  # uvloop's processes are its own, none is forked
    smaller(monkeypatch)
    code = main(["demo", "--json", "--peers", "2", "--steps", "16"])
    said = capsys.readouterr()
    assert code == 0, said.err[-2000:]
    figures = json.loads(said.out.splitlines()[-1])
    assert list(figures) == FIGURES
    assert (figures["peers"], figures["stages"], figures["steps"]) == (3, 2, 16)
    assert figures["loss_last"] < figures["loss_first"] - 0.5
    assert figures["val_loss"] < figures["loss_first"] - 0.5
    assert figures["text"].startswith("def ") and len(figures["text"]) > 20


def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's model has a fifteenth of its parameters, and a step an eighth of its tokens."""
    for name, value in {
        "BLOCKS": 2,
        "WIDTH": 64,
        "HEADS": 4,
        "SEQUENCE": 128,
        "MICROBATCHES": 2,
        "MICROBATCH_SIZE": 1,
    }.items():
        monkeypatch.setattr(demo, name, value)


@pytest.mark.cold
@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_demo_that_is_ended(number: int) -> None:
    process = subprocess.Popen(
        [*DEMO, "--peers", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if number == signal.SIGKILL:
        _until_launched(process)
    else:
        _until_trained(process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said


@pytest.mark.cold
@pytest.mark.slow
@pytest.mark.usefixtures("traces")
def test_nothing_is_left_when_the_parent_of_the_demo_is_killed() -> None:
    """As `make demo` runs it: the shell's process becomes the demo, its parent is killed."""
    parent = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", "sh", "-c",
         f'exec {" ".join(DEMO)} --peers 1 --stop-with $PPID'],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _until_trained(parent)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()


def _until_launched(process: subprocess.Popen[str]) -> None:
    """Read what the demo says until its peers are up and a command of its own launches the job."""
    _until_said(process, "2. ")
    deadline = time.monotonic() + 60
    while not any("train" in child.cmdline() for child in psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _until_trained(process: subprocess.Popen[str]) -> None:
    """Read what the demo says until its peers train."""
    _until_said(process, "stage 0")
    assert process.poll() is None
    assert len(psutil.Process(process.pid).children(recursive=True)) >= 2


def _until_said(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    deadline = time.monotonic() + 240
    for line in process.stderr:
        if words in line:
            break
        assert time.monotonic() < deadline
