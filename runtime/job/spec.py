"""`job.toml`: a training job. Parsed strictly, so that a typing error is reported and not ignored.

name = "stdlib-gpt"

[model]
kind = "gpt"                 # or "huggingface" with path = "DIR"; or "python": path = "model.py", see PythonConfig
blocks = 4
width = 128

[data]
files = ["src/**/*.py"]      # relative to this file; or kind = "npz", "images" or "jsonl" with a path, see DatasetSpec
held_out = 0.05              # share of the files, or a list of patterns

[train]
steps = 200
sequence = 128
precision = "bf16"           # of products and of the edges between stages; left out: float32

[optimizer]
learning_rate = 1e-3

[compression]                # of the edges between stages; left out: none
kind = "adaptive"            # the slower a link, the more; or "uniform" with codec = "int8"
ratio = 8                    # the slowest link carries at least an eighth of its bytes
families = ["bf16", "int8"]  # what may be chosen; "topk" allows any ratio

[admission]                  # left out: all peers may take part
kind = "granted"             # those that you invite; or "listed": `peers`, for good
peers = ["12D3KooW..."]      # that are invited at launch

[limits]
stages_per_owner = 1
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from fusion.runtime.job import toml_files
from fusion.runtime.job.admission import AdmissionSpec, LimitsSpec
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import build
from fusion.runtime.job.manifest import CompressionConfig, OptimizerConfig, Precision
from fusion.runtime.job.manifest_wire import (
    NAME_RULE,
    is_name,
    validate_amounts,
    validate_compression,
    validate_optimizer,
)
from fusion.runtime.job.model_files import check_huggingface

MAX_SPEC_BYTES = 1 << 20
LEAST_ROWS = 8  # of a table of positions: with fewer a model is not captured
MAX_SIDE = 1 << 14  # pixels of an image's side


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocabulary: int = 256
    blocks: int = 4
    width: int = 128
    heads: int = 4
    sequence: int = 128  # the longest there can be: rows of the position table
    dropout: float = 0.0
    tied: bool = True  # the head shares the embedding's matrix

    def __post_init__(self) -> None:
        for name in ("vocabulary", "blocks", "width", "heads", "sequence"):
            if getattr(self, name) < 1:
                raise JobError(f"model.{name}: at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise JobError(f"model.width: a multiple of model.heads ({self.heads}), not {self.width}")
        if not 0.0 <= self.dropout < 1.0:
            raise JobError(f"model.dropout: from 0 to below 1, not {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A causal language model in a directory; `weights` False starts from random weights of its config.json."""

    path: Path
    weights: bool = True


@dataclass(frozen=True, kw_only=True)
class PythonConfig:
    """A function of a Python file that returns the model, an `nn.Module`. The file runs on the launching machine alone.

    The module's `forward` takes the data's arrays by the names of its parameters. `loss` names a function of the same file: its
    first argument is what forward returned, the others are arrays by name. Without one, forward returns the loss itself. A loss
    is one number, or several in a dict, list or tuple, whose sum is trained on."""

    path: Path
    function: str = "model"
    loss: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the function, by name


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Samples of named arrays.

    npz: every array of the file, the first dimension counting samples. images: a folder for each class; `images` uint8
    (3, height, width) and `labels` int64, the place of the class among the folders' names in order. jsonl: an object a line;
    a field of numbers, or of lists of them, all alike, is an array of its name; one of text is token ids (sequence) and
    `NAME_mask`; one of `classes` the place of its text among all that occur, in order."""

    kind: Literal["npz", "images", "jsonl"]
    path: Path
    # A share of the samples, one in each piece of them, or another file or folder.
    held_out: float | Path = 0.05
    size: tuple[int, int] = (0, 0)  # images: height and width that they are scaled to
    classes: tuple[str, ...] = ()  # jsonl
    text: str = "text"  # jsonl: the field that a language model reads
    tokenizer: Path | None = None  # as of DataSpec
    limit_bytes: int = 4 << 30  # of arrays, training and held-out together


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    files: tuple[Path, ...]  # sorted, each once, held-out files not among them
    held_out: tuple[Path, ...] = ()
    tokenizer: Path | None = None  # tokenizer.json; None: token ids are the bytes of the text
    limit_bytes: int = 256 << 20  # of text read, training and held-out together


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    steps: int
    sequence: int = 0  # tokens in a sample; 0, or left out, where samples are no texts
    microbatches: int = 8
    microbatch_size: int = 4
    seed: int = 0
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    precision: Precision = "float32"
    snapshot_every: int = 0  # steps; 0, or left out: the lead decides from costs and losses
    evaluate_every: int = 0
    evaluate_batches: int = 8

    def __post_init__(self) -> None:
        for name, low in (
            ("steps", 1), ("sequence", 0), ("microbatches", 1), ("microbatch_size", 1), ("seed", 0),
            ("snapshot_every", 0), ("evaluate_every", 0), ("evaluate_batches", 1),
        ):  # fmt: skip
            if getattr(self, name) < low:
                raise JobError(f"{name} must be at least {low}, not {getattr(self, name)}")

    @property
    def sizes(self) -> dict[str, int]:
        """Of the graph's symbols, in one microbatch."""
        return {"batch": self.microbatch_size, "sequence": self.sequence}


