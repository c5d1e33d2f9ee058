"""Maps the tensors of a GGUF file to the parameters of a transformers module, and inverts what llama.cpp's conversion did to them (its
`conversion` folder).

The `gguf` package has the names of most modules in files. Here are the others, and the inverse of transformations of rows and values.
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
from fusion.runtime.capture.gguf.decoders import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from fusion.runtime.capture.gguf.header import GGUFHeader, TensorInfo, quoted
from fusion.runtime.capture.gguf.stored import Order, StoredParameter, from_tiles, to_groups, to_halves
from fusion.runtime.capture.gguf.weights import is_readable, opened_files, read_tensor, single_tensor
from fusion.runtime.job.errors import JobError

Values = Mapping[str, Any]  # of a configuration
Inverse = Mapping[str, Any]  # fields of a `StoredParameter` that invert a conversion

# Architectures whose conversion permutes queries and keys, as Llama's.
_PERMUTED = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3", "internlm2", "arcee")
_ROPE_TENSORS = {  # factors of the rotary embedding, which are no parameters
    **{name: {ROPE_FACTORS} for name in _PERMUTED},
    **{name: {ROPE_FACTORS} for name in ("apertus", "exaone", "exaone4", "gemma4", "llama4")},
    "phi3": {SHORT_FACTORS, LONG_FACTORS},
}

# File names of parameters that the `gguf` package does not name: alternatives, each of one or several tensors of the layer.
_NAMES: Sequence[tuple[str, Sequence[str]]] = (
    (r"experts\.gate_up_proj", ("ffn_gate_up_exps.weight", "ffn_gate_exps.weight ffn_up_exps.weight")),
    (r"experts\.gate_up_proj_bias", ("ffn_gate_up_exps.bias", "ffn_gate_exps.bias ffn_up_exps.bias")),
    (r"experts\.down_proj", ("ffn_down_exps.weight",)),
    (r"experts\.down_proj_bias", ("ffn_down_exps.bias",)),
    (r"e_score_correction_bias", ("exp_probs_b.bias",)),  # added for a router's choice, not for weights
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

# Nomic's encoder has queries, keys and values in one tensor, and norms after attention and after the feed-forward network.
_NOMIC = "nomic-bert"
_NOMIC_NORMS: Sequence[tuple[str, str]] = (
    (r"post_attention_layernorm\.(weight|bias)", "attn_output_norm"),
    (r"post_mlp_layernorm\.(weight|bias)", "layer_output_norm"),
)
_QKV_PARAMETER = re.compile(r"(?:.*\.)?(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)")
# Matrices that are stacked in one tensor of the file.
_STACKED = re.compile(r"altup_(unembed_)?projections\.(\d+)\.weight$")


def stored_parameters(
    header: GGUFHeader, config: ModelConfig, module: nn.Module
) -> dict[str, StoredParameter]:
    """How the file stores each parameter of the module (by its first name) and each buffer that weights files hold, except those among its
    metadata. JobError if a tensor is missing, has another shape, or belongs to no parameter."""
    names = _Names(header, config)
    parameters: dict[str, StoredParameter] = {}
    tensors = {name: value for name, value in _stored_tensors(module).items() if name not in config.constants}
    for parameter, value in tensors.items():
        infos = [header.tensors[name] for name in names.tensors_of(parameter)]
        stored = _stored_parameter(infos, parameter, tuple(value.shape), config)
        if _shape(stored) != _without_ones(value.shape):
            named = " and ".join(quoted(info.name) for info in stored.tensors)
            shapes = " and ".join(str(info.shape) for info in infos)
            raise JobError(f"{header.path}: {named} has the shape {shapes}, not {tuple(value.shape)}")
        for info in infos:
            if not is_readable(info.kind, info.block_bytes):
                raise JobError(f"{header.path}: {quoted(info.name)} is in {info.kind}, which is not read")
        parameters[parameter] = stored
    used = {info.name for stored in parameters.values() for info in stored.tensors}
    used |= _ROPE_TENSORS.get(config.architecture, set())
    for name in sorted(header.tensors.keys() - used):
        if not _is_ignored(name, config):
            raise JobError(
                f"{header.path} has a tensor {quoted(name)}, which no {config.model_type} model has"
            )
    return parameters


def set_constants(config: ModelConfig, module: nn.Module) -> None:
    """Put the parameters and buffers that a file has in its metadata into the module."""
    for name, number in config.constants.items():
        owner, _, own = name.rpartition(".")
        owner_module = module.get_submodule(owner)
        old = getattr(owner_module, own)
        value = torch.full(old.shape, number, dtype=old.dtype)
        parameter = nn.Parameter(value, requires_grad=False)
        setattr(owner_module, own, parameter if isinstance(old, nn.Parameter) else value)


def _stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each under its first name, and buffers that weights files hold."""
    stored = module.state_dict()
    buffers = {name: value for name, value in module.named_buffers() if name in stored}
    return {**dict(module.named_parameters()), **buffers}


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to a layer of multi-token prediction, or makes keys and values in a layer that shares those of another."""
    match = re.match(r"blk\.(\d+)\.(attn_[kv]\b|attn_k_norm\b)?", name)
    if match is None:
        return False
    layer, first_shared = int(match[1]), config.layers - config.values.get("num_kv_shared_layers", 0)
    return (config.nextn_layers > 0 and layer >= config.layers) or (
        match[2] is not None and first_shared <= layer < config.layers
    )


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without dimensions of 1, which conversions drop or add: a matrix of one row, a depthwise convolution."""
    return tuple(size for size in shape if size != 1)


