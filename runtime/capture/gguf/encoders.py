"""Embedding models, and the pooling of their token vectors (llama.cpp's `conversion/bert.py`, `src/models/bert.cpp`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fusion.runtime.capture.gguf.decoders import Architectures, Values, decoder, rotary
from fusion.runtime.capture.gguf.metadata import Metadata

_NORM = "attn_output_norm"
PoolingKind = Literal["mean", "first", "last"]
_POOLINGS: Mapping[int, PoolingKind] = {1: "mean", 2: "first", 3: "last"}


def pooling_of(metadata: Metadata, *, encoder: bool) -> PoolingKind | None:
    """The pooling of token vectors; None for a file whose model generates."""
    kind = metadata.integer("pooling_type", 0)
    if not kind and not encoder:
        return None
    if kind not in _POOLINGS:
        raise metadata.error("pooling_type", kind, "1 (mean), 2 (first token) or 3 (last token)")
    return _POOLINGS[kind]


def _encoder(metadata: Metadata) -> Values:
    """An encoder with bidirectional attention."""
    values = decoder(metadata, _NORM, causal=False)
    hidden, token_types = values["hidden_size"], metadata.header.tensors.get("token_types.weight")
    type_count = 0 if token_types is None else token_types.shape[0]
    metadata.require_tensor("token_types.weight", type_count, hidden)
    metadata.require("attention.head_count_kv", values["num_attention_heads"])
    for name in ("head_dim", "num_key_value_heads"):
        del values[name]
    return values | {
        "type_vocab_size": type_count,
        "layer_norm_eps": metadata.real("attention.layer_norm_epsilon"),
    }


def _bert(metadata: Metadata) -> Values:
    values = _encoder(metadata)
    hidden = values["hidden_size"]
    metadata.require_tensor("position_embd.weight", values["max_position_embeddings"], hidden)
    metadata.require_tensor("blk.0.attn_q.weight", hidden, hidden)
    metadata.require_tensor("blk.0.ffn_up.weight", values["intermediate_size"], hidden)
    return values | {"hidden_act": "gelu"}


def _nomic_bert(metadata: Metadata) -> Values:
    """Nomic's encoder without experts."""
    metadata.require("moe_every_n_layers", 0)
    values = _encoder(metadata)
    hidden = values["hidden_size"]
    metadata.require_tensor("blk.0.attn_qkv.weight", 3 * hidden, hidden)
    metadata.require_tensor("blk.0.ffn_gate.weight", values["intermediate_size"], hidden)
    rope = rotary(metadata, hidden // values["num_attention_heads"])
    # The padding token changes nothing that is computed; the configuration requires one.
    return values | {"hidden_act": "silu", "rope_parameters": rope, "pad_token_id": 0}


ENCODERS: Architectures = {"bert": ("bert", _bert), "nomic-bert": ("nomic_bert", _nomic_bert)}
