"""A small configuration of any family of transformers, made from the fields that its configuration class has.

Nothing is known of a family but what its fields are called: layers, widths, heads, experts, vocabulary and windows are
made small, all else stays as the family has it, so that what makes it different stays too. A few families tie numbers to
each other in a way that no name tells; they have a line in `TIED`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

LAYERS = 2
MIXED_LAYERS = 4  # of a family of several sorts of layers, which has each of them
VOCABULARY = 256
POSITIONS = 128
MAX_PARAMETERS = 20_000_000

# The first pattern that fits the whole name says how large the number may be.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|n_layer|num_hidden_layers|depth|num_blocks|num_mem_blocks", LAYERS),
    (r".*vocab_size.*", VOCABULARY),
    (r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|.*max_(source|target)_positions|max_sequence_length", POSITIONS),
    (r".*(sliding_window|window_size|attention_window|local_window).*", 16),
    (r".*chunk_size|.*chunk_length|block_size|index_block_size", 16),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|dff|d_inner|mlp_dim|inner_dim)", 96),
    (r"rotary_dim|.*rotary_ndims", 8),
    # So many that no two keys score zero: which of equal keys are selected depends on how many there are.
    (r"index_n_heads", 32),
    (r"index_topk", 32),
    (r"num_kv_shared_layers", 0),
    (r".*lora_rank|.*low_rank_dim|.*_rank", 16),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_heads|.*_num_key_heads|.*num_key_value_heads)", 2),
    (r".*(num_attention_heads|attention_heads|n_heads?|num_heads|num_value_heads)", 4),
    (r".*(head_dim|kv_channels|head_size|d_kv|head_width)", 16),
    (r"(mamba_|ssm_)?(d_state|state_size|ssm_state_size)", 8),
    (r"(mamba_)?(dt_rank|time_step_rank)", 8),
    (r"(mamba_)?n_groups|mamba_n_groups", 1),
    (r"n_group", 2),
    (r"topk_group", 1),
    (r"(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_local_experts|n_experts)", 8),
    (r"(num_experts_per_tok(en)?|moe_top_?k|top_k|moe_k|moe_topk|num_selected_experts|num_experts_per_token|experts_per_token)", 2),
    (r"(num_|n_)shared_experts", 1),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers", 1),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
    (r"(hidden_size|n_embd|d_model|dim|dim_model|embedding_size|emb_dim|word_embed_proj_dim|hidden_dim|lru_width|embedding_dim|model_dim|.*_hidden_size|n_embed|attention_hidden_size)", 64),
)  # fmt: skip
_BERT = {
    "model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": POSITIONS, "initializer_range": 0.2,
}  # fmt: skip
# Numbers that have to fit each other, where names do not say so.
TIED: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {
        "vocabulary_map": {"<image>": 250, "<|extra_200|>": 251, "<|visual token 000000|>": 252},
        "vq_config": {"base_channels": 32, "hidden_size": 64, "codebook_size": 64},
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "encoder-decoder": {
        "encoder": _BERT,
        "decoder": {**_BERT, "is_decoder": True, "add_cross_attention": True},
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8},
    "longt5": {"local_radius": 15, "global_block_size": 8},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "deepseek_v2": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "doge": {
        "keep_window_size": 2048
    },  # beyond it attention is sparse, and no text of this many positions gets there
    "ministral": {"head_dim": 16},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},  # else two layers have no experts
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},  # its layers of attention are each third one
    "reformer": {
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [16, 16],
        "attn_layers": ["local", "lsh"],
    },
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "longcat_flash": {"qk_head_dim": 32},
    "mamba2": {"num_heads": 8},
    "qwen2_vl": {"vision_config": {"depth": LAYERS, "embed_dim": 64, "hidden_size": 64, "num_heads": 4}},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_offset": 0,
    },
}
# The same of a part, by what it is called.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
}


def tiny(config_class: Any, family: str = "") -> Any:
    """A small instance of a configuration class of transformers. Exceptions of the class are not caught."""
    found = _small(config_class, family)
    return config_class(**{**found, **TIED.get(family, {})})


def _small(config_class: Any, family: str) -> dict[str, Any]:
    default = config_class()
    subs = getattr(config_class, "sub_configs", {})
    values = {field.name: vars(default).get(field.name) for field in fields(config_class)}
    depth = max(
        (v for n, v in values.items() if isinstance(v, int) and re.fullmatch(SIZES[0][0], n)), default=0
    )
    by_layer = {n: v for n, v in values.items() if depth and _is_by_layer(n, v, depth)}
    layers = MIXED_LAYERS if any(len(set(map(repr, v))) > 1 for v in by_layer.values()) else LAYERS
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in subs:
            kind = type(value)
            if hasattr(kind, "model_type"):
                found[name] = {
                    **_small(kind, family),
                    **PARTS.get(kind.model_type, {}),
                    "model_type": kind.model_type,
                }
        elif name == "is_decoder":
            found[name] = True  # else it reads a text from both sides
        elif name in ("bos_token_id", "eos_token_id"):
            found[name] = None if _takes_none(config_class, name) else 0
        elif name.endswith("token_id") and isinstance(value, int):
            found[name] = min(value, VOCABULARY - 1)
        elif name in by_layer:
            found[name] = _each_kind(value, layers)
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _smaller(name, value, layers)
            if small is not None:
                found[name] = small
        elif name == "initializer_range" and isinstance(value, float):
            found[name] = 0.2
    if "kv_lora_rank" in values and values.get(
        "num_key_value_heads"
    ):  # latent attention has as many keys as queries
        found["num_key_value_heads"] = found.get("num_attention_heads", values.get("num_attention_heads"))
    return found


def _is_by_layer(name: str, value: Any, depth: int) -> bool:
    listed = isinstance(value, (list, tuple)) or (isinstance(value, str) and "pattern" in name)
    return listed and len(value) == depth > MIXED_LAYERS


def _takes_none(config_class: Any, name: str) -> bool:
    field = next(f for f in fields(config_class) if f.name == name)
    return "None" in str(field.type) or field.default in (None, MISSING)


def _smaller(name: str, value: int, layers: int) -> int | None:
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            size = layers if pattern == SIZES[0][0] else size
            return size if value > size else None
    return None


def _each_kind(values: Any, layers: int) -> Any:
    """The first ones of a list by layer, in their order, with each kind that occurs among them if there is room."""
    kinds = sorted({repr(v): i for i, v in reversed(list(enumerate(values)))}.values())[:layers]
    rest = [i for i in range(len(values)) if i not in kinds][: layers - len(kinds)]
    chosen = [values[i] for i in sorted(kinds + rest)]
    return "".join(chosen) if isinstance(values, str) else chosen
