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
    said: Metadata,
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
        plain_heads(said)
    values = attentive(said, decoder(said, norm))
    count, found = mixed(said, values, normed=normed, wide=wide, gating=gating)
    values |= {"hidden_act": "silu", "rope_parameters": rope(said, values["head_dim"])}
    if plain:
        del values["head_dim"]
    return values, count, found


def mixed(
    said: Metadata, values: Values, *, normed: bool, wide: int | None = None, gating: int = SOFTMAX
) -> tuple[int, int]:
    """As `experts`, in every layer. `normed`: whether this architecture divides the weights of those that are chosen by their sum
    (`norm_topk_prob`); `gating`: how weights are made of a router's logits."""
    found = experts(said, values, wide)
    said.must_be("expert_weights_norm", normed)
    said.must_be("expert_weights_scale", 1.0, 0.0)  # none
    said.must_be("expert_gating_func", gating, 0)  # 0: that of the architecture
    return found


def experts(
    said: Metadata,
    values: Values,
    wide: int | None = None,
    dense: int = 0,
    *,
    every: int = 1,
    in_groups: bool = False,
) -> tuple[int, int]:
    """How many experts a layer has, and how wide each is, checked against their tensors; how many of them a position goes to is put into
    `values`. `dense`: layers at the beginning that have none; `every`: as many layers lie from one with experts to the next. `in_groups`: whether the architecture may choose groups of them first."""
    count, used = said.size("expert_count"), said.size("expert_used_count")
    if count > MAX_EXPERTS:
        raise said.bad("expert_count", count, f"at most {MAX_EXPERTS}")
    if used > count:
        raise said.bad("expert_used_count", used, f"at most {count}")
    found = said.size(
        "expert_feed_forward_length", wide or max(1, values.get("intermediate_size", 0) // used)
    )
    if wide not in (None, found):
        raise said.bad("expert_feed_forward_length", found, f"{wide}")
    for layer in range(dense, values["num_hidden_layers"], every):
        said.tensor(f"blk.{layer}.ffn_down_exps.weight", count, values["hidden_size"], found)
    groups, chosen = (said.whole(f"expert_group_{key}", 0) or 1 for key in ("count", "used_count"))
    if not in_groups and groups > 1:
        raise said.bad("expert_group_count", groups, "0 or 1")
    if count % groups or (groups > 1 and count // groups < 2):
        raise said.bad("expert_group_count", groups, f"a divisor of {count}")
    if chosen > groups or used > count // groups * chosen:
        raise said.bad("expert_group_used_count", chosen, f"at most {groups}, with {used} experts")
    if in_groups:
        values |= {"n_group": groups, "topk_group": chosen}
    values["num_experts_per_tok"] = used
    return count, found


def _mixtral(said: Metadata) -> Values:
    permuted(said)
    values, count, _ = _mixed(said, normed=True, wide=said.size("feed_forward_length"), rope=stretched)
    return values | {"sliding_window": None, "num_local_experts": count}


def _olmoe(said: Metadata) -> Values:
    values, count, _ = _mixed(said, normed=False, wide=said.size("feed_forward_length"), plain=True)
    return values | {
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": count,
        "norm_topk_prob": False,
    }


def _qwen2_moe(said: Metadata) -> Values:
    values, count, wide = _mixed(said, normed=False, plain=True)
    shared = said.size("expert_shared_feed_forward_length", values["intermediate_size"])
    said.tensor("blk.0.ffn_up_shexp.weight", shared, values["hidden_size"])
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


def _qwen3_moe(said: Metadata) -> Values:
    values, count, wide = _mixed(said, normed=True)
    said.must_be("expert_shared_feed_forward_length", 0)  # of a configuration that says it as older ones do
    return values | {
        "attention_bias": said.has("blk.0.attn_output.bias"),
        "use_sliding_window": False,
        "moe_intermediate_size": wide,
        "num_experts": count,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(said: Metadata) -> Values:
    values, count, wide = _mixed(said, normed=False, norm="post_attention_norm", gating=SOFTMAX_CHOSEN)
    rope = values["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as the models of this kind do
    return values | {
        "attention_bias": True,
        "intermediate_size": wide,
        "num_local_experts": count,
        "sliding_window": said.size("attention.sliding_window"),
        "layer_types": alternating(said, values, 2),
    }


def routed(said: Metadata, values: Values, *, in_groups: bool = False) -> Values:
    """Experts beside one that every position goes to, in all layers but some at the beginning, as those have them whose routers give
    each a number of its own (GLM-4.5, DeepSeek-V3, dots.llm1)."""
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    dense, shared = said.whole("leading_dense_block_count", 0), said.whole("expert_shared_count")
    if dense > layers:
        raise said.bad("leading_dense_block_count", dense, f"at most {layers}")
    count, wide = experts(said, values, dense=dense, in_groups=in_groups)
    for layer in range(dense):
        said.tensor(f"blk.{layer}.ffn_gate.weight", values["intermediate_size"], hidden)
    if dense < layers:
        said.tensor(f"blk.{dense}.ffn_up_shexp.weight", shared * wide, hidden)
    said.must_be("expert_shared_feed_forward_length", shared * wide)
    return values | {
        "first_k_dense_replace": dense,
        "moe_intermediate_size": wide,
        "n_routed_experts": count,
        "n_shared_experts": shared,
        "norm_topk_prob": said.flag("expert_weights_norm", False),
        "routed_scaling_factor": said.real("expert_weights_scale", 0.0) or 1.0,
    }


def _glm4_moe(said: Metadata) -> Values:
    values = routed(said, attentive(said, decoder(said, "post_attention_norm", ahead=True)))
    said.must_be("expert_gating_func", SIGMOID, 0)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"], partial=True),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "use_qk_norm": said.has("blk.0.attn_q_norm.weight"),
        "n_group": 1,
        "topk_group": 1,
    }


def _granite_moe(said: Metadata) -> Values:
    permuted(said)
    values, count, _ = _mixed(
        said, normed=True, wide=said.size("feed_forward_length"), plain=True, rope=stretched
    )
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        said.any(f"ssm.{key}")  # of layers that do not attend, where all do
    said.must_be("rope.scaling.finetuned", True)  # False: positions are not rotated at all
    shared = said.whole("expert_shared_feed_forward_length", 0)
    if shared:
        said.tensor("blk.0.ffn_gate_shexp.weight", shared, values["hidden_size"])
    return values | granite_scales(said, plain_heads(said)) | {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "num_local_experts": count,
        **({"shared_intermediate_size": shared} if shared else {}),
    }  # fmt: skip


def _minimax_m2(said: Metadata) -> Values:
    rope = partial(rotary, partial=True)
    values, count, wide = _mixed(said, normed=True, gating=SIGMOID, rope=rope)
    return values | {"intermediate_size": wide, "num_local_experts": count}


def _dots1(said: Metadata) -> Values:
    values = routed(said, attentive(said, decoder(said)))
    said.must_be("expert_gating_func", SIGMOID)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": None,
        "layer_types": ["full_attention"] * values["num_hidden_layers"],
    }


def _hunyuan_moe(said: Metadata) -> Values:
    wide = said.size("feed_forward_length")
    values, count, _ = _mixed(said, normed=True, wide=wide)
    said.must_be("expert_shared_feed_forward_length", wide)
    said.must_be("expert_shared_count", 1)
    return values | {
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "num_experts": count,
        "moe_topk": values.pop("num_experts_per_tok"),
    }


def _ernie4_5_moe(said: Metadata) -> Values:
    """Its shared experts are as wide as one for each head of keys, by what conversions write, and in the model as many experts."""
    values = attentive(said, decoder(said))
    head_dim, hidden = values["head_dim"], values["hidden_size"]
    dense, shared = said.whole("leading_dense_block_count", 0), said.whole("expert_shared_count", 0)
    said.must_be("interleave_moe_layer_step", 1)
    said.must_be("expert_gating_func", SOFTMAX, 0)
    said.any("expert_shared_feed_forward_length")
    if not dense < values["num_hidden_layers"]:
        raise said.bad("leading_dense_block_count", dense, f"at most {values['num_hidden_layers'] - 1}")
    count, wide = experts(said, values, dense=dense)
    for layer in range(dense):
        said.tensor(f"blk.{layer}.ffn_gate.weight", values["intermediate_size"], hidden)
    if shared:
        said.tensor(f"blk.{dense}.ffn_up_shexp.weight", shared * wide, hidden)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, head_dim),
        "use_bias": said.has("blk.0.attn_q.bias"),
        "moe_k": values.pop("num_experts_per_tok"),
        "moe_num_experts": count,
        "moe_num_shared_experts": shared,
        "moe_intermediate_size": wide,
        "moe_layer_start_index": dense,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }


