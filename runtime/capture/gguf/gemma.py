"""The Gemmas (llama.cpp's `conversion/gemma.py`)."""

from __future__ import annotations

import math

from fusion.runtime.capture.gguf.decoders import (
    ROPE_FACTORS,
    Architectures,
    Values,
    alternating,
    decoder,
    gated,
    rms,
    rotary,
    sizes,
)
from fusion.runtime.capture.gguf.metadata import LEAST, Metadata
from fusion.runtime.capture.gguf.mixtures import mixed

LEAST_SCALE = 1e-3  # of queries: 1 by the root of a head's length, which then has a million numbers
_FULL, _NEAR = "full_attention", "sliding_attention"


def _gemma(metadata: Metadata) -> Values:
    values = gated(metadata, decoder(metadata))
    return values | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": rotary(metadata, values["head_dim"]),
    }


def _gemma2(metadata: Metadata) -> Values:
    values = _gemma(metadata)
    return values | {
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0, least=LEAST),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0, least=LEAST),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "layer_types": alternating(metadata, values, 2),
        "query_pre_attn_scalar": _query_scale(metadata, values, 46),
    }


def _gemma3(metadata: Metadata) -> Values:
    values = _gemma(metadata)
    near = metadata.real("rope.freq_base_swa", 10_000.0, least=1.0)
    return values | {
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": alternating(metadata, values, 6),
        "query_pre_attn_scalar": _query_scale(metadata, values, 62),
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
    }


def _query_scale(metadata: Metadata, values: Values, largest: int) -> float:
    """Queries are divided by its root. Conversions do not write it: it is the length of a head, but for the largest model of
    the family, which goes by its layers."""
    heads = values["num_attention_heads"]
    usual = values["hidden_size"] // heads if values["num_hidden_layers"] == largest else values["head_dim"]
    scale = metadata.real("attention.scale", usual**-0.5)
    if not LEAST_SCALE <= scale <= 1:
        raise metadata.bad("attention.scale", scale, f"from {LEAST_SCALE:g} to 1")
    whole = round(scale**-2)  # what it was before it was rounded to 32 bits
    return whole if math.isclose(whole**-0.5, scale, rel_tol=1e-6) else scale**-2


def _gemma3n(metadata: Metadata) -> Values:
    """The text of a model of images and sounds: four streams, an embedding for each layer, keys and values that the last layers share."""
    values = gated(metadata, decoder(metadata))
    layers, hidden, vocabulary = values["num_hidden_layers"], values["hidden_size"], values["vocab_size"]
    types = alternating(metadata, values, 5)
    shared, each = (
        metadata.whole("attention.shared_kv_layers", 0),
        metadata.size("embedding_length_per_layer_input"),
    )
    if not set(types[: layers - shared]) >= set(types) or shared >= layers:
        raise metadata.bad(
            "attention.shared_kv_layers", shared, "fewer, so that there are layers to share with"
        )
    streams, active = metadata.size("altup.num_inputs"), metadata.whole("altup.active_idx")
    if active >= streams:
        raise metadata.bad("altup.active_idx", active, f"below {streams}")
    metadata.tensor("altup_proj.weight", streams - 1, hidden, hidden)
    metadata.tensor("per_layer_token_embd.weight", vocabulary, layers * each)
    low = metadata.header.tensors.get("blk.0.laurel_l.weight")
    rank = 0 if low is None else low.shape[0]
    metadata.tensor("blk.0.laurel_l.weight", rank, hidden)
    # As many standard deviations above the mean as the largest of this share of numbers begin.
    scales = metadata.reals("activation_sparsity_scale", layers)
    sparsity = [(1 + math.erf(scale / math.sqrt(2))) / 2 for scale in scales]
    if not all(0 <= share < 1 for share in sparsity):
        raise metadata.bad("activation_sparsity_scale", tuple(scales), "numbers that are not too large")
    near = metadata.real("rope.freq_base_swa", 10_000.0, least=1.0)
    return values | {
        "intermediate_size": [values["intermediate_size"]] * layers,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "attention_bias": False,
        "hidden_size_per_layer_input": each,
        "vocab_size_per_layer_input": vocabulary,
        "altup_num_inputs": streams,
        "altup_active_idx": active,
        "altup_correct_scale": metadata.has("blk.0.altup_correct_scale.weight"),
        "laurel_rank": rank,
        "activation_sparsity_pattern": [round(share, 7) for share in sparsity],
        "rope_parameters": {
            _FULL: rotary(metadata, values["head_dim"]),
            _NEAR: {"rope_type": "default", "rope_theta": near},
        },
    }