def _shape(stored: StoredParameter) -> tuple[int, ...] | None:
    """The shape that its tensors make, without dimensions of 1; None if their shapes do not fit together."""
    try:
        tensors = [torch.empty(info.shape, device="meta") for info in stored.tensors]
        return _without_ones(stored.assembled(tensors).shape)
    except (RuntimeError, IndexError, ValueError):
        return None


def divide_frequencies(header: GGUFHeader, module: nn.Module) -> None:
    """Divide the frequencies of the rotary embedding by the file's factors, if it has any."""
    name = next((name for name in (ROPE_FACTORS, SHORT_FACTORS) if name in header.tensors), None)
    if name is None:
        return
    info = header.tensors[name]
    if info.kind != "F32":
        raise JobError(f"{header.path}: {name} is in {info.kind}, not in F32")
    with opened_files() as open_file:
        factors = read_tensor(open_file, single_tensor(info), torch.float32)
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise JobError(f"{header.path}: {name} has factors that are not above 0")
    tables = {buffer: table for buffer, table in module.named_buffers() if buffer.endswith("inv_freq")}
    # Where layers with full attention have frequencies of their own, the factors are for these.
    full_attention = {buffer for buffer in tables if "full_attention" in buffer}
    for buffer, table in tables.items():
        if not full_attention or buffer in full_attention:
            table.div_(factors)


class _Names:
    """The file's names of each parameter's tensors."""

    def __init__(self, header: GGUFHeader, config: ModelConfig) -> None:
        from gguf.constants import MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        architecture = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == config.architecture)
        self._table = get_tensor_name_map(architecture, config.layers)
        self._header, self._architecture = header, config.architecture

    def tensors_of(self, parameter: str) -> list[str]:
        """The tensors that the parameter is made of. JobError if the file lacks them."""
        alternatives = (
            self._alternatives(parameter)
            if self._architecture != _NOMIC
            else [*self._alternatives(parameter), self._nomic_names(parameter)]
        )
        for names in alternatives:
            if names and all(name in self._header.tensors for name in names):
                return names
        missing = [
            name
            for name in next(filter(None, reversed(alternatives)), ())
            if name not in self._header.tensors
        ]
        raise JobError(f"{self._header.path}: no tensor {' and '.join(missing) or 'for'} ({parameter})")

    def _alternatives(self, parameter: str) -> list[list[str]]:
        for pattern, alternatives in _NAMES:
            match = re.fullmatch(rf"(?:.*\.)?(\d+)\.(?:.*\.)?{pattern}", parameter)
            if match is not None:
                return [[f"blk.{match[1]}.{name}" for name in names.split()] for names in alternatives]
        if (stacked := _STACKED.search(parameter)) is not None:
            return [["altup_unembd_proj.weight" if stacked[1] else "altup_proj.weight"]]
        # A model without a head lacks the prefix "model.".
        for spelled in (parameter, parameter.removeprefix("transformer."), f"model.{parameter}"):
            owner, _, kind = spelled.rpartition(".")
            if (name_in_file := self._table.get_name(owner)) is not None:
                return [[f"{name_in_file}.{kind}"]]
            if (name_in_file := self._table.get_name(spelled)) is not None:  # a parameter beside modules
                return [[name_in_file], [f"{name_in_file}.weight"]]
        return []

    def _nomic_names(self, parameter: str) -> list[str]:
        for pattern, owner in _NOMIC_NORMS:
            if match := re.fullmatch(rf"layers\.(\d+)\.{pattern}", parameter):
                return [f"blk.{match[1]}.{owner}.{match[2]}"]
        qkv = _QKV_PARAMETER.fullmatch(parameter)
        return [] if qkv is None else [f"blk.{qkv[1]}.attn_qkv.{qkv[3]}"]


def _stored_parameter(
    infos: Sequence[TensorInfo], parameter: str, shape: tuple[int, ...], config: ModelConfig
) -> StoredParameter:
    """A parameter made of these tensors, with the inverse of this architecture's conversion."""
    part = re.sub(r"^blk\.\d+\.", "", infos[0].name)  # "attn_q.weight"
    inverse: dict[str, Any] = {}
    for pattern, inverse_of in (*_COMMON_INVERSES, *_INVERSES.get(config.architecture, ())):
        if re.fullmatch(pattern, part):
            inverse.update(inverse_of(config.values))
    if (qkv := _QKV_PARAMETER.fullmatch(parameter)) is not None and part.startswith("attn_qkv."):
        inverse["combine"] = partial(_third, "qkv".index(qkv[2]))
    if (stacked := _STACKED.search(parameter)) is not None:
        inverse["combine"] = partial(_one_of, int(stacked[2]))
    owner, _, suffix = part.partition(".")
    if owner.endswith("_exps") and suffix != "scale":
        if suffix == "bias":
            infos = [replace(info, shape=(*info.shape, 1)) for info in infos]
        inverse["experts"] = infos[0].shape[0]
    return StoredParameter(tuple(infos), shape, **inverse)


