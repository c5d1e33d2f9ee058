"""Architectures with one feed-forward network in each layer."""

from __future__ import annotations

import math
from collections.abc import Callable

from fusion.runtime.capture.gguf.decoders import (
    Architectures,
    Values,
    alternating_layers,
    check_permuted,
    check_queries_and_keys,
    decoder,
    default_head_dim,
    gated_decoder,
    granite_multipliers,
    rms_norm,
    rotary,
    scaled_rotary,
    unfused_decoder,
)
from fusion.runtime.capture.gguf.metadata import Metadata


def _rotary_decoder(
    metadata: Metadata,
    norm: str = "ffn_norm",
    *,
    default_heads: bool = False,
    rope: Callable[[Metadata, int], Values] = rotary,
    **biases: str,
) -> Values:
    """A `gated_decoder` whose heads are rotated as a whole. `norm`: as of `decoder`; `default_heads`: its configuration has no head size;
    `biases`: configuration key -> the tensor of the first layer that has a bias if it is set."""
    if default_heads:
        default_head_dim(metadata)
    values = gated_decoder(metadata, decoder(metadata, norm))
    values |= {"hidden_act": "silu", "rope_parameters": rope(metadata, values["head_dim"])}
    values |= {name: metadata.has_tensor(f"blk.0.{tensor}.bias") for name, tensor in biases.items()}
    if default_heads:
        del values["head_dim"]
    return values


def _llama(metadata: Metadata, *, default_heads: bool = False) -> Values:
    check_permuted(metadata)
    return _rotary_decoder(
        metadata,
        default_heads=default_heads,
        rope=scaled_rotary,
        attention_bias="attn_output",
        mlp_bias="ffn_down",
    )


def _granite_base(metadata: Metadata) -> Values:
    metadata.require("rope.scaling.finetuned", True)  # False: positions are not rotated at all
    return _llama(metadata, default_heads=True) | granite_multipliers(metadata, default_head_dim(metadata))


def _granite(metadata: Metadata) -> Values:
    """Granite, and Granite 4 without recurrent layers, whose files have metadata of these all the same."""
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        metadata.ignore(f"ssm.{key}")
    metadata.require("expert_shared_feed_forward_length", metadata.size("feed_forward_length"))
    return _granite_base(metadata)


def _smollm3(metadata: Metadata) -> Values:
    return _llama(metadata, default_heads=True) | {
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "use_sliding_window": False,
    }


def _mistral3(metadata: Metadata) -> Values:
    """A Llama whose queries are scaled up with their position beyond the original context."""
    values = _llama(metadata)
    original = metadata.size("rope.scaling.original_context_length", values["max_position_embeddings"])
    rope = {"original_max_position_embeddings": original, **values["rope_parameters"]}
    metadata.require("rope.scaling.yarn_log_multiplier", 0.0, 1.0)
    if rope["rope_type"] == "yarn" and metadata.real("rope.scaling.yarn_log_multiplier", 0.0):
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    rope["llama_4_scaling_beta"] = metadata.real("attention.temperature_scale", 0.0)
    return values | {"rope_parameters": rope}


def _ernie4_5(metadata: Metadata) -> Values:
    return _rotary_decoder(metadata, use_bias="attn_q")


def _olmo2(metadata: Metadata) -> Values:
    return _rotary_decoder(metadata, "post_ffw_norm", default_heads=True, attention_bias="attn_output")


def _seed_oss(metadata: Metadata) -> Values:
    return _rotary_decoder(
        metadata,
        "post_attention_norm",
        attention_bias="attn_q",
        attention_out_bias="attn_output",
        mlp_bias="ffn_down",
    )


def _glm4(metadata: Metadata) -> Values:
    values = unfused_decoder(metadata, decoder(metadata))
    metadata.require_tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, values["head_dim"], partial=True),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def _starcoder2(metadata: Metadata) -> Values:
    head_dim = default_head_dim(metadata)
    values = decoder(metadata)
    check_queries_and_keys(metadata, values)
    metadata.require_tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    del values["head_dim"]
    return values | {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": metadata.real("attention.layer_norm_epsilon"),
        "rope_parameters": rotary(metadata, head_dim),
        "use_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": None,
    }


