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
from fusion.runtime.capture.gguf.stored import Order, Stored, grouped, halves, tiled
from fusion.runtime.capture.gguf.weights import alone, opened_files, read_tensor, readable
from fusion.runtime.job.errors import JobError

Values = Mapping[str, Any]  # of a configuration
Undone = Mapping[str, Any]  # how a `Stored` was transformed

# Whose conversion is Llama's, which goes over queries and keys.
_PERMUTED = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3", "internlm2", "arcee")
_NO_PARAMETERS = {  # but factors of the rotary embedding
    **{name: {ROPE_FACTORS} for name in _PERMUTED},
    **{name: {ROPE_FACTORS} for name in ("apertus", "exaone", "exaone4", "gemma4", "llama4")},
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
    (r"expert_bias", ("exp_probs_b.bias",)),
    (r"router\.scale", ("ffn_gate_inp.scale",)),
    (r"router\.per_expert_scale", ("ffn_down_exps.scale",)),
    (r"dt_bias", ("ssm_dt.bias",)),
    (r"in_proj_qkvz\.weight", ("ssm_in.weight", "attn_qkv.weight attn_gate.weight")),
    (r"block_sparse_moe\.router\.weight", ("ffn_gate_inp.weight",)),
    (
        r"shared_mlp\.input_linear\.weight",
        ("ffn_gate_shexp.weight ffn_up_shexp.weight", "ffn_gate.weight ffn_up.weight"),
    ),
    (r"shared_mlp\.output_linear\.weight", ("ffn_down_shexp.weight", "ffn_down.weight")),
    (r"kv_b_proj\.weight", ("attn_kv_b.weight", "attn_k_b.weight attn_v_b.weight")),
)

# The same of Nomic's encoder, whose queries, keys and values are one tensor in the file, and which norms what its layers give.
_NOMIC = "nomic-bert"
_NORMED_BEHIND: Sequence[tuple[str, str]] = (
    (r"post_attention_layernorm\.(weight|bias)", "attn_output_norm"),
    (r"post_mlp_layernorm\.(weight|bias)", "layer_output_norm"),
)
_ONE_OF_THREE = re.compile(r"(?:.*\.)?(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)")
# Matrices that are one tensor in the file.
_STACKED = re.compile(r"altup_(unembed_)?projections\.(\d+)\.weight$")


def stored_parameters(header: GGUFHeader, config: ModelConfig, module: nn.Module) -> dict[str, Stored]:
    """How the file has each parameter of the module, under its first name, and each buffer that is stored with them, but for those among
    its values. JobError where it lacks one, has one in another shape, or has tensors that the module does not."""
    names = _Names(header, config)
    found: dict[str, Stored] = {}
    tensors = {name: value for name, value in _kept(module).items() if name not in config.constants}
    for parameter, value in tensors.items():
        places = [header.tensors[name] for name in names.of(parameter)]
        stored = _stored(places, parameter, tuple(value.shape), config)
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
        if not _unread(name, config):
            raise JobError(
                f"{header.path} has a tensor {shown(name)}, which no {config.model_type} model has"
            )
    return found


def set_constants(config: ModelConfig, module: nn.Module) -> None:
    """Put the parameters and buffers that a file has among its values into the module."""
    for name, number in config.constants.items():
        owner, _, own = name.rpartition(".")
        place = module.get_submodule(owner)
        old = getattr(place, own)
        value = torch.full(old.shape, number, dtype=old.dtype)
        parameter = nn.Parameter(value, requires_grad=False)
        setattr(place, own, parameter if isinstance(old, nn.Parameter) else value)


