"""The architectures with experts, in every layer or in all but the first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fusion.dag.ir.opset_experts import MAX_EXPERTS
from fusion.runtime.capture.gguf.decoders import (
    Architectures,
    Values,
    alternating,
    attentive,
    decoder,
    granite_scales,
    permuted,
    plain_heads,
    rotary,
    stretched,
)
from fusion.runtime.capture.gguf.metadata import Metadata

# What makes weights of all of a router's numbers, or of the largest of them.
SOFTMAX, SIGMOID, SOFTMAX_CHOSEN = 1, 2, 3


def _mixed(
    metadata: Metadata,
    *,
    normed: bool,
    wide: int | None = None,
    norm: str = "ffn_norm",
    gating: int = SOFTMAX,
    plain: bool = False,
    rope: Callable[[Metadata, int], Values] = rotary,
) -> tuple[Values, int, int]:
    """A decoder whose every layer has gated experts, checked against their tensors; how many experts, and how wide each is: `wide`
    where the file does not say it. `norm`: as of `decoder`; `plain`: its configuration does not say how long a head is; else as of
    `mixed`."""
    if plain:
        plain_heads(metadata)
    values = attentive(metadata, decoder(metadata, norm))
    count, found = mixed(metadata, values, normed=normed, wide=wide, gating=gating)
    values |= {"hidden_act": "silu", "rope_parameters": rope(metadata, values["head_dim"])}
    if plain:
        del values["head_dim"]
    return values, count, found


def mixed(
    metadata: Metadata, values: Values, *, normed: bool, wide: int | None = None, gating: int = SOFTMAX
) -> tuple[int, int]:
    """As `experts`, in every layer. `normed`: whether this architecture divides the weights of those that are chosen by their sum
    (`norm_topk_prob`); `gating`: how weights are made of a router's logits."""
    found = experts(metadata, values, wide)
    metadata.must_be("expert_weights_norm", normed)
    metadata.must_be("expert_weights_scale", 1.0, 0.0)  # none
    metadata.must_be("expert_gating_func", gating, 0)  # 0: that of the architecture
    return found