@dataclass(frozen=True, kw_only=True)
class PlacementSpec:
    stages: int | None = None  # None: as many as pay
    peers: tuple[str, ...] = ()  # peer ids or friendly names that may take part; none: all

    def __post_init__(self) -> None:
        if self.stages is not None and self.stages < 1:
            raise JobError(f"stages must be at least 1, not {self.stages}")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    name: str
    model: GPTConfig | HuggingFaceConfig | PythonConfig
    data: DataSpec | DatasetSpec
    train: TrainSpec
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    placement: PlacementSpec = field(default_factory=PlacementSpec)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    admission: AdmissionSpec = field(default_factory=AdmissionSpec)
    limits: LimitsSpec = field(default_factory=LimitsSpec)


def load(path: Path) -> JobSpec:
    """Read a job file. JobError names in one line the field that is wrong and what would be right."""
    text = toml_files.read(path, MAX_SPEC_BYTES)
    try:
        return parse(text, path.resolve().parent)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def parse(text: str, base: Path) -> JobSpec:
    """A JobSpec from TOML text; paths and patterns are relative to `base`. Raises JobError."""
    table = toml_files.tables(text, "a job")
    known = {f.name for f in fields(JobSpec)}
    for key in table:
        if key not in known:
            raise JobError(f"{key!r:.80} is not known here (known: {', '.join(sorted(known))})")
    for key in ("name", "model", "data", "train"):
        if key not in table:
            raise JobError(f"{key} is missing")
    if not isinstance(table["name"], str) or not is_name(table["name"]):
        raise JobError(f"name must be {NAME_RULE}")
    try:
        train = build(TrainSpec, table["train"], "train")
        validate_amounts(vars(train))
        model, data = _model(table["model"], base, train.sequence), _data(table["data"], base)
        _check_together(model, data, train)
        if train.evaluate_every > 0 and not data.held_out:
            right = "files of its own" if isinstance(data, DataSpec) else "a share of the samples, or a path"
            raise JobError(f"train.evaluate_every needs data that is held out: give data.held_out {right}")
        return JobSpec(
            name=table["name"],
            model=model,
            data=data,
            train=train,
            optimizer=_optimizer(table.get("optimizer", {})),
            placement=build(PlacementSpec, table.get("placement", {}), "placement"),
            compression=_compression(table.get("compression", {})),
            admission=build(AdmissionSpec, table.get("admission", {}), "admission"),
            limits=build(LimitsSpec, table.get("limits", {}), "limits"),
        )
    except JobError:
        raise
    except ValueError as error:
        raise JobError(str(error)) from None


def _optimizer(table: Any) -> OptimizerConfig:
    config = build(OptimizerConfig, table, "optimizer")
    if config.clip_norm == 0:  # TOML has no null
        config = replace(config, clip_norm=None)
    validate_optimizer(config)
    _refuse_unread(table, "optimizer", _UNREAD[config.kind], f"kind {config.kind}")
    if config.schedule == "constant":
        _refuse_unread(table, "optimizer", ("final_ratio",), "schedule constant")
    return config


# What an optimizer, or a compression, of that kind does not read.
_UNREAD = {
    "adamw": ("momentum",),
    "sgd": ("betas", "eps"),
    "none": ("codec", "ratio", "families", "reuse_mask", "error_feedback"),
    "uniform": ("ratio", "families"),
    "adaptive": ("codec",),
}


def _refuse_unread(table: Mapping[str, Any], where: str, unread: tuple[str, ...], what: str) -> None:
    for key in unread:
        if key in table:
            raise JobError(f"{where}.{key} does not go with {what}, which does not read it")


def _compression(table: Any) -> CompressionConfig:
    config = build(CompressionConfig, table, "compression")
    validate_compression(config)
    _refuse_unread(table, "compression", _UNREAD[config.kind], f"kind {config.kind}")
    return config