def _kept(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each under its first name, and buffers that are stored with them."""
    stored = module.state_dict()
    buffers = {name: value for name, value in module.named_buffers() if name in stored}
    return {**dict(module.named_parameters()), **buffers}


def _unread(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is of the layers behind the model's own, which predict further tokens; or makes keys and values of a layer that
    has those of another one."""
    found = re.match(r"blk\.(\d+)\.(attn_[kv]\b|attn_k_norm\b)?", name)
    if found is None:
        return False
    layer, own = int(found[1]), config.layers - config.values.get("num_kv_shared_layers", 0)
    return (config.ahead > 0 and layer >= config.layers) or (
        found[2] is not None and own <= layer < config.layers
    )


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


def stretch(header: GGUFHeader, module: nn.Module) -> None:
    """Divide the frequencies of the rotary embedding by the factors that the file has, if it has any."""
    name = next((name for name in (ROPE_FACTORS, NEAR_FACTORS) if name in header.tensors), None)
    if name is None:
        return
    place = header.tensors[name]
    if place.kind != "F32":
        raise JobError(f"{header.path}: {name} is in {place.kind}, not in F32")
    with opened_files() as opened:
        factors = read_tensor(opened, alone(place), torch.float32)
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise JobError(f"{header.path}: {name} has factors that are not above 0")
    tables = {buffer: table for buffer, table in module.named_buffers() if buffer.endswith("inv_freq")}
    # Where layers that see all positions rotate otherwise than those with a window, it is theirs.
    of_all = {buffer for buffer in tables if "full_attention" in buffer}
    for buffer, table in tables.items():
        if not of_all or buffer in of_all:
            table.div_(factors)


class _Names:
    """What the file calls each parameter."""

    def __init__(self, header: GGUFHeader, config: ModelConfig) -> None:
        from gguf.constants import MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        architecture = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == config.architecture)
        self._table = get_tensor_name_map(architecture, config.layers)
        self._header, self._architecture = header, config.architecture

    def of(self, parameter: str) -> list[str]:
        """The tensors that it is made of. JobError where the file has them not."""
        ways = (
            self._ways(parameter)
            if self._architecture != _NOMIC
            else [*self._ways(parameter), self._of_nomic(parameter)]
        )
        for way in ways:
            if way and all(name in self._header.tensors for name in way):
                return way
        missing = [
            name for name in next(filter(None, reversed(ways)), ()) if name not in self._header.tensors
        ]
        raise JobError(f"{self._header.path}: no tensor {' and '.join(missing) or 'for'} ({parameter})")

    def _ways(self, parameter: str) -> list[list[str]]:
        for pattern, ways in _NAMES:
            found = re.fullmatch(rf"(?:.*\.)?(\d+)\.(?:.*\.)?{pattern}", parameter)
            if found is not None:
                return [[f"blk.{found[1]}.{name}" for name in way.split()] for way in ways]
        if (stacked := _STACKED.search(parameter)) is not None:
            return [["altup_unembd_proj.weight" if stacked[1] else "altup_proj.weight"]]
        # A model without a head has no name for itself.
        for spelled in (parameter, parameter.removeprefix("transformer."), f"model.{parameter}"):
            owner, _, kind = spelled.rpartition(".")
            if (known := self._table.get_name(owner)) is not None:
                return [[f"{known}.{kind}"]]
            if (known := self._table.get_name(spelled)) is not None:  # a parameter beside modules
                return [[known], [f"{known}.weight"]]
        return []

    def _of_nomic(self, parameter: str) -> list[str]:
        for pattern, owner in _NORMED_BEHIND:
            if found := re.fullmatch(rf"layers\.(\d+)\.{pattern}", parameter):
                return [f"blk.{found[1]}.{owner}.{found[2]}"]
        one = _ONE_OF_THREE.fullmatch(parameter)
        return [] if one is None else [f"blk.{one[1]}.attn_qkv.{one[3]}"]


def _stored(
    places: Sequence[TensorPlace], parameter: str, shape: tuple[int, ...], config: ModelConfig
) -> Stored:
    """A parameter of these tensors, with what the conversion of this architecture does to them."""
    part = re.sub(r"^blk\.\d+\.", "", places[0].name)  # "attn_q.weight"
    undone: dict[str, Any] = {}
    for pattern, undo in (*_UNDONE_EVERYWHERE, *_UNDONE.get(config.architecture, ())):
        if re.fullmatch(pattern, part):
            undone.update(undo(config.values))
    if (one := _ONE_OF_THREE.fullmatch(parameter)) is not None and part.startswith("attn_qkv."):
        undone["made"] = partial(_third, "qkv".index(one[2]))
    if (stacked := _STACKED.search(parameter)) is not None:
        undone["made"] = partial(_one_of, int(stacked[2]))
    owner, _, what = part.partition(".")
    if owner.endswith("_exps") and what != "scale":
        if what == "bias":
            places = [replace(place, shape=(*place.shape, 1)) for place in places]
        undone["experts"] = places[0].shape[0]
    return Stored(tuple(places), shape, **undone)


