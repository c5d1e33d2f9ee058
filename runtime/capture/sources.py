"""Where a language model that is to be launched comes from: the built-in GPT, a Hugging Face directory, a GGUF file, or a
directory that `jobs export` wrote. Only the launching machine reads one; what it hands on are graphs and tensors by name.

What captures a module imports torch.export and SymPy, half as long again as PyTorch: an exported directory does without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph, Variable
from fusion.dag.rewrites.expert_groups import part_of
from fusion.dag.rewrites.quantise import Layout, Source, Use
from fusion.runtime.capture.model_dtype import FLOAT32, model_dtype
from fusion.runtime.capture.models import GPT
from fusion.runtime.job.errors import CaptureError, JobError
from fusion.runtime.job.fields import build, plain
from fusion.runtime.job.manifest import EMBEDDING, SourceConfig
from fusion.runtime.job.model_files import (
    ABOUT_FILE,
    GRAPH_FILE,
    MAX_JSON_BYTES,
    SPECIAL_TOKENS_FILE,
    WEIGHTS_FILE,
    chat_files,
    check_model,
    is_exported,
    is_exported_directory,
    read_capped,
)
from fusion.runtime.job.spec import GPTConfig, HuggingFaceConfig
from fusion.runtime.job.text import check_tokenizer

if TYPE_CHECKING:
    from fusion.runtime.capture.huggingface import HuggingFaceModel

CONSTANTS_FILE = "constants.safetensors"  # what the graph reads and no state_dict of the module has
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILES = ("config.json", "generation_config.json")
FORMAT = 1

Read = Callable[[Iterable[Variable]], dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class About:
    """fusion.json: metadata of an exported model beside its graph and weights."""

    vocabulary: int = 0
    max_sequence: int = 0
    byte_level: bool = False
    end_tokens: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()  # names for what a model gives that answers in one run; else it generates
    format: int = FORMAT

    def to_json(self) -> bytes:
        fields = plain(self)
        if not self.outputs:
            del fields["outputs"]  # unknown to older releases
        return json.dumps(fields, indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, where: str) -> About:
        try:
            about = build(cls, json.loads(data))
        except (ValueError, RecursionError) as error:
            raise JobError(f"{where}: {error}") from None
        if about.format != FORMAT:
            raise JobError(f"{where}: format {about.format}; this software knows {FORMAT}")
        for name in ("vocabulary", "max_sequence") if not about.outputs else ():
            if getattr(about, name) < 1:
                raise JobError(f"{where}: {name} is missing: at least 1, for a model that generates")
        return about


@dataclass(frozen=True)
class StoredBlocks:
    """Matrices that the files of a model have quantised already, and that are served as they are."""

    layout: Callable[[Variable, frozenset[Use]], Layout | None]  # how one is stored, by how the graph uses it
    read: Callable[[Source], tuple[torch.Tensor, ...]]  # its parts


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    about: About
    inference: Graph
    read: Read  # values of variables, by name; a stage's at a time
    check: Callable[[Iterable[Variable]], None] = lambda variables: None  # as `read`, but of headers alone
    blocks: StoredBlocks | None = None
    dtype: str = FLOAT32  # that it computes in
    stored_dtypes: Mapping[str, int] = field(default_factory=dict)  # bytes of its files' weights, by dtype
    unread: tuple[str, ...] = ()  # tensors of its files that it has no place for
    training: Graph | None = None
    source: SourceConfig | None = None  # what an encoder-decoder reads
    tokenizer: Path | bytes | None = None  # tokenizer.json, or what would stand in it
    config: tuple[Path, ...] = ()  # files that an export repeats
    # File name -> content: chat template and special tokens, if any
    chat: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def unended(self) -> str | None:
        """The eos_token of a chat model's tokenizer, where its configuration does not end answers with it; else None."""
        special, tokenizer = self.chat.get(SPECIAL_TOKENS_FILE), self.tokenizer
        text = None if special is None else json.loads(special).get("eos_token")
        if text is None or tokenizer is None:
            return None
        read = json.loads(tokenizer if isinstance(tokenizer, bytes) else tokenizer.read_bytes())
        ends = {each["id"] for each in read.get("added_tokens") or () if each["content"] == text}
        return text if ends and ends.isdisjoint(self.about.end_tokens) else None

    @property
    def unknown_tokens(self) -> int:
        """The number of the tokenizer's tokens beyond the model's vocabulary: a prompt with one of them is refused."""
        if self.tokenizer is None:
            return 0
        read = json.loads(
            self.tokenizer if isinstance(self.tokenizer, bytes) else self.tokenizer.read_bytes()
        )
        found = read["model"].get("vocab") or ()
        known = found.values() if isinstance(found, dict) else range(len(found))
        ids = {*known, *(each["id"] for each in read.get("added_tokens") or ())}
        return sum(token >= self.about.vocabulary for token in ids)


def builtin(config: GPTConfig, seed: int, *, byte_level: bool, tokenizer: Path | None) -> LanguageModel:
    """The built-in GPT with the random weights that `seed` gives, whatever was drawn before."""
    from fusion.runtime.capture.capture import capture_language_model, variables_from_module

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = GPT(config)
    values = variables_from_module(module)
    return LanguageModel(
        about=About(vocabulary=config.vocabulary, max_sequence=config.sequence, byte_level=byte_level),
        inference=capture_language_model(module, training=False, maximum_sequence=config.sequence),
        training=capture_language_model(module, training=True, maximum_sequence=config.sequence),
        read=lambda variables: {v.name: values[v.name] for v in variables},
        tokenizer=tokenizer,
    )