def _check_together(
    model: GPTConfig | HuggingFaceConfig | PythonConfig, data: DataSpec | DatasetSpec, train: TrainSpec
) -> None:
    python = isinstance(model, PythonConfig)
    if isinstance(data, DatasetSpec) and data.kind != "jsonl" and not python:
        raise JobError(f'data.kind: "{data.kind}" holds no text, which a language model reads')
    if train.sequence < 1 and not (python and isinstance(data, DatasetSpec)):
        raise JobError("train.sequence must be at least 1: tokens in a sample")


def _model(table: Any, base: Path, sequence: int) -> GPTConfig | HuggingFaceConfig | PythonConfig:
    if not isinstance(table, dict):
        raise JobError("model must be a table")
    rest = {key: value for key, value in table.items() if key != "kind"}
    match table.get("kind"):
        case "gpt":
            model = build(GPTConfig, {"sequence": max(1, sequence), **rest}, "model")
            if model.sequence < LEAST_ROWS:
                right = f"at least {LEAST_ROWS}, not {rest.get('sequence', sequence)}"
                raise JobError(f"model.sequence (train.sequence, where it is left out) must be {right}")
            if model.sequence < sequence:
                raise JobError(
                    f"model.sequence must be at least train.sequence ({sequence}), not {model.sequence}"
                )
            return model
        case "huggingface":
            for key in rest:
                if key not in ("path", "weights"):
                    raise JobError(f"model.{key} is not known here (known: path, weights)")
            path, weights = rest.get("path"), rest.get("weights", True)
            if not isinstance(path, str):
                raise JobError("model.path must be the directory that holds config.json")
            if not isinstance(weights, bool):
                raise JobError("model.weights must be true or false")
            directory = base / _expanded(path, "model.path")
            try:
                check_huggingface(directory, weights=weights)
            except JobError as error:
                raise JobError(f"model.path: {error}") from None
            return HuggingFaceConfig(path=directory, weights=weights)
        case "python":
            return _python(rest, base)
        case kind:
            raise JobError(f'model.kind must be "gpt", "huggingface" or "python", not {kind!r:.40}')


@dataclass(frozen=True, kw_only=True)
class _PythonTable:
    path: str
    function: str = PythonConfig.function
    loss: str | None = None