def experts(
    metadata: Metadata,
    values: Values,
    wide: int | None = None,
    dense: int = 0,
    *,
    every: int = 1,
    in_groups: bool = False,
) -> tuple[int, int]:
    """How many experts a layer has, and how wide each is, checked against their tensors; how many of them a position goes to is put into
    `values`. `dense`: layers at the beginning that have none; `every`: as many layers lie from one with experts to the next. `in_groups`: whether the architecture may choose groups of them first."""
    count, used = metadata.size("expert_count"), metadata.size("expert_used_count")
    if count > MAX_EXPERTS:
        raise metadata.bad("expert_count", count, f"at most {MAX_EXPERTS}")
    if used > count:
        raise metadata.bad("expert_used_count", used, f"at most {count}")
    found = metadata.size(
        "expert_feed_forward_length", wide or max(1, values.get("intermediate_size", 0) // used)
    )
    if wide not in (None, found):
        raise metadata.bad("expert_feed_forward_length", found, f"{wide}")
    for layer in range(dense, values["num_hidden_layers"], every):
        metadata.tensor(f"blk.{layer}.ffn_down_exps.weight", count, values["hidden_size"], found)
    groups, chosen = (metadata.whole(f"expert_group_{key}", 0) or 1 for key in ("count", "used_count"))
    if not in_groups and groups > 1:
        raise metadata.bad("expert_group_count", groups, "0 or 1")
    if count % groups or (groups > 1 and count // groups < 2):
        raise metadata.bad("expert_group_count", groups, f"a divisor of {count}")
    if chosen > groups or used > count // groups * chosen:
        raise metadata.bad("expert_group_used_count", chosen, f"at most {groups}, with {used} experts")
    if in_groups:
        values |= {"n_group": groups, "topk_group": chosen}
    values["num_experts_per_tok"] = used
    return count, found


def _mixtral(metadata: Metadata) -> Values:
    permuted(metadata)
    values, count, _ = _mixed(
        metadata, normed=True, wide=metadata.size("feed_forward_length"), rope=stretched
    )
    return values | {"sliding_window": None, "num_local_experts": count}


def _olmoe(metadata: Metadata) -> Values:
    values, count, _ = _mixed(metadata, normed=False, wide=metadata.size("feed_forward_length"), plain=True)
    return values | {
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": count,
        "norm_topk_prob": False,
    }


def _qwen2_moe(metadata: Metadata) -> Values:
    values, count, wide = _mixed(metadata, normed=False, plain=True)
    shared = metadata.size("expert_shared_feed_forward_length", values["intermediate_size"])
    metadata.tensor("blk.0.ffn_up_shexp.weight", shared, values["hidden_size"])
    return values | {
        "qkv_bias": True,
        "use_sliding_window": False,
        "moe_intermediate_size": wide,
        "shared_expert_intermediate_size": shared,
        "num_experts": count,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_moe(metadata: Metadata) -> Values:
    values, count, wide = _mixed(metadata, normed=True)
    metadata.must_be(
        "expert_shared_feed_forward_length", 0
    )  # of a configuration that says it as older ones do
    return values | {
        "attention_bias": metadata.has("blk.0.attn_output.bias"),
        "use_sliding_window": False,
        "moe_intermediate_size": wide,
        "num_experts": count,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(metadata: Metadata) -> Values:
    values, count, wide = _mixed(metadata, normed=False, norm="post_attention_norm", gating=SOFTMAX_CHOSEN)
    rope = values["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as the models of this kind do
    return values | {
        "attention_bias": True,
        "intermediate_size": wide,
        "num_local_experts": count,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": alternating(metadata, values, 2),
    }


def routed(metadata: Metadata, values: Values, *, in_groups: bool = False) -> Values:
    """Experts beside one that every position goes to, in all layers but some at the beginning, as those have them whose routers give
    each a number of its own (GLM-4.5, DeepSeek-V3, dots.llm1)."""
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    dense, shared = metadata.whole("leading_dense_block_count", 0), metadata.whole("expert_shared_count")
    if dense > layers:
        raise metadata.bad("leading_dense_block_count", dense, f"at most {layers}")
    count, wide = experts(metadata, values, dense=dense, in_groups=in_groups)
    for layer in range(dense):
        metadata.tensor(f"blk.{layer}.ffn_gate.weight", values["intermediate_size"], hidden)
    if dense < layers:
        metadata.tensor(f"blk.{dense}.ffn_up_shexp.weight", shared * wide, hidden)
    metadata.must_be("expert_shared_feed_forward_length", shared * wide)
    return values | {
        "first_k_dense_replace": dense,
        "moe_intermediate_size": wide,
        "n_routed_experts": count,
        "n_shared_experts": shared,
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.real("expert_weights_scale", 0.0) or 1.0,
    }


def _glm4_moe(metadata: Metadata) -> Values:
    values = routed(metadata, attentive(metadata, decoder(metadata, "post_attention_norm", ahead=True)))
    metadata.must_be("expert_gating_func", SIGMOID, 0)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, values["head_dim"], partial=True),
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
        "n_group": 1,
        "topk_group": 1,
    }


def _granite_moe(metadata: Metadata) -> Values:
    permuted(metadata)
    values, count, _ = _mixed(
        metadata, normed=True, wide=metadata.size("feed_forward_length"), plain=True, rope=stretched
    )
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        metadata.any(f"ssm.{key}")  # of layers that do not attend, where all do
    metadata.must_be("rope.scaling.finetuned", True)  # False: positions are not rotated at all
    shared = metadata.whole("expert_shared_feed_forward_length", 0)
    if shared:
        metadata.tensor("blk.0.ffn_gate_shexp.weight", shared, values["hidden_size"])
    return values | granite_scales(metadata, plain_heads(metadata)) | {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "num_local_experts": count,
        **({"shared_intermediate_size": shared} if shared else {}),
    }  # fmt: skip


def _minimax_m2(metadata: Metadata) -> Values:
    rope = partial(rotary, partial=True)
    values, count, wide = _mixed(metadata, normed=True, gating=SIGMOID, rope=rope)
    return values | {"intermediate_size": wide, "num_local_experts": count}


def _dots1(metadata: Metadata) -> Values:
    values = routed(metadata, attentive(metadata, decoder(metadata)))
    metadata.must_be("expert_gating_func", SIGMOID)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, values["head_dim"]),
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": None,
        "layer_types": ["full_attention"] * values["num_hidden_layers"],
    }


def _hunyuan_moe(metadata: Metadata) -> Values:
    wide = metadata.size("feed_forward_length")
    values, count, _ = _mixed(metadata, normed=True, wide=wide)
    metadata.must_be("expert_shared_feed_forward_length", wide)
    metadata.must_be("expert_shared_count", 1)
    return values | {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "num_experts": count,
        "moe_topk": values.pop("num_experts_per_tok"),
    }


def _ernie4_5_moe(metadata: Metadata) -> Values:
    """Its shared experts are as wide as one for each head of keys, by what conversions write, and in the model as many experts."""
    values = attentive(metadata, decoder(metadata))
    head_dim, hidden = values["head_dim"], values["hidden_size"]
    dense, shared = metadata.whole("leading_dense_block_count", 0), metadata.whole("expert_shared_count", 0)
    metadata.must_be("interleave_moe_layer_step", 1)
    metadata.must_be("expert_gating_func", SOFTMAX, 0)
    metadata.any("expert_shared_feed_forward_length")
    if not dense < values["num_hidden_layers"]:
        raise metadata.bad("leading_dense_block_count", dense, f"at most {values['num_hidden_layers'] - 1}")
    count, wide = experts(metadata, values, dense=dense)
    for layer in range(dense):
        metadata.tensor(f"blk.{layer}.ffn_gate.weight", values["intermediate_size"], hidden)
    if shared:
        metadata.tensor(f"blk.{dense}.ffn_up_shexp.weight", shared * wide, hidden)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(metadata, head_dim),
        "use_bias": metadata.has("blk.0.attn_q.bias"),
        "moe_k": values.pop("num_experts_per_tok"),
        "moe_num_experts": count,
        "moe_num_shared_experts": shared,
        "moe_intermediate_size": wide,
        "moe_layer_start_index": dense,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }


