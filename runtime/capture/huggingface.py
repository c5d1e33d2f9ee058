"""A Hugging Face language model in a directory, causal, an encoder-decoder or an embedding model: config.json, safetensors, perhaps a tokenizer.

Only the machine that launches a job reads one, and only it needs transformers. The module is built without memory for its parameters; weights
are read from the files on demand, a stage at a time, under their names in the module. No code that came with the model is run.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion.dag.ir.graph import Graph, Variable
from fusion.dag.rewrites.expert_groups import part_of
from fusion.runtime.capture.auto_classes import model_class, model_pooling
from fusion.runtime.capture.capture import (
    capture_encoder_decoder,
    capture_language_model,
    capture_text_encoder,
    variables_from_module,
)
from fusion.runtime.capture.encoder_decoder import (
    architectures,
    longest_answer,
    reads_source,
    source_config,
)
from fusion.runtime.capture.generation import generation_file, suppress, suppressed_tokens
from fusion.runtime.capture.model_dtype import FLOAT32, model_dtype, stored_dtypes
from fusion.runtime.capture.rope import longest_text, unknown_kind
from fusion.runtime.capture.stored_config import error_reason, stored_config, stored_tokenizer
from fusion.runtime.capture.stored_weights import (
    LoadingRules,
    StoredWeights,
    computed_parameter,
    is_unsaved,
    no_weights,
    stored_weights,
    weights_files,
)
from fusion.runtime.capture.text_encoder import Pooling, usable_positions
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import SourceConfig
from fusion.runtime.job.model_files import check_huggingface, is_exported
from fusion.runtime.planes.input_sizes import TORCH_DTYPES

_MAX_COMPARED = 1000  # names of unread tensors, in the search for one like a missing weight


@dataclass(frozen=True)
class HuggingFaceModel:
    """`module` has computed tables in memory, and parameters on the meta device unless they are random."""

    directory: Path
    module: nn.Module
    vocabulary: int
    max_sequence: int
    end_tokens: tuple[int, ...]
    tokenizer: Path | bytes | None  # tokenizer.json, or its content
    weights: StoredWeights
    dtype: str  # of the computation
    stored_dtypes: Mapping[str, int]  # bytes of the files' floating-point tensors, by dtype
    source: SourceConfig | None = None  # of an encoder-decoder
    pooling: Pooling | None = None  # of an embedding model

    def capture(self, *, training: bool = False, maximum_sequence: int | None = None) -> Graph:
        """See `capture_language_model`; with at most the model's own `max_sequence` positions."""
        longest = min(maximum_sequence or self.max_sequence, self.max_sequence)
        if self.pooling is not None:
            if training:
                raise JobError(f"{self.directory} makes vectors of texts: it can be served and not trained")
            return capture_text_encoder(self.module, self.pooling, maximum_sequence=longest)
        if self.source is not None:
            if training:
                raise JobError(
                    f"{self.directory} holds an encoder-decoder, which can be served and not trained"
                )
            length, channels = self.source.length, self.source.channels
            return capture_encoder_decoder(
                self.module, maximum_sequence=longest, maximum_source=length, features=channels
            )
        return capture_language_model(self.module, training=training, maximum_sequence=longest)

    @property
    def fingerprint(self) -> str:
        """What the graph for inference follows from: the library's code, the configuration, and the module's tensors but the values of
        parameters."""
        code = Path(inspect.getfile(type(self.module)))
        tensors = [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        first_names: dict[int, str] = {}
        described = [
            (
                name, first_names.setdefault(id(tensor), name), [*tensor.shape], str(tensor.dtype),
                "" if tensor.is_meta or isinstance(tensor, nn.Parameter) else _digest(tensor),
            )
            for name, tensor in tensors
        ]  # fmt: skip
        status = code.stat()
        library = _transformers().__version__, str(code), status.st_size, status.st_mtime_ns
        kind = self.dtype, self.max_sequence, repr(self.source), repr(self.pooling)
        config: Any = self.module.config
        return repr((library, kind, config.to_dict(), described))

    def read(self, variables: Iterable[Variable]) -> dict[str, torch.Tensor]:
        """The values of these variables, in the dtype of the graph. JobError names one that no file has, or that has another shape there."""
        stored: list[tuple[Variable, str]] = []
        values: dict[str, torch.Tensor] = {}
        for variable in variables:
            name = self._stored_name(variable)
            if name is None:
                values[variable.name] = self._unstored(variable).clone()
            else:
                stored.append((variable, name))
        return {**values, **self.weights.read(stored)}

    def check(self, variables: Iterable[Variable]) -> None:
        """JobError as in `read`, from the headers of the files alone."""
        stored: list[tuple[Variable, str]] = []
        for variable in variables:
            name = self._stored_name(variable)
            if name is None:
                self._unstored(variable)
            else:
                stored.append((variable, name))
        self.weights.check(stored)

    def _stored_name(self, variable: Variable) -> str | None:
        return self.weights.name_of(variable) if is_exported(variable.name) else None

    def _unstored(self, variable: Variable) -> torch.Tensor:
        """The module's own value of a variable that no file has. JobError where that would not be the trained one."""
        part = part_of(variable.name)
        value = self._attributes.get(variable.name if part is None else part.name)
        if value is not None and value.is_meta and part is None:
            value = computed_parameter(self.module, variable.name)
        if value is None or value.is_meta or self._is_lost(variable.name, value):
            raise self._missing(variable.name)
        return value if part is None else value[part.start : part.stop]

    def _missing(self, name: str) -> JobError:
        declared, built = architectures(self.module.config), type(self.module).__name__
        mismatch = f"; config.json says {', '.join(declared)!r:.80}, and {built} is what would be served"
        mismatch = mismatch if declared and built not in declared else ""
        nearest = get_close_matches(name, self.weights.unread()[:_MAX_COMPARED], 1, 0.0)
        suggestion = (
            f"; the nearest is {nearest[0]!r:.100}, which the model has no place for" if nearest else ""
        )
        return JobError(f"{self.directory}: no safetensors file has the weight {name}{suggestion}{mismatch}")

    def with_suppressed_tokens(self, graph: Graph) -> Graph:
        """A graph for serving, as `capture` returns it, that never generates the tokens that the files suppress; those of an encoder-decoder are in
        its `source`. JobError for malformed settings, or settings that cannot be served."""
        if self.source is not None or self.pooling is not None:
            return graph
        return suppress(graph, suppressed_tokens(self.directory, self.vocabulary, self.end_tokens))

    def _is_lost(self, name: str, value: torch.Tensor) -> bool:
        """Whether a buffer that files should have, and these do not, was trained, such as the bias by which routers choose experts: transformers
        initialises such a buffer with one number. Buffers that are computed from the configuration need no files."""
        if not self.weights.files or not is_exported(name) or is_unsaved(self.module, name):
            return False
        return bool((value == value.flatten()[:1]).all())

    @cached_property
    def _attributes(self) -> Mapping[str, torch.Tensor]:
        return variables_from_module(self.module)


def open_model(
    directory: Path, *, weights: bool = True, seed: int = 0, dtype: str | None = None
) -> HuggingFaceModel:
    """Read config.json and the index of the weights; not the weights. JobError names what is missing or unsupported.

    Without `weights`, no weights file is needed: the module is in memory, initialised at random from `seed`. `dtype`: of the computation, one of
    MODEL_DTYPES; None: that of the files, as with transformers' `dtype="auto"`.
    """
    check_huggingface(directory, weights=weights)
    config = stored_config(directory, _transformers())
    text = config.get_text_config()
    files = weights_files(directory) if weights else {}
    stored = stored_dtypes(files.values())
    runs_in = model_dtype(dtype, _configured_dtype(config), stored, str(directory))
    if weights:
        module, stored_tensors = _stored_module(config, directory, runs_in, files)
    else:
        module = _random_module(config, directory, runs_in, seed)
        stored_tensors = no_weights(module)
    try:
        longest, vocabulary = longest_text(text), int(text.vocab_size)
    except (
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        KeyError,
    ) as error:  # values that transformers does not check
        raise JobError(f"{directory}/config.json cannot be used: {error_reason(error)}") from error
    source, pooling = None, model_pooling(config, directory, _transformers())
    ends = _end_tokens(directory, config, text)
    if pooling is not None:
        longest = min(usable_positions(module, longest), pooling.tokens or longest)
    elif reads_source(config):
        source = source_config(config, directory, longest, vocabulary, ends)
        longest = longest_answer(config, longest)
    return HuggingFaceModel(
        directory=directory,
        module=module,
        vocabulary=vocabulary,
        max_sequence=longest,
        end_tokens=ends,
        tokenizer=stored_tokenizer(directory, _transformers()),
        weights=stored_tensors,
        dtype=runs_in,
        stored_dtypes=stored,
        source=source,
        pooling=pooling,
    )


def _digest(tensor: torch.Tensor) -> str:
    """A digest of its values."""
    return hashlib.sha256(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def _transformers() -> Any:
    import transformers  # an optional dependency, and slow to import

    return transformers


def config_for(model_type: str, values: Mapping[str, Any], model: Path) -> Any:
    """The configuration of a model type with these values. JobError where transformers cannot make one. `model`: the path for messages."""
    try:
        return _transformers().AutoConfig.for_model(model_type, **values)
    except Exception as error:  # whatever unchecked values cause in the library's code
        raise JobError(
            f"{model}: transformers knows no such {model_type} model: {error_reason(error)}"
        ) from error


def _configured_dtype(config: Any) -> str | None:
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def hollow_module(config: Any, directory: Path, dtype: str = FLOAT32, kind: str | None = None) -> nn.Module:
    """The model without memory for its parameters. `directory`: its path for messages; `kind`: the result of `model_class`, if already known."""
    with parameters_on_meta():
        return _module(config, directory, dtype, kind)


def _stored_module(
    config: Any, directory: Path, dtype: str, files: Mapping[str, Path]
) -> tuple[nn.Module, StoredWeights]:
    """The module without its parameters, and the weights in its files. A head that is tied to the embedding, and that differs from it in the
    files, becomes a parameter of its own, as in transformers; other ties that differ are refused."""
    module = hollow_module(config, directory, dtype)
    quantization = getattr(config, "quantization_config", None)
    weights = stored_weights(files, module, _loading_rules(module), directory, quantization)
    tied_names = [*getattr(module, "all_tied_weights_keys", ())]  # in transformers' order
    while (differing := weights.differing_ties()) is not None:
        untied = max(differing, key=lambda name: tied_names.index(name) if name in tied_names else -1)
        if untied not in tied_names:
            raise JobError(
                f"{directory}: {' and '.join(differing)} are one in the model, and differ in its files"
            )
        owner, _, name = untied.rpartition(".")
        parameter = nn.Parameter(torch.empty_like(module.get_parameter(untied)))
        setattr(module.get_submodule(owner), name, parameter)
    return module, weights


def _random_module(config: Any, directory: Path, dtype: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _module(config, directory, dtype)


def _module(config: Any, directory: Path, dtype: str, kind: str | None = None) -> nn.Module:
    kind = kind or model_class(config, directory, _transformers())
    try:
        module: nn.Module = getattr(_transformers(), kind).from_config(
            config, dtype=TORCH_DTYPES[dtype], trust_remote_code=False
        )
    except Exception as error:  # whatever inconsistent values cause in the model's code
        known = _transformers().modeling_rope_utils.ROPE_INIT_FUNCTIONS
        reason = unknown_kind(config, error, known) or error_reason(error)
        raise JobError(
            f"{directory} is not a language model that transformers can build: {reason}"
        ) from error
    _keep_float32(module, dtype)
    return module.eval()


def _keep_float32(module: nn.Module, dtype: str) -> None:
    """Convert parameters to float32 that transformers keeps so in any dtype, such as routers, whose rounding decides the choice of experts."""
    names = ["_keep_in_fp32_modules_strict"] if dtype != FLOAT32 else []
    names += ["_keep_in_fp32_modules"] if dtype == "float16" else []
    patterns = [pattern.replace("*", ".*") for name in names for pattern in getattr(module, name, None) or ()]
    if patterns:
        wide = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        for name, parameter in module.named_parameters():
            if wide.search(name):
                parameter.data = parameter.data.float()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While open, new modules get no memory for parameters and transformers does not initialise them; buffers are computed as usual."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A parameter that is on the meta device already may be tied to another: it must stay the same object.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            # As if it were loaded: initialising a parameter without memory takes 3 ms for each layer.
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _end_tokens(directory: Path, *configs: Any) -> tuple[int, ...]:
    """The end tokens as in transformers: those of generation_config.json, or none, where it exists; else of the first configuration with some."""
    settings = generation_file(directory)
    if settings is not None:
        value = settings.get("eos_token_id")
    else:
        values = (getattr(config, "eos_token_id", None) for config in configs)
        value = next((tokens for tokens in values if tokens is not None), None)
    if value is None:
        return ()
    tokens = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in tokens):
        raise JobError(f"{directory}: eos_token_id is a token's number, or a list of them, not {value!r:.80}")
    return tuple(tokens)


def _loading_rules(module: Any) -> LoadingRules:
    """How the files' tensor names map to the module's: often the same, but files keep the names of old versions, and those of a base model (such
    as GPT-2's) lack the prefix under which the causal model holds it."""
    state = module.state_dict()
    prefix = str(getattr(module, "base_model_prefix", ""))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # before version 5, files had the module's names

        def with_prefix(name: str) -> tuple[str, None]:
            return (f"{prefix}.{name}" if f"{prefix}.{name}" in state else name), None

        return LoadingRules(order=str, target=with_prefix, converters={})
    mapping = get_model_conversion_mapping(module)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]

    def renamed(name: str) -> tuple[str, str | None]:
        new, pattern = rename_source_key(name, renamings, converters, prefix, state)
        return (name, None) if new not in state and name in state else (new, pattern)

    return LoadingRules(
        order=dot_natural_key,
        target=renamed,
        converters={pattern: each for each in converters for pattern in each.source_patterns},
    )
