"""Which tensors of a GGUF file are which parameters of a transformers module, and what llama.cpp's conversion did to them
(its `conversion` folder), undone.

The `gguf` package knows what most modules are called in files. Here are the others, and the rows and numbers that are not as the
module has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fusion.runtime.capture.gguf.config import ModelConfig
from fusion.runtime.capture.gguf.decoders import FAR_FACTORS, NEAR_FACTORS, ROPE_FACTORS
from fusion.runtime.capture.gguf.header import GGUFHeader, TensorPlace, shown
from fusion.runtime.capture.gguf.stored import Stored, grouped, halves
from fusion.runtime.capture.gguf.weights import readable
from fusion.runtime.job.errors import JobError

Values = Mapping[str, Any]  # of a configuration
Undone = Mapping[str, Any]  # what is said of a `Stored`

# Whose conversion is Llama's, which goes over queries and keys.
_PERMUTED = ("llama", "granite", "smollm3", "mistral3")
_NO_PARAMETERS = {  # but factors of the rotary embedding
    **{name: {ROPE_FACTORS} for name in _PERMUTED},
    "phi3": {NEAR_FACTORS, FAR_FACTORS},
}

# What the file calls parameters that the `gguf` package has no name for; \1 is the layer. Each may be made of several tensors, in one
# way or another.
_NAMES: Sequence[tuple[str, Sequence[str]]] = (
    (r"experts\.gate_up_proj", ("ffn_gate_up_exps.weight", "ffn_gate_exps.weight ffn_up_exps.weight")),
    (r"experts\.gate_up_proj_bias", ("ffn_gate_up_exps.bias", "ffn_gate_exps.bias ffn_up_exps.bias")),
    (r"experts\.down_proj", ("ffn_down_exps.weight",)),
    (r"experts\.down_proj_bias", ("ffn_down_exps.bias",)),
    (r"e_score_correction_bias", ("exp_probs_b.bias",)),  # that a router adds as it chooses, not as it weighs
)


def stored_parameters(header: GGUFHeader, config: ModelConfig, module: nn.Module) -> dict[str, Stored]:
    """How the file has each parameter of the module, under its first name, and each buffer that is stored with them. JobError where
    it lacks one, has one in another shape, or has tensors that the module does not."""
    names = _Names(header, config)
    found: dict[str, Stored] = {}
    for parameter, value in _kept(module).items():
        places = [header.tensors[name] for name in names.of(parameter)]
        stored = _stored(places, tuple(value.shape), config)
        if _shape(stored) != _without_ones(value.shape):
            named = " and ".join(shown(place.name) for place in stored.places)
            shapes = " and ".join(str(place.shape) for place in places)
            raise JobError(f"{header.path}: {named} has the shape {shapes}, not {tuple(value.shape)}")
        for place in places:
            if not readable(place.kind, place.block_bytes):
                raise JobError(f"{header.path}: {shown(place.name)} is in {place.kind}, which is not read")
        found[parameter] = stored
    used = {place.name for stored in found.values() for place in stored.places}
    used |= _NO_PARAMETERS.get(config.architecture, set())
    for name in sorted(header.tensors.keys() - used):
        if not _predicts_further(name, config):
            raise JobError(
                f"{header.path} has a tensor {shown(name)}, which no {config.model_type} model has"
            )
    return found


def _kept(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each under its first name, and buffers that are stored with them."""
    stored = module.state_dict()
    buffers = {name: value for name, value in module.named_buffers() if name in stored}
    return {**dict(module.named_parameters()), **buffers}


def _predicts_further(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is of the layers behind the model's own, where its kind has some; they are not read."""
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return config.ahead > 0 and block.isdecimal() and int(block) >= config.layers


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Conversions leave out dimensions of 1, or have more of them: a matrix of one row, a convolution of each channel alone."""
    return tuple(size for size in shape if size != 1)


def _shape(stored: Stored) -> tuple[int, ...] | None:
    """What its tensors make, but for dimensions of 1; None where their shapes do not fit together."""
    try:
        tensors = [torch.empty(place.shape, device="meta") for place in stored.places]
        return _without_ones(stored.assembled(tensors).shape)
    except (RuntimeError, IndexError, ValueError):
        return None


class _Names:
    """What the file calls each parameter."""

    def __init__(self, header: GGUFHeader, config: ModelConfig) -> None:
        from gguf.constants import MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        architecture = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == config.architecture)
        self._table = get_tensor_name_map(architecture, config.layers)
        self._header = header

    def of(self, parameter: str) -> list[str]:
        """The tensors that it is made of. JobError where the file has them not."""
        ways = self._ways(parameter)
        for way in ways:
            if way and all(name in self._header.tensors for name in way):
                return way
        missing = [name for name in (ways[-1] if ways else ()) if name not in self._header.tensors]
        raise JobError(f"{self._header.path}: no tensor {' and '.join(missing) or 'for'} ({parameter})")

    def _ways(self, parameter: str) -> list[list[str]]:
        for pattern, ways in _NAMES:
            found = re.fullmatch(rf"(?:.*\.)?(\d+)\.(?:.*\.)?{pattern}", parameter)
            if found is not None:
                return [[f"blk.{found[1]}.{name}" for name in way.split()] for way in ways]
        owner, _, kind = parameter.rpartition(".")
        if (known := self._table.get_name(owner)) is not None:
            return [[f"{known}.{kind}"]]
        if (known := self._table.get_name(parameter)) is not None:  # a parameter beside modules
            return [[known], [f"{known}.weight"]]
        return []


def _stored(places: Sequence[TensorPlace], shape: tuple[int, ...], config: ModelConfig) -> Stored:
    """A parameter of these tensors, with what the conversion of this architecture does to them."""
    part = re.sub(r"^blk\.\d+\.", "", places[0].name)  # "attn_q.weight"
    undone: dict[str, Any] = {}
    for pattern, undo in _UNDONE.get(config.architecture, ()):
        if re.fullmatch(pattern, part):
            undone.update(undo(config.values))
    if part.partition(".")[0].endswith("_exps"):
        if part.endswith(".bias"):
            places = [replace(place, shape=(*place.shape, 1)) for place in places]
        undone["experts"] = places[0].shape[0]
    return Stored(tuple(places), shape, **undone)


def _in_halves(heads: str) -> Callable[[Values], Undone]:
    return lambda values: {"order": partial(halves, values[heads])}


def _as_is(**undone: Any) -> Callable[[Values], Undone]:
    return lambda values: undone


def _minus_one(value: torch.Tensor) -> torch.Tensor:
    return value - 1


_LLAMA = (
    (r"attn_q\.(weight|bias)", _in_halves("num_attention_heads")),
    (r"attn_k\.(weight|bias)", _in_halves("num_key_value_heads")),
)
# llama.cpp has no norm that multiplies by 1 more than its weight.
_ONE_MORE = ((r".*norm\.weight", _as_is(made=_minus_one)),)
_UNDONE: Mapping[str, Sequence[tuple[str, Callable[[Values], Undone]]]] = {
    **dict.fromkeys(_PERMUTED, _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), _ONE_MORE),
    "gpt2": ((r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", _as_is(transposed=True)),),
    "gpt-oss": (
        (r"ffn_gate_exps\..*", lambda values: {"order": partial(grouped, values["intermediate_size"], (1, 1))}),
        (r"ffn_.*_exps\.weight", _as_is(transposed=True)),
    ),
}
