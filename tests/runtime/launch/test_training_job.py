from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

transformers = pytest.importorskip("transformers")

from support.captured_once import capture_once  # noqa: E402
from support.families import GROUPED, build  # noqa: E402

from fusion.runtime.capture import capture  # noqa: E402
from fusion.runtime.capture.sources import About  # noqa: E402
from fusion.runtime.job.errors import JobError  # noqa: E402
from fusion.runtime.job.model_files import ABOUT_FILE  # noqa: E402
from fusion.runtime.job.spec import parse  # noqa: E402
from fusion.runtime.launch.training_job import training_job  # noqa: E402
from fusion.runtime.placing.offline_graph import training_graph  # noqa: E402
from fusion.swarm.blobs.store import BlobStore  # noqa: E402

JOB = """
name = "new"
model = { kind = "huggingface", path = "model", weights = false }
data = { files = ["text.txt"], held_out = 0.0, tokenizer = "%s" }
train = { steps = 1, sequence = 4 }
"""
SHAPE: dict[str, Any] = {**GROUPED, "num_hidden_layers": 1, "vocab_size": 300}


@pytest.fixture(autouse=True)
def _each_gpt_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch, capture)


def tokenizer_file(path: Path, *names: str) -> Path:
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    "data", ["the model's", *(pytest.param(each, marks=pytest.mark.slow) for each in ("named", "bytes"))]
)
def test_a_model_is_asked_in_the_tokens_that_it_was_trained_on(tmp_path: Path, data: str) -> None:
    model = tmp_path / "model"
    build(transformers.LlamaConfig(**SHAPE)).save_pretrained(model)
    of_model = None if data == "bytes" else tokenizer_file(model / "tokenizer.json", "?", "to", "be")
    named = tokenizer_file(tmp_path / "ours.json", "?", "be", "to")
    (tmp_path / "text.txt").write_text("to be or not to be")
    spec = parse(JOB % ("ours.json" if data == "named" else "bytes"), tmp_path)
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    made = training_job(spec, store, lambda line: None)
    row = store.path(made.data.train).read_bytes()[:: made.data.token_bytes]
    about = made.files[ABOUT_FILE]
    assert isinstance(about, bytes)
    if data == "bytes":
        assert row == b"to be or not to be\0" and made.tokenizer is None
    else:
        source = named if data == "named" else of_model
        assert row[:2] == (b"\2\1" if data == "named" else b"\1\2") and made.tokenizer == source
    assert made.byte_level is About.from_json(about, "").byte_level is (data == "bytes")


MODEL = """
from torch import nn
from torch.nn import functional as F

class Scores(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(rows, 4), nn.Embedding(6, 4), nn.Linear(4, 128)
    def forward(self, input_ids, position_ids):
        return self.head(self.table(input_ids) + self.places(position_ids))

def model(rows=128):
    return Scores(rows)

def plain():
    return nn.Linear(4, 3)

def normed():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

def loss(made, targets):
    return F.cross_entropy(made.flatten(0, -2), targets.flatten())
"""
OWN = """
name = "own"
model = { kind = "python", path = "model.py", function = "%s", loss = "loss" }
data = { %s, held_out = %s }
train = { steps = 1, sequence = %d }
"""


def test_a_job_that_is_to_be_evaluated_has_samples_that_are_held_out(tmp_path: Path) -> None:
    """Of one sample no share can be held out: such a job was trained without a warning, and never evaluated."""
    (tmp_path / "model.py").write_text(MODEL)
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    text = OWN % ("plain", 'kind = "npz", path = "data.npz"', "0.5", 0)
    for samples in (2, 1):
        np.savez(tmp_path / "data.npz", input=np.zeros((samples, 4)), targets=np.zeros(samples, np.int64))
        spec = parse(text.replace("steps = 1", "steps = 1, evaluate_every = 1"), tmp_path)
        if samples == 2:
            assert training_job(spec, store, lambda line: None).data.held_out is not None
            continue
        with pytest.raises(JobError, match=r"train\.evaluate_every needs data that is held out"):
            training_job(spec, store, lambda line: None)


