"""Architectures of before Llama, and what is like these: norms with a bias, positions of several kinds, one matrix for queries, keys and
values (llama.cpp's `conversion/gpt2.py`, `gpt_neox.py`, `bloom.py`, `falcon.py`, `phi.py`, `stablelm.py`, `nemotron.py`)."""

from __future__ import annotations

from fusion.runtime.capture.gguf.decoders import Architectures, Values, decoder, plain_heads, rotary, separate
from fusion.runtime.capture.gguf.metadata import Metadata


def _gpt2(said: Metadata) -> Values:
    head_dim = plain_heads(said)
    values = decoder(said)
    hidden, layers = values["hidden_size"], values["num_hidden_layers"]
    said.must_be("attention.head_count_kv", values["num_attention_heads"])
    said.must_be("rope.dimension_count", head_dim)  # some files say it; nothing is rotated
    said.tensor("position_embd.weight", values["max_position_embeddings"], hidden)
    said.tensor("blk.0.attn_qkv.weight", 3 * hidden, hidden)
    said.tensor("blk.0.ffn_up.weight", values["intermediate_size"], hidden)
    return {
        "vocab_size": values["vocab_size"],
        "n_positions": values["max_position_embeddings"],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": values["num_attention_heads"],
        "n_inner": values["intermediate_size"],
        "layer_norm_epsilon": said.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": values["tie_word_embeddings"],
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _fused(said: Metadata, norm: str) -> Values:
    """Queries, keys and values in one matrix."""
    head_dim = plain_heads(said)
    values = decoder(said, norm)
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    rows = (heads + 2 * values["num_key_value_heads"]) * head_dim
    said.tensor("blk.0.attn_qkv.weight", rows, hidden)
    said.tensor("blk.0.ffn_up.weight", values["intermediate_size"], hidden)
    return values


def _layer_norm(said: Metadata) -> float:
    return said.real("attention.layer_norm_epsilon")


def _gpt_neox(said: Metadata) -> Values:
    values = _fused(said, "ffn_norm")
    head_dim = values.pop("head_dim")
    said.must_be("attention.head_count_kv", values.pop("num_key_value_heads"))
    return values | {
        "hidden_act": "gelu",
        "layer_norm_eps": _layer_norm(said),
        "rope_parameters": rotary(said, head_dim, partial=True),
        "use_parallel_residual": said.flag("use_parallel_residual", True),
        "attention_bias": said.has("blk.0.attn_qkv.bias"),
    }


def _bloom(said: Metadata) -> Values:
    values = _fused(said, "ffn_norm")
    said.must_be("feed_forward_length", 4 * values["hidden_size"])
    said.must_be("attention.head_count_kv", values["num_attention_heads"])
    return {
        **{key: values[key] for key in ("vocab_size", "hidden_size", "tie_word_embeddings")},
        "n_layer": values["num_hidden_layers"],
        "n_head": values["num_attention_heads"],
        "layer_norm_epsilon": _layer_norm(said),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _falcon(said: Metadata) -> Values:
    """Newer ones have keys and values for several heads; of these some have a norm of its own for attention."""
    said.must_be("tensor_data_layout", "jploski")
    values = _fused(said, "attn_norm")
    head_dim, kv_heads = values.pop("head_dim"), values.pop("num_key_value_heads")
    said.must_be("feed_forward_length", 4 * values["hidden_size"])
    newer = kv_heads > 1
    return values | {
        "ffn_hidden_size": values.pop("intermediate_size"),
        "activation": "gelu",
        "layer_norm_epsilon": _layer_norm(said),
        "rope_parameters": rotary(said, head_dim),
        "new_decoder_architecture": newer,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": (2 if said.has("blk.0.attn_norm_2.weight") else 1) if newer else None,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }


def _apart(said: Metadata, norm: str, head_dim: int) -> Values:
    """Queries, keys and values in three, part of each head rotated."""
    values = decoder(said, norm)
    separate(said, values)
    said.tensor("blk.0.ffn_up.weight", values["intermediate_size"], values["hidden_size"])
    return values | {"rope_parameters": rotary(said, head_dim, partial=True)}


def _phi2(said: Metadata) -> Values:
    values = _apart(said, "attn_norm", plain_heads(said))
    del values["head_dim"]
    return values | {"hidden_act": "gelu_new", "layer_norm_eps": _layer_norm(said), "qk_layernorm": False}


def _stablelm(said: Metadata) -> Values:
    values = _apart(said, "attn_norm", plain_heads(said))
    del values["head_dim"]
    said.tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    parallel = said.flag("use_parallel_residual", not said.has("blk.0.ffn_norm.weight"))
    return values | {
        "hidden_act": "silu",
        "layer_norm_eps": _layer_norm(said),
        "use_qkv_bias": said.has("blk.0.attn_q.bias"),
        "qk_layernorm": False,
        "use_parallel_residual": parallel,
    }


def _nemotron(said: Metadata) -> Values:
    head_dim = said.size(
        "attention.key_length", said.size("embedding_length") // said.size("attention.head_count")
    )
    said.any("attention.layer_norm_rms_epsilon")  # the same as what is read, under another name
    return _apart(said, "ffn_norm", head_dim) | {
        "hidden_act": "relu2",
        "norm_eps": _layer_norm(said),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
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
