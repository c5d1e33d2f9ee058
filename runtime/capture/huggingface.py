"""A Hugging Face language model in a directory, causal, an encoder-decoder or one that makes a vector of a text: config.json,
safetensors, perhaps a tokenizer.

Only the machine that launches a job reads one, and only it needs transformers. The module is built without memory for
its parameters; weights are read from the files when they are asked for, a stage at a time, under the names that the
module gives them. No code that came with the model is run.
"""

from __future__ import annotations

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
from fusion.runtime.capture.generation import decoder_withholds, generation_file, withhold
from fusion.runtime.capture.model_dtype import FLOAT32, model_dtype, stored_dtypes
from fusion.runtime.capture.rope import longest_text, unknown_kind
from fusion.runtime.capture.stored_config import error_reason, stored_config, stored_tokenizer
from fusion.runtime.capture.stored_weights import (
    Loading,
    StoredWeights,
    computed,
    left_out,
    no_weights,
    stored_weights,
    weights_files,
)
from fusion.runtime.capture.text_encoder import Pooling, positions_left
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import SourceConfig
from fusion.runtime.job.model_files import check_huggingface, is_exported
from fusion.runtime.planes.input_sizes import TORCH_DTYPES

_LOOKED_AT = 1000  # names of tensors that the model has no place for, where one that it wants is missing


@dataclass(frozen=True)
class HuggingFaceModel:
    """`module` has its computed tables in memory, and its parameters on the meta device unless they are random."""

    directory: Path
    module: nn.Module
    vocabulary: int
    max_sequence: int
    end_tokens: tuple[int, ...]
    tokenizer: Path | bytes | None  # tokenizer.json, or what would stand in it
    weights: StoredWeights
    dtype: str  # that the module computes in
    stored_dtypes: Mapping[str, int]  # bytes of the files' floating-point tensors, by dtype
    source: SourceConfig | None = None  # what an encoder-decoder reads
    pooling: Pooling | None = None  # of a model that makes a vector of a text

    def capture(self, *, training: bool = False, maximum_sequence: int | None = None) -> Graph:
        """See `capture_language_model`; at most the model's own `max_sequence` positions."""
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

    def read(self, variables: Iterable[Variable]) -> dict[str, torch.Tensor]:
        """The values of these variables, in the dtype of the graph. JobError names one that no file has, or that has
        another shape there."""
        stored: list[tuple[Variable, str]] = []
        found: dict[str, torch.Tensor] = {}
        for variable in variables:
            name = self._stored_name(variable)
            if name is None:
                found[variable.name] = self._unstored(variable).clone()
            else:
                stored.append((variable, name))
        return {**found, **self.weights.read(stored)}

    def check(self, variables: Iterable[Variable]) -> None:
        """JobError as of `read`, as far as the headers of the files tell: before anything is read."""
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
        """What the module itself has for a variable that no file has. JobError where that would be made up."""
        part = part_of(variable.name)
        value = self._attributes.get(variable.name if part is None else part.name)
        if value is not None and value.is_meta and part is None:
            value = computed(self.module, variable.name)
        if value is None or value.is_meta or self._is_lost(variable.name, value):
            raise self._missing(variable.name)
        return value if part is None else value[part.start : part.stop]

    def _missing(self, name: str) -> JobError:
        named, built = architectures(self.module.config), type(self.module).__name__
        said = f"; config.json says {', '.join(named)!r:.80}, and {built} is what would be served"
        said = said if named and built not in named else ""
        nearest = get_close_matches(name, self.weights.unread()[:_LOOKED_AT], 1, 0.0)
        held = f"; the nearest is {nearest[0]!r:.100}, which the model has no place for" if nearest else ""
        return JobError(f"{self.directory}: no safetensors file has the weight {name}{held}{said}")

    def answering(self, graph: Graph) -> Graph:
        """`graph`, as `capture` gives it to serve, without the tokens that the files withhold from answers: those of an encoder-decoder,
        `source` tells. JobError for settings that are none, or that it cannot be served with."""
        if self.source is not None or self.pooling is not None:
            return graph
        return withhold(graph, decoder_withholds(self.directory, self.vocabulary, self.end_tokens))

    def _is_lost(self, name: str, value: torch.Tensor) -> bool:
        """Whether a buffer that files are to have, and these do not, was learnt, as the bias is by which routers choose experts: the
        library begins with one number for all of it. What it computes of the configuration is the same without files."""
        if not self.weights.files or not is_exported(name) or left_out(self.module, name):
            return False
        return bool((value == value.flatten()[:1]).all())

    @cached_property
    def _attributes(self) -> Mapping[str, torch.Tensor]:
        return variables_from_module(self.module)


