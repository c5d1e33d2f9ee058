from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

transformers = pytest.importorskip("transformers")

from support.families import GROUPED, build  # noqa: E402

from fusion.runtime.capture.sources import About  # noqa: E402
from fusion.runtime.job.model_files import ABOUT_FILE  # noqa: E402
from fusion.runtime.job.spec import parse  # noqa: E402
from fusion.runtime.launch.training_job import training_job  # noqa: E402
from fusion.swarm.blobs.store import BlobStore  # noqa: E402

JOB = """
name = "new"
model = { kind = "huggingface", path = "model", weights = false }
data = { files = ["text.txt"], held_out = 0.0, tokenizer = "%s" }
train = { steps = 1, sequence = 4 }
"""
SHAPE: dict[str, Any] = {**GROUPED, "num_hidden_layers": 1, "vocab_size": 300}


def words(path: Path, *names: str) -> Path:
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("data", ["ours", "bytes", "the model's"])
def test_a_model_is_asked_in_the_tokens_that_it_was_trained_on(tmp_path: Path, data: str) -> None:
    model = tmp_path / "model"
    build(transformers.LlamaConfig(**SHAPE)).save_pretrained(model)
    theirs = None if data == "bytes" else words(model / "tokenizer.json", "?", "to", "be")
    ours = words(tmp_path / "ours.json", "?", "be", "to")
    (tmp_path / "text.txt").write_text("to be or not to be")
    spec = parse(JOB % ("ours.json" if data == "ours" else "bytes"), tmp_path)
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    made = training_job(spec, store, lambda line: None)
    row = store.path(made.data.train).read_bytes()[:: made.data.token_bytes]
    about = made.files[ABOUT_FILE]
    assert isinstance(about, bytes)
    if data == "bytes":
        assert row == b"to be or not to be\0" and made.tokenizer is None
    else:
        source = ours if data == "ours" else theirs
        assert row[:2] == (b"\2\1" if data == "ours" else b"\1\2") and made.tokenizer == source
    assert made.byte_level is About.from_json(about, "").byte_level is (data == "bytes")
