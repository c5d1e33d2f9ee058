"""An export that cannot be written leaves nothing that would be in the way of the next one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from fusion.runtime.launch import export
from fusion.runtime.training.snapshots import snapshot


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_no_half_of_a_model(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    config, out = tmp_path / "blob", tmp_path / "out"
    config.write_text("{}")
    if there:
        out.mkdir()
    tensors = {"weight": torch.zeros(2)}
    files = {"config.json": config, "additional_chat_templates/tool_use.jinja": config}
    with monkeypatch.context() as full:
        full.setattr(snapshot, "save", save)
        with pytest.raises(OSError, match="No space left") as error:
            export._write(out, files, tensors)
    assert error.value.filename == str(out)
    assert out.exists() == there and not (there and list(out.iterdir()))
    export._write(out, files, tensors)
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {*files, "model.safetensors"}


def test_who_is_interrupted_waits_until_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def save(tensors: object, path: Path, metadata: object) -> None:
        began.set()
        may_end.wait()
        path.write_bytes(b"whole")

    async def main() -> None:
        writing = asyncio.create_task(export._written(tmp_path, {}, {}))
        await asyncio.to_thread(began.wait)
        writing.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not writing.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert (tmp_path / "model.safetensors").read_bytes() == b"whole"

    monkeypatch.setattr(snapshot, "save", save)
    asyncio.run(main())
