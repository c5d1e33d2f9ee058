"""The architectures that make a vector of a text, and how a file says that the vectors of its tokens become one (llama.cpp's
`conversion/bert.py`, `src/models/bert.cpp`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fusion.runtime.capture.gguf.decoders import Architectures, Values, decoder, rotary
from fusion.runtime.capture.gguf.metadata import Metadata

_NORM = "attn_output_norm"
Pooled = Literal["mean", "first", "last"]
_POOLINGS: Mapping[int, Pooled] = {1: "mean", 2: "first", 3: "last"}


def pooling_of(metadata: Metadata, *, encoder: bool) -> Pooled | None:
    """Which of its tokens' vectors is that of a text, or their mean; None for a file whose model generates."""
    kind = metadata.whole("pooling_type", 0)
    if not kind and not encoder:
        return None
    if kind not in _POOLINGS:
        raise metadata.bad("pooling_type", kind, "1 (mean), 2 (first token) or 3 (last token)")
    return _POOLINGS[kind]


def _encoder(metadata: Metadata) -> Values:
    """Of which every token sees every other."""
    values = decoder(metadata, _NORM, causal=False)
    hidden, types = values["hidden_size"], metadata.header.tensors.get("token_types.weight")
    rows = 0 if types is None else types.shape[0]
    metadata.tensor("token_types.weight", rows, hidden)
    metadata.must_be("attention.head_count_kv", values["num_attention_heads"])
    for name in ("head_dim", "num_key_value_heads"):
        del values[name]
    return values | {"type_vocab_size": rows, "layer_norm_eps": metadata.real("attention.layer_norm_epsilon")}


def _bert(metadata: Metadata) -> Values:
    values = _encoder(metadata)
    hidden = values["hidden_size"]
    metadata.tensor("position_embd.weight", values["max_position_embeddings"], hidden)
    metadata.tensor("blk.0.attn_q.weight", hidden, hidden)
    metadata.tensor("blk.0.ffn_up.weight", values["intermediate_size"], hidden)
    return values | {"hidden_act": "gelu"}


def _nomic_bert(metadata: Metadata) -> Values:
    """Without experts."""
    metadata.must_be("moe_every_n_layers", 0)
    values = _encoder(metadata)
    hidden = values["hidden_size"]
    metadata.tensor("blk.0.attn_qkv.weight", 3 * hidden, hidden)
    metadata.tensor("blk.0.ffn_gate.weight", values["intermediate_size"], hidden)
    rope = rotary(metadata, hidden // values["num_attention_heads"])
    # Which token pads changes nothing that is computed; the configuration wants one.
    return values | {"hidden_act": "silu", "rope_parameters": rope, "pad_token_id": 0}


ENCODERS: Architectures = {"bert": ("bert", _bert), "nomic-bert": ("nomic_bert", _nomic_bert)}
