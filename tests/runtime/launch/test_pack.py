from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion.runtime.datasets.jsonl import JsonLines
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import DatasetSpec
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
