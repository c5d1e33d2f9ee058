"""Architectures with experts, in every layer or in all but the first ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fusion.dag.ir.opset_experts import MAX_EXPERTS
from fusion.runtime.capture.gguf.decoders import (
    Architectures,
    Values,
    alternating_layers,
    check_permuted,
    decoder,
    default_head_dim,
    granite_multipliers,
    rotary,
    scaled_rotary,
    unfused_decoder,
)
from fusion.runtime.capture.gguf.metadata import Metadata

# How a router turns logits into weights; the last takes the softmax of the chosen ones only.
SOFTMAX, SIGMOID, SOFTMAX_CHOSEN = 1, 2, 3


def _mixture_decoder(
    metadata: Metadata,
    *,
    normalised: bool,
    width: int | None = None,
    norm: str = "ffn_norm",
    gating: int = SOFTMAX,
    default_heads: bool = False,
    rope: Callable[[Metadata, int], Values] = rotary,
) -> tuple[Values, int, int]:
    """A decoder with gated experts in every layer, checked against their tensors; the number of experts; and the width of each: `width` where
    the file does not have it. `norm`: as of `decoder`; `default_heads`: its configuration has no head size; else as of `experts_everywhere`."""
    if default_heads:
        default_head_dim(metadata)
    values = unfused_decoder(metadata, decoder(metadata, norm))
    count, expert_width = experts_everywhere(
        metadata, values, normalised=normalised, width=width, gating=gating
    )
    values |= {"hidden_act": "silu", "rope_parameters": rope(metadata, values["head_dim"])}
    if default_heads:
        del values["head_dim"]
    return values, count, expert_width


def experts_everywhere(
    metadata: Metadata, values: Values, *, normalised: bool, width: int | None = None, gating: int = SOFTMAX
) -> tuple[int, int]:
    """`experts` in every layer. `normalised`: whether this architecture divides the weights of the chosen experts by their sum
    (`norm_topk_prob`); `gating`: how a router turns logits into weights."""
    count_and_width = experts(metadata, values, width)
    metadata.require("expert_weights_norm", normalised)
    metadata.require("expert_weights_scale", 1.0, 0.0)  # none
    metadata.require("expert_gating_func", gating, 0)  # 0: that of the architecture
    return count_and_width


def experts(
    metadata: Metadata,
    values: Values,
    width: int | None = None,
    dense: int = 0,
    *,
    interval: int = 1,
    allow_groups: bool = False,
) -> tuple[int, int]:
    """The number of experts in a layer and the width of each, checked against their tensors; sets num_experts_per_tok in `values`. `dense`: first
    layers without experts; `interval`: every how many layers there are experts; `allow_groups`: whether the architecture may choose groups of
    experts first."""
    count, used = metadata.size("expert_count"), metadata.size("expert_used_count")
    if count > MAX_EXPERTS:
        raise metadata.error("expert_count", count, f"at most {MAX_EXPERTS}")
    if used > count:
        raise metadata.error("expert_used_count", used, f"at most {count}")
    expert_width = metadata.size(
        "expert_feed_forward_length", width or max(1, values.get("intermediate_size", 0) // used)
    )
    if width not in (None, expert_width):
        raise metadata.error("expert_feed_forward_length", expert_width, f"{width}")
    for layer in range(dense, values["num_hidden_layers"], interval):
        metadata.require_tensor(
            f"blk.{layer}.ffn_down_exps.weight", count, values["hidden_size"], expert_width
        )
    groups, chosen = (metadata.integer(f"expert_group_{key}", 0) or 1 for key in ("count", "used_count"))
    if not allow_groups and groups > 1:
        raise metadata.error("expert_group_count", groups, "0 or 1")
    if count % groups or (groups > 1 and count // groups < 2):
        raise metadata.error("expert_group_count", groups, f"a divisor of {count}")
    if chosen > groups or used > count // groups * chosen:
        raise metadata.error("expert_group_used_count", chosen, f"at most {groups}, with {used} experts")
    if allow_groups:
        values |= {"n_group": groups, "topk_group": chosen}
    values["num_experts_per_tok"] = used
    return count, expert_width


def _mixtral(metadata: Metadata) -> Values:
    check_permuted(metadata)
    values, count, _ = _mixture_decoder(
        metadata, normalised=True, width=metadata.size("feed_forward_length"), rope=scaled_rotary
    )
    return values | {"sliding_window": None, "num_local_experts": count}


def _olmoe(metadata: Metadata) -> Values:
    values, count, _ = _mixture_decoder(
        metadata, normalised=False, width=metadata.size("feed_forward_length"), default_heads=True
    )
    return values | {
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": count,
        "norm_topk_prob": False,
    }


def _qwen2_moe(metadata: Metadata) -> Values:
    values, count, width = _mixture_decoder(metadata, normalised=False, default_heads=True)
    shared = metadata.size("expert_shared_feed_forward_length", values["intermediate_size"])
    metadata.require_tensor("blk.0.ffn_up_shexp.weight", shared, values["hidden_size"])
    return values | {
        "qkv_bias": True,
        "use_sliding_window": False,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "num_experts": count,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_moe(metadata: Metadata) -> Values:
    values, count, width = _mixture_decoder(metadata, normalised=True)
    # Some configurations have this key of Qwen2's.
    metadata.require("expert_shared_feed_forward_length", 0)
    return values | {
        "attention_bias": metadata.has_tensor("blk.0.attn_output.bias"),
        "use_sliding_window": False,
        "moe_intermediate_size": width,
        "num_experts": count,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(metadata: Metadata) -> Values:
    values, count, width = _mixture_decoder(
        metadata, normalised=False, norm="post_attention_norm", gating=SOFTMAX_CHOSEN
    )
    rope = values["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as the models of this kind do
    return values | {
        "attention_bias": True,
        "intermediate_size": width,
        "num_local_experts": count,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": alternating_layers(metadata, values, 2),
    }


def routed_experts(metadata: Metadata, values: Values, *, allow_groups: bool = False) -> Values:
    """Routed experts with shared ones, in all layers but some at the beginning, as in models with sigmoid routers (GLM-4.5, DeepSeek-V3,
    dots.llm1)."""
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    dense, shared = metadata.integer("leading_dense_block_count", 0), metadata.integer("expert_shared_count")
    if dense > layers:
        raise metadata.error("leading_dense_block_count", dense, f"at most {layers}")
    count, width = experts(metadata, values, dense=dense, allow_groups=allow_groups)
    for layer in range(dense):
        metadata.require_tensor(f"blk.{layer}.ffn_gate.weight", values["intermediate_size"], hidden)
    if dense < layers:
        metadata.require_tensor(f"blk.{dense}.ffn_up_shexp.weight", shared * width, hidden)
    metadata.require("expert_shared_feed_forward_length", shared * width)
    return values | {
        "first_k_dense_replace": dense,
        "moe_intermediate_size": width,
        "n_routed_experts": count,
        "n_shared_experts": shared,
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.real("expert_weights_scale", 0.0) or 1.0,
    }


def _glm4_moe(metadata: Metadata) -> Values:
    values = routed_experts(
        metadata, unfused_decoder(metadata, decoder(metadata, "post_attention_norm", allow_nextn=True))
    )
    metadata.require("expert_gating_func", SIGMOID, 0)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, values["head_dim"], partial=True),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "n_group": 1,
        "topk_group": 1,
    }


def _granite_moe(metadata: Metadata) -> Values:
    check_permuted(metadata)
    values, count, _ = _mixture_decoder(
        metadata,
        normalised=True,
        width=metadata.size("feed_forward_length"),
        default_heads=True,
        rope=scaled_rotary,
    )
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        metadata.ignore(f"ssm.{key}")  # metadata of recurrent layers, of which it has none
    metadata.require("rope.scaling.finetuned", True)  # False: positions are not rotated at all
    shared = metadata.integer("expert_shared_feed_forward_length", 0)
    if shared:
        metadata.require_tensor("blk.0.ffn_gate_shexp.weight", shared, values["hidden_size"])
    return values | granite_multipliers(metadata, default_head_dim(metadata)) | {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "num_local_experts": count,
        **({"shared_intermediate_size": shared} if shared else {}),
    }  # fmt: skip


def _minimax_m2(metadata: Metadata) -> Values:
    rope = partial(rotary, partial=True)
    values, count, width = _mixture_decoder(metadata, normalised=True, gating=SIGMOID, rope=rope)
    return values | {"intermediate_size": width, "num_local_experts": count}


def _dots1(metadata: Metadata) -> Values:
    values = routed_experts(metadata, unfused_decoder(metadata, decoder(metadata)))
    metadata.require("expert_gating_func", SIGMOID)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, values["head_dim"]),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": None,
        "layer_types": ["full_attention"] * values["num_hidden_layers"],
    }


def _hunyuan_moe(metadata: Metadata) -> Values:
    width = metadata.size("feed_forward_length")
    values, count, _ = _mixture_decoder(metadata, normalised=True, width=width)
    metadata.require("expert_shared_feed_forward_length", width)
    metadata.require("expert_shared_count", 1)
    return values | {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "num_experts": count,
        "moe_topk": values.pop("num_experts_per_tok"),
    }


def _ernie4_5_moe(metadata: Metadata) -> Values:
    """Files give the width of its shared experts in another unit; in the model it is that of as many experts."""
    values = unfused_decoder(metadata, decoder(metadata))
    head_dim, hidden = values["head_dim"], values["hidden_size"]
    dense, shared = (
        metadata.integer("leading_dense_block_count", 0),
        metadata.integer("expert_shared_count", 0),
    )
    metadata.require("interleave_moe_layer_step", 1)
    metadata.require("expert_gating_func", SOFTMAX, 0)
    metadata.ignore("expert_shared_feed_forward_length")
    if not dense < values["num_hidden_layers"]:
        raise metadata.error("leading_dense_block_count", dense, f"at most {values['num_hidden_layers'] - 1}")
    count, width = experts(metadata, values, dense=dense)
    for layer in range(dense):
        metadata.require_tensor(f"blk.{layer}.ffn_gate.weight", values["intermediate_size"], hidden)
    if shared:
        metadata.require_tensor(f"blk.{dense}.ffn_up_shexp.weight", shared * width, hidden)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, head_dim),
        "use_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "moe_k": values.pop("num_experts_per_tok"),
        "moe_num_experts": count,
        "moe_num_shared_experts": shared,
        "moe_intermediate_size": width,
        "moe_layer_start_index": dense,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }


def _llama4(metadata: Metadata) -> Values:
    """The text part. Three layers of four attend to chunks; the fourth has no rotary embedding and scales queries up with their position. Files
    have none of that: llama.cpp assumes it (`src/models/llama4.cpp`), and also which models lack a norm, those with 128 experts."""
    values = unfused_decoder(metadata, decoder(metadata))
    interval, layers, dense = (
        metadata.size("interleave_moe_layer_step"),
        values["num_hidden_layers"],
        values["intermediate_size"],
    )
    if interval > layers:
        raise metadata.error("interleave_moe_layer_step", interval, f"at most {layers}")
    metadata.require("leading_dense_block_count", 0)
    metadata.require("expert_weights_scale", 1.0, 0.0)
    metadata.require("expert_gating_func", SIGMOID, 0)
    metadata.require("attention.sliding_window_pattern", 4)
    metadata.require("attention.sliding_window", 8192)
    count, width = experts(metadata, values, dense=interval - 1, interval=interval)
    if interval > 1:
        metadata.require_tensor("blk.0.ffn_gate.weight", dense, values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "rope_parameters": scaled_rotary(metadata, values["head_dim"]),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "intermediate_size": width,
        "intermediate_size_mlp": dense,
        "num_local_experts": count,
        "interleave_moe_layer_step": interval,
        "use_qk_norm": count != 128,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _qwen3_vl_moe(metadata: Metadata) -> Values:
    """The text part; the vision part is in another file."""
    metadata.ignore("n_deepstack_layers")
    return _qwen3_moe(metadata)


MIXTURES: Architectures = {
    "llama": ("mixtral", _mixtral),
    "llama4": ("llama4_text", _llama4),
    "qwen2moe": ("qwen2_moe", _qwen2_moe),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "qwen3vlmoe": ("qwen3_moe", _qwen3_vl_moe),
    "granitemoe": ("granitemoe", _granite_moe),
    "minimax-m2": ("minimax_m2", _minimax_m2),
    "dots1": ("dots1", _dots1),
    "hunyuan-moe": ("hunyuan_v1_moe", _hunyuan_moe),
    "ernie4_5-moe": ("ernie4_5_moe", _ernie4_5_moe),
    "olmoe": ("olmoe", _olmoe),
    "gpt-oss": ("gpt_oss", _gpt_oss),
    "glm4moe": ("glm4_moe", _glm4_moe),
}