def _python(table: Mapping[str, Any], base: Path) -> PythonConfig:
    arguments = table.get("arguments", {})
    if not isinstance(arguments, dict):
        raise JobError("model.arguments must be a table: arguments of the function by name")
    given = build(_PythonTable, {k: v for k, v in table.items() if k != "arguments"}, "model")
    path = base / _expanded(given.path, "model.path")
    if not path.is_file():
        raise JobError(f"model.path must be a Python file: there is no file {path}")
    for name in (given.function, given.loss or "loss"):
        if not name.isidentifier():
            raise JobError(f"model.function and model.loss are names of functions, not {name!r:.80}")
    return PythonConfig(path=path, function=given.function, loss=given.loss, arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class _DatasetTable:
    path: str
    held_out: float | str = 0.05
    size: tuple[int, int] = DatasetSpec.size
    classes: tuple[str, ...] = ()
    text: str = DatasetSpec.text
    tokenizer: str = "bytes"
    limit_bytes: int = DatasetSpec.limit_bytes


_OF_KIND = {
    "npz": (),
    "images": ("size",),
    "jsonl": ("classes", "text", "tokenizer"),
}  # what only this kind has


def _dataset(kind: Literal["npz", "images", "jsonl"], table: Mapping[str, Any], base: Path) -> DatasetSpec:
    others = {key for other, keys in _OF_KIND.items() for key in keys if other != kind}
    for key in sorted(others & table.keys()):
        raise JobError(f"data.{key} does not go with data of kind {kind}")
    data = build(_DatasetTable, table, "data")
    if data.limit_bytes < 1:
        raise JobError(f"data.limit_bytes must be at least 1, not {data.limit_bytes}")
    if kind == "images" and not all(1 <= side <= MAX_SIDE for side in data.size):
        raise JobError(f"data.size must be the height and width of an image, from 1 to {MAX_SIDE}")
    path, held_out = _dataset_path(kind, data.path, base, "data.path"), data.held_out
    found = (
        _dataset_path(kind, held_out, base, "data.held_out")
        if isinstance(held_out, str)
        else _share(held_out)
    )
    if isinstance(found, Path):
        one, other = path.resolve(), found.resolve()
        if one == other or one in other.parents or other in one.parents:
            raise JobError("data.held_out must be apart from data.path: what is in both would be trained on")
    return DatasetSpec(
        kind=kind,
        path=path,
        held_out=found,
        size=data.size,
        classes=data.classes,
        text=data.text,
        tokenizer=_tokenizer(data.tokenizer, base),
        limit_bytes=data.limit_bytes,
    )


def _dataset_path(kind: str, text: str, base: Path, where: str) -> Path:
    path = base / _expanded(text, where)
    if kind == "images" and not path.is_dir():
        raise JobError(
            f"{where} must be a folder with a folder of images for each class: there is no folder {path}"
        )
    if kind != "images" and not path.is_file():
        raise JobError(f"{where} must be a file: there is no file {path}")
    return path


@dataclass(frozen=True, kw_only=True)
class _DataTable:
    files: tuple[str, ...]
    held_out: float | tuple[str, ...] = 0.05
    tokenizer: str = "bytes"
    limit_bytes: int = DataSpec.limit_bytes


def _data(table: Any, base: Path) -> DataSpec | DatasetSpec:
    if isinstance(table, dict) and (kind := table.get("kind", "text")) != "text":
        if kind not in tuple(_OF_KIND):  # a list or a table has no hash
            raise JobError(f'data.kind must be "text", "npz", "images" or "jsonl", not {kind!r:.40}')
        return _dataset(kind, {key: value for key, value in table.items() if key != "kind"}, base)
    if isinstance(table, dict):
        table = {key: value for key, value in table.items() if key != "kind"}
    data = build(_DataTable, table, "data")
    if data.limit_bytes < 1:
        raise JobError(f"data.limit_bytes must be at least 1, not {data.limit_bytes}")
    files = _expand(data.files, base, "data.files")
    if isinstance(data.held_out, tuple):
        held_out = _expand(data.held_out, base, "data.held_out")
    else:
        held_out = tuple(files[i] for i in spread(len(files), _share(data.held_out)))
        if data.held_out > 0 and not held_out and "held_out" in table:
            raise JobError(
                "data.held_out: a share of the files, of which there is one: list files to hold out, or set it to 0"
            )
    train = tuple(sorted(set(files) - set(held_out)))
    if not train:
        raise JobError("data.files: every file is held out, nothing is left to train on")
    tokenizer = _tokenizer(data.tokenizer, base)
    return DataSpec(files=train, held_out=held_out, tokenizer=tokenizer, limit_bytes=data.limit_bytes)


def _tokenizer(text: str, base: Path) -> Path | None:
    path = None if text == "bytes" else base / _expanded(text, "data.tokenizer")
    if path is not None and not path.is_file():
        raise JobError(f'data.tokenizer must be "bytes" or a tokenizer.json: there is no file {path}')
    return path


def _share(part: float) -> float:
    if not 0.0 <= part < 1.0:
        raise JobError(f"data.held_out must be from 0 to below 1, not {part}")
    return part


def spread(total: int, part: float) -> tuple[int, ...]:
    """About `part` of range(total), one in each of as many equal pieces, at least one where `part` > 0 and there are two. Where in its
    piece follows from a hash: at even distances, samples whose classes take turns would all be of one class."""
    count = min(total - 1, max(1, round(part * total))) if part > 0 else 0
    begins = [i * total // count for i in range(count)] + [total]
    return tuple(somewhere(begin, end) for begin, end in pairwise(begins))


def somewhere(begin: int, end: int) -> int:
    """One of range(begin, end), the same every time."""
    digest = hashlib.blake2b(f"{begin}/{end}".encode(), digest_size=8).digest()
    return begin + int.from_bytes(digest, "little") % (end - begin)


def _expand(patterns: tuple[str, ...], base: Path, where: str) -> tuple[Path, ...]:
    found: set[Path] = set()
    for pattern in patterns:
        path = _expanded(pattern, where)
        root, parts = (Path(path.anchor), path.parts[1:]) if path.is_absolute() else (base, path.parts)
        if not parts:
            raise JobError(f"{where}: an empty pattern")
        matched = [p for p in root.glob(str(Path(*parts))) if p.is_file()]
        if not matched:
            raise JobError(f"{where}: no file matches {pattern!r:.200} (looked in {base})")
        found.update(matched)
    if not found:
        raise JobError(f"{where} must name at least one file or pattern")
    return tuple(sorted(found))


def _expanded(text: str, where: str) -> Path:
    """With ~ or ~name replaced by the user's home."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise JobError(f"{where}: {text!r:.200} is in the home of a user who has none here") from None
