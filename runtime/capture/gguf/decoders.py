"""What decoders of one kind or another have in common: sizes, heads, rotary embeddings, windows; checked against the tensors of the
file, so that nothing larger than these is ever built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusion.runtime.capture.gguf.metadata import LEAST, TOKENS, Metadata
from fusion.runtime.job.errors import JobError

MAX_CONTEXT = 1 << 24  # positions
# Llama 3.1 405B has 126. Each is built, which takes a millisecond, before it is known what the file lacks.
MAX_LAYERS = 1 << 10
# By which the frequencies of a rotary embedding are divided: by Llama 3.1 always, by Phi-3 up to its original context and beyond.
ROPE_FACTORS = "rope_freqs.weight"
NEAR_FACTORS, FAR_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
MOST_ATTENTION = 10.0  # times that queries and keys are made longer with those of Phi-3; for 131,072 positions of 4096 it is 1.19

Values = dict[str, Any]  # keyword arguments of a configuration
# By the name that files have for it: its model type in transformers, and what makes its configuration.
Architectures = Mapping[str, tuple[str, Callable[[Metadata], Values]]]


def sizes(metadata: Metadata, norm: str = "ffn_norm", *, ahead: bool = False, causal: bool = True) -> Values:
    """What all decoders have, under the names of most configurations. `norm`: a tensor that each layer has. `ahead`: whether files of this
    architecture may have layers behind these that predict further tokens, which are not read. `causal`: whether a token sees those before it alone."""
    hidden, blocks = metadata.size("embedding_length"), metadata.size("block_count")
    beyond = metadata.whole("nextn_predict_layers", 0) if ahead else 0
    if beyond >= blocks:
        raise metadata.bad("nextn_predict_layers", beyond, f"at most {blocks - 1}")
    layers = blocks - beyond
    metadata.must_be("attention.causal", causal)
    context = metadata.size("context_length")
    if context > MAX_CONTEXT:
        raise metadata.bad("context_length", context, f"at most {MAX_CONTEXT}")
    if layers > MAX_LAYERS:
        raise metadata.bad("block_count", layers, f"at most {MAX_LAYERS}")
    embedding = metadata.header.tensors.get("token_embd.weight")
    vocabulary = 0 if embedding is None else embedding.shape[0]
    metadata.tensor("token_embd.weight", vocabulary, hidden)
    metadata.must_be("vocab_size", vocabulary)
    tokens = metadata.header.values.get(TOKENS)
    if isinstance(tokens, tuple) and len(tokens) > vocabulary:
        raise JobError(
            f"{metadata.header.path} has {len(tokens)} tokens in its tokenizer, and {vocabulary} in token_embd.weight"
        )
    for layer in range(layers):  # each has one: no list is longer than the file's own of its tensors
        metadata.tensor(f"blk.{layer}.{norm}.weight", hidden)
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        **({"num_nextn_predict_layers": beyond} if ahead else {}),
        "max_position_embeddings": context,
        "tie_word_embeddings": not metadata.has("output.weight"),
        # Ids of tokens change nothing that is computed, and defaults may lie outside the vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def decoder(
    metadata: Metadata,
    norm: str = "ffn_norm",
    *,
    ahead: bool = False,
    kv_heads: int | None = None,
    feed_forward: bool = True,
    causal: bool = True,
) -> Values:
    """`sizes`, and what one of attention and a feed-forward network has. `kv_heads`: where layers differ in whether they have any;
    `feed_forward`: whether files say how wide that is."""
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", hidden // heads)
    metadata.must_be("attention.value_length", head_dim)
    kv_heads = kv_heads or metadata.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise metadata.bad("attention.head_count_kv", kv_heads, f"a divisor of {heads}")
    return sizes(metadata, norm, ahead=ahead, causal=causal) | {
        **({"intermediate_size": metadata.size("feed_forward_length")} if feed_forward else {}),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def gated(metadata: Metadata, values: Values) -> Values:
    """A decoder with separate queries, keys and values, and a gated feed-forward; checked against its first layer, so that
    nothing larger than the file's tensors is ever built."""
    metadata.tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return attentive(metadata, values)


def attentive(metadata: Metadata, values: Values) -> Values:
    """One with separate queries, keys and values."""
    separate(metadata, values)
    return values | rms(metadata)


def separate(metadata: Metadata, values: Values, layer: int = 0) -> None:
    """Queries and keys have tensors of their own."""
    hidden, head_dim = values["hidden_size"], values["head_dim"]
    metadata.tensor(f"blk.{layer}.attn_q.weight", values["num_attention_heads"] * head_dim, hidden)
    metadata.tensor(f"blk.{layer}.attn_k.weight", values["num_key_value_heads"] * head_dim, hidden)


