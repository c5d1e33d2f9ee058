from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.cli import client, jobs
from fusion.cli.terminal.output import Output
from fusion.runtime.job.model_files import ABOUT_FILE, GRAPH_FILE


def test_what_export_says_to_do_next_can_be_pasted_into_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def connect(way: object) -> AsyncIterator[Any]:
        yield None

    async def find_current(*_: object) -> Any:
        return SimpleNamespace(
            record=SimpleNamespace(job="0" * 64, name="m"), belief=SimpleNamespace(vouched=True)
        )

    async def export(*_: object) -> int:
        return 3

    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(jobs.job_client, "find_current", find_current)
    monkeypatch.setattr("fusion.runtime.launch.export.export", export)
    folder = tmp_path / "my model"
    folder.mkdir()
    asyncio.run(jobs._export("m", folder, client.Way(tmp_path), Output()))
    assert "cannot be served" in capsys.readouterr().out, "tensors alone"
    for name in (ABOUT_FILE, GRAPH_FILE):
        (folder / name).touch()
    asyncio.run(jobs._export("m", folder, client.Way(tmp_path), Output()))
    said = capsys.readouterr().out.partition("serve it with: ")[2]
    assert shlex.split(said) == ["fusion-peer", "serve", str(folder), "--name", "m"]
