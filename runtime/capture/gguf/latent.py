"""The architecture with multi-head latent attention: DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash, which files give one name (llama.cpp's
`conversion/deepseek.py`, `src/models/deepseek2.cpp`)."""

from __future__ import annotations

from fusion.runtime.capture.gguf.decoders import Values, rms_norm, rotary, sizes
from fusion.runtime.capture.gguf.metadata import Metadata
from fusion.runtime.capture.gguf.mixtures import SIGMOID, SOFTMAX, routed_experts


def deepseek2(metadata: Metadata) -> Values:
    """The configuration of DeepSeek-V3, or of V2, whose router differs."""
    values = (
        sizes(metadata) | rms_norm(metadata) | {"intermediate_size": metadata.size("feed_forward_length")}
    )
    values |= _attention(metadata, values["hidden_size"])
    values = routed_experts(metadata, values, allow_groups=True)
    gating = metadata.integer("expert_gating_func", 0) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise metadata.error("expert_gating_func", gating, f"{SOFTMAX} or {SIGMOID}")
    rope = rotary(metadata, values["qk_rope_head_dim"])
    mscale = metadata.real("rope.scaling.yarn_log_multiplier", 0.0) * 10
    if rope["rope_type"] == "yarn":
        if not mscale:
            raise metadata.error("rope.scaling.yarn_log_multiplier", None, "a number above 0")
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    values |= {"hidden_act": "silu", "attention_bias": False, "rope_parameters": rope}
    if gating == SIGMOID:
        return values | {"model_type": "deepseek_v3", "rope_interleave": True, "num_mtp_layers": 0}
    if values.pop("norm_topk_prob"):
        raise metadata.error("expert_weights_norm", True, "false")
    return values | {"topk_method": "group_limited_greedy" if values["n_group"] > 1 else "greedy"}


def _attention(metadata: Metadata, hidden: int) -> Values:
    """Older files have one matrix from the latent vector to keys and values; newer ones have two, and give the sizes of the latent vectors in
    place of those of heads."""
    heads, rank = metadata.size("attention.head_count"), metadata.size("attention.kv_lora_rank")
    rotary_dim = metadata.size("rope.dimension_count")
    is_split = metadata.has_tensor("blk.0.attn_k_b.weight")
    if is_split:
        metadata.require("attention.head_count_kv", 1)
        metadata.require("attention.key_length", rank + rotary_dim)
        metadata.require("attention.value_length", rank)
    else:
        metadata.require("attention.head_count_kv", heads)
    key_dim = metadata.size("attention.key_length_mla" if is_split else "attention.key_length")
    value_dim = metadata.size("attention.value_length_mla" if is_split else "attention.value_length")
    if key_dim <= rotary_dim:
        raise metadata.error("attention.key_length", key_dim, f"more than the {rotary_dim} that are rotated")
    metadata.require_tensor("blk.0.attn_kv_a_mqa.weight", rank + rotary_dim, hidden)
    metadata.require_tensor("blk.0.attn_output.weight", hidden, heads * value_dim)
    if is_split:
        metadata.require_tensor("blk.0.attn_k_b.weight", heads, rank, key_dim - rotary_dim)
    else:
        metadata.require_tensor("blk.0.attn_kv_b.weight", heads * (key_dim - rotary_dim + value_dim), rank)
    query_rank = metadata.integer("attention.q_lora_rank", 0)
    if query_rank:
        metadata.require_tensor("blk.0.attn_q_a.weight", query_rank, hidden)
    metadata.require_tensor(
        "blk.0.attn_q_b.weight" if query_rank else "blk.0.attn_q.weight",
        heads * key_dim,
        query_rank or hidden,
    )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": query_rank or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": key_dim - rotary_dim,
        "v_head_dim": value_dim,
    }
