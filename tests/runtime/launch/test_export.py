"""An export that cannot be written leaves nothing that would be in the way of the next one."""

from __future__ import annotations

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
    with monkeypatch.context() as full:
        full.setattr(snapshot, "save", save)
        with pytest.raises(OSError, match="No space left"):
            export._write(out, {"config.json": config}, tensors)
    assert out.exists() == there and not (there and list(out.iterdir()))
    export._write(out, {"config.json": config}, tensors)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