def _in_halves(heads: str) -> Callable[[Values], Undone]:
    return lambda values: {"order": partial(halves, values[heads])}


def _as_is(**undone: Any) -> Callable[[Values], Undone]:
    return lambda values: undone


def _one_of(number: int, value: torch.Tensor) -> torch.Tensor:
    return value[number]


def _third(number: int, value: torch.Tensor) -> torch.Tensor:
    return value.chunk(3)[number]


def _minus_one(value: torch.Tensor) -> torch.Tensor:
    return value - 1


def _keys_and_values(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of each head, whose keys (rank, length) are the other way around."""
    return torch.cat([keys.mT, values], dim=1).flatten(0, 1)


_LLAMA = (
    (r"attn_q\.(weight|bias)", _in_halves("num_attention_heads")),
    (r"attn_k\.(weight|bias)", _in_halves("num_key_value_heads")),
)
# llama.cpp has no norm that multiplies by 1 more than its weight.
_ONE_MORE = ((r".*norm\.weight", _as_is(made=_minus_one)),)


def _logarithm(value: torch.Tensor) -> torch.Tensor:
    return torch.log(-value)


def _qwen3_next(values: Values) -> Undone:
    """Queries, keys, values and gates of each head of keys."""
    groups, key = values["linear_num_key_heads"], values["linear_key_head_dim"]
    value = values["linear_num_value_heads"] // groups * values["linear_value_head_dim"]
    return {"order": partial(grouped, groups, (key, key, value, value))}


def _heads_of_values(what: str, *, behind: bool = False) -> Callable[[Values], Undone]:
    """Those of one head of keys lie together. `behind`: after queries and keys."""

    def undo(values: Values) -> Undone:
        groups = values["linear_num_key_heads"]
        start = 2 * groups * values["linear_key_head_dim"] if behind else 0
        order: Order = partial(tiled, groups, values["linear_num_value_heads"] // groups, start=start)
        return {what: order}

    return undo


def _fused_heads(values: Values) -> Undone:
    """Queries, keys and values of each head, which the file has one kind after the other."""
    heads = values.get("num_attention_heads") or values["n_head"]
    length = values["hidden_size"] // heads
    return {"order": partial(grouped, heads, (length, length, length))}


def _falcon(values: Values) -> Undone:
    """The same of queries that share keys and values."""
    groups, heads = values["num_kv_heads"], values["num_attention_heads"]
    length = values["hidden_size"] // heads
    return {"order": partial(grouped, groups, (heads // groups * length, length, length))}


_DELTA = ((r"(attn|post_attention|attn_q|attn_k|output)_norm\.weight", _as_is(made=_minus_one)),)
_QWEN3_5 = (
    *_DELTA,
    (r"(attn_qkv|ssm_conv1d)\.weight", _heads_of_values("order", behind=True)),
    (r"attn_gate\.weight|ssm_alpha\.weight|ssm_beta\.weight|ssm_a|ssm_dt\.bias", _heads_of_values("order")),
    (r"ssm_out\.weight", _heads_of_values("columns")),
)
_UNDONE_EVERYWHERE = (
    (r"ssm_a", _as_is(made=_logarithm)),
    (r"ssm_norm\.weight", _as_is(made=torch.flatten)),
)
_UNDONE: Mapping[str, Sequence[tuple[str, Callable[[Values], Undone]]]] = {
    **dict.fromkeys(_PERMUTED, _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron"), _ONE_MORE),
    "deepseek2": ((r"attn_k_b\.weight", _as_is(made=_keys_and_values)),),
    "qwen3next": (*_DELTA, (r"attn_qkv\.weight", _qwen3_next)),
    **dict.fromkeys(("qwen35", "qwen35moe"), _QWEN3_5),
    **dict.fromkeys(("bloom", "gptneox"), ((r"attn_qkv\..*", _fused_heads),)),
    "falcon": ((r"attn_qkv\.weight", _falcon),),
    "gpt2": ((r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", _as_is(transposed=True)),),
    "llama4": ((r"ffn_.*_exps\.weight", _as_is(transposed=True)),),
    "gpt-oss": (
        (
            r"ffn_gate_exps\..*",
            lambda values: {"order": partial(grouped, values["intermediate_size"], (1, 1))},
        ),
        (r"ffn_.*_exps\.weight", _as_is(transposed=True)),
    ),
}