def rms(metadata: Metadata) -> Values:
    return {"rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon")}


def plain_heads(metadata: Metadata) -> int:
    """The length of a head, for configurations that do not say it: all heads together are as long as the embedding."""
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    metadata.must_be("attention.key_length", hidden // heads)
    return hidden // heads


def rotary(
    metadata: Metadata,
    head_dim: int,
    *,
    partial: bool = False,
    finetuned: tuple[bool, ...] = (False, True),
) -> Values:
    """The rotary embedding and how it was stretched to longer contexts. `partial`: whether it may rotate a part of each head, and the
    configuration says which; `finetuned`: what the file may say of that, where it means something else."""
    rotated = metadata.size("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2 or (rotated != head_dim and not partial):
        raise metadata.bad("rope.dimension_count", rotated, f"the {head_dim} of a head")
    found: Values = {"partial_rotary_factor": rotated / head_dim} if partial else {}
    found |= {"rope_type": "default", "rope_theta": metadata.real("rope.freq_base", 10_000.0, least=1.0)}
    older = metadata.real("rope.scale_linear", 0.0)
    factor = metadata.real("rope.scaling.factor", older) or 1.0
    kind = metadata.text("rope.scaling.type", "linear")
    original = metadata.size("rope.scaling.original_context_length", metadata.size("context_length"))
    metadata.must_be("rope.scaling.finetuned", *finetuned)  # else says nothing of what is computed
    metadata.any("rope.dimension_sections")  # positions of a text are the same in all of them
    yarn = {
        "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", 32.0, least=LEAST),
        "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", 1.0, least=LEAST),
    }
    metadata.must_be("rope.scaling.yarn_ext_factor", 1.0)
    metadata.must_be("rope.scaling.yarn_attn_factor", 1.0)
    if partial and metadata.has(NEAR_FACTORS):
        return found | _by_length(metadata, rotated // 2, original, factor)
    metadata.must_be("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise metadata.bad("rope.scaling.type", kind, "none, linear and yarn are read")
    if kind != "none" and factor != 1.0:
        found |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found |= {"original_max_position_embeddings": original, **yarn}
    return found


def stretched(metadata: Metadata, head_dim: int) -> Values:
    """A rotary embedding whose frequencies may be divided, as Llama 3.1's are."""
    if metadata.has(ROPE_FACTORS):
        metadata.tensor(ROPE_FACTORS, head_dim // 2)
    return rotary(metadata, head_dim)


def _by_length(metadata: Metadata, factors: int, original: int, scaled: float) -> Values:
    """Frequencies with a factor each, others beyond the original context, where the model is not served. What they are is read with
    the tensors: here they are 1."""
    for name in (NEAR_FACTORS, FAR_FACTORS):
        metadata.tensor(name, factors)
    attention = metadata.real("rope.scaling.attn_factor", 1.0)
    if not 0 < attention <= MOST_ATTENTION:
        raise metadata.bad("rope.scaling.attn_factor", attention, f"above 0, at most {MOST_ATTENTION:g}")
    if scaled != 1.0:
        raise metadata.bad("rope.scaling.factor", scaled, f"1, beside {NEAR_FACTORS}")
    return {
        "rope_type": "longrope",
        "short_factor": [1.0] * factors,
        "long_factor": [1.0] * factors,
        "factor": max(1.0, metadata.size("context_length") / original),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def granite_scales(metadata: Metadata, head_dim: int) -> Values:
    return {
        "attention_multiplier": metadata.real("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": metadata.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.real("logit_scale", least=LEAST),
    }


def permuted(metadata: Metadata) -> None:
    """What all files of this architecture have."""
    metadata.must_be("tensor_data_layout", "Meta AI original pth")  # how queries and keys are permuted


def alternating(metadata: Metadata, values: Values, period: int) -> list[str]:
    """Every `period`-th layer attends to all positions, the others to a window; or as the file says of each layer."""
    layers, key = values["num_hidden_layers"], "attention.sliding_window_pattern"
    if isinstance(metadata.header.values.get(f"{metadata.architecture}.{key}"), tuple):
        return ["sliding_attention" if each else "full_attention" for each in metadata.each(key, layers)]
    metadata.must_be(key, period)
    return [
        "full_attention" if layer % period == 0 else "sliding_attention" for layer in range(1, layers + 1)
    ]
