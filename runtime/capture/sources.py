"""Opens a language model to launch: the built-in GPT, a Hugging Face directory, a GGUF file, or a directory that `jobs export` wrote. Only the
launching machine reads one; it passes on graphs, and tensors by name.

Capturing a module imports torch.export and SymPy, which takes half as long again as importing PyTorch; an exported directory needs neither.
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

CONSTANTS_FILE = "constants.safetensors"  # variables of the graph that are in no state_dict
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILES = ("config.json", "generation_config.json")
FORMAT = 1

Read = Callable[[Iterable[Variable]], dict[str, torch.Tensor]]
Captured = tuple[Graph, int]  # for inference, and its largest number of positions
Remember = Callable[[str, Callable[[], Captured]], Captured]  # of a model's fingerprint, and what captures it


@dataclass(frozen=True, kw_only=True)
class About:
    """fusion.json: metadata of an exported model beside its graph and weights."""

    vocabulary: int = 0
    max_sequence: int = 0
    byte_level: bool = False
    end_tokens: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()  # the results of a model that answers in one run; else it generates
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
    """Matrices that a model's files have quantised already, and that are served as they are."""

    layout: Callable[[Variable, frozenset[Use]], Layout | None]  # of a matrix, by its uses in the graph
    read: Callable[[Source], tuple[torch.Tensor, ...]]  # the tensors of a matrix


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    about: About
    inference: Graph
    read: Read  # values of variables, by name; one stage at a time
    check: Callable[[Iterable[Variable]], None] = lambda variables: None  # as `read`, from the headers alone
    blocks: StoredBlocks | None = None
    dtype: str = FLOAT32  # of the computation
    stored_dtypes: Mapping[str, int] = field(default_factory=dict)  # bytes of its files' weights, by dtype
    unread: tuple[str, ...] = ()  # tensors of its files that the model does not have
    training: Graph | None = None
    source: SourceConfig | None = None  # of an encoder-decoder
    tokenizer: Path | bytes | None = None  # tokenizer.json, or its content
    config: tuple[Path, ...] = ()  # copied by an export
    # File name -> content: chat template and special tokens, if any
    chat: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def missing_end_token(self) -> str | None:
        """The eos_token of a chat model's tokenizer if the model's configuration does not end answers with it; else None."""
        special, tokenizer = self.chat.get(SPECIAL_TOKENS_FILE), self.tokenizer
        text = None if special is None else json.loads(special).get("eos_token")
        if text is None or tokenizer is None:
            return None
        content = json.loads(tokenizer if isinstance(tokenizer, bytes) else tokenizer.read_bytes())
        ends = {each["id"] for each in content.get("added_tokens") or () if each["content"] == text}
        return text if ends and ends.isdisjoint(self.about.end_tokens) else None

    @property
    def unknown_tokens(self) -> int:
        """The number of the tokenizer's tokens beyond the model's vocabulary: a prompt with one of them is refused."""
        if self.tokenizer is None:
            return 0
        content = json.loads(
            self.tokenizer if isinstance(self.tokenizer, bytes) else self.tokenizer.read_bytes()
        )
        vocabulary = content["model"].get("vocab") or ()
        known = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        ids = {*known, *(each["id"] for each in content.get("added_tokens") or ())}
        return sum(token >= self.about.vocabulary for token in ids)


def builtin(config: GPTConfig, seed: int, *, byte_level: bool, tokenizer: Path | None) -> LanguageModel:
    """The built-in GPT with random weights from `seed`, independent of torch's global state."""
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


def in_files(path: Path, dtype: str | None = None, remember: Remember | None = None) -> LanguageModel:
    """The model of a directory or GGUF file, for serving. `dtype`: None for that of its files; `remember`: if
    graphs that were captured before are to count (`CapturedBefore.of`). Raises JobError, CaptureError."""
    check_model(path)
    if path.is_file():
        return gguf(path, model_dtype(dtype, FLOAT32, {}, str(path)))
    if (path / TOKENIZER_FILE).is_file():
        check_tokenizer(path / TOKENIZER_FILE)
    if is_exported_directory(path):
        return exported(path, dtype)
    return huggingface(HuggingFaceConfig(path=path), training=False, dtype=dtype, remember=remember)


def huggingface(
    config: HuggingFaceConfig,
    *,
    training: bool,
    seed: int = 0,
    dtype: str | None = None,
    remember: Remember | None = None,
) -> LanguageModel:
    """A Hugging Face model directory; without its weights, initialised from `seed`. `dtype`: see `open_model`; training is in float32. `remember`: as
    in `in_files`. Raises JobError, CaptureError."""
    from fusion.runtime.capture.huggingface import open_model

    model = open_model(config.path, weights=config.weights, seed=seed, dtype=FLOAT32 if training else dtype)
    files = (config.path / name for name in CONFIG_FILES)
    inference, longest = (
        _captured(model) if remember is None else remember(model.fingerprint, lambda: _captured(model))
    )
    weights = model.weights
    return LanguageModel(
        about=About(
            vocabulary=model.vocabulary,
            max_sequence=longest,
            byte_level=False,
            end_tokens=model.end_tokens,
            outputs=() if model.pooling is None else (EMBEDDING,),
        ),
        inference=inference if training else model.with_suppressed_tokens(inference),
        training=model.capture(training=True, maximum_sequence=longest) if training else None,
        read=model.read,
        check=model.check,
        blocks=StoredBlocks(weights.layout, weights.read_stored) if weights.packed else None,
        dtype=model.dtype,
        stored_dtypes={} if weights.packed else model.stored_dtypes,  # they would be those of scales
        unread=weights.unread() if model.pooling is None else (),
        source=model.source,
        tokenizer=model.tokenizer,
        config=tuple(path for path in files if path.is_file()),
        chat=chat_files(config.path),
    )


def gguf(path: Path, dtype: str = FLOAT32) -> LanguageModel:
    """A GGUF file, for serving in `dtype`, with its quantised matrices as `blocks`. Raises JobError, CaptureError; JobError for a `dtype` other
    than float32 if it has such matrices."""
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


def _captured(model: HuggingFaceModel) -> Captured:
    """The graph for inference, and its maximum number of positions. Code that compares the length of a sequence with that of a table may behave
    otherwise at exactly that length: then the maximum is one position less."""
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
    """A directory that `jobs export` wrote, in the dtype of its graph. Raises JobError, GraphError; JobError for another `dtype`: an exported
    graph does not say where the model rounds."""
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
    """These variables, some of them parts of tensors in the file. JobError for a file that cannot be read, or lacks one."""
    if not names:
        return {}  # an export need not have both files
    values: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            for name in names:
                part = part_of(name)
                tensor_name = name if part is None else part.name
                if tensor_name not in stored:
                    raise JobError(f"{path} has no {tensor_name}")
                if part is None:
                    values[name] = file.get_tensor(tensor_name)
                else:
                    values[name] = file.get_slice(tensor_name)[part.start : part.stop]
    except (SafetensorError, OSError) as error:
        raise JobError(f"{path}: {error}") from None
    return values
