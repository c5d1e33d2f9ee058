"""The architecture whose keys and values come of one short vector for each position: DeepSeek-V2, V3 and R1, Kimi K2,
GLM-4.7-Flash, which files call one kind (llama.cpp's `conversion/deepseek.py`, `src/models/deepseek2.cpp`)."""

from __future__ import annotations

from fusion.runtime.capture.gguf.decoders import Values, rms, rotary, sizes
from fusion.runtime.capture.gguf.metadata import Metadata
from fusion.runtime.capture.gguf.mixtures import SIGMOID, SOFTMAX, routed


def deepseek2(metadata: Metadata) -> Values:
    """Of DeepSeek-V3, or of V2, whose routers choose otherwise."""
    values = sizes(metadata) | rms(metadata) | {"intermediate_size": metadata.size("feed_forward_length")}
    values |= _attention(metadata, values["hidden_size"])
    values = routed(metadata, values, in_groups=True)
    gating = metadata.whole("expert_gating_func", 0) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise metadata.bad("expert_gating_func", gating, f"{SOFTMAX} or {SIGMOID}")
    rope = rotary(metadata, values["qk_rope_head_dim"])
    stretched = metadata.real("rope.scaling.yarn_log_multiplier", 0.0) * 10
    if rope["rope_type"] == "yarn":
        if not stretched:
            raise metadata.bad("rope.scaling.yarn_log_multiplier", None, "a number above 0")
        rope |= {"mscale": stretched, "mscale_all_dim": stretched}
    values |= {"hidden_act": "silu", "attention_bias": False, "rope_parameters": rope}
    if gating == SIGMOID:
        return values | {"model_type": "deepseek_v3", "rope_interleave": True, "num_mtp_layers": 0}
    if values.pop("norm_topk_prob"):
        raise metadata.bad("expert_weights_norm", True, "false")
    return values | {"topk_method": "group_limited_greedy" if values["n_group"] > 1 else "greedy"}


def _attention(metadata: Metadata, hidden: int) -> Values:
    """Older files have what makes keys and values of the short vector in one matrix, newer ones in two, and say the lengths of what is
    attended to instead of those of heads."""
    heads, rank = metadata.size("attention.head_count"), metadata.size("attention.kv_lora_rank")
    rotated = metadata.size("rope.dimension_count")
    apart = metadata.has("blk.0.attn_k_b.weight")
    if apart:
        metadata.must_be("attention.head_count_kv", 1)
        metadata.must_be("attention.key_length", rank + rotated)
        metadata.must_be("attention.value_length", rank)
    else:
        metadata.must_be("attention.head_count_kv", heads)
    key = metadata.size("attention.key_length_mla" if apart else "attention.key_length")
    value = metadata.size("attention.value_length_mla" if apart else "attention.value_length")
    if key <= rotated:
        raise metadata.bad("attention.key_length", key, f"more than the {rotated} that are rotated")
    metadata.tensor("blk.0.attn_kv_a_mqa.weight", rank + rotated, hidden)
    metadata.tensor("blk.0.attn_output.weight", hidden, heads * value)
    if apart:
        metadata.tensor("blk.0.attn_k_b.weight", heads, rank, key - rotated)
    else:
        metadata.tensor("blk.0.attn_kv_b.weight", heads * (key - rotated + value), rank)
    short = metadata.whole("attention.q_lora_rank", 0)
    if short:
        metadata.tensor("blk.0.attn_q_a.weight", short, hidden)
    metadata.tensor("blk.0.attn_q_b.weight" if short else "blk.0.attn_q.weight", heads * key, short or hidden)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": short or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
    }
