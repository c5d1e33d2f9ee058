"""Architectures from before Llama, and similar ones: norms with a bias, several kinds of positions, one matrix for queries, keys and
values (llama.cpp's `conversion/gpt2.py`, `gpt_neox.py`, `bloom.py`, `falcon.py`, `phi.py`, `stablelm.py`, `nemotron.py`)."""

from __future__ import annotations

from fusion.runtime.capture.gguf.decoders import (
    Architectures,
    Values,
    check_queries_and_keys,
    decoder,
    default_head_dim,
    rotary,
)
from fusion.runtime.capture.gguf.metadata import Metadata


def _gpt2(metadata: Metadata) -> Values:
    head_dim = default_head_dim(metadata)
    values = decoder(metadata)
    hidden, layers = values["hidden_size"], values["num_hidden_layers"]
    metadata.require("attention.head_count_kv", values["num_attention_heads"])
    metadata.require("rope.dimension_count", head_dim)  # in some files; there is no rotary embedding
    metadata.require_tensor("position_embd.weight", values["max_position_embeddings"], hidden)
    metadata.require_tensor("blk.0.attn_qkv.weight", 3 * hidden, hidden)
    metadata.require_tensor("blk.0.ffn_up.weight", values["intermediate_size"], hidden)
    return {
        "vocab_size": values["vocab_size"],
        "n_positions": values["max_position_embeddings"],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": values["num_attention_heads"],
        "n_inner": values["intermediate_size"],
        "layer_norm_epsilon": metadata.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": values["tie_word_embeddings"],
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _fused_decoder(metadata: Metadata, norm: str) -> Values:
    """A decoder with queries, keys and values in one matrix."""
    head_dim = default_head_dim(metadata)
    values = decoder(metadata, norm)
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    rows = (heads + 2 * values["num_key_value_heads"]) * head_dim
    metadata.require_tensor("blk.0.attn_qkv.weight", rows, hidden)
    metadata.require_tensor("blk.0.ffn_up.weight", values["intermediate_size"], hidden)
    return values


def _layer_norm(metadata: Metadata) -> float:
    return metadata.real("attention.layer_norm_epsilon")


def _gpt_neox(metadata: Metadata) -> Values:
    values = _fused_decoder(metadata, "ffn_norm")
    head_dim = values.pop("head_dim")
    metadata.require("attention.head_count_kv", values.pop("num_key_value_heads"))
    return values | {
        "hidden_act": "gelu",
        "layer_norm_eps": _layer_norm(metadata),
        "rope_parameters": rotary(metadata, head_dim, partial=True),
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
        "attention_bias": metadata.has_tensor("blk.0.attn_qkv.bias"),
    }


def _bloom(metadata: Metadata) -> Values:
    values = _fused_decoder(metadata, "ffn_norm")
    metadata.require("feed_forward_length", 4 * values["hidden_size"])
    metadata.require("attention.head_count_kv", values["num_attention_heads"])
    return {
        **{key: values[key] for key in ("vocab_size", "hidden_size", "tie_word_embeddings")},
        "n_layer": values["num_hidden_layers"],
        "n_head": values["num_attention_heads"],
        "layer_norm_epsilon": _layer_norm(metadata),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _falcon(metadata: Metadata) -> Values:
    """Newer ones have several key-value heads; some of these have a separate norm before attention."""
    metadata.require("tensor_data_layout", "jploski")
    values = _fused_decoder(metadata, "attn_norm")
    head_dim, kv_heads = values.pop("head_dim"), values.pop("num_key_value_heads")
    metadata.require("feed_forward_length", 4 * values["hidden_size"])
    newer = kv_heads > 1
    return values | {
        "ffn_hidden_size": values.pop("intermediate_size"),
        "activation": "gelu",
        "layer_norm_epsilon": _layer_norm(metadata),
        "rope_parameters": rotary(metadata, head_dim),
        "new_decoder_architecture": newer,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": (2 if metadata.has_tensor("blk.0.attn_norm_2.weight") else 1)
        if newer
        else None,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }


def _partly_rotary_decoder(metadata: Metadata, norm: str, head_dim: int) -> Values:
    """A decoder with separate queries, keys and values and a part of each head rotated."""
    values = decoder(metadata, norm)
    check_queries_and_keys(metadata, values)
    metadata.require_tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    return values | {"rope_parameters": rotary(metadata, head_dim, partial=True)}


def _phi2(metadata: Metadata) -> Values:
    values = _partly_rotary_decoder(metadata, "attn_norm", default_head_dim(metadata))
    del values["head_dim"]
    return values | {"hidden_act": "gelu_new", "layer_norm_eps": _layer_norm(metadata), "qk_layernorm": False}


def _stablelm(metadata: Metadata) -> Values:
    values = _partly_rotary_decoder(metadata, "attn_norm", default_head_dim(metadata))
    del values["head_dim"]
    metadata.require_tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    parallel = metadata.flag("use_parallel_residual", not metadata.has_tensor("blk.0.ffn_norm.weight"))
    return values | {
        "hidden_act": "silu",
        "layer_norm_eps": _layer_norm(metadata),
        "use_qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "qk_layernorm": False,
        "use_parallel_residual": parallel,
    }


def _nemotron(metadata: Metadata) -> Values:
    head_dim = metadata.size(
        "attention.key_length", metadata.size("embedding_length") // metadata.size("attention.head_count")
    )
    metadata.ignore("attention.layer_norm_rms_epsilon")  # the same value under another name
    return _partly_rotary_decoder(metadata, "ffn_norm", head_dim) | {
        "hidden_act": "relu2",
        "norm_eps": _layer_norm(metadata),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
    }


OLDER: Architectures = {
    "gpt2": ("gpt2", _gpt2),
    "gptneox": ("gpt_neox", _gpt_neox),
    "bloom": ("bloom", _bloom),
    "falcon": ("falcon", _falcon),
    "phi2": ("phi", _phi2),
    "stablelm": ("stablelm", _stablelm),
    "nemotron": ("nemotron", _nemotron),
}
