from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion.runtime.datasets.jsonl import JsonLines
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import DatasetSpec, DataSpec
from fusion.runtime.launch.pack import pack_data
from fusion.swarm.blobs.store import BlobStore


def test_no_more_texts_are_read_than_a_job_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, texts = tmp_path / "data.jsonl", list[str](), JsonLines.texts
    path.write_text("\n".join(json.dumps({"text": "x" * 10}) for _ in range(1000)))

    def noted(self: JsonLines, field: str) -> Iterator[str]:
        for text in texts(self, field):
            read.append(text)
            yield text

    monkeypatch.setattr(JsonLines, "texts", noted)
    data = DatasetSpec(kind="jsonl", path=path, limit_bytes=95)
    with pytest.raises(JobError, match=r"more than data\.limit_bytes = 95 characters"):
        pack_data(data, None, 256, 4, BlobStore(tmp_path / "blobs", 1 << 20), lambda _: None)
    assert len(read) == 10


def test_text_that_is_cut_at_the_limit_is_reported(tmp_path: Path) -> None:
    files = tuple(tmp_path / f"{name}.txt" for name in "abc")
    for file in files:
        file.write_text(file.stem * 1000)
    store, heard = BlobStore(tmp_path / "blobs", 1 << 20), list[str]()

    def packed(data: DataSpec) -> int:
        return store.path(pack_data(data, None, 256, 4, store, heard.append).train).stat().st_size

    assert (
        packed(DataSpec(files=files, limit_bytes=3000)) == 3003
    )  # a byte between files; nothing for held-out text
    assert not heard
    packed(DataSpec(files=files, limit_bytes=1500))
    assert heard == ["read 1,500 of 3,000 bytes of text (data.limit_bytes)"]
    packed(DataSpec(files=files[:2], held_out=files[2:], limit_bytes=1500))
    assert heard[1:] == [
        "read 1,350 of 2,000 bytes of text (data.limit_bytes)",
        "read 150 of 1,000 bytes of held-out text (data.limit_bytes)",
    ]
