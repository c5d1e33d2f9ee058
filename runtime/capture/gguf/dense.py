"""The architectures with one feed-forward network a layer."""

from __future__ import annotations

import math
from collections.abc import Callable

from fusion.runtime.capture.gguf.decoders import (
    Architectures,
    Values,
    alternating,
    attentive,
    decoder,
    gated,
    granite_scales,
    permuted,
    plain_heads,
    rms,
    rotary,
    separate,
    stretched,
)
from fusion.runtime.capture.gguf.metadata import Metadata


def _rotating(
    metadata: Metadata,
    norm: str = "ffn_norm",
    *,
    plain: bool = False,
    rope: Callable[[Metadata, int], Values] = rotary,
    **biases: str,
) -> Values:
    """A decoder as `gated` checks it, whose heads are rotated whole. `norm`: as of `decoder`; `plain`: its configuration does not say
    how long a head is; `biases`: by what that calls it, the tensor of the first layer that has a bias or has none."""
    if plain:
        plain_heads(metadata)
    values = gated(metadata, decoder(metadata, norm))
    values |= {"hidden_act": "silu", "rope_parameters": rope(metadata, values["head_dim"])}
    values |= {name: metadata.has(f"blk.0.{tensor}.bias") for name, tensor in biases.items()}
    if plain:
        del values["head_dim"]
    return values


def _llama(metadata: Metadata, *, plain: bool = False) -> Values:
    permuted(metadata)
    return _rotating(metadata, plain=plain, rope=stretched, attention_bias="attn_output", mlp_bias="ffn_down")


def _granite(metadata: Metadata) -> Values:
    metadata.must_be("rope.scaling.finetuned", True)  # False: positions are not rotated at all
    return _llama(metadata, plain=True) | granite_scales(metadata, plain_heads(metadata))


def _granite_alike(metadata: Metadata) -> Values:
    """Also of a Granite 4 whose layers all attend: what files say of the others is of none."""
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        metadata.any(f"ssm.{key}")
    metadata.must_be("expert_shared_feed_forward_length", metadata.size("feed_forward_length"))
    return _granite(metadata)


def _smollm3(metadata: Metadata) -> Values:
    return _llama(metadata, plain=True) | {
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "use_sliding_window": False,
    }


def _mistral3(metadata: Metadata) -> Values:
    """A Llama whose queries grow with their position, beyond the original context."""
    values = _llama(metadata)
    original = metadata.size("rope.scaling.original_context_length", values["max_position_embeddings"])
    rope = {"original_max_position_embeddings": original, **values["rope_parameters"]}
    metadata.must_be("rope.scaling.yarn_log_multiplier", 0.0, 1.0)
    if rope["rope_type"] == "yarn" and metadata.real("rope.scaling.yarn_log_multiplier", 0.0):
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    rope["llama_4_scaling_beta"] = metadata.real("attention.temperature_scale", 0.0)
    return values | {"rope_parameters": rope}


def _ernie4_5(metadata: Metadata) -> Values:
    return _rotating(metadata, use_bias="attn_q")


def _olmo2(metadata: Metadata) -> Values:
    return _rotating(metadata, "post_ffw_norm", plain=True, attention_bias="attn_output")


def _seed_oss(metadata: Metadata) -> Values:
    return _rotating(
        metadata,
        "post_attention_norm",
        attention_bias="attn_q",
        attention_out_bias="attn_output",
        mlp_bias="ffn_down",
    )


def _glm4(metadata: Metadata) -> Values:
    values = attentive(metadata, decoder(metadata))
    metadata.tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, values["head_dim"], partial=True),
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
    }


def _starcoder2(metadata: Metadata) -> Values:
    head_dim = plain_heads(metadata)
    values = decoder(metadata)
    separate(metadata, values)
    metadata.tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    del values["head_dim"]
    return values | {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": metadata.real("attention.layer_norm_epsilon"),
        "rope_parameters": rotary(metadata, head_dim),
        "use_bias": metadata.has("blk.0.attn_q.bias"),
        "sliding_window": None,
    }


def _command_r(metadata: Metadata) -> Values:
    head_dim = plain_heads(metadata)
    values = decoder(metadata, "attn_norm")
    separate(metadata, values)
    metadata.tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "layer_norm_eps": metadata.real("attention.layer_norm_epsilon"),
        "logit_scale": metadata.real("logit_scale", 0.0) or 1.0,
        "rope_parameters": rotary(metadata, head_dim),
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
    }


