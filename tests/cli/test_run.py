"""What comes of a model for one batch after the other is put together, unless a peer made it up."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusion.cli import main
from fusion.cli.run import _ask, _joined, _write
from fusion.runtime.serving.graphs.client import ModelRuns
from fusion.swarm.errors import FrameError, RemoteError
from fusion.swarm.transport import PeerId


def test_outputs_of_batches_are_put_together() -> None:
    one, two = np.zeros((2, 3), np.float32), np.ones((1, 3), np.float32)
    assert _joined("y", [one, two]).tolist() == [[0.0] * 3] * 2 + [[1.0] * 3]
    assert _joined("y", [one]) is one
    for other in (np.ones((1, 4), np.float32), np.ones((1, 3), np.int64), np.float32(1)):
        with pytest.raises(FrameError, match="'y' another shape or dtype"):
            _joined("y", [one, other])


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "y.npz"
    _write(path, {"y": np.arange(3), "file": np.arange(2)})
    assert np.load(path)["file"].tolist() == [0, 1]
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="No space left"):
        _write(path, {"y": np.arange(4)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "digits", "--input", "x.npz", "--output", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.parametrize("given", [os.devnull, "."])  # the end of /dev/zero would be looked for without end
def test_an_input_is_a_file(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "digits", "--input", given, "--output", str(tmp_path / "y.npz")]) == 2
    assert capsys.readouterr().err == f"fusion-peer: --input: {given} is not a regular file\n"


def test_a_name_that_is_not_served_is_called_what_the_command_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(*_: Any) -> None:
        raise RemoteError("model: the swarm serves none now")

    async def job_records() -> tuple[()]:
        return ()

    monkeypatch.setattr("fusion.runtime.serving.graphs.client.run_model", refused)
    monkeypatch.setattr("fusion.cli.job_client.RETRY_SECONDS", 0.0)
    context: Any = SimpleNamespace(transport=None, directory=SimpleNamespace(job_records=job_records))
    asking = ModelRuns(context.transport, PeerId("gateway"))
    with pytest.raises(ValueError, match=r"^NAME: 'digits' is not served"):
        asyncio.run(_ask(context, asking, "digits", {}))


def test_outputs_can_go_into_a_device_and_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(Path(os.devnull), {"y": np.arange(3), "z": np.arange(2)})
    reads, writes = os.pipe()
    _write(Path(f"/dev/fd/{writes}"), {"y": np.arange(3)})
    os.close(writes)
    with open(reads, "rb") as pipe:
        assert np.load(io.BytesIO(pipe.read()))["y"].tolist() == [0, 1, 2]

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="No space left") as error:
        _write(tmp_path / "y.npz", {"y": np.arange(4)})
    assert error.value.filename == str(tmp_path / "y.npz")