def test_labels_beyond_the_classes_are_refused_by_both_commands(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    arrays = {"input": np.zeros((4, 4)), "targets": np.array([0, 2, 3, 1])}
    np.savez(tmp_path / "data.npz", **arrays)
    spec = parse(OWN % ("plain", 'kind = "npz", path = "data.npz"', "0.0", 0), tmp_path)
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    for read in (lambda: training_job(spec, store, lambda line: None), lambda: training_graph(spec)):
        with pytest.raises(JobError, match=r"data: targets is from 0 to 3; the classes of the loss are 3"):
            read()


def test_a_batch_normalisation_of_single_numbers_is_refused_by_both_commands(tmp_path: Path) -> None:
    """What it gave was the same for all samples, and the running variance that was exported NaN."""
    (tmp_path / "model.py").write_text(MODEL)
    np.savez(tmp_path / "data.npz", input=np.zeros((4, 4)), targets=np.zeros(4, np.int64))
    text = OWN % ("normed", 'kind = "npz", path = "data.npz"', "0.0", 0)
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    for size in (2, 1):
        spec = parse(text.replace("steps = 1", f"steps = 1, microbatch_size = {size}"), tmp_path)
        if size == 2:
            assert training_job(spec, store, lambda line: None).graph == training_graph(spec)
            continue
        says = r"train\.microbatch_size must be at least 2: .*batch_norm"
        with pytest.raises(JobError, match=says):
            training_job(spec, store, lambda line: None)
        with pytest.raises(JobError, match=says):
            training_graph(spec)


@pytest.mark.parametrize(
    ("text", "held_out", "sequence", "says"),
    [
        ("caf\u00e9", "plain", 3, "^data: input_ids is from 0 to 195; the rows of an embedding are 128"),
        ("plain", "caf\u00e9", 3, "^data, held out: input_ids is from 0 to 195; the rows"),
        ("plain text", "plain text", 7, "^data: position_ids is from 0 to 6; the rows of an embedding are 6"),
        ("plain", "plain", 3, ""),
    ],
)
def test_token_ids_and_positions_beyond_a_table_are_refused(
    tmp_path: Path, text: str, held_out: str, sequence: int, says: str
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "held.txt").write_text(held_out)
    spec = parse(OWN % ("model", 'files = ["text.txt"]', '["held.txt"]', sequence), tmp_path)
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    if not says:
        assert training_job(spec, store, lambda line: None).data.kind == "tokens"
        return
    with pytest.raises(JobError, match=says):
        training_job(spec, store, lambda line: None)


@pytest.mark.parametrize(("samples", "batches"), [(20, 5), (3, 3), (400, 8)])
def test_an_evaluation_counts_few_samples_alike(tmp_path: Path, samples: int, batches: int) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for name, count in (("data", 8), ("held", samples)):
        arrays = {"input": np.zeros((count, 4)), "targets": np.arange(count) % 3}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    data = 'kind = "npz", path = "data.npz"', '"held.npz"'
    assert training_job(parse(OWN % ("plain", *data, 0), tmp_path), store, print).evaluate_batches == batches
    (tmp_path / "train.txt").write_text("text" * 20)
    (tmp_path / "held.txt").write_text("t" * 8 * samples)
    text = JOB.replace("held_out = 0.0", 'held_out = ["held.txt"]').replace("text.txt", "train.txt")
    text = text.replace("sequence = 4", "sequence = 8")
    text = text.replace(
        'kind = "huggingface", path = "model", weights = false', 'kind = "gpt", blocks = 1, width = 4'
    )
    spec = parse(text % "bytes", tmp_path)
    assert training_job(spec, store, print).evaluate_batches == batches