def _interleaved_heads(heads: str) -> Callable[[Values], Inverse]:
    return lambda values: {"row_order": partial(to_halves, values[heads])}


def _always(**inverse: Any) -> Callable[[Values], Inverse]:
    return lambda values: inverse


def _one_of(number: int, value: torch.Tensor) -> torch.Tensor:
    return value[number]


def _third(number: int, value: torch.Tensor) -> torch.Tensor:
    return value.chunk(3)[number]


def _minus_one(value: torch.Tensor) -> torch.Tensor:
    return value - 1


def _keys_and_values(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The kv_b projection of each head from its key part, which the file transposes to (rank, length), and its value part."""
    return torch.cat([keys.mT, values], dim=1).flatten(0, 1)


_LLAMA = (
    (r"attn_q\.(weight|bias)", _interleaved_heads("num_attention_heads")),
    (r"attn_k\.(weight|bias)", _interleaved_heads("num_key_value_heads")),
)
# In files, norms that multiply by 1 + weight have 1 added to the weight.
_PLUS_ONE_NORMS = ((r".*norm\.weight", _always(combine=_minus_one)),)


def _logarithm(value: torch.Tensor) -> torch.Tensor:
    return torch.log(-value)


def _qwen3_next(values: Values) -> Inverse:
    """Queries, keys, values and gates grouped by key head."""
    groups, key = values["linear_num_key_heads"], values["linear_key_head_dim"]
    value = values["linear_num_value_heads"] // groups * values["linear_value_head_dim"]
    return {"row_order": partial(to_groups, groups, (key, key, value, value))}


def _value_heads(field: str, *, after_queries_and_keys: bool = False) -> Callable[[Values], Inverse]:
    """Value heads grouped by the key head that they share. `after_queries_and_keys`: in the same tensor."""

    def inverse_of(values: Values) -> Inverse:
        groups = values["linear_num_key_heads"]
        start = 2 * groups * values["linear_key_head_dim"] if after_queries_and_keys else 0
        order: Order = partial(from_tiles, groups, values["linear_num_value_heads"] // groups, start=start)
        return {field: order}

    return inverse_of


def _qkv_by_kind(values: Values) -> Inverse:
    """Queries, keys and values of each head, from a file that has all queries, all keys, all values."""
    heads = values.get("num_attention_heads") or values["n_head"]
    length = values["hidden_size"] // heads
    return {"row_order": partial(to_groups, heads, (length, length, length))}


def _falcon(values: Values) -> Inverse:
    """The same for queries that share keys and values."""
    groups, heads = values["num_kv_heads"], values["num_attention_heads"]
    length = values["hidden_size"] // heads
    return {"row_order": partial(to_groups, groups, (heads // groups * length, length, length))}


_DELTA = ((r"(attn|post_attention|attn_q|attn_k|output)_norm\.weight", _always(combine=_minus_one)),)
_QWEN3_5 = (
    *_DELTA,
    (r"(attn_qkv|ssm_conv1d)\.weight", _value_heads("row_order", after_queries_and_keys=True)),
    (r"attn_gate\.weight|ssm_alpha\.weight|ssm_beta\.weight|ssm_a|ssm_dt\.bias", _value_heads("row_order")),
    (r"ssm_out\.weight", _value_heads("column_order")),
)
_COMMON_INVERSES = (
    (r"ssm_a", _always(combine=_logarithm)),
    (r"ssm_norm\.weight", _always(combine=torch.flatten)),
)
_INVERSES: Mapping[str, Sequence[tuple[str, Callable[[Values], Inverse]]]] = {
    **dict.fromkeys(_PERMUTED, _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron"), _PLUS_ONE_NORMS),
    "deepseek2": ((r"attn_k_b\.weight", _always(combine=_keys_and_values)),),
    "qwen3next": (*_DELTA, (r"attn_qkv\.weight", _qwen3_next)),
    **dict.fromkeys(("qwen35", "qwen35moe"), _QWEN3_5),
    **dict.fromkeys(("bloom", "gptneox"), ((r"attn_qkv\..*", _qkv_by_kind),)),
    "falcon": ((r"attn_qkv\.weight", _falcon),),
    "gpt2": ((r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", _always(transposed=True)),),
    "llama4": ((r"ffn_.*_exps\.weight", _always(transposed=True)),),
    "gpt-oss": (
        (
            r"ffn_gate_exps\..*",
            lambda values: {"row_order": partial(to_groups, values["intermediate_size"], (1, 1))},
        ),
        (r"ffn_.*_exps\.weight", _always(transposed=True)),
    ),
}