def _llama4(metadata: Metadata) -> Values:
    """As it reads texts. Three layers of four see chunks of positions; the fourth rotates nothing, and its queries grow with their
    position. Files do not say any of that: llama.cpp takes it to be so (`src/models/llama4.cpp`), also which norm those with 128 experts
    do without."""
    values = attentive(metadata, decoder(metadata))
    every, layers, dense = (
        metadata.size("interleave_moe_layer_step"),
        values["num_hidden_layers"],
        values["intermediate_size"],
    )
    if every > layers:
        raise metadata.bad("interleave_moe_layer_step", every, f"at most {layers}")
    metadata.must_be("leading_dense_block_count", 0)
    metadata.must_be("expert_weights_scale", 1.0, 0.0)
    metadata.must_be("expert_gating_func", SIGMOID, 0)
    metadata.must_be("attention.sliding_window_pattern", 4)
    metadata.must_be("attention.sliding_window", 8192)
    count, wide = experts(metadata, values, dense=every - 1, every=every)
    if every > 1:
        metadata.tensor("blk.0.ffn_gate.weight", dense, values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "rope_parameters": stretched(metadata, values["head_dim"]),
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "intermediate_size": wide,
        "intermediate_size_mlp": dense,
        "num_local_experts": count,
        "interleave_moe_layer_step": every,
        "use_qk_norm": count != 128,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _qwen3_vl_moe(metadata: Metadata) -> Values:
    """As it reads texts; what sees images is in another file."""
    metadata.any("n_deepstack_layers")
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