def _gemma4(metadata: Metadata) -> Values:
    """Layers that see all positions have longer heads; the last layers may have the keys and values of others, and wider feed-forward
    networks; each layer may get an embedding of its own."""
    values = sizes(metadata) | rms(metadata)
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    heads = metadata.size("attention.head_count")
    types = alternating(metadata, values, 6)
    if types[-1] != _FULL:
        raise metadata.bad("attention.sliding_window_pattern", types[-1], f"{_FULL} for the last layer")
    shared, wide = (
        metadata.whole("attention.shared_kv_layers", 0),
        metadata.each("feed_forward_length", layers),
    )
    if shared >= layers:
        raise metadata.bad("attention.shared_kv_layers", shared, f"at most {layers - 1}")
    own = layers - shared
    double = wide[-1] != wide[0]
    if wide != [wide[0]] * own + [wide[0] * (2 if double else 1)] * shared:
        raise metadata.bad(
            "feed_forward_length", wide[-1], f"{wide[0]}, or twice that in the last {shared} layers"
        )
    lengths = {_FULL: metadata.size("attention.key_length"), _NEAR: metadata.size("attention.key_length_swa")}
    metadata.must_be("attention.value_length", lengths[_FULL])
    metadata.must_be("attention.value_length_swa", lengths[_NEAR])
    metadata.must_be("rope.dimension_count", lengths[_FULL])
    metadata.must_be("rope.dimension_count_swa", lengths[_NEAR])
    counts = metadata.each("attention.head_count_kv", layers)
    kv_heads = {kind: counts[types.index(kind)] for kind in lengths if kind in types}
    if any(
        count != kv_heads[kind] or not count or heads % count
        for count, kind in zip(counts, types, strict=True)
    ):
        raise metadata.bad(
            "attention.head_count_kv", counts[0], f"a divisor of {heads}, for each kind of layer"
        )
    full = types.index(_FULL)
    same = full < own and not metadata.has(f"blk.{full}.attn_v.weight")
    if kv_heads[_FULL] != kv_heads.get(_NEAR, kv_heads[_FULL]) and not same:
        raise metadata.bad(
            "attention.head_count_kv", kv_heads[_FULL], f"{kv_heads[_NEAR]}, beside values of their own"
        )
    for kind, count in kv_heads.items():
        layer = types.index(kind)
        metadata.tensor(f"blk.{layer}.attn_q.weight", heads * lengths[kind], hidden)
        if layer < own:
            metadata.tensor(f"blk.{layer}.attn_k.weight", count * lengths[kind], hidden)
    metadata.tensor("blk.0.ffn_gate.weight", wide[0], hidden)
    metadata.tensor(ROPE_FACTORS, lengths[_FULL] // 2)
    each = metadata.whole("embedding_length_per_layer_input", 0)
    if each:
        metadata.tensor("per_layer_token_embd.weight", values["vocab_size"], layers * each)
    base, near = (
        metadata.real("rope.freq_base", least=1.0),
        metadata.real("rope.freq_base_swa", 10_000.0, least=1.0),
    )
    return values | {
        "intermediate_size": wide[0],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads.get(_NEAR, kv_heads[_FULL]),
        "num_global_key_value_heads": kv_heads[_FULL],
        "head_dim": lengths[_NEAR],
        "global_head_dim": lengths[_FULL],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": double,
        "attention_k_eq_v": same,
        "attention_bias": False,
        "hidden_size_per_layer_input": each,
        "vocab_size_per_layer_input": values["vocab_size"],
        # The file has factors of the frequencies, by which those that do not rotate are next to 0.
        "rope_parameters": {
            _FULL: {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": 1.0},
            _NEAR: {"rope_type": "default", "rope_theta": near},
        },
    }


def _gemma4_mixture(metadata: Metadata) -> Values:
    """Experts beside the feed-forward network of each layer."""
    values = _gemma4(metadata)
    count, wide = mixed(metadata, values, normed=True)
    return values | {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": values.pop("num_experts_per_tok"),
        "moe_intermediate_size": wide,
    }


GEMMA_MIXTURES: Architectures = {"gemma4": ("gemma4_text", _gemma4_mixture)}
GEMMAS: Architectures = {
    "gemma": ("gemma", _gemma),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "gemma3n": ("gemma3n_text", _gemma3n),
    "gemma4": ("gemma4_text", _gemma4),
}
