from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.training.data.batches import Batches, pack_text, token_bytes
from fusion.runtime.training.data.samples import sample_indices
from fusion.swarm.directory.records import Digest

DIGEST = Digest("0" * 64)
LANGUAGE = ("input_ids", "position_ids", "targets")
CONFIG = TrainConfig(
    steps=5,
    microbatches=3,
    microbatch_size=2,
    sequence=4,
    seed=0,
    optimizer=OptimizerConfig(),
    data=DataConfig(kind="tokens", train=DIGEST),
    evaluate_batches=3,
)


def test_bytes_are_packed_with_a_separator_under_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ab")
    (tmp_path / "b").write_bytes(b"cdef")
    files = [tmp_path / "a", tmp_path / "b"]
    assert pack_text(files, None, 100, 256).tobytes() == b"ab\0cdef\0"
    assert pack_text(files, None, 4, 256).tobytes() == b"ab\0cd\0"
    with pytest.raises(JobError, match=r"model.vocabulary must be above .* \(102\)"):
        pack_text(files, None, 100, 100)
    with pytest.raises(JobError, match="No such file"):
        pack_text([tmp_path / "c"], None, 100, 256)


def test_of_a_corpus_that_is_larger_than_the_memory_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus"
    path.touch()
    os.truncate(path, 1 << 42)
    assert pack_text([path], None, 4, 256).tobytes() == bytes(5)


def test_a_corpus_is_not_many_times_in_memory_while_it_is_packed(tmp_path: Path) -> None:
    """Every byte of it was there as 8, twice, and a limit beyond the memory was set aside for each file."""
    files = [tmp_path / name for name in "abcd"]
    for file in files:
        file.write_bytes(file.name.encode() * (1 << 18))
    tracemalloc.start()
    try:
        row = pack_text(files, None, 1 << 46, 256)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(row) == 4 * ((1 << 18) + 1) and peak < 4 * len(row)


def test_a_tokenizer_and_the_width_of_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 300}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    (tmp_path / "a").write_text("one two three")
    row = pack_text([tmp_path / "a"], tokenizer, 100, 301)
    assert row.dtype.itemsize == 2 and row.tolist() == [1, 300, 0]
    assert [token_bytes(v) for v in (2, 256, 257, 65536, 65537)] == [1, 1, 2, 2, 4]


def test_windows_and_their_targets(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(bytes(range(41)))
    batches = Batches(CONFIG, LANGUAGE, path, path)
    batch = batches.train(0, 1)
    chosen = sample_indices(0, 0, 1, CONFIG, 10)
    assert batch["input_ids"].tolist() == [list(range(4 * i, 4 * i + 4)) for i in chosen]
    assert torch.equal(batch["targets"], batch["input_ids"] + 1)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert {t.dtype for t in batch.values()} == {torch.int64}
    assert batches.held_out(1)["input_ids"].tolist() == [[12, 13, 14, 15], [20, 21, 22, 23]]


def test_the_first_and_the_last_stage_see_the_same_samples(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(bytes(range(200)))
    first, last = Batches(CONFIG, ["input_ids"], path, None), Batches(CONFIG, ["targets"], path, None)
    for step in range(4):
        for m in range(3):
            a, b = first.train(step, m)["input_ids"], last.train(step, m)["targets"]
            assert torch.equal(a + 1, b)


def test_a_stage_in_the_middle_opens_no_blob() -> None:
    assert not Batches.needs_blobs(CONFIG, ["position_ids"]) and Batches.needs_blobs(CONFIG, ["targets"])
    batch = Batches(CONFIG, ["position_ids"], None, None).train(3, 1)
    assert batch["position_ids"].shape == (2, 4)
    with pytest.raises(JobError, match="pixels"):
        Batches(CONFIG, ["pixels"], None, None)


@pytest.mark.parametrize("size", [0, 4])
def test_a_blob_without_one_whole_sample_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "blob"
    path.write_bytes(bytes(size))
    with pytest.raises(JobError, match="no sample of 5 tokens"):
        Batches(CONFIG, LANGUAGE, path, None)


def test_arrays(tmp_path: Path) -> None:
    config = replace(CONFIG, data=DataConfig(kind="arrays", train=DIGEST), sequence=0)
    path = tmp_path / "blob"
    x = torch.arange(20.0).reshape(10, 2)
    save_file({"x": x, "targets": x.sum(1)}, path)
    batch = Batches(config, ["x", "targets"], path, None).train(1, 2)
    assert torch.equal(batch["x"], x[sample_indices(0, 1, 2, config, 10)])
    assert torch.equal(batch["x"].sum(1), batch["targets"])
    with pytest.raises(JobError, match="'y'"):
        Batches(config, ["y"], path, None)
    path.write_bytes(b"no tensors")
    with pytest.raises(JobError, match="not safetensors"):
        Batches(config, ["x"], path, None)
    save_file({"x": x, **{f"{i:0200}": torch.zeros(0) for i in range(5000)}}, path)
    with pytest.raises(
        JobError, match=r"a header of 1\d{6} bytes"
    ):  # a million took ten seconds and gigabytes
        Batches(config, ["x"], path, None)
    save_file({"x": x, "targets": x[:3].clone()}, path)
    with pytest.raises(JobError, match="first dimension"):
        Batches(config, ["x", "targets"], path, None)


def test_numbers_are_little_endian(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(np.arange(256, 266, dtype="<u2").tobytes())
    config = replace(CONFIG, data=DataConfig(kind="tokens", train=DIGEST, token_bytes=2))
    assert int(Batches(config, LANGUAGE, path, None).train(0, 0)["input_ids"].min()) >= 256
