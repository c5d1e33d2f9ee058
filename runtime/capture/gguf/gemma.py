"""The Gemmas (llama.cpp's `conversion/gemma.py`)."""

from __future__ import annotations

import math

from fusion.runtime.capture.gguf.decoders import (
    ROPE_FACTORS,
    Architectures,
    Values,
    alternating_layers,
    decoder,
    gated_decoder,
    rms_norm,
    rotary,
    sizes,
)
from fusion.runtime.capture.gguf.metadata import MIN_DIVISOR, Metadata
from fusion.runtime.capture.gguf.mixtures import experts_everywhere

MIN_QUERY_SCALE = 1e-3  # 1 / sqrt(head size): a head of a million numbers
_FULL, _WINDOWED = "full_attention", "sliding_attention"


def _gemma(metadata: Metadata) -> Values:
    values = gated_decoder(metadata, decoder(metadata))
    return values | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": rotary(metadata, values["head_dim"]),
    }


def _gemma2(metadata: Metadata) -> Values:
    values = _gemma(metadata)
    return values | {
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0, least=MIN_DIVISOR),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0, least=MIN_DIVISOR),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "layer_types": alternating_layers(metadata, values, 2),
        "query_pre_attn_scalar": _query_scale(metadata, values, 46),
    }


def _gemma3(metadata: Metadata) -> Values:
    values = _gemma(metadata)
    window_base = metadata.real("rope.freq_base_swa", 10_000.0, least=1.0)
    return values | {
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": alternating_layers(metadata, values, 6),
        "query_pre_attn_scalar": _query_scale(metadata, values, 62),
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": window_base},
        },
    }


def _query_scale(metadata: Metadata, values: Values, largest_layers: int) -> float:
    """query_pre_attn_scalar: queries are divided by its square root. Files do not have it: it is the head size, except in the largest model of
    the family, where it is hidden size / heads."""
    heads = values["num_attention_heads"]
    default = (
        values["hidden_size"] // heads
        if values["num_hidden_layers"] == largest_layers
        else values["head_dim"]
    )
    scale = metadata.real("attention.scale", default**-0.5)
    if not MIN_QUERY_SCALE <= scale <= 1:
        raise metadata.error("attention.scale", scale, f"from {MIN_QUERY_SCALE:g} to 1")
    integer = round(scale**-2)  # undoes the rounding to float32
    return integer if math.isclose(integer**-0.5, scale, rel_tol=1e-6) else scale**-2


def _gemma3n(metadata: Metadata) -> Values:
    """The text part of Gemma 3n: AltUp streams, an embedding for each layer, last layers that share keys and values."""
    values = gated_decoder(metadata, decoder(metadata))
    layers, hidden, vocabulary = values["num_hidden_layers"], values["hidden_size"], values["vocab_size"]
    types = alternating_layers(metadata, values, 5)
    shared, per_layer_width = (
        metadata.integer("attention.shared_kv_layers", 0),
        metadata.size("embedding_length_per_layer_input"),
    )
    if not set(types[: layers - shared]) >= set(types) or shared >= layers:
        raise metadata.error(
            "attention.shared_kv_layers", shared, "fewer, so that there are layers to share with"
        )
    streams, active = metadata.size("altup.num_inputs"), metadata.integer("altup.active_idx")
    if active >= streams:
        raise metadata.error("altup.active_idx", active, f"below {streams}")
    metadata.require_tensor("altup_proj.weight", streams - 1, hidden, hidden)
    metadata.require_tensor("per_layer_token_embd.weight", vocabulary, layers * per_layer_width)
    laurel = metadata.header.tensors.get("blk.0.laurel_l.weight")
    rank = 0 if laurel is None else laurel.shape[0]
    metadata.require_tensor("blk.0.laurel_l.weight", rank, hidden)
    # The file has thresholds in standard deviations above the mean; the configuration, shares of a normal distribution.
    scales = metadata.reals_per_layer("activation_sparsity_scale", layers)
    sparsity = [(1 + math.erf(scale / math.sqrt(2))) / 2 for scale in scales]
    if not all(0 <= share < 1 for share in sparsity):
        raise metadata.error("activation_sparsity_scale", tuple(scales), "numbers that are not too large")
    window_base = metadata.real("rope.freq_base_swa", 10_000.0, least=1.0)
    return values | {
        "intermediate_size": [values["intermediate_size"]] * layers,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "attention_bias": False,
        "hidden_size_per_layer_input": per_layer_width,
        "vocab_size_per_layer_input": vocabulary,
        "altup_num_inputs": streams,
        "altup_active_idx": active,
        "altup_correct_scale": metadata.has_tensor("blk.0.altup_correct_scale.weight"),
        "laurel_rank": rank,
        "activation_sparsity_pattern": [round(share, 7) for share in sparsity],
        "rope_parameters": {
            _FULL: rotary(metadata, values["head_dim"]),
            _WINDOWED: {"rope_type": "default", "rope_theta": window_base},
        },
    }


