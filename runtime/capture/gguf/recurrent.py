"""Architectures with layers that keep a state of fixed size in place of keys and values: Mamba and hybrids of it (llama.cpp's
`conversion/mamba.py`, `granite.py`, `falcon_h1.py`), gated delta networks (`qwen.py`) and short convolutions (`lfm2.py`)."""

from __future__ import annotations

from typing import NamedTuple

from fusion.runtime.capture.gguf.decoders import (
    Architectures,
    Values,
    check_queries_and_keys,
    decoder,
    default_head_dim,
    granite_multipliers,
    rms_norm,
    rotary,
    sizes,
    unfused_decoder,
)
from fusion.runtime.capture.gguf.metadata import Metadata
from fusion.runtime.capture.gguf.mixtures import SIGMOID, experts, experts_everywhere

_TYPES = ("linear_attention", "full_attention")


class _State(NamedTuple):
    """The sizes of a recurrent layer."""

    kernel: int  # of its convolution
    inner: int
    size: int  # of the state of each inner channel
    heads: int
    groups: int


def _state(metadata: Metadata, groups: int | None = None) -> _State:
    state = _State(
        kernel=metadata.size("ssm.conv_kernel"),
        inner=metadata.size("ssm.inner_size"),
        size=metadata.size("ssm.state_size"),
        heads=metadata.size("ssm.time_step_rank"),
        groups=groups or metadata.size("ssm.group_count"),
    )
    if state.inner % state.heads or state.heads % state.groups:
        raise metadata.error(
            "ssm.time_step_rank", state.heads, f"a divisor of {state.inner}, by {state.groups} groups"
        )
    return state


def _mamba2_layer(metadata: Metadata, hidden: int, layer: int) -> _State:
    """The sizes of a Mamba-2 layer, checked against its tensors."""
    state = _state(metadata)
    channels = state.inner + 2 * state.groups * state.size
    metadata.require_tensor(f"blk.{layer}.ssm_in.weight", state.inner + channels + state.heads, hidden)
    metadata.require_tensor(f"blk.{layer}.ssm_conv1d.weight", channels, state.kernel)
    metadata.require_tensor(f"blk.{layer}.ssm_out.weight", hidden, state.inner)
    return state


def _mamba(metadata: Metadata) -> Values:
    values = _no_attention(metadata)
    state = _state(metadata, groups=1)
    hidden = values["hidden_size"]
    metadata.require_tensor("blk.0.ssm_a", state.inner, state.size)
    metadata.require_tensor("blk.0.ssm_conv1d.weight", state.inner, state.kernel)
    metadata.require_tensor("blk.0.ssm_dt.weight", state.inner, state.heads)
    metadata.require("ssm.inner_size", 2 * hidden)
    metadata.require("ssm.dt_b_c_rms", False)
    return values | {
        "state_size": state.size,
        "expand": 2,
        "conv_kernel": state.kernel,
        "time_step_rank": state.heads,
        "use_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
    }


def _mamba2(metadata: Metadata) -> Values:
    values = _no_attention(metadata)
    hidden = values["hidden_size"]
    state = _mamba2_layer(metadata, hidden, 0)
    metadata.require("ssm.inner_size", 2 * hidden)
    return values | {
        "state_size": state.size,
        "expand": 2,
        "conv_kernel": state.kernel,
        "num_heads": state.heads,
        "head_dim": state.inner // state.heads,
        "n_groups": state.groups,
        "use_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
    }


def _no_attention(metadata: Metadata) -> Values:
    metadata.require("attention.head_count", 0)
    metadata.require("feed_forward_length", 0)
    eps = metadata.real("attention.layer_norm_rms_epsilon")
    return sizes(metadata, "attn_norm") | {"hidden_act": "silu", "layer_norm_epsilon": eps}


