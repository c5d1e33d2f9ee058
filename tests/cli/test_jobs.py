from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.known_job import Known

from fusion.cli import client, jobs, main
from fusion.cli.terminal import options
from fusion.cli.terminal.output import Output
from fusion.runtime.job.model_files import ABOUT_FILE, GRAPH_FILE
from fusion.swarm.errors import BlobError


def test_what_export_says_to_do_next_can_be_pasted_into_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def connect(way: object) -> AsyncIterator[Any]:
        yield None

    async def find_current(*_: object) -> Any:
        return SimpleNamespace(
            record=SimpleNamespace(job="0" * 64, name="m"), belief=SimpleNamespace(vouched=True, over=True)
        )

    async def export(*_: object) -> int:
        return 3

    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(jobs.job_client, "find_current", find_current)
    monkeypatch.setattr("fusion.runtime.launch.export.export", export)
    folder = tmp_path / "my model"
    folder.mkdir()
    asyncio.run(jobs._export("m", folder, client.JoinOptions(home=tmp_path), Output()))
    assert "cannot be served" in capsys.readouterr().out, "tensors alone"
    for name in (ABOUT_FILE, GRAPH_FILE):
        (folder / name).touch()
    asyncio.run(jobs._export("m", folder, client.JoinOptions(home=tmp_path), Output()))
    said = capsys.readouterr().out.partition("serve it with: ")[2]
    assert shlex.split(said) == ["fusion-peer", "serve", str(folder), "--name", "m"]


def test_a_snapshot_that_is_dropped_while_it_is_exported_gives_way_to_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a job that goes on peers keep the last two alone: its export failed, where `serve` had tried again."""
    belief = SimpleNamespace(vouched=True, over=False, record=SimpleNamespace(job="0" * 64, name="m", step=3))

    @asynccontextmanager
    async def connect(way: object) -> AsyncIterator[Any]:
        yield None

    async def find_current(*_: object) -> Any:
        return Known(belief)

    async def read_belief(*_: object, **__: object) -> Any:
        record = SimpleNamespace(**{**vars(belief.record), "step": 6})
        return SimpleNamespace(**{**vars(belief), "record": record})

    async def export(context: object, job: object, directory: object, known: Any) -> int:
        if known.record.step == 3:
            raise BlobError("nobody has it any more")
        return int(known.record.step)

    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(jobs.job_client, "find_current", find_current)
    monkeypatch.setattr("fusion.runtime.launch.export.export", export)
    monkeypatch.setattr("fusion.runtime.launch.export.read_belief", read_belief)
    monkeypatch.setattr("fusion.runtime.launch.export.EXPORT_PAUSE_SECONDS", 0.0, raising=False)
    asyncio.run(jobs._export("m", tmp_path / "out", client.JoinOptions(home=tmp_path), Output()))
    assert "m at step 6 is in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("jobs --home here --json list", ("here", True)),
        ("jobs --home there list --home here", ("here", False)),
        ("jobs --home here --json", ("here", True)),
        ("jobs list", (str(options.DEFAULT_HOME), False)),
    ],
)
def test_options_before_the_command_count_for_it(
    words: str, expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`jobs --home DIR stop JOB` would ask with the default home, and look for its key there."""
    seen: list[tuple[str, bool]] = []

    async def listed(way: client.JoinOptions, output: Output) -> None:
        seen.append((str(way.home), output.as_json))

    monkeypatch.setattr(jobs, "_list", listed)
    assert main.main(words.split()) == 0
    assert seen == [expected]
