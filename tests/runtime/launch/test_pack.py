from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

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
        pack_data(data, None, 256, 4, BlobStore(tmp_path / "blobs", 1 << 20), print, print)
    assert len(read) == 10


def test_text_that_is_cut_at_the_limit_is_reported(tmp_path: Path) -> None:
    files = tuple(tmp_path / f"{name}.txt" for name in "abc")
    for file in files:
        file.write_text(file.stem * 1000)
    store, notes = BlobStore(tmp_path / "blobs", 1 << 20), list[str]()

    def packed(data: DataSpec) -> int:
        return store.path(pack_data(data, None, 256, 4, store, print, notes.append).train).stat().st_size

    assert (
        packed(DataSpec(files=files, limit_bytes=3000)) == 3003
    )  # a byte between files; nothing for held-out text
    assert not notes
    packed(DataSpec(files=files, limit_bytes=1500))
    assert notes == ["read 1,500 of 3,000 bytes of text (data.limit_bytes)"]
    packed(DataSpec(files=files[:2], held_out=files[2:], limit_bytes=1500))
    assert notes[1:] == [
        "read 1,350 of 2,000 bytes of text (data.limit_bytes)",
        "read 150 of 1,000 bytes of held-out text (data.limit_bytes)",
    ]


def test_text_in_another_encoding_is_told_of(tmp_path: Path) -> None:
    """A tokenizer gets U+FFFD for what is no UTF-8; a character that the limit cuts is none of that."""
    tokenizer = Tokenizer(WordLevel({"?": 0, "caf\u00e9": 1}, unk_token="?"))
    for name, data in (
        ("a", "caf\u00e9".encode("latin-1")),
        ("b", "caf\u00e9".encode()),
        ("c", b"\xff\xfeh\0"),
    ):
        (tmp_path / name).write_bytes(data)
    store, notes = BlobStore(tmp_path / "blobs", 1 << 20), list[str]()

    def packed(names: str, limit_bytes: int = 100) -> list[str]:
        data = DataSpec(files=tuple(tmp_path / name for name in names), limit_bytes=limit_bytes)
        notes.clear()
        pack_data(data, tokenizer, 256, len(names) - 1, store, print, notes.append)
        return notes

    assert packed("bb") == []
    why = "not in UTF-8: U+FFFD stands for what cannot be read"
    assert packed("ab") == [f"{tmp_path / 'a'} is {why}"]
    assert packed("abc") == [f"{tmp_path / 'a'} and 1 more are {why}"]
    assert packed("bb", 9) == ["read 9 of 10 bytes of text (data.limit_bytes)"]
