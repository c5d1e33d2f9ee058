from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from fusion.runtime.job import spec
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import CompressionConfig
from fusion.runtime.job.spec import GPTConfig

SOUND = """
name = "small"
[model]
kind = "gpt"
blocks = 2
width = 32
heads = 2
[data]
files = ["src/*.py"]
[train]
steps = 10
sequence = 16
[optimizer]
learning_rate = 3e-3
clip_norm = 0
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    for i in range(10):
        (tmp_path / "src" / f"m{i}.py").write_text(f"x = {i}\n")
    return tmp_path


def test_a_sound_job_file(base: Path) -> None:
    job = spec.parse(SOUND, base)
    assert job.name == "small" and job.train.steps == 10 and job.train.microbatches == 8
    assert job.model == GPTConfig(blocks=2, width=32, heads=2, sequence=16)
    assert job.optimizer.learning_rate == 3e-3 and job.optimizer.clip_norm is None
    assert len(job.data.held_out) == 1 and len(job.data.files) == 9
    assert not set(job.data.held_out) & set(job.data.files)
    assert job.data.tokenizer is None and job.placement.stages is None
    assert job.train.snapshot_every == 0  # the lead decides
    assert (
        spec.parse(SOUND.replace("steps = 10", "steps = 10\nsnapshot_every = 4"), base).train.snapshot_every
        == 4
    )


def test_held_out_files_by_pattern_are_not_trained_on(base: Path) -> None:
    job = spec.parse(
        SOUND.replace('files = ["src/*.py"]', 'files = ["src/*.py"]\nheld_out = ["src/m7.py"]'), base
    )
    assert [p.name for p in job.data.held_out] == ["m7.py"]
    assert "m7.py" not in {p.name for p in job.data.files}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps = 10", 'steps = "ten"', "train.steps must be a whole number"),
        ("steps = 10", "", "train.steps is missing"),
        ("steps = 10", "steps = 0", "train.steps must be at least 1"),
        ("steps = 10", "steps = true", "train.steps must be a whole number"),
        ("steps = 10", "steps = 10\nstep = 3", "train.step is not known"),
        ("learning_rate = 3e-3", "learning_rate = -1.0", "optimizer.learning_rate must be from 0"),
        ("learning_rate = 3e-3", "lr = 1.0", "optimizer.lr is not known"),
        ("learning_rate = 3e-3", 'schedule = "step"', "optimizer.schedule must be one of"),
        ("learning_rate = 3e-3", "betas = [0.9]", "optimizer.betas must have 2 values"),
        ("learning_rate = 3e-3", "betas = [0.9, 1.0]", "optimizer.betas must be"),
        ("learning_rate = 3e-3", "momentum = 0.9", "optimizer.momentum does not go with kind adamw"),
        (
            "learning_rate = 3e-3",
            'kind = "sgd"\nbetas = [0.9, 0.9]',
            "optimizer.betas does not go with kind sgd",
        ),
        (
            "learning_rate = 3e-3",
            "final_ratio = 0.5",
            "optimizer.final_ratio does not go with schedule constant",
        ),
        ("[train]", "[compression]\ncodec = 'int8'\n[train]", "compression.codec does not go with kind none"),
        (
            "[train]",
            "[compression]\nkind = 'uniform'\nratio = 4\n[train]",
            "compression.ratio does not go with kind uniform",
        ),
        (
            "[train]",
            "[compression]\nkind = 'adaptive'\ncodec = 'int4'\n[train]",
            "compression.codec does not go with kind adaptive",
        ),
        (
            "sequence = 16",
            "sequence = 4",
            "model.sequence (train.sequence, where it is left out) must be at least 8, not 4",
        ),
        ("sequence = 16", "sequence = 0", "must be at least 8, not 0"),
        ("[train]", "[compression]\nratio = 0.5\n[train]", "compression.ratio must be from 1"),
        ("[train]", "[compression]\nkind = 'some'\n[train]", "compression.kind must be one of"),
        ("[train]", "[compression]\nfamilies = ['zip']\n[train]", "compression.families must be some of"),
        ("[train]", "[compression]\ncodec = 'topk:0.9'\n[train]", "compression.codec: a density of topk"),
        ("[train]", "[compression]\ncodec = 'topk:0.010'\n[train]", "compression.codec must be 'topk:0.01'"),
        ("[train]", "[compression]\nlive = 1\n[train]", "compression.live must be true or false"),
        ("[train]", "[compression]\nspeed = 1\n[train]", "compression.speed is not known"),
        ('kind = "gpt"', 'kind = "rnn"', "model.kind must be"),
        ('kind = "gpt"', 'kind = "huggingface"', "model.blocks is not known"),
        ("heads = 2", "heads = 3", "model.width: a multiple of"),
        ("heads = 2", "sequence = 8", "model.sequence must be at least train.sequence"),
        ('files = ["src/*.py"]', 'files = ["nothing/*.py"]', "data.files: no file matches 'nothing/*.py'"),
        ('files = ["src/*.py"]', "files = []", "data.files must name"),
        ('files = ["src/*.py"]', 'files = ["src/*.py"]\nheld_out = 1.5', "data.held_out must be from 0"),
        ('files = ["src/*.py"]', 'files = ["src/m1.py"]\nheld_out = ["src/m1.py"]', "every file is held out"),
        ('files = ["src/*.py"]', 'files = ["src/*.py"]\ntokenizer = "t.json"', "data.tokenizer must be"),
        ('files = ["src/*.py"]', 'kind = ["text"]\nfiles = ["src/*.py"]', 'data.kind must be "text", "npz"'),
        ('files = ["src/*.py"]', 'kind = {a = 1}\nfiles = ["src/*.py"]', 'data.kind must be "text", "npz"'),
        (
            'files = ["src/*.py"]',
            'files = ["src/m1.py"]\nheld_out = 0.2',
            "data.held_out: a share of the files, of which",
        ),
        (
            'files = ["src/*.py"]\n[train]',
            'files = ["src/m1.py"]\n[train]\nevaluate_every = 2',
            "train.evaluate_every needs data that is held out",
        ),
        ('name = "small"', "", "name is missing"),
        ('name = "small"', 'name = "small"\nstray = 1', "'stray' is not known"),
        ('name = "small"', "name = ", "not TOML"),
        ('name = "small"', 'name = "my job"', "name must be letters, digits and"),
        ("[train]", "[limits]\nstages_per_owner = 5000\n[train]", "stages_per_owner must be from 0 to 4096"),
        ("steps = 10", "steps = 10\nmicrobatches = 5000", "train.microbatches must be from 1 to 4096"),
        ("steps = 10", "steps = 10\nmicrobatch_size = 9000", "train.microbatches must be at most 3"),
        ("learning_rate = 3e-3", f"learning_rate = 1{'0' * 400}", "optimizer.learning_rate does not fit"),
        ("steps = 10", f"steps = 1{'0' * 5000}", "not TOML: Exceeds the limit"),
        (
            '"src/*.py"',
            '"~nobody-is-called-so/*.py"',
            "data.files: '~nobody-is-called-so/*.py' is in the home of",
        ),
    ],
)
def test_a_mistake_is_named_in_one_line(base: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(JobError) as error:
        spec.parse(SOUND.replace(old, new), base)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        spec.load(tmp_path / "job.toml")


def test_a_file_may_begin_with_a_mark_and_end_lines_as_on_windows(base: Path) -> None:
    (base / "job.toml").write_bytes(b"\xef\xbb\xbf" + SOUND.strip().replace("\n", "\r\n").encode())
    assert spec.load(base / "job.toml").name == "small"


def test_a_file_that_is_no_job_is_not_read_whole(tmp_path: Path) -> None:
    """A model, say, of more bytes than there is memory."""
    path = tmp_path / "model.gguf"
    path.touch()
    os.truncate(path, 1 << 42)
    with pytest.raises(JobError, match="larger than"):
        spec.load(path)


@pytest.mark.parametrize(
    ("count", "part", "held"), [(1, 0.5, 0), (2, 0.01, 1), (10, 0.3, 3), (10, 0.0, 0), (3, 0.99, 2)]
)
def test_the_share_held_out(count: int, part: float, held: int) -> None:
    chosen = spec.spread(count, part)
    assert len(set(chosen)) == held and set(chosen) <= set(range(count))


@pytest.mark.parametrize(("classes", "part"), [(10, 0.1), (10, 0.05), (2, 0.05), (3, 1 / 3)])
def test_classes_that_take_turns_are_held_out_alike(classes: int, part: float) -> None:
    chosen = spec.spread(3000, part)
    seen = Counter(i % classes for i in chosen)
    fair = len(chosen) / classes
    assert all(0.4 * fair <= seen[each] <= 1.7 * fair for each in range(classes)), seen
    assert all(i * 3000 // len(chosen) <= at < (i + 1) * 3000 // len(chosen) for i, at in enumerate(chosen))


def test_compression_is_none_unless_the_file_asks_for_it(base: Path) -> None:
    assert spec.parse(SOUND, base).compression == CompressionConfig()
    text = (
        SOUND + '[compression]\nkind = "adaptive"\nratio = 100\nfamilies = ["int8", "topk"]\nlive = false\n'
    )
    assert spec.parse(text, base).compression == CompressionConfig(
        kind="adaptive", ratio=100.0, families=("int8", "topk"), live=False
    )


PYTHON = """
name = "digits"
[model]
kind = "python"
path = "model.py"
loss = "loss"
arguments = { width = 3 }
[data]
kind = "npz"
path = "data.npz"
[train]
steps = 10
"""


@pytest.fixture
def own(base: Path) -> Path:
    for name in ("model.py", "data.npz", "held.npz", "rows.jsonl"):
        (base / name).write_text("")
    (base / "photos" / "val").mkdir(parents=True)
    return base


def test_a_model_in_python_and_samples_with_names(own: Path) -> None:
    job = spec.parse(PYTHON, own)
    wanted = spec.PythonConfig(path=own / "model.py", loss="loss", arguments={"width": 3})
    assert job.model == wanted and job.train.sequence == 0
    assert job.data == spec.DatasetSpec(kind="npz", path=own / "data.npz", held_out=0.05)
    other = PYTHON.replace('path = "data.npz"', 'path = "data.npz"\nheld_out = "held.npz"')
    assert spec.parse(other, own).data.held_out == own / "held.npz"
    photos = PYTHON.replace('"npz"', '"images"').replace('"data.npz"', '"photos"\nsize = [32, 48]')
    assert spec.parse(photos, own).data.size == (32, 48)  # type: ignore[union-attr]
    text = PYTHON.replace('kind = "npz"\npath = "data.npz"', 'files = ["src/*.py"]')
    assert isinstance(
        spec.parse(text.replace("steps = 10", "steps = 10\nsequence = 4"), own).data, spec.DataSpec
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"model.py"', '"nowhere.py"', "model.path must be a Python file: there is no file"),
        ('"model.py"', '"photos"', "model.path must be a Python file: there is no file"),
        ('path = "data.npz"', 'path = "photos"', "data.path must be a file: there is no file"),
        ('loss = "loss"', 'loss = "a b"', "model.function and model.loss are names of functions"),
        ('loss = "loss"', "loss = 3", "model.loss must be text"),
        ('loss = "loss"', "losses = 3", "model.losses is not known here"),
        ("{ width = 3 }", "3", "model.arguments must be a table"),
        ('kind = "npz"', 'kind = "csv"', 'data.kind must be "text", "npz", "images" or "jsonl"'),
        ('kind = "npz"', 'kind = "npz"\nsize = [3, 3]', "data.size does not go with data of kind npz"),
        (
            'kind = "npz"',
            'kind = "images"\nsize = [3, 3]',
            "data.path must be a folder with a folder of images for each class: there is no folder",
        ),
        ('"npz"\npath = "data.npz"', '"images"\npath = "photos"', "data.size must be the height and width"),
        ('path = "data.npz"', 'path = "data.npz"\nheld_out = "no.npz"', "data.held_out must be a file"),
        (
            'path = "data.npz"',
            'path = "data.npz"\nheld_out = "./data.npz"',
            "data.held_out must be apart from data.path",
        ),
        (
            'kind = "npz"\npath = "data.npz"',
            'kind = "images"\nsize = [3, 3]\npath = "photos"\nheld_out = "photos/val"',
            "data.held_out must be apart from data.path",
        ),
        ('path = "data.npz"', 'path = "data.npz"\nheld_out = 1.5', "data.held_out must be from 0 to below 1"),
        (
            'path = "data.npz"\n[train]',
            'path = "data.npz"\nheld_out = 0\n[train]\nevaluate_every = 2',
            "train.evaluate_every needs data that is held out: give data.held_out a share of the samples, or a path",
        ),
        ('path = "data.npz"', 'path = "data.npz"\nlimit_bytes = 0', "data.limit_bytes must be at least 1"),
        ('kind = "npz"\npath = "data.npz"', 'files = ["src/*.py"]', "train.sequence must be at least 1"),
    ],
)
def test_mistakes_in_a_job_of_ones_own(own: Path, old: str, new: str, says: str) -> None:
    assert old in PYTHON
    with pytest.raises(JobError) as error:
        spec.parse(PYTHON.replace(old, new), own)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_language_model_reads_text(own: Path) -> None:
    data = SOUND.replace('files = ["src/*.py"]', 'kind = "jsonl"\npath = "rows.jsonl"\ntext = "body"')
    assert spec.parse(data, own).data.text == "body"  # type: ignore[union-attr]
    with pytest.raises(JobError, match='"npz" holds no text'):
        spec.parse(data.replace('"jsonl"', '"npz"').replace('text = "body"', ""), own)