def _attention_layers(metadata: Metadata) -> tuple[list[bool], int]:
    """Whether each layer attends, and the number of key-value heads of those that do: in files, the others have 0."""
    counts = (
        metadata.per_layer("attention.head_count_kv", metadata.size("block_count"))
        if metadata.has_tensor("blk.0.attn_norm.weight")
        else []
    )
    distinct = {count for count in counts if count}
    if len(distinct) != 1:
        raise metadata.error(
            "attention.head_count_kv",
            tuple(counts)[:8],
            "one number for all layers that attend, 0 for the others",
        )
    return [count > 0 for count in counts], distinct.pop()


def _mamba_values(metadata: Metadata, state: _State, layer: int) -> Values:
    return {
        "mamba_n_heads": state.heads,
        "mamba_n_groups": state.groups,
        "mamba_d_state": state.size,
        "mamba_d_head": state.inner // state.heads,
        "mamba_d_conv": state.kernel,
        "mamba_conv_bias": metadata.has_tensor(f"blk.{layer}.ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has_tensor(f"blk.{layer}.ssm_in.bias"),
    }


def _granite_hybrid(metadata: Metadata) -> Values:
    attends, kv_heads = _attention_layers(metadata)
    if all(attends):
        raise metadata.error("attention.head_count_kv", kv_heads, "0 for layers that do not attend")
    head_dim = default_head_dim(metadata)
    values = decoder(metadata, kv_heads=kv_heads) | rms_norm(metadata)
    hidden, first = values["hidden_size"], attends.index(False)
    del values["head_dim"]
    check_queries_and_keys(metadata, values | {"head_dim": head_dim}, attends.index(True))
    state = _mamba2_layer(metadata, hidden, first)
    if state.inner % hidden:
        raise metadata.error("ssm.inner_size", state.inner, f"a multiple of {hidden}")
    width, count = values["intermediate_size"], metadata.integer("expert_count", 0)
    shared = metadata.integer("expert_shared_feed_forward_length", 0)
    if count:
        experts(metadata, values, width)
    metadata.require_tensor(
        f"blk.{first}.ffn_{'gate_shexp' if count else 'gate'}.weight", shared or width, hidden
    )
    rotated = metadata.flag("rope.scaling.finetuned", True)
    return values | _mamba_values(metadata, state, first) | granite_multipliers(metadata, head_dim) | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, head_dim, finetuned=(rotated,)),
        "position_embedding_type": "rope" if rotated else None,
        "layer_types": [_TYPES[each] for each in attends],
        "num_local_experts": count,
        "num_experts_per_tok": values.get("num_experts_per_tok", 0),
        "shared_intermediate_size": shared or width,
        "mamba_expand": state.inner // hidden,
    }  # fmt: skip


def _falcon_h1(metadata: Metadata) -> Values:
    """Conversions multiply its multipliers into the matrices."""
    values = unfused_decoder(metadata, decoder(metadata, "attn_norm"))
    hidden = values["hidden_size"]
    metadata.require_tensor("blk.0.ffn_gate.weight", values["intermediate_size"], hidden)
    state = _mamba2_layer(metadata, hidden, 0)
    return values | _mamba_values(metadata, state, 0) | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, values["head_dim"]),
        "tie_word_embeddings": False,  # embedding and head have different multipliers
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
        "projectors_bias": metadata.has_tensor("blk.0.ssm_out.bias"),
        "mamba_d_ssm": state.inner,
        "mamba_rms_norm": metadata.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }  # fmt: skip


def _short_convolution(metadata: Metadata) -> Values:
    """Attention in some layers, a short convolution in the others."""
    attends, kv_heads = _attention_layers(metadata)
    head_dim = default_head_dim(metadata)
    values = decoder(metadata, kv_heads=kv_heads)
    hidden, kernel = values["hidden_size"], metadata.size("shortconv.l_cache")
    check_queries_and_keys(metadata, values, attends.index(True))
    if False in attends:
        metadata.require_tensor(f"blk.{attends.index(False)}.shortconv.conv.weight", hidden, kernel)
    del values["head_dim"]
    return values | {
        "norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rotary(metadata, head_dim),
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in metadata.header.tensors),
        "conv_L_cache": kernel,
    }