def _cohere2(metadata: Metadata) -> Values:
    values = _command_r(metadata)
    del values["use_qk_norm"]
    return values | {
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": alternating(metadata, values, 4),
    }


def _arcee(metadata: Metadata) -> Values:
    values = attentive(metadata, decoder(metadata))
    permuted(metadata)
    metadata.tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "relu2",
        "rope_parameters": stretched(metadata, values["head_dim"]),
        "attention_bias": metadata.has("blk.0.attn_output.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_down.bias"),
    }


def _apertus(metadata: Metadata) -> Values:
    """The numbers of its activation, a few for each layer, are among the file's values."""
    head_dim = plain_heads(metadata)
    values = attentive(metadata, decoder(metadata))
    metadata.tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    del values["head_dim"]
    return values | {
        "constants": {
            f"model.layers.{layer}.mlp.act_fn.{name}": number
            for name in ("alpha_p", "alpha_n", "beta", "eps")
            for layer, number in enumerate(_xielu(metadata, name, values["num_hidden_layers"]))
        },
        "hidden_act": "xielu",
        "rope_parameters": stretched(metadata, head_dim),
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
    }


def _xielu(metadata: Metadata, name: str, layers: int) -> list[float]:
    found = metadata.reals(f"xielu.{name}", layers, shared=True)
    if not all(map(math.isfinite, found)):
        raise metadata.bad(f"xielu.{name}", tuple(found), "numbers")
    return found


def _exaone(metadata: Metadata) -> Values:
    # The same as what is read, under the name that the model has for it
    metadata.any("attention.layer_norm_epsilon")
    return _rotating(metadata, plain=True, rope=stretched)


def _exaone4(metadata: Metadata) -> Values:
    """Without a window every layer rotates; with one, those that see all positions do not."""
    values = _rotating(metadata, "post_ffw_norm", rope=stretched)
    window = metadata.whole("attention.sliding_window", 0)
    types = alternating(metadata, values, 4) if window else ["full_attention"] * values["num_hidden_layers"]
    return values | {
        "sliding_window": window or None,
        "sliding_window_pattern": None,
        "layer_types": types,
    }


def _hunyuan(metadata: Metadata) -> Values:
    return _rotating(metadata, attention_bias="attn_q")


def _of_images(of_texts: Callable[[Metadata], Values]) -> Callable[[Metadata], Values]:
    """What a model of images and texts has for texts; what sees images is in another file."""

    def values(metadata: Metadata) -> Values:
        metadata.any("n_deepstack_layers")
        return of_texts(metadata)

    return values


def _qwen2(metadata: Metadata) -> Values:
    return _rotating(metadata, plain=True) | {"use_sliding_window": False}


def _qwen3(metadata: Metadata) -> Values:
    return _rotating(metadata, attention_bias="attn_output") | {"use_sliding_window": False}


def _phi3(metadata: Metadata) -> Values:
    head_dim = plain_heads(metadata)
    values = decoder(metadata) | rms(metadata)
    del values["head_dim"]
    hidden = values["hidden_size"]
    rows = values["num_attention_heads"] + 2 * values["num_key_value_heads"]
    metadata.tensor("blk.0.attn_qkv.weight", rows * head_dim, hidden)
    metadata.tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], hidden)
    window = metadata.whole("attention.sliding_window", 0)
    rope = rotary(metadata, head_dim, partial=True)
    whole = values["max_position_embeddings"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", whole),
        "sliding_window": window or None,
    }


DENSE: Architectures = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _qwen2),
    "qwen3": ("qwen3", _qwen3),
    "qwen2vl": ("qwen2", _of_images(_qwen2)),
    "qwen3vl": ("qwen3", _of_images(_qwen3)),
    "internlm2": ("llama", _llama),
    "arcee": ("arcee", _arcee),
    "apertus": ("apertus", _apertus),
    "exaone": ("exaone", _exaone),
    "exaone4": ("exaone4", _exaone4),
    "hunyuan-dense": ("hunyuan_v1_dense", _hunyuan),
    "phi3": ("phi3", _phi3),
    "granite": ("granite", _granite_alike),
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
