"""GGUF files of small models with random weights, written by the `gguf` package as llama.cpp's conversion writes them, and
the same models with the weights that those files hold."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFWriter
from gguf.constants import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    RopeScalingType,
)
from gguf.quants import dequantize, quantize
from gguf.tensor_mapping import get_tensor_name_map
from tokenizers import Tokenizer

Array = npt.NDArray[Any]

# Where llama.cpp has another name than transformers.
ARCHITECTURES = {
    "gemma3_text": "gemma3", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "cohere": "command-r", "ministral3": "mistral3", "glm4_moe": "glm4moe",
}  # fmt: skip
PERMUTED = (
    "llama",
    "granite",
    "smollm3",
    "mistral3",
)  # whose conversion is Llama's, which goes over queries and keys


def write(
    path: Path,
    model: Any,
    kind: str = "F16",
    *,
    more: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    version: int = 3,
) -> Any:
    """Write the model's matrices in `kind`, its other tensors in F32, and its configuration. Returns the model with the
    weights of the file. `more`: further values; `tokenizer(writer)` writes a tokenizer."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(str(path), architecture)
    _values(writer, config)
    for key, value in (more or {}).items():
        writer.kv_data[-1].pop(key, None)
        add(writer, key, value)
    if tokenizer is not None:
        tokenizer(writer)
    layers = config.num_hidden_layers
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, layers)
    held = copy.deepcopy(model)
    with torch.no_grad():
        kept = {**dict(held.named_parameters()), **_routers_biases(held)}
        for parameter, value in kept.items():
            for owner, what, data in _tensors(parameter, value.numpy(), architecture == "gpt-oss"):
                name = names.get_name(owner)
                assert name is not None, parameter
                given = _converted(data, f"{name}.{what}", architecture, config)
                small = given.ndim < 2 or "ffn_gate_inp" in name or what == "bias"
                chosen = GGMLQuantizationType["F32" if small else kind]
                blocks = quantize_as(given, chosen)
                writer.add_tensor(f"{name}.{what}", blocks, raw_dtype=chosen)
                read = dequantize(blocks, chosen).reshape(given.shape)
                data[...] = _unconverted(read, f"{name}.{what}", architecture, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _routers_biases(model: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")}


def _tensors(parameter: str, value: Array, oss: bool) -> list[tuple[str, str, Array]]:
    """The tensors that a conversion makes of a parameter: the module of each, its name there, and a view of its values."""
    owner, _, what = parameter.rpartition(".")
    if what == "sinks":
        return [(parameter, "weight", value)]
    if what == "e_score_correction_bias":
        return [(parameter.removesuffix("_bias"), "bias", value)]
    if owner.endswith(".experts"):
        name, kind = what.removesuffix("_bias"), "bias" if what.endswith("_bias") else "weight"
        if oss and kind == "weight":
            value = value.swapaxes(1, 2)
        if name == "down_proj":
            return [(f"{owner}.{name}", kind, value)]
        halves = (value[:, 0::2], value[:, 1::2]) if oss else np.split(value, 2, axis=1)
        named = zip(("gate_proj", "up_proj"), halves, strict=True)
        return [(f"{owner}.{each}", kind, half) for each, half in named]
    # Older conversions wrote a matrix of one row so, newer ones leave it as it is.
    return [(owner, what, value[0] if owner.endswith("shared_expert_gate") else value)]


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    _ADD[type(value)](writer, key, value)


_ADD: dict[type, Any] = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}


def _values(writer: GGUFWriter, config: Any) -> None:
    """Write the values that llama.cpp's conversion writes for these families."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name("small")
    writer.add_file_type(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(heads)
    if config.model_type == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type in ("starcoder2", "cohere", "cohere2"):
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", None) or config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if experts := getattr(config, "num_local_experts", getattr(config, "num_experts", 0)):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if wide := getattr(config, "moe_intermediate_size", 0):
        writer.add_expert_feed_forward_length(wide)
    if wide := getattr(config, "shared_expert_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(wide)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    rotated = head_dim // 2 if config.model_type in ("glm4", "glm4_moe") else head_dim
    if config.model_type in (*PERMUTED, "mixtral", "ministral3", "phi3", "cohere2"):
        writer.add_vocab_size(config.vocab_size)
    if config.model_type in (*PERMUTED, "mixtral", "ministral3", "phi3", "cohere2", "glm4", "glm4_moe"):
        writer.add_rope_dimension_count(rotated)
    if getattr(config, "head_dim", None) and config.model_type not in ("qwen2", "qwen2_moe", "olmoe", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if config.model_type not in ("gemma", "gemma2"):  # whose conversion leaves it to the default
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "ministral3":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(scale) / math.log(config.original_max_position_embeddings))
        )
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(RopeScalingType.NONE)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type in ("gemma2", "gemma3_text", "phi3", "gpt_oss", "cohere2"):
        writer.add_sliding_window(config.sliding_window or 0)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Array:
    """The divisor of each frequency (llama.cpp's conversion, `generate_extra_tensors`)."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    before = rope["original_max_position_embeddings"]
    found = []
    for i in range(0, head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if length < before / high:
            found.append(1.0)
        elif length > before / low:
            found.append(factor)
        else:
            smooth = (before / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def _converted(data: Array, name: str, architecture: str, config: Any) -> Array:
    heads = _rotated_heads(name, architecture, config)
    if heads:
        return data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return data + 1
    return data.T if _is_conv1d(name, architecture) else data


def _unconverted(data: Array, name: str, architecture: str, config: Any) -> Array:
    heads = _rotated_heads(name, architecture, config)
    if heads:
        rows = np.arange(data.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
        back = np.empty_like(data)
        back[rows] = data  # row i of the file is row rows[i] of the model
        return back
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return data - 1
    return data.T if _is_conv1d(name, architecture) else data


def _rotated_heads(name: str, architecture: str, config: Any) -> int:
    if architecture not in PERMUTED or not (".attn_q." in name or ".attn_k." in name):
        return 0
    return int(config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads)


def _is_conv1d(name: str, architecture: str) -> bool:
    return (
        architecture == "gpt2" and name.startswith("blk.") and name.endswith("weight") and "norm" not in name
    )


def quantize_as(data: Array, kind: GGMLQuantizationType) -> Array:
    data = np.ascontiguousarray(data, np.float32)
    return _quantize_q4_k(data) if kind == GGMLQuantizationType.Q4_K else quantize(data, kind)


def _quantize_q4_k(data: Array) -> Array:
    """Quantise to Q4_K, which the package only reads: 8 groups of 32 numbers of 4 bits, each with a scale and a minimum of 6
    bits, in units of two float16 for all 8 (ggml-quants.c, without its search for better scales)."""
    groups = data.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    scale = (groups.max(axis=2).clip(0) - low) / 15
    d = (scale.max(axis=1, keepdims=True) / 63).astype(np.float16)
    d_low = ((-low).max(axis=1, keepdims=True) / 63).astype(np.float16)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = np.nan_to_num(np.round(scale / d.astype(np.float32))).clip(0, 63).astype(np.uint8)
        lows = np.nan_to_num(np.round(-low / d_low.astype(np.float32))).clip(0, 63).astype(np.uint8)
        step = (d.astype(np.float32) * scales)[:, :, None]
        least = (d_low.astype(np.float32) * lows)[:, :, None]
        numbers = np.nan_to_num(np.round((groups + least) / step)).clip(0, 15).astype(np.uint8)
    packed = np.concatenate(
        [
            scales[:, :4] | (scales[:, 4:] >> 4 << 6),
            lows[:, :4] | (lows[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | (lows[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    pairs = numbers.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    blocks = np.concatenate([d.view(np.uint8), d_low.view(np.uint8), packed, nibbles], axis=1)
    assert blocks.shape[1] == GGML_QUANT_SIZES[GGMLQuantizationType.Q4_K][1]
    return blocks.reshape(*data.shape[:-1], -1)


# --- tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # kinds of token


def byte_level(tokens: Sequence[str], merges: Sequence[tuple[str, str]], pre: str, **special: Any) -> Any:
    """A function that writes a tokenizer like GPT-2's. `special`: kinds of tokens, ids and flags, as `_special` takes them."""

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(list(tokens))
        writer.add_token_merges([" ".join(merge) for merge in merges])
        _special(writer, tokens, **special)

    return add


def sentencepiece(tokens: Sequence[str], scores: Sequence[float], **special: Any) -> Any:
    """A function that writes a tokenizer like Llama's and Gemma's."""

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(list(tokens))
        writer.add_token_scores(list(scores))
        _special(writer, tokens, **special)

    return add


def _special(
    writer: GGUFWriter,
    tokens: Sequence[str],
    *,
    kinds: Mapping[str, int],
    template: str | None = None,
    flags: Mapping[str, bool] | None = None,
    **ids: str,
) -> None:
    """Write the kinds, ids and flags of special tokens. `ids`: the format's name (bos, eos, unknown, padding, eot) -> token."""
    byte = {f"<0x{n:02X}>": BYTE for n in range(256)}
    writer.add_token_types([kinds.get(token, byte.get(token, NORMAL)) for token in tokens])
    for name, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", list(tokens).index(token))
    for name, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    if template is not None:
        writer.add_chat_template(template)


def tokenizer_only(path: Path, tokenizer: Any, architecture: str = "llama") -> None:
    """Write a file that has a tokenizer and no model."""
    writer = GGUFWriter(str(path), architecture)
    tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]