def open_model(
    directory: Path, *, weights: bool = True, seed: int = 0, dtype: str | None = None
) -> HuggingFaceModel:
    """Read config.json and the index of the weights; not the weights. JobError says what is missing or unsupported.

    Without `weights` no file of weights is needed: the module is in memory, initialised at random from `seed`. `dtype`: that
    the model runs in, of MODEL_DTYPES; None: that of its files, as transformers' `dtype="auto"` takes it.
    """
    check_huggingface(directory, weights=weights)
    config = stored_config(directory, _transformers())
    text = config.get_text_config()
    files = weights_files(directory) if weights else {}
    stored = stored_dtypes(files.values())
    chosen = model_dtype(dtype, _configured_dtype(config), stored, str(directory))
    if weights:
        module, held = _stored_module(config, directory, chosen, files)
    else:
        module = _random_module(config, directory, chosen, seed)
        held = no_weights(module)
    try:
        longest, vocabulary = longest_text(text), int(text.vocab_size)
    except (
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        KeyError,
    ) as error:  # what no class of transformers looks at
        raise JobError(f"{directory}/config.json cannot be used: {error_reason(error)}") from error
    source, pooling = None, model_pooling(config, directory, _transformers())
    ends = _end_tokens(directory, config, text)
    if pooling is not None:
        longest = min(positions_left(module, longest), pooling.tokens or longest)
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
        weights=held,
        dtype=chosen,
        stored_dtypes=stored,
        source=source,
        pooling=pooling,
    )


def _transformers() -> Any:
    import transformers  # an optional dependency, and slow to import

    return transformers


def config_for(model_type: str, values: Mapping[str, Any], model: Path) -> Any:
    """The configuration of a kind of model, with these values. JobError where transformers knows none such."""
    try:
        return _transformers().AutoConfig.for_model(model_type, **values)
    except Exception as error:  # as of `_config`
        raise JobError(
            f"{model}: transformers knows no such {model_type} model: {error_reason(error)}"
        ) from error


def _configured_dtype(config: Any) -> str | None:
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def hollow_module(config: Any, directory: Path, dtype: str = FLOAT32, kind: str | None = None) -> nn.Module:
    """The model without memory for its parameters. `directory`: where it comes from, for what is said of it; `kind`: as of `model_class`,
    where that is not for its files to say."""
    with parameters_on_meta():
        return _module(config, directory, dtype, kind)


def _stored_module(
    config: Any, directory: Path, dtype: str, files: Mapping[str, Path]
) -> tuple[nn.Module, StoredWeights]:
    """The module without its parameters, and where these are. A head that is said to be the embedding, and of which the files hold
    other numbers than of that, is one of its own, as it is to transformers; all else that is tied stays so."""
    module = hollow_module(config, directory, dtype)
    quantization = getattr(config, "quantization_config", None)
    weights = stored_weights(files, module, _loading(module), directory, quantization)
    tied = [*getattr(module, "all_tied_weights_keys", ())]  # in the order in which they are tied
    while (apart := weights.tied_apart()) is not None:
        own = max(apart, key=lambda name: tied.index(name) if name in tied else -1)
        if own not in tied:
            raise JobError(
                f"{directory}: {' and '.join(apart)} are one in the model, and differ in its files"
            )
        place, _, name = own.rpartition(".")
        parameter = nn.Parameter(torch.empty_like(module.get_parameter(own)))
        setattr(module.get_submodule(place), name, parameter)
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
    except Exception as error:  # whatever the model's code makes of values that do not fit together
        known = _transformers().modeling_rope_utils.ROPE_INIT_FUNCTIONS
        reason = unknown_kind(config, error, known) or error_reason(error)
        raise JobError(
            f"{directory} is not a language model that transformers can build: {reason}"
        ) from error
    _keep_wide(module, dtype)
    return module.eval()


def _keep_wide(module: nn.Module, dtype: str) -> None:
    """What transformers loads in float32 whatever dtype the model has: routers, say, whose rounding chooses experts."""
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
    """While open, modules that are built give their parameters no memory, and transformers draws no numbers for them; their buffers
    are computed as ever."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # One that is on the meta device already may be tied to another: it must stay the same object.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            # As of one that it has loaded: to draw what has no memory takes it 3 ms a layer.
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _end_tokens(directory: Path, *configs: Any) -> tuple[int, ...]:
    """As in transformers: those of generation_config.json, or none, where it exists; else of the first configuration with some."""
    settings = generation_file(directory)
    if settings is not None:
        found = settings.get("eos_token_id")
    else:
        each = (getattr(config, "eos_token_id", None) for config in configs)
        found = next((tokens for tokens in each if tokens is not None), None)
    if found is None:
        return ()
    tokens = found if isinstance(found, list) else [found]
    if not all(type(token) is int for token in tokens):
        raise JobError(f"{directory}: eos_token_id is a token's number, or a list of them, not {found!r:.80}")
    return tuple(tokens)


def _loading(module: Any) -> Loading:
    """What the files call each tensor of the module: often the same, but files keep the names of old versions, and those of a
    base model (GPT-2's, say) leave out the name under which the causal model holds it."""
    own = module.state_dict()
    prefix = str(getattr(module, "base_model_prefix", ""))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # before version 5 the names of the files were those of the module

        def with_prefix(name: str) -> tuple[str, None]:
            return (f"{prefix}.{name}" if f"{prefix}.{name}" in own else name), None

        return Loading(order=str, target=with_prefix, converters={})
    ways = get_model_conversion_mapping(module)
    renamings = [way for way in ways if isinstance(way, WeightRenaming)]
    converters = [way for way in ways if isinstance(way, WeightConverter)]

    def renamed(name: str) -> tuple[str, str | None]:
        new, pattern = rename_source_key(name, renamings, converters, prefix, own)
        return (name, None) if new not in own and name in own else (new, pattern)

    return Loading(
        order=dot_natural_key,
        target=renamed,
        converters={pattern: way for way in converters for pattern in way.source_patterns},
    )
