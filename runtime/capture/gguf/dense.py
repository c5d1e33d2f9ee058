"""The architectures with one feed-forward network a layer."""

from __future__ import annotations

import math

from fusion.runtime.capture.gguf.decoders import (
    Architectures,
    Values,
    alternating,
    attentive,
    decoder,
    permuted,
    plain_heads,
    rms,
    rotary,
    separate,
)
from fusion.runtime.capture.gguf.metadata import LEAST, Metadata

LEAST_SCALE = 1e-3  # of queries: 1 by the root of a head's length, which then has a million numbers


def _gated(said: Metadata, values: Values) -> Values:
    """A decoder with separate queries, keys and values, and a gated feed-forward; checked against its first layer, so that
    nothing larger than the file's tensors is ever built."""
    said.tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return attentive(said, values)


def _llama(said: Metadata) -> Values:
    values = _gated(said, decoder(said))
    permuted(said, values)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_output.bias"),
        "mlp_bias": said.has("blk.0.ffn_down.bias"),
    }


def _like_llama(said: Metadata) -> Values:
    """A Llama whose configuration does not say how long a head is."""
    plain_heads(said)
    values = _llama(said)
    del values["head_dim"]
    return values


def _granite(said: Metadata) -> Values:
    said.must_be("rope.scaling.finetuned", True)  # False: positions are not rotated at all
    head_dim = plain_heads(said)
    return _like_llama(said) | {
        "attention_multiplier": said.real("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": said.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": said.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": said.real("logit_scale", least=LEAST),
    }


def _smollm3(said: Metadata) -> Values:
    return _like_llama(said) | {
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "use_sliding_window": False,
    }


def _mistral3(said: Metadata) -> Values:
    """A Llama whose queries grow with their position, beyond the original context."""
    values = _llama(said)
    original = said.size("rope.scaling.original_context_length", values["max_position_embeddings"])
    rope = {"original_max_position_embeddings": original, **values["rope_parameters"]}
    said.must_be("rope.scaling.yarn_log_multiplier", 0.0, 1.0)
    if rope["rope_type"] == "yarn" and said.real("rope.scaling.yarn_log_multiplier", 0.0):
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    rope["llama_4_scaling_beta"] = said.real("attention.temperature_scale", 0.0)
    return values | {"rope_parameters": rope}


def _ernie4_5(said: Metadata) -> Values:
    values = _gated(said, decoder(said))
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"]),
        "use_bias": said.has("blk.0.attn_q.bias"),
    }


def _olmo2(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values = _gated(said, decoder(said, "post_ffw_norm"))
    del values["head_dim"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, head_dim),
        "attention_bias": said.has("blk.0.attn_output.bias"),
    }


def _seed_oss(said: Metadata) -> Values:
    values = _gated(said, decoder(said, "post_attention_norm"))
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "attention_out_bias": said.has("blk.0.attn_output.bias"),
        "mlp_bias": said.has("blk.0.ffn_down.bias"),
    }


def _glm4(said: Metadata) -> Values:
    values = attentive(said, decoder(said))
    said.tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "rope_parameters": {"partial_rotary_factor": 1.0, **rotary(said, values["head_dim"], partial=True)},
        "attention_bias": said.has("blk.0.attn_q.bias"),
    }


def _starcoder2(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values = decoder(said)
    separate(said, values)
    said.tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    del values["head_dim"]
    return values | {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": said.real("attention.layer_norm_epsilon"),
        "rope_parameters": rotary(said, head_dim),
        "use_bias": said.has("blk.0.attn_q.bias"),
        "sliding_window": None,
    }


def _command_r(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values = decoder(said, "attn_norm")
    separate(said, values)
    said.tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "layer_norm_eps": said.real("attention.layer_norm_epsilon"),
        "logit_scale": said.real("logit_scale", 0.0) or 1.0,
        "rope_parameters": rotary(said, head_dim),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "use_qk_norm": said.has("blk.0.attn_q_norm.weight"),
    }


def _cohere2(said: Metadata) -> Values:
    values = _command_r(said)
    del values["use_qk_norm"]
    return values | {
        "sliding_window": said.size("attention.sliding_window"),
        "layer_types": alternating(said, values, 4),
    }


def _qwen2(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values = _gated(said, decoder(said))
    del values["head_dim"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, head_dim),
        "use_sliding_window": False,
    }


def _qwen3(said: Metadata) -> Values:
    values = _gated(said, decoder(said))
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_output.bias"),
        "use_sliding_window": False,
    }


