"""The architectures with experts, in every layer or in all but the first."""

from __future__ import annotations

from fusion.dag.ir.opset_experts import MAX_EXPERTS
from fusion.runtime.capture.gguf.decoders import (
    Architectures,
    Values,
    alternating,
    attentive,
    decoder,
    permuted,
    plain_heads,
    rotary,
)
from fusion.runtime.capture.gguf.metadata import Metadata

# What makes weights of all of a router's numbers, or of the largest of them.
SOFTMAX, SIGMOID, SOFTMAX_CHOSEN = 1, 2, 3


def _mixed(
    said: Metadata, *, normed: bool, wide: int | None = None, norm: str = "ffn_norm", gating: int = SOFTMAX
) -> tuple[Values, int, int]:
    """A decoder whose every layer has gated experts, checked against their tensors; how many experts, and how wide each is: `wide`
    where the file does not say it. `normed`: whether this architecture divides the weights of those that are chosen by their sum
    (`norm_topk_prob`); `norm`: as of `decoder`; `gating`: how weights are made of a router's logits."""
    values = attentive(said, decoder(said, norm))
    count, found = _experts(said, values, wide)
    said.must_be("expert_weights_norm", normed)
    said.must_be("expert_weights_scale", 1.0, 0.0)  # none
    said.must_be("expert_gating_func", gating, 0)  # 0: that of the architecture
    return values, count, found


def _experts(said: Metadata, values: Values, wide: int | None = None, dense: int = 0) -> tuple[int, int]:
    """How many experts a layer has, and how wide each is, checked against their tensors; how many of them a position goes to is put into
    `values`. `dense`: layers at the beginning that have none."""
    count, used = said.size("expert_count"), said.size("expert_used_count")
    if count > MAX_EXPERTS:
        raise said.bad("expert_count", count, f"at most {MAX_EXPERTS}")
    if used > count:
        raise said.bad("expert_used_count", used, f"at most {count}")
    found = said.size("expert_feed_forward_length", wide or max(1, values["intermediate_size"] // used))
    if wide not in (None, found):
        raise said.bad("expert_feed_forward_length", found, f"{wide}")
    for layer in range(dense, values["num_hidden_layers"]):
        said.tensor(f"blk.{layer}.ffn_down_exps.weight", count, values["hidden_size"], found)
    said.must_be("expert_group_count", 0, 1)
    said.must_be("expert_group_used_count", 0, 1)
    values["num_experts_per_tok"] = used
    return count, found


def _mixtral(said: Metadata) -> Values:
    values, count, _ = _mixed(said, normed=True, wide=said.size("feed_forward_length"))
    permuted(said, values)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"]),
        "sliding_window": None,
        "num_local_experts": count,
    }


def _olmoe(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values, count, _ = _mixed(said, normed=False, wide=said.size("feed_forward_length"))
    del values["head_dim"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, head_dim),
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": count,
        "norm_topk_prob": False,
    }


def _qwen2_moe(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values, count, wide = _mixed(said, normed=False)
    del values["head_dim"]
    hidden = values["hidden_size"]
    shared = said.size("expert_shared_feed_forward_length", values["intermediate_size"])
    said.tensor("blk.0.ffn_up_shexp.weight", shared, hidden)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary(said, head_dim),
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
        "hidden_act": "silu",
        "rope_parameters": rotary(said, values["head_dim"]),
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
    rope = rotary(said, values["head_dim"])
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as the models of this kind do
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rope,
        "attention_bias": True,
        "intermediate_size": wide,
        "num_local_experts": count,
        "sliding_window": said.size("attention.sliding_window"),
        "layer_types": alternating(said, values, 2),
    }


def _glm4_moe(said: Metadata) -> Values:
    values = attentive(said, decoder(said, "post_attention_norm", ahead=True))
    dense, shared = said.whole("leading_dense_block_count", 0), said.whole("expert_shared_count")
    if dense > values["num_hidden_layers"]:
        raise said.bad("leading_dense_block_count", dense, f"at most {values['num_hidden_layers']}")
    count, wide = _experts(said, values, dense=dense)
    for layer in range(dense):
        said.tensor(f"blk.{layer}.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    said.tensor(f"blk.{dense}.ffn_up_shexp.weight", shared * wide, values["hidden_size"])
    said.must_be("expert_gating_func", SIGMOID, 0)
    normed = said.flag("expert_weights_norm", False)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": {"partial_rotary_factor": 1.0, **rotary(said, values["head_dim"], partial=True)},
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "use_qk_norm": said.has("blk.0.attn_q_norm.weight"),
        "first_k_dense_replace": dense,
        "moe_intermediate_size": wide,
        "n_routed_experts": count,
        "n_shared_experts": shared,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": normed,
        "routed_scaling_factor": said.real("expert_weights_scale", 0.0) or 1.0,
    }


MIXTURES: Architectures = {
    "llama": ("mixtral", _mixtral),
    "qwen2moe": ("qwen2_moe", _qwen2_moe),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "olmoe": ("olmoe", _olmoe),
    "gpt-oss": ("gpt_oss", _gpt_oss),
    "glm4moe": ("glm4_moe", _glm4_moe),
}