def _command_r(metadata: Metadata) -> Values:
    head_dim = default_head_dim(metadata)
    values = decoder(metadata, "attn_norm")
    check_queries_and_keys(metadata, values)
    metadata.require_tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "layer_norm_eps": metadata.real("attention.layer_norm_epsilon"),
        "logit_scale": metadata.real("logit_scale", 0.0) or 1.0,
        "rope_parameters": rotary(metadata, head_dim),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _cohere2(metadata: Metadata) -> Values:
    values = _command_r(metadata)
    del values["use_qk_norm"]
    return values | {
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": alternating_layers(metadata, values, 4),
    }


def _arcee(metadata: Metadata) -> Values:
    values = unfused_decoder(metadata, decoder(metadata))
    check_permuted(metadata)
    metadata.require_tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "relu2",
        "rope_parameters": scaled_rotary(metadata, values["head_dim"]),
        "attention_bias": metadata.has_tensor("blk.0.attn_output.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
    }


def _apertus(metadata: Metadata) -> Values:
    """The parameters of its activation, for each layer, are metadata of the file."""
    head_dim = default_head_dim(metadata)
    values = unfused_decoder(metadata, decoder(metadata))
    metadata.require_tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    del values["head_dim"]
    return values | {
        "constants": {
            f"model.layers.{layer}.mlp.act_fn.{name}": number
            for name in ("alpha_p", "alpha_n", "beta", "eps")
            for layer, number in enumerate(_xielu(metadata, name, values["num_hidden_layers"]))
        },
        "hidden_act": "xielu",
        "rope_parameters": scaled_rotary(metadata, head_dim),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def _xielu(metadata: Metadata, name: str, layers: int) -> list[float]:
    values = metadata.reals_per_layer(f"xielu.{name}", layers, shared=True)
    if not all(map(math.isfinite, values)):
        raise metadata.error(f"xielu.{name}", tuple(values), "numbers")
    return values


def _exaone(metadata: Metadata) -> Values:
    # The same value as rms_norm_eps, under the model's own name
    metadata.ignore("attention.layer_norm_epsilon")
    return _rotary_decoder(metadata, default_heads=True, rope=scaled_rotary)


def _exaone4(metadata: Metadata) -> Values:
    """All layers are rotary if there is no window; else only those with a window."""
    values = _rotary_decoder(metadata, "post_ffw_norm", rope=scaled_rotary)
    window = metadata.integer("attention.sliding_window", 0)
    types = (
        alternating_layers(metadata, values, 4)
        if window
        else ["full_attention"] * values["num_hidden_layers"]
    )
    return values | {
        "sliding_window": window or None,
        "sliding_window_pattern": None,
        "layer_types": types,
    }


def _hunyuan(metadata: Metadata) -> Values:
    return _rotary_decoder(metadata, attention_bias="attn_q")


def _text_part(text_values: Callable[[Metadata], Values]) -> Callable[[Metadata], Values]:
    """The text model of a vision-language model; the vision part is in another file."""

    def values(metadata: Metadata) -> Values:
        metadata.ignore("n_deepstack_layers")
        return text_values(metadata)

    return values


def _qwen2(metadata: Metadata) -> Values:
    return _rotary_decoder(metadata, default_heads=True) | {"use_sliding_window": False}


def _qwen3(metadata: Metadata) -> Values:
    return _rotary_decoder(metadata, attention_bias="attn_output") | {"use_sliding_window": False}


def _phi3(metadata: Metadata) -> Values:
    head_dim = default_head_dim(metadata)
    values = decoder(metadata) | rms_norm(metadata)
    del values["head_dim"]
    hidden = values["hidden_size"]
    rows = values["num_attention_heads"] + 2 * values["num_key_value_heads"]
    metadata.require_tensor("blk.0.attn_qkv.weight", rows * head_dim, hidden)
    metadata.require_tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], hidden)
    window = metadata.integer("attention.sliding_window", 0)
    rope = rotary(metadata, head_dim, partial=True)
    context = values["max_position_embeddings"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", context),
        "sliding_window": window or None,
    }


DENSE: Architectures = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _qwen2),
    "qwen3": ("qwen3", _qwen3),
    "qwen2vl": ("qwen2", _text_part(_qwen2)),
    "qwen3vl": ("qwen3", _text_part(_qwen3)),
    "internlm2": ("llama", _llama),
    "arcee": ("arcee", _arcee),
    "apertus": ("apertus", _apertus),
    "exaone": ("exaone", _exaone),
    "exaone4": ("exaone4", _exaone4),
    "hunyuan-dense": ("hunyuan_v1_dense", _hunyuan),
    "phi3": ("phi3", _phi3),
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