def _lfm2(metadata: Metadata) -> Values:
    values = _short_convolution(metadata)
    metadata.require_tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return values | {"block_auto_adjust_ff_dim": False}


def _lfm2_moe(metadata: Metadata) -> Values:
    values = _short_convolution(metadata)
    dense = metadata.integer("leading_dense_block_count", 0)
    count, width = experts(metadata, values, dense=dense)
    for layer in range(min(dense, values["num_hidden_layers"])):
        metadata.require_tensor(
            f"blk.{layer}.ffn_gate.weight", values["intermediate_size"], values["hidden_size"]
        )
    metadata.require("expert_gating_func", SIGMOID)
    return values | {
        "num_dense_layers": dense,
        "moe_intermediate_size": width,
        "num_experts": count,
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in metadata.header.tensors),
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    }


def _delta_network(metadata: Metadata, values: Values) -> Values:
    """Gated delta networks in all layers but every `full_attention_interval`-th, which has gated attention."""
    hidden, heads, head_dim = values["hidden_size"], values["num_attention_heads"], values["head_dim"]
    layers, period = values["num_hidden_layers"], metadata.size("full_attention_interval", 4)
    state = _state(metadata)
    key_width = state.groups * state.size
    if period > layers:
        raise metadata.error("full_attention_interval", period, f"at most {layers}")
    metadata.require_tensor(f"blk.{period - 1}.attn_q.weight", 2 * heads * head_dim, hidden)
    metadata.require_tensor(
        f"blk.{period - 1}.attn_k.weight", values["num_key_value_heads"] * head_dim, hidden
    )
    if period > 1:
        metadata.require_tensor("blk.0.ssm_conv1d.weight", 2 * key_width + state.inner, state.kernel)
        metadata.require_tensor("blk.0.ssm_out.weight", hidden, state.inner)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, head_dim, partial=True),
        "attention_bias": False,
        "layer_types": [_TYPES[(layer + 1) % period == 0] for layer in range(layers)],
        "linear_conv_kernel_dim": state.kernel,
        "linear_key_head_dim": state.size,
        "linear_value_head_dim": state.inner // state.heads,
        "linear_num_key_heads": state.groups,
        "linear_num_value_heads": state.heads,
    }


_POST_NORM = "post_attention_norm"


def _delta_mixture(metadata: Metadata) -> Values:
    values = decoder(
        metadata, _POST_NORM, allow_nextn=metadata.architecture != "qwen3next", feed_forward=False
    ) | rms_norm(metadata)
    count, width = experts_everywhere(metadata, values, normalised=True)
    shared = metadata.size("expert_shared_feed_forward_length")
    metadata.ignore("feed_forward_length")  # of layers without experts, of which there are none
    metadata.require_tensor("blk.0.ffn_up_shexp.weight", shared, values["hidden_size"])
    return _delta_network(metadata, values) | {
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "num_experts": count,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_5(metadata: Metadata) -> Values:
    """The sections of the rotary embedding all have the same positions in a text."""
    values = decoder(metadata, _POST_NORM, allow_nextn=True) | rms_norm(metadata)
    metadata.require_tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return _delta_network(metadata, values)


RECURRENT: Architectures = {
    "qwen35": ("qwen3_5_text", _qwen3_5),
    "lfm2": ("lfm2", _lfm2),
    "granitehybrid": ("granitemoehybrid", _granite_hybrid),
    "falcon-h1": ("falcon_h1", _falcon_h1),
    "mamba": ("mamba", _mamba),
    "mamba2": ("mamba2", _mamba2),
}
RECURRENT_MIXTURES: Architectures = {
    "qwen3next": ("qwen3_next", _delta_mixture),
    "qwen35moe": ("qwen3_5_moe_text", _delta_mixture),
    "lfm2moe": ("lfm2_moe", _lfm2_moe),
    "granitehybrid": ("granitemoehybrid", _granite_hybrid),
}
