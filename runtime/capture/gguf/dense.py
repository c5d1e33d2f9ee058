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
    said: Metadata,
    norm: str = "ffn_norm",
    *,
    plain: bool = False,
    rope: Callable[[Metadata, int], Values] = rotary,
    **biases: str,
) -> Values:
    """A decoder as `gated` checks it, whose heads are rotated whole. `norm`: as of `decoder`; `plain`: its configuration does not say
    how long a head is; `biases`: by what that calls it, the tensor of the first layer that has a bias or has none."""
    if plain:
        plain_heads(said)
    values = gated(said, decoder(said, norm))
    values |= {"hidden_act": "silu", "rope_parameters": rope(said, values["head_dim"])}
    values |= {name: said.has(f"blk.0.{tensor}.bias") for name, tensor in biases.items()}
    if plain:
        del values["head_dim"]
    return values


def _llama(said: Metadata, *, plain: bool = False) -> Values:
    permuted(said)
    return _rotating(said, plain=plain, rope=stretched, attention_bias="attn_output", mlp_bias="ffn_down")


def _granite(said: Metadata) -> Values:
    said.must_be("rope.scaling.finetuned", True)  # False: positions are not rotated at all
    return _llama(said, plain=True) | granite_scales(said, plain_heads(said))


def _granite_alike(said: Metadata) -> Values:
    """Also of a Granite 4 whose layers all attend: what files say of the others is of none."""
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        said.any(f"ssm.{key}")
    said.must_be("expert_shared_feed_forward_length", said.size("feed_forward_length"))
    return _granite(said)


def _smollm3(said: Metadata) -> Values:
    return _llama(said, plain=True) | {
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
    return _rotating(said, use_bias="attn_q")


def _olmo2(said: Metadata) -> Values:
    return _rotating(said, "post_ffw_norm", plain=True, attention_bias="attn_output")


def _seed_oss(said: Metadata) -> Values:
    return _rotating(
        said,
        "post_attention_norm",
        attention_bias="attn_q",
        attention_out_bias="attn_output",
        mlp_bias="ffn_down",
    )


def _glm4(said: Metadata) -> Values:
    values = attentive(said, decoder(said))
    said.tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"], partial=True),
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


def _arcee(said: Metadata) -> Values:
    values = attentive(said, decoder(said))
    permuted(said)
    said.tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    return values | {
        "hidden_act": "relu2",
        "rope_parameters": stretched(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_output.bias"),
        "mlp_bias": said.has("blk.0.ffn_down.bias"),
    }


def _apertus(said: Metadata) -> Values:
    """The numbers of its activation, a few for each layer, are among the file's values."""
    head_dim = plain_heads(said)
    values = attentive(said, decoder(said))
    said.tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    del values["head_dim"]
    return values | {
        "constants": {
            f"model.layers.{layer}.mlp.act_fn.{name}": number
            for name in ("alpha_p", "alpha_n", "beta", "eps")
            for layer, number in enumerate(_xielu(said, name, values["num_hidden_layers"]))
        },
        "hidden_act": "xielu",
        "rope_parameters": stretched(said, head_dim),
        "attention_bias": said.has("blk.0.attn_q.bias"),
    }


def _xielu(said: Metadata, name: str, layers: int) -> list[float]:
    found = said.reals(f"xielu.{name}", layers, shared=True)
    if not all(map(math.isfinite, found)):
        raise said.bad(f"xielu.{name}", tuple(found), "numbers")
    return found


def _exaone(said: Metadata) -> Values:
    # The same as what is read, under the name that the model has for it
    said.any("attention.layer_norm_epsilon")
    return _rotating(said, plain=True, rope=stretched)


def _exaone4(said: Metadata) -> Values:
    """Without a window every layer rotates; with one, those that see all positions do not."""
    values = _rotating(said, "post_ffw_norm", rope=stretched)
    window = said.whole("attention.sliding_window", 0)
    types = alternating(said, values, 4) if window else ["full_attention"] * values["num_hidden_layers"]
    return values | {
        "sliding_window": window or None,
        "sliding_window_pattern": None,
        "layer_types": types,
    }


def _hunyuan(said: Metadata) -> Values:
    return _rotating(said, attention_bias="attn_q")


def _of_images(of_texts: Callable[[Metadata], Values]) -> Callable[[Metadata], Values]:
    """What a model of images and texts has for texts; what sees images is in another file."""

    def values(said: Metadata) -> Values:
        said.any("n_deepstack_layers")
        return of_texts(said)

    return values


def _qwen2(said: Metadata) -> Values:
    return _rotating(said, plain=True) | {"use_sliding_window": False}


def _qwen3(said: Metadata) -> Values:
    return _rotating(said, attention_bias="attn_output") | {"use_sliding_window": False}


def _phi3(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values = decoder(said) | rms(said)
    del values["head_dim"]
    hidden = values["hidden_size"]
    rows = values["num_attention_heads"] + 2 * values["num_key_value_heads"]
    said.tensor("blk.0.attn_qkv.weight", rows * head_dim, hidden)
    said.tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], hidden)
    window = said.whole("attention.sliding_window", 0)
    rope = rotary(said, head_dim, partial=True)
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