def _gemma4(metadata: Metadata) -> Values:
    """Layers with full attention have larger heads; the last layers may share keys and values of earlier ones and have wider feed-forward
    networks; each layer may have an embedding of its own."""
    values = sizes(metadata) | rms_norm(metadata)
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    heads = metadata.size("attention.head_count")
    types = alternating_layers(metadata, values, 6)
    if types[-1] != _FULL:
        raise metadata.error("attention.sliding_window_pattern", types[-1], f"{_FULL} for the last layer")
    shared, widths = (
        metadata.integer("attention.shared_kv_layers", 0),
        metadata.per_layer("feed_forward_length", layers),
    )
    if shared >= layers:
        raise metadata.error("attention.shared_kv_layers", shared, f"at most {layers - 1}")
    first_shared = layers - shared
    double = widths[-1] != widths[0]
    if widths != [widths[0]] * first_shared + [widths[0] * (2 if double else 1)] * shared:
        raise metadata.error(
            "feed_forward_length", widths[-1], f"{widths[0]}, or twice that in the last {shared} layers"
        )
    head_dims = {
        _FULL: metadata.size("attention.key_length"),
        _WINDOWED: metadata.size("attention.key_length_swa"),
    }
    metadata.require("attention.value_length", head_dims[_FULL])
    metadata.require("attention.value_length_swa", head_dims[_WINDOWED])
    metadata.require("rope.dimension_count", head_dims[_FULL])
    metadata.require("rope.dimension_count_swa", head_dims[_WINDOWED])
    kv_counts = metadata.per_layer("attention.head_count_kv", layers)
    kv_heads = {kind: kv_counts[types.index(kind)] for kind in head_dims if kind in types}
    if any(
        count != kv_heads[kind] or not count or heads % count
        for count, kind in zip(kv_counts, types, strict=True)
    ):
        raise metadata.error(
            "attention.head_count_kv", kv_counts[0], f"a divisor of {heads}, for each kind of layer"
        )
    full = types.index(_FULL)
    values_are_keys = full < first_shared and not metadata.has_tensor(f"blk.{full}.attn_v.weight")
    if kv_heads[_FULL] != kv_heads.get(_WINDOWED, kv_heads[_FULL]) and not values_are_keys:
        raise metadata.error(
            "attention.head_count_kv", kv_heads[_FULL], f"{kv_heads[_WINDOWED]}, beside values of their own"
        )
    for kind, count in kv_heads.items():
        layer = types.index(kind)
        metadata.require_tensor(f"blk.{layer}.attn_q.weight", heads * head_dims[kind], hidden)
        if layer < first_shared:
            metadata.require_tensor(f"blk.{layer}.attn_k.weight", count * head_dims[kind], hidden)
    metadata.require_tensor("blk.0.ffn_gate.weight", widths[0], hidden)
    metadata.require_tensor(ROPE_FACTORS, head_dims[_FULL] // 2)
    per_layer_width = metadata.integer("embedding_length_per_layer_input", 0)
    if per_layer_width:
        metadata.require_tensor("per_layer_token_embd.weight", values["vocab_size"], layers * per_layer_width)
    full_base, window_base = (
        metadata.real("rope.freq_base", least=1.0),
        metadata.real("rope.freq_base_swa", 10_000.0, least=1.0),
    )
    return values | {
        "intermediate_size": widths[0],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads.get(_WINDOWED, kv_heads[_FULL]),
        "num_global_key_value_heads": kv_heads[_FULL],
        "head_dim": head_dims[_WINDOWED],
        "global_head_dim": head_dims[_FULL],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": double,
        "attention_k_eq_v": values_are_keys,
        "attention_bias": False,
        "hidden_size_per_layer_input": per_layer_width,
        "vocab_size_per_layer_input": values["vocab_size"],
        # The file has divisors of the frequencies; those of dimensions that do not rotate become almost 0.
        "rope_parameters": {
            _FULL: {"rope_type": "proportional", "rope_theta": full_base, "partial_rotary_factor": 1.0},
            _WINDOWED: {"rope_type": "default", "rope_theta": window_base},
        },
    }


def _gemma4_mixture(metadata: Metadata) -> Values:
    """Experts next to the feed-forward network of each layer."""
    values = _gemma4(metadata)
    count, width = experts_everywhere(metadata, values, normalised=True)
    return values | {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": values.pop("num_experts_per_tok"),
        "moe_intermediate_size": width,
    }


GEMMA_MIXTURES: Architectures = {"gemma4": ("gemma4_text", _gemma4_mixture)}
GEMMAS: Architectures = {
    "gemma": ("gemma", _gemma),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "gemma3n": ("gemma3n_text", _gemma3n),
    "gemma4": ("gemma4_text", _gemma4),
}
