"""What decoders have in common: sizes, heads, rotary embeddings, windows. Each is checked against the file's tensors, so that nothing
larger than these is ever built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusion.runtime.capture.gguf.metadata import MIN_DIVISOR, TOKENS, Metadata
from fusion.runtime.job.errors import JobError

MAX_CONTEXT = 1 << 24  # positions
# Llama 3.1 405B has 126. Each takes a millisecond to build, before missing tensors are found.
MAX_LAYERS = 1 << 10
# Divisors of the rotary embedding's frequencies: in Llama 3.1; in Phi-3, up to the original context and beyond it.
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
MAX_ATTENTION_FACTOR = 10.0  # of queries and keys; Phi-3, at 131,072 positions instead of 4096, has 1.19

Values = dict[str, Any]  # keyword arguments of a configuration
# Architecture name in files -> (model type in transformers, what makes its configuration).
Architectures = Mapping[str, tuple[str, Callable[[Metadata], Values]]]


def sizes(
    metadata: Metadata, norm: str = "ffn_norm", *, allow_nextn: bool = False, causal: bool = True
) -> Values:
    """The configuration values of all decoders, under the names that most configurations have. `norm`: a tensor that each layer has.
    `allow_nextn`: whether files of this architecture may have further layers of multi-token prediction, which are not read. `causal`: whether a
    token sees only those before it."""
    hidden, blocks = metadata.size("embedding_length"), metadata.size("block_count")
    nextn_layers = metadata.integer("nextn_predict_layers", 0) if allow_nextn else 0
    if nextn_layers >= blocks:
        raise metadata.error("nextn_predict_layers", nextn_layers, f"at most {blocks - 1}")
    layers = blocks - nextn_layers
    metadata.require("attention.causal", causal)
    context = metadata.size("context_length")
    if context > MAX_CONTEXT:
        raise metadata.error("context_length", context, f"at most {MAX_CONTEXT}")
    if layers > MAX_LAYERS:
        raise metadata.error("block_count", layers, f"at most {MAX_LAYERS}")
    embedding = metadata.header.tensors.get("token_embd.weight")
    vocabulary = 0 if embedding is None else embedding.shape[0]
    metadata.require_tensor("token_embd.weight", vocabulary, hidden)
    metadata.require("vocab_size", vocabulary)
    tokens = metadata.header.values.get(TOKENS)
    if isinstance(tokens, tuple) and len(tokens) > vocabulary:
        raise JobError(
            f"{metadata.header.path} has {len(tokens)} tokens in its tokenizer, and {vocabulary} in token_embd.weight"
        )
    for layer in range(layers):  # so the layer count is bounded by the file's tensors
        metadata.require_tensor(f"blk.{layer}.{norm}.weight", hidden)
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        **({"num_nextn_predict_layers": nextn_layers} if allow_nextn else {}),
        "max_position_embeddings": context,
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        # Token ids change nothing that is computed, and defaults may lie outside the vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def decoder(
    metadata: Metadata,
    norm: str = "ffn_norm",
    *,
    allow_nextn: bool = False,
    kv_heads: int | None = None,
    feed_forward: bool = True,
    causal: bool = True,
) -> Values:
    """`sizes`, attention heads and the feed-forward width. `kv_heads`: given where only some layers attend; `feed_forward`: whether files have
    its width."""
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", hidden // heads)
    metadata.require("attention.value_length", head_dim)
    kv_heads = kv_heads or metadata.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise metadata.error("attention.head_count_kv", kv_heads, f"a divisor of {heads}")
    return sizes(metadata, norm, allow_nextn=allow_nextn, causal=causal) | {
        **({"intermediate_size": metadata.size("feed_forward_length")} if feed_forward else {}),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def gated_decoder(metadata: Metadata, values: Values) -> Values:
    """A decoder with separate queries, keys and values and a gated feed-forward network, checked against its first layer."""
    metadata.require_tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return unfused_decoder(metadata, values)


def unfused_decoder(metadata: Metadata, values: Values) -> Values:
    """A decoder with separate queries, keys and values."""
    check_queries_and_keys(metadata, values)
    return values | rms_norm(metadata)


def check_queries_and_keys(metadata: Metadata, values: Values, layer: int = 0) -> None:
    """JobError unless queries and keys have tensors of their own."""
    hidden, head_dim = values["hidden_size"], values["head_dim"]
    metadata.require_tensor(f"blk.{layer}.attn_q.weight", values["num_attention_heads"] * head_dim, hidden)
    metadata.require_tensor(f"blk.{layer}.attn_k.weight", values["num_key_value_heads"] * head_dim, hidden)


def rms_norm(metadata: Metadata) -> Values:
    return {"rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon")}


def default_head_dim(metadata: Metadata) -> int:
    """The size of a head, for configurations that do not have it: all heads together are as wide as the embedding."""
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    metadata.require("attention.key_length", hidden // heads)
    return hidden // heads


def rotary(
    metadata: Metadata,
    head_dim: int,
    *,
    partial: bool = False,
    finetuned: tuple[bool, ...] = (False, True),
) -> Values:
    """The rotary embedding and its scaling to longer contexts. `partial`: whether it may rotate a part of each head; `finetuned`: allowed values
    of rope.scaling.finetuned."""
    rotated = metadata.size("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2 or (rotated != head_dim and not partial):
        raise metadata.error("rope.dimension_count", rotated, f"the {head_dim} of a head")
    rope: Values = {"partial_rotary_factor": rotated / head_dim} if partial else {}
    rope |= {"rope_type": "default", "rope_theta": metadata.real("rope.freq_base", 10_000.0, least=1.0)}
    linear_scale = metadata.real("rope.scale_linear", 0.0)
    factor = metadata.real("rope.scaling.factor", linear_scale) or 1.0
    scaling = metadata.text("rope.scaling.type", "linear")
    original = metadata.size("rope.scaling.original_context_length", metadata.size("context_length"))
    metadata.require("rope.scaling.finetuned", *finetuned)  # other values change nothing that is computed
    metadata.ignore("rope.dimension_sections")  # for texts, all sections have the same positions
    yarn = {
        "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", 32.0, least=MIN_DIVISOR),
        "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", 1.0, least=MIN_DIVISOR),
    }
    metadata.require("rope.scaling.yarn_ext_factor", 1.0)
    metadata.require("rope.scaling.yarn_attn_factor", 1.0)
    if partial and metadata.has_tensor(SHORT_FACTORS):
        return rope | _longrope(metadata, rotated // 2, original, factor)
    metadata.require("rope.scaling.attn_factor", 1.0)
    if scaling not in ("none", "linear", "yarn"):
        raise metadata.error("rope.scaling.type", scaling, "none, linear and yarn are read")
    if scaling != "none" and factor != 1.0:
        rope |= {"rope_type": scaling, "factor": factor}
        if scaling == "yarn":
            rope |= {"original_max_position_embeddings": original, **yarn}
    return rope


def scaled_rotary(metadata: Metadata, head_dim: int) -> Values:
    """A rotary embedding whose frequencies may be divided by factors, as Llama 3.1's."""
    if metadata.has_tensor(ROPE_FACTORS):
        metadata.require_tensor(ROPE_FACTORS, head_dim // 2)
    return rotary(metadata, head_dim)


def _longrope(metadata: Metadata, factors: int, original: int, linear_factor: float) -> Values:
    """Phi-3's scaling: a factor for each frequency, and others beyond the original context, where the model is not served. The factors are read
    with the tensors; here they are 1."""
    for name in (SHORT_FACTORS, LONG_FACTORS):
        metadata.require_tensor(name, factors)
    attention = metadata.real("rope.scaling.attn_factor", 1.0)
    if not 0 < attention <= MAX_ATTENTION_FACTOR:
        raise metadata.error(
            "rope.scaling.attn_factor", attention, f"above 0, at most {MAX_ATTENTION_FACTOR:g}"
        )
    if linear_factor != 1.0:
        raise metadata.error("rope.scaling.factor", linear_factor, f"1, beside {SHORT_FACTORS}")
    return {
        "rope_type": "longrope",
        "short_factor": [1.0] * factors,
        "long_factor": [1.0] * factors,
        "factor": max(1.0, metadata.size("context_length") / original),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def granite_multipliers(metadata: Metadata, head_dim: int) -> Values:
    return {
        "attention_multiplier": metadata.real("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": metadata.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.real("logit_scale", least=MIN_DIVISOR),
    }


def check_permuted(metadata: Metadata) -> None:
    """JobError unless queries and keys are permuted as Llama's."""
    metadata.require("tensor_data_layout", "Meta AI original pth")


def alternating_layers(metadata: Metadata, values: Values, period: int) -> list[str]:
    """The type of each layer: every `period`-th has full attention, the others a window; or as the file lists them."""
    layers, key = values["num_hidden_layers"], "attention.sliding_window_pattern"
    if isinstance(metadata.header.values.get(f"{metadata.architecture}.{key}"), tuple):
        return [
            "sliding_attention" if windowed else "full_attention"
            for windowed in metadata.per_layer(key, layers)
        ]
    metadata.require(key, period)
    return [
        "full_attention" if layer % period == 0 else "sliding_attention" for layer in range(1, layers + 1)
    ]