def _llama4(said: Metadata) -> Values:
    """As it reads texts. Three layers of four see chunks of positions; the fourth rotates nothing, and its queries grow with their
    position. Files do not say any of that: llama.cpp takes it to be so (`src/models/llama4.cpp`), also which norm those with 128 experts
    do without."""
    values = attentive(said, decoder(said))
    every, layers, dense = (
        said.size("interleave_moe_layer_step"),
        values["num_hidden_layers"],
        values["intermediate_size"],
    )
    if every > layers:
        raise said.bad("interleave_moe_layer_step", every, f"at most {layers}")
    said.must_be("leading_dense_block_count", 0)
    said.must_be("expert_weights_scale", 1.0, 0.0)
    said.must_be("expert_gating_func", SIGMOID, 0)
    said.must_be("attention.sliding_window_pattern", 4)
    said.must_be("attention.sliding_window", 8192)
    count, wide = experts(said, values, dense=every - 1, every=every)
    if every > 1:
        said.tensor("blk.0.ffn_gate.weight", dense, values["hidden_size"])
    return values | {
        "hidden_act": "silu",
        "rope_parameters": stretched(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_q.bias"),
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


def _qwen3_vl_moe(said: Metadata) -> Values:
    """As it reads texts; what sees images is in another file."""
    said.any("n_deepstack_layers")
    return _qwen3_moe(said)


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
