"""A Hugging Face causal language model in a directory: config.json, safetensors, perhaps tokenizer.json.

Only the machine that launches a job reads one, and only it needs transformers. The module is built without memory for
its parameters; weights are read from the files when they are asked for, a stage at a time, under the names that the
module gives them. No code that came with the model is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fusion.dag.ir.graph import Graph, Variable
from fusion.runtime.capture.capture import capture_language_model, is_exported, variables_from_module
from fusion.runtime.capture.rope import fixed_length
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import check_huggingface, indexed_files, json_object
from fusion.runtime.planes.codegen import TORCH_DTYPES


@dataclass(frozen=True)
class HuggingFaceModel:
    """`module` has its computed tables in memory, and its parameters on the meta device unless they are random."""

    directory: Path
    module: nn.Module
    vocabulary: int
    max_sequence: int
    end_tokens: tuple[int, ...]
    tokenizer: Path | None  # tokenizer.json
    files: Mapping[str, Path]  # stored tensor -> the file that holds it
    stored: Mapping[str, str]  # tensor of the module -> its name in the files

    def capture(self, *, training: bool = False, maximum_sequence: int | None = None) -> Graph:
        """See `capture_language_model`; at most the model's own `max_sequence` positions."""
        longest = min(maximum_sequence or self.max_sequence, self.max_sequence)
        return capture_language_model(self.module, training=training, maximum_sequence=longest)

    def read(self, variables: Iterable[Variable]) -> dict[str, torch.Tensor]:
        """The values of these variables, in the dtype of the graph. JobError names one that no file has, or that has
        another shape there."""
        attributes = variables_from_module(self.module)
        places: dict[Path, list[tuple[Variable, str]]] = {}
        found: dict[str, torch.Tensor] = {}
        for variable in variables:
            names = (variable.name, *variable.aliases) if is_exported(variable.name) else ()
            name = next((self.stored[n] for n in names if n in self.stored), None)
            if name is not None:
                places.setdefault(self.files[name], []).append((variable, name))
                continue
            value = attributes.get(variable.name)
            if value is None or value.is_meta:
                raise JobError(f"{self.directory}: no safetensors file has the weight {variable.name}")
            found[variable.name] = value.clone()
        for path, wanted in places.items():
            found.update(_read(path, wanted))
        return found


def open_model(directory: Path, *, weights: bool = True, seed: int = 0) -> HuggingFaceModel:
    """Read config.json and the index of the weights; not the weights. JobError says what is missing or unsupported.

    Without `weights` no file of weights is needed: the module is in memory, initialised at random from `seed`.
    """
    check_huggingface(directory, weights=weights)
    config = _config(directory)
    said = getattr(config, "quantization_config", None)
    if weights and said is not None:
        # Read as plain numbers, they would make a model that answers, and answers nonsense.
        method = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
        raise JobError(
            f"{directory} holds weights that are quantised already ({method or 'no method named'!s:.40}), which are not "
            "read; serve the model in full precision, with --quantization int8 or int4"
        )
    text = config.get_text_config()
    tokenizer = directory / "tokenizer.json"
    module = _hollow_module(config, directory) if weights else _random_module(config, directory, seed)
    files = _files(directory) if weights else {}
    return HuggingFaceModel(
        directory=directory,
        module=module,
        vocabulary=int(text.vocab_size),
        max_sequence=_longest(text),
        end_tokens=_end_tokens(directory, text),
        tokenizer=tokenizer if tokenizer.is_file() else None,
        files=files,
        stored=_stored_names(module, files, directory),
    )


def _transformers() -> Any:
    import transformers  # an optional dependency, and slow to import

    return transformers


def _config(directory: Path) -> Any:
    try:
        return _transformers().AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError) as error:
        raise JobError(
            f"{directory}/config.json cannot be used: {str(error).strip().splitlines()[0][:200]}"
        ) from error


def _hollow_module(config: Any, directory: Path) -> nn.Module:
    with parameters_on_meta():
        return _module(config, directory)


def _random_module(config: Any, directory: Path, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _module(config, directory)


def _module(config: Any, directory: Path) -> nn.Module:
    try:
        module: nn.Module = _transformers().AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    except (ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise JobError(
            f"{directory} is not a causal language model that transformers knows: {reason}"
        ) from error
    return module.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While open, modules that are built give their parameters no memory; their buffers are computed as ever."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # One that is on the meta device already may be tied to another: it must stay the same object.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _longest(config: Any) -> int:
    """The most positions of a text, all of which the model treats in one way."""
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    if longest < 1:  # XLNet, for one, says -1
        longest = 2048
    return min(longest, fixed_length(config) or longest)


def _end_tokens(directory: Path, config: Any) -> tuple[int, ...]:
    found = getattr(config, "eos_token_id", None)
    path = directory / "generation_config.json"
    if path.is_file():
        found = json_object(path).get("eos_token_id", found)
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))


def _files(directory: Path) -> dict[str, Path]:
    found = indexed_files(directory)
    if found is not None:
        return found
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), path))
        except (SafetensorError, OSError) as error:
            raise JobError(f"{path} is not a safetensors file: {error}") from error
    return files


def _stored_names(module: Any, files: Iterable[str], directory: Path) -> dict[str, str]:
    """What the files call each tensor of the module: often the same, but files keep the names of old versions, and
    those of a base model (GPT-2's, say) leave out the name under which the causal model holds it."""
    own = module.state_dict()
    prefix = str(getattr(module, "base_model_prefix", ""))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before version 5 the names of the files were those of the module
        return {(f"{prefix}.{name}" if f"{prefix}.{name}" in own else name): name for name in files}
    ways = get_model_conversion_mapping(module)
    renamings = [way for way in ways if isinstance(way, WeightRenaming)]
    converters = [way for way in ways if isinstance(way, WeightConverter)]
    stored = {}
    for name in files:
        new, conversion = rename_source_key(name, renamings, converters, prefix, own)
        if new not in own and name in own:
            new, conversion = name, None
        if conversion is not None and new in own:
            raise JobError(
                f"{directory}: transformers rearranges {name} when it loads it, which is not supported"
            )
        stored[new] = name
    return stored


def _read(path: Path, wanted: Iterable[tuple[Variable, str]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as tensors:
            for variable, name in wanted:
                value = tensors.get_tensor(name)
                if tuple(value.shape) != variable.type.shape:
                    raise JobError(
                        f"{path}: {name} has shape {tuple(value.shape)}, not {variable.type.shape}"
                    )
                found[variable.name] = value.to(TORCH_DTYPES[variable.type.dtype])
    except (SafetensorError, OSError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    return found