def _gemma(said: Metadata) -> Values:
    values = _gated(said, decoder(said))
    return values | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": rotary(said, values["head_dim"]),
    }


def _gemma2(said: Metadata) -> Values:
    values = _gemma(said)
    return values | {
        "attn_logit_softcapping": said.real("attn_logit_softcapping", 50.0, least=LEAST),
        "final_logit_softcapping": said.real("final_logit_softcapping", 30.0, least=LEAST),
        "sliding_window": said.size("attention.sliding_window", 4096),
        "layer_types": alternating(said, values, 2),
        "query_pre_attn_scalar": _query_scale(said, values, 46),
    }


def _gemma3(said: Metadata) -> Values:
    values = _gemma(said)
    near = said.real("rope.freq_base_swa", 10_000.0, least=1.0)
    return values | {
        "final_logit_softcapping": said.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": said.size("attention.sliding_window"),
        "layer_types": alternating(said, values, 6),
        "query_pre_attn_scalar": _query_scale(said, values, 62),
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
    }


def _query_scale(said: Metadata, values: Values, largest: int) -> float:
    """Queries are divided by its root. Conversions do not write it: it is the length of a head, but for the largest model of
    the family, which goes by its layers."""
    heads = values["num_attention_heads"]
    usual = values["hidden_size"] // heads if values["num_hidden_layers"] == largest else values["head_dim"]
    scale = said.real("attention.scale", usual**-0.5)
    if not LEAST_SCALE <= scale <= 1:
        raise said.bad("attention.scale", scale, f"from {LEAST_SCALE:g} to 1")
    whole = round(scale**-2)  # what it was before it was rounded to 32 bits
    return whole if math.isclose(whole**-0.5, scale, rel_tol=1e-6) else scale**-2


def _phi3(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values = decoder(said) | rms(said)
    del values["head_dim"]
    hidden = values["hidden_size"]
    rows = values["num_attention_heads"] + 2 * values["num_key_value_heads"]
    said.tensor("blk.0.attn_qkv.weight", rows * head_dim, hidden)
    said.tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], hidden)
    window = said.whole("attention.sliding_window", 0)
    rope = {"partial_rotary_factor": 1.0, **rotary(said, head_dim, partial=True)}
    whole = values["max_position_embeddings"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", whole),
        "sliding_window": window or None,
    }


def _gpt2(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values = decoder(said)
    hidden, layers = values["hidden_size"], values["num_hidden_layers"]
    said.must_be("attention.head_count_kv", values["num_attention_heads"])
    said.must_be("rope.dimension_count", head_dim)  # some files say it; nothing is rotated
    said.tensor("position_embd.weight", values["max_position_embeddings"], hidden)
    said.tensor("blk.0.attn_qkv.weight", 3 * hidden, hidden)
    said.tensor("blk.0.ffn_up.weight", values["intermediate_size"], hidden)
    return {
        "vocab_size": values["vocab_size"],
        "n_positions": values["max_position_embeddings"],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": values["num_attention_heads"],
        "n_inner": values["intermediate_size"],
        "layer_norm_epsilon": said.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": values["tie_word_embeddings"],
        "bos_token_id": None,
        "eos_token_id": None,
    }


DENSE: Architectures = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _qwen2),
    "qwen3": ("qwen3", _qwen3),
    "gemma": ("gemma", _gemma),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "phi3": ("phi3", _phi3),
    "gpt2": ("gpt2", _gpt2),
    "granite": ("granite", _granite),
    "smollm3": ("smollm3", _smollm3),
    "mistral3": ("ministral3", _mistral3),
    "ernie4_5": ("ernie4_5", _ernie4_5),
    "olmo2": ("olmo2", _olmo2),
    "seed_oss": ("seed_oss", _seed_oss),
    "glm4": ("glm4", _glm4),
    "starcoder2": ("starcoder2", _starcoder2),
    "command-r": ("cohere", _command_r),
    "cohere2": ("cohere2", _cohere2),
}
