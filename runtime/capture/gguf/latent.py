"""The architecture whose keys and values come of one short vector for each position: DeepSeek-V2, V3 and R1, Kimi K2,
GLM-4.7-Flash, which files call one kind (llama.cpp's `conversion/deepseek.py`, `src/models/deepseek2.cpp`)."""

from __future__ import annotations

from fusion.runtime.capture.gguf.decoders import Values, rms, rotary, sizes
from fusion.runtime.capture.gguf.metadata import Metadata
from fusion.runtime.capture.gguf.mixtures import SIGMOID, SOFTMAX, routed


def deepseek2(said: Metadata) -> Values:
    """Of DeepSeek-V3, or of V2, whose routers choose otherwise."""
    values = sizes(said) | rms(said) | {"intermediate_size": said.size("feed_forward_length")}
    values |= _attention(said, values["hidden_size"])
    values = routed(said, values, in_groups=True)
    gating = said.whole("expert_gating_func", 0) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise said.bad("expert_gating_func", gating, f"{SOFTMAX} or {SIGMOID}")
    rope = rotary(said, values["qk_rope_head_dim"])
    stretched = said.real("rope.scaling.yarn_log_multiplier", 0.0) * 10
    if rope["rope_type"] == "yarn":
        if not stretched:
            raise said.bad("rope.scaling.yarn_log_multiplier", None, "a number above 0")
        rope |= {"mscale": stretched, "mscale_all_dim": stretched}
    values |= {"hidden_act": "silu", "attention_bias": False, "rope_parameters": rope}
    if gating == SIGMOID:
        return values | {"model_type": "deepseek_v3", "rope_interleave": True, "num_mtp_layers": 0}
    if values.pop("norm_topk_prob"):
        raise said.bad("expert_weights_norm", True, "false")
    return values | {"topk_method": "group_limited_greedy" if values["n_group"] > 1 else "greedy"}


def _attention(said: Metadata, hidden: int) -> Values:
    """Older files have what makes keys and values of the short vector in one matrix, newer ones in two, and say the lengths of what is
    attended to instead of those of heads."""
    heads, rank = said.size("attention.head_count"), said.size("attention.kv_lora_rank")
    rotated = said.size("rope.dimension_count")
    apart = said.has("blk.0.attn_k_b.weight")
    if apart:
        said.must_be("attention.head_count_kv", 1)
        said.must_be("attention.key_length", rank + rotated)
        said.must_be("attention.value_length", rank)
    else:
        said.must_be("attention.head_count_kv", heads)
    key = said.size("attention.key_length_mla" if apart else "attention.key_length")
    value = said.size("attention.value_length_mla" if apart else "attention.value_length")
    if key <= rotated:
        raise said.bad("attention.key_length", key, f"more than the {rotated} that are rotated")
    said.tensor("blk.0.attn_kv_a_mqa.weight", rank + rotated, hidden)
    said.tensor("blk.0.attn_output.weight", hidden, heads * value)
    if apart:
        said.tensor("blk.0.attn_k_b.weight", heads, rank, key - rotated)
    else:
        said.tensor("blk.0.attn_kv_b.weight", heads * (key - rotated + value), rank)
    short = said.whole("attention.q_lora_rank", 0)
    if short:
        said.tensor("blk.0.attn_q_a.weight", short, hidden)
    said.tensor("blk.0.attn_q_b.weight" if short else "blk.0.attn_q.weight", heads * key, short or hidden)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": short or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
    }