def in_files(path: Path, dtype: str | None = None) -> LanguageModel:
    """The model of a directory or GGUF file that is to be served. `dtype`: None for that of its files. Raises JobError,
    CaptureError."""
    check_model(path)
    if path.is_file():
        return gguf(path, model_dtype(dtype, FLOAT32, {}, str(path)))
    if (path / TOKENIZER_FILE).is_file():
        check_tokenizer(path / TOKENIZER_FILE)
    if is_exported_directory(path):
        return exported(path, dtype)
    return huggingface(HuggingFaceConfig(path=path), training=False, dtype=dtype)


def huggingface(
    config: HuggingFaceConfig, *, training: bool, seed: int = 0, dtype: str | None = None
) -> LanguageModel:
    """A Hugging Face model directory; without its weights, as `seed` initialises it. `dtype`: see `open_model`; training is
    in float32. Raises JobError, CaptureError."""
    from fusion.runtime.capture.huggingface import open_model

    model = open_model(config.path, weights=config.weights, seed=seed, dtype=FLOAT32 if training else dtype)
    files = (config.path / name for name in CONFIG_FILES)
    inference, longest = _captured(model)
    weights = model.weights
    return LanguageModel(
        about=About(
            vocabulary=model.vocabulary,
            max_sequence=longest,
            byte_level=False,
            end_tokens=model.end_tokens,
            outputs=() if model.pooling is None else (EMBEDDING,),
        ),
        inference=inference if training else model.answering(inference),
        training=model.capture(training=True, maximum_sequence=longest) if training else None,
        read=model.read,
        check=model.check,
        blocks=StoredBlocks(weights.layout, weights.read_stored) if weights.packed else None,
        dtype=model.dtype,
        stored_dtypes={} if weights.packed else model.stored_dtypes,  # of scales, it would be
        unread=weights.unread() if model.pooling is None else (),
        source=model.source,
        tokenizer=model.tokenizer,
        config=tuple(path for path in files if path.is_file()),
        chat=chat_files(config.path),
    )


def gguf(path: Path, dtype: str = FLOAT32) -> LanguageModel:
    """A GGUF file, to be served in `dtype`, with its quantised matrices as `blocks`. Raises JobError, CaptureError; JobError for
    another `dtype` than float32 where it has such matrices."""
    from fusion.runtime.capture.gguf_model import open_gguf

    model = open_gguf(path, dtype)
    if dtype != FLOAT32 and model.quantised:
        raise JobError(
            f"--dtype: {path} has quantised matrices, which stay as they are: it is served in {FLOAT32}"
        )
    return LanguageModel(
        about=About(
            vocabulary=model.vocabulary,
            max_sequence=model.max_sequence,
            byte_level=False,
            end_tokens=model.tokenizer.end_tokens,
            outputs=() if model.pooling is None else (EMBEDDING,),
        ),
        inference=model.capture(),
        read=model.read,
        dtype=dtype,
        blocks=StoredBlocks(model.layout, model.read_stored),
        tokenizer=model.tokenizer.file,
        chat=model.tokenizer.chat,
    )


def _captured(model: HuggingFaceModel) -> tuple[Graph, int]:
    """The graph for inference, and how many positions it takes. Code that compares the length of a sequence with that of a
    table of its own may do otherwise at that very length: then it is one position less."""
    longest = model.max_sequence
    try:
        return model.capture(), longest
    except CaptureError as error:
        if "size of sequence free" not in str(error):
            raise
        try:
            return model.capture(maximum_sequence=longest - 1), longest - 1
        except CaptureError:
            raise error from None


def exported(directory: Path, dtype: str | None = None) -> LanguageModel:
    """A directory that `jobs export` wrote, in the dtype of its graph. Raises JobError, GraphError, and JobError for another
    `dtype`: in float32 an export does not say which of its numbers a model rounds."""
    path = directory / ABOUT_FILE
    about = About.from_json(read_capped(path, MAX_JSON_BYTES), str(path))
    inference = serialise.decode(read_capped(directory / GRAPH_FILE, serialise.MAX_BYTES))
    runs_in = inference.types[inference.outputs[0]].dtype
    if dtype not in (None, runs_in):
        raise JobError(
            f"--dtype: {directory} was written by `jobs export` and holds a graph in {runs_in}, which cannot be had in {dtype}"
        )
    tokenizer = directory / TOKENIZER_FILE
    return LanguageModel(
        about=about,
        inference=inference,
        dtype=runs_in,
        read=lambda variables: _read(directory, variables),
        tokenizer=tokenizer if tokenizer.is_file() else None,
        config=tuple(directory / name for name in CONFIG_FILES if (directory / name).is_file()),
        chat=chat_files(directory),
    )


def _read(directory: Path, variables: Iterable[Variable]) -> dict[str, torch.Tensor]:
    names = [variable.name for variable in variables]
    weights, constants = directory / WEIGHTS_FILE, directory / CONSTANTS_FILE
    return {
        **_read_file(weights, [name for name in names if is_exported(name)]),
        **_read_file(constants, [name for name in names if not is_exported(name)]),
    }


def _read_file(path: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The variables of these names, of which some are parts of what the file holds. JobError for a file that cannot be read, or has not
    all of them."""
    if not names:
        return {}  # an export need not have both files
    found: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            for name in names:
                part = part_of(name)
                whole = name if part is None else part.name
                if whole not in held:
                    raise JobError(f"{path} has no {whole}")
                if part is None:
                    found[name] = file.get_tensor(whole)
                else:
                    found[name] = file.get_slice(whole)[part.start : part.stop]
    except (SafetensorError, OSError) as error:
        raise JobError(f"{path}: {error}") from None
    return found
