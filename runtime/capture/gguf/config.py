"""What a GGUF file says of its model, as the configuration of the same model in transformers.

A value that is passed over, or taken for another, makes a model that answers, and answers nonsense. So every value under the
architecture's name has to be understood here, and the sizes have to be those of the tensors; the file is refused otherwise.
What files leave unsaid is what llama.cpp, whose format it is, takes for it (its `src/models`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusion.runtime.capture.gguf.header import GGUFHeader, Value, shown
from fusion.runtime.job.errors import JobError

MAX_CONTEXT = 1 << 24  # positions
LEAST_SCALE = 1e-3  # of queries: 1 by the root of a head's length, which then has a million numbers
TOKENS = "tokenizer.ggml.tokens"
SOFTMAX, SOFTMAX_CHOSEN = 1, 3  # what makes weights of all of a router's numbers, or of the largest of them
# By which the frequencies of a rotary embedding are divided: by Llama 3.1 always, by Phi-3 up to its original context and beyond.
ROPE_FACTORS = "rope_freqs.weight"
NEAR_FACTORS, FAR_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
MOST_ATTENTION = 10.0  # times that queries and keys are made longer with those of Phi-3; for 131,072 positions of 4096 it is 1.19

Values = dict[str, Any]  # keyword arguments of a configuration


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    architecture: str  # as the file names it
    model_type: str  # as transformers does
    values: Mapping[str, Any]  # of the configuration
    layers: int
    vocabulary: int
    max_sequence: int


def model_config(header: GGUFHeader) -> ModelConfig:
    """JobError for an architecture that is not read, a value that is missing or not understood, or one that does not fit
    the tensors."""
    said = _Said(header)
    architecture = said.architecture
    mixture = said.whole("expert_count", 0) > 0
    if not mixture:
        said.must_be("expert_used_count", 0)
    table = MIXTURES if mixture else ARCHITECTURES
    found = table.get(architecture)
    if found is None:
        kind = "a mixture of experts" if mixture else "a model"
        known = ", ".join(table)
        raise JobError(f"{header.path}: {kind} of the kind {shown(architecture)}; {known} are read from GGUF")
    model_type, values = found
    config = ModelConfig(
        architecture=architecture,
        model_type=model_type,
        values=values(said),
        layers=said.size("block_count"),
        vocabulary=header.tensors["token_embd.weight"].shape[0],
        max_sequence=said.size("context_length"),
    )
    said.all_taken()
    return config


class _Said:
    """The file's values, each to be taken by whoever understands it."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        kind = header.values.get("general.type", "model")
        if kind != "model":
            raise JobError(f"{header.path}: not a model but {shown(str(kind))}")
        self.architecture = str(header.values.get("general.architecture"))
        self._prefix = f"{self.architecture}."
        self._left = {key for key in header.values if key.startswith(self._prefix)}

    def whole(self, key: str, default: int | None = None) -> int:
        found = self._same(key, default)
        if type(found) is not int or not 0 <= found < 1 << 32:
            raise self.bad(key, found, "a whole number")
        return found

    def size(self, key: str, default: int | None = None) -> int:
        found = self.whole(key, default)
        if not found:
            raise self.bad(key, found, "at least 1")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        found = self._same(key, default)
        if type(found) not in (int, float) or not math.isfinite(found):
            raise self.bad(key, found, "a number")
        return float(found)

    def text(self, key: str, default: str | None = None) -> str:
        found = self._same(key, default)
        if not isinstance(found, str):
            raise self.bad(key, found, "a text")
        return found

    def must_be(self, key: str, *wanted: Value) -> None:
        """For a value that is only known as one of these, if it is there at all."""
        found = self._same(key, wanted[0])
        if found not in wanted:
            raise self.bad(key, found, " or ".join(map(str, wanted)))

    def tensor(self, name: str, *shape: int) -> None:
        """JobError unless the file has this tensor, in this shape."""
        found = self.header.tensors.get(name)
        if found is None:
            raise JobError(f"{self.header.path}: no tensor {name}")
        if found.shape != shape:
            raise JobError(
                f"{self.header.path}: {name} has the shape {found.shape}, and its values say {shape}"
            )

    def has(self, name: str) -> bool:
        return name in self.header.tensors

    def all_taken(self) -> None:
        for key in sorted(self._left):
            raise JobError(
                f"{self.header.path} says {shown(key)} = {_brief(self.header.values[key])}, which is not understood"
            )

    def bad(self, key: str, found: object, wanted: str) -> JobError:
        what = "does not say" if found is None else "says"
        value = "" if found is None else f" = {_brief(found)}"
        return JobError(f"{self.header.path} {what} {self._prefix}{key}{value}: {wanted}")

    def _same(self, key: str, default: Any) -> Any:
        """A value, or the one that a list repeats for each layer."""
        self._left.discard(self._prefix + key)
        found = self.header.values.get(self._prefix + key, default)
        if not isinstance(found, tuple):
            return found
        if not found or any(each != found[0] for each in found):
            raise JobError(
                f"{self.header.path} says another {self._prefix}{key} for each layer, which is not supported"
            )
        return found[0]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


# --- what all of them say


def _decoder(said: _Said, norm: str = "ffn_norm") -> Values:
    """Sizes and heads, under the names of most configurations. `norm`: a tensor that each layer has."""
    hidden, heads = said.size("embedding_length"), said.size("attention.head_count")
    layers = said.size("block_count")
    head_dim = said.size("attention.key_length", hidden // heads)
    said.must_be("attention.value_length", head_dim)
    said.must_be("attention.causal", True)
    context = said.size("context_length")
    if context > MAX_CONTEXT:
        raise said.bad("context_length", context, f"at most {MAX_CONTEXT}")
    embedding = said.header.tensors.get("token_embd.weight")
    vocabulary = 0 if embedding is None else embedding.shape[0]
    said.tensor("token_embd.weight", vocabulary, hidden)
    said.must_be("vocab_size", vocabulary)
    tokens = said.header.values.get(TOKENS)
    if isinstance(tokens, tuple) and len(tokens) > vocabulary:
        raise JobError(
            f"{said.header.path} has {len(tokens)} tokens in its tokenizer, and {vocabulary} in token_embd.weight"
        )
    kv_heads = said.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise said.bad("attention.head_count_kv", kv_heads, f"a divisor of {heads}")
    for layer in range(layers):  # each has one: no list is longer than the file's own of its tensors
        said.tensor(f"blk.{layer}.{norm}.weight", hidden)
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": said.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "tie_word_embeddings": not said.has("output.weight"),
        # Ids of tokens change nothing that is computed, and defaults may lie outside the vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _gated(said: _Said, values: Values) -> Values:
    """A decoder with separate queries, keys and values, and a gated feed-forward; checked against its first layer, so that
    nothing larger than the file's tensors is ever built."""
    said.tensor("blk.0.ffn_gate.weight", values["intermediate_size"], values["hidden_size"])
    return _attentive(said, values)


def _attentive(said: _Said, values: Values) -> Values:
    """One with separate queries, keys and values."""
    hidden, head_dim = values["hidden_size"], values["head_dim"]
    said.tensor("blk.0.attn_q.weight", values["num_attention_heads"] * head_dim, hidden)
    said.tensor("blk.0.attn_k.weight", values["num_key_value_heads"] * head_dim, hidden)
    return values | _rms(said)


def _mixed(
    said: _Said, *, normed: bool, wide: int | None = None, norm: str = "ffn_norm", gating: int = SOFTMAX
) -> tuple[Values, int, int]:
    """A decoder whose every layer has gated experts, checked as `_gated` does; how many experts, and how wide each is: `wide`
    where the file does not say it. `normed`: whether this architecture's weights of those that are chosen are divided by their sum;
    `norm`: as of `_decoder`; `gating`: how weights are made of a router's numbers."""
    values = _attentive(said, _decoder(said, norm))
    count, used = said.size("expert_count"), said.size("expert_used_count")
    if used > count:
        raise said.bad("expert_used_count", used, f"at most {count}")
    found = said.size("expert_feed_forward_length", wide or max(1, values["intermediate_size"] // used))
    if wide not in (None, found):
        raise said.bad("expert_feed_forward_length", found, f"{wide}")
    for layer in range(values["num_hidden_layers"]):
        said.tensor(f"blk.{layer}.ffn_down_exps.weight", count, values["hidden_size"], found)
    said.must_be("expert_weights_norm", normed)
    said.must_be("expert_weights_scale", 1.0, 0.0)  # none
    said.must_be("expert_gating_func", gating, 0)  # 0: that of the architecture
    said.must_be("expert_group_count", 0, 1)
    said.must_be("expert_group_used_count", 0, 1)
    return values | {"num_experts_per_tok": used}, count, found


def _rms(said: _Said) -> Values:
    return {"rms_norm_eps": said.real("attention.layer_norm_rms_epsilon")}


def _plain_heads(said: _Said) -> int:
    """The length of a head, for configurations that do not say it: all heads together are as long as the embedding."""
    hidden, heads = said.size("embedding_length"), said.size("attention.head_count")
    said.must_be("attention.key_length", hidden // heads)
    return hidden // heads


def _rotary(said: _Said, head_dim: int, *, partial: bool = False) -> Values:
    """The rotary embedding and how it was stretched to longer contexts."""
    rotated = said.size("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2 or (rotated != head_dim and not partial):
        raise said.bad("rope.dimension_count", rotated, f"the {head_dim} of a head")
    found: Values = {"rope_type": "default", "rope_theta": said.real("rope.freq_base", 10_000.0)}
    if found["rope_theta"] <= 0:
        raise said.bad("rope.freq_base", found["rope_theta"], "above 0")
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    older = said.real("rope.scale_linear", 0.0)
    factor = said.real("rope.scaling.factor", older) or 1.0
    kind = said.text("rope.scaling.type", "linear")
    original = said.size("rope.scaling.original_context_length", said.size("context_length"))
    said.must_be("rope.scaling.finetuned", False, True)  # says nothing of what is computed
    yarn = {
        "beta_fast": said.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": said.real("rope.scaling.yarn_beta_slow", 1.0),
    }
    said.must_be("rope.scaling.yarn_ext_factor", 1.0)
    said.must_be("rope.scaling.yarn_attn_factor", 1.0)
    if partial and said.has(NEAR_FACTORS):
        return found | _by_length(said, rotated // 2, original, factor)
    said.must_be("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise said.bad("rope.scaling.type", kind, "none, linear and yarn are read")
    if factor <= 0:
        raise said.bad("rope.scaling.factor", factor, "above 0")
    if kind != "none" and factor != 1.0:
        found |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found |= {"original_max_position_embeddings": original, **yarn}
    return found


def _by_length(said: _Said, factors: int, original: int, scaled: float) -> Values:
    """Frequencies with a factor each, others beyond the original context, where the model is not served. What they are is read with
    the tensors: here they are 1."""
    for name in (NEAR_FACTORS, FAR_FACTORS):
        said.tensor(name, factors)
    attention = said.real("rope.scaling.attn_factor", 1.0)
    if not 0 < attention <= MOST_ATTENTION:
        raise said.bad("rope.scaling.attn_factor", attention, f"above 0, at most {MOST_ATTENTION:g}")
    if scaled != 1.0:
        raise said.bad("rope.scaling.factor", scaled, f"1, beside {NEAR_FACTORS}")
    return {
        "rope_type": "longrope",
        "short_factor": [1.0] * factors,
        "long_factor": [1.0] * factors,
        "factor": max(1.0, said.size("context_length") / original),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


# --- the architectures


def _llama(said: _Said) -> Values:
    values = _gated(said, _decoder(said))
    _permuted(said, values)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": _rotary(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_output.bias"),
        "mlp_bias": said.has("blk.0.ffn_down.bias"),
    }


def _permuted(said: _Said, values: Values) -> None:
    """What all files of this architecture have."""
    said.must_be("tensor_data_layout", "Meta AI original pth")  # how queries and keys are permuted
    if said.has(ROPE_FACTORS):
        said.tensor(ROPE_FACTORS, values["head_dim"] // 2)


def _mixtral(said: _Said) -> Values:
    values, count, _ = _mixed(said, normed=True, wide=said.size("feed_forward_length"))
    _permuted(said, values)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": _rotary(said, values["head_dim"]),
        "sliding_window": None,
        "num_local_experts": count,
    }


def _olmoe(said: _Said) -> Values:
    head_dim = _plain_heads(said)
    values, count, _ = _mixed(said, normed=False, wide=said.size("feed_forward_length"))
    del values["head_dim"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": _rotary(said, head_dim),
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": count,
        "norm_topk_prob": False,
    }


def _qwen2_moe(said: _Said) -> Values:
    head_dim = _plain_heads(said)
    values, count, wide = _mixed(said, normed=False)
    del values["head_dim"]
    hidden = values["hidden_size"]
    shared = said.size("expert_shared_feed_forward_length", values["intermediate_size"])
    said.tensor("blk.0.ffn_up_shexp.weight", shared, hidden)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": _rotary(said, head_dim),
        "qkv_bias": True,
        "use_sliding_window": False,
        "moe_intermediate_size": wide,
        "shared_expert_intermediate_size": shared,
        "num_experts": count,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_moe(said: _Said) -> Values:
    values, count, wide = _mixed(said, normed=True)
    return values | {
        "hidden_act": "silu",
        "rope_parameters": _rotary(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_output.bias"),
        "use_sliding_window": False,
        "moe_intermediate_size": wide,
        "num_experts": count,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(said: _Said) -> Values:
    values, count, wide = _mixed(said, normed=False, norm="post_attention_norm", gating=SOFTMAX_CHOSEN)
    rotary = _rotary(said, values["head_dim"])
    if rotary["rope_type"] == "yarn":
        rotary["truncate"] = False  # as the models of this kind do
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary,
        "attention_bias": True,
        "intermediate_size": wide,
        "num_local_experts": count,
        "sliding_window": said.size("attention.sliding_window"),
        "layer_types": _alternating(said, values, 2),
    }


def _qwen2(said: _Said) -> Values:
    head_dim = _plain_heads(said)
    values = _gated(said, _decoder(said))
    del values["head_dim"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": _rotary(said, head_dim),
        "use_sliding_window": False,
    }


def _qwen3(said: _Said) -> Values:
    values = _gated(said, _decoder(said))
    return values | {
        "hidden_act": "silu",
        "rope_parameters": _rotary(said, values["head_dim"]),
        "attention_bias": said.has("blk.0.attn_output.bias"),
        "use_sliding_window": False,
    }


def _gemma(said: _Said) -> Values:
    values = _gated(said, _decoder(said))
    return values | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": _rotary(said, values["head_dim"]),
    }


def _gemma2(said: _Said) -> Values:
    values = _gemma(said)
    return values | {
        "attn_logit_softcapping": said.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said.real("final_logit_softcapping", 30.0),
        "sliding_window": said.size("attention.sliding_window", 4096),
        "layer_types": _alternating(said, values, 2),
        "query_pre_attn_scalar": _query_scale(said, values, 46),
    }


def _gemma3(said: _Said) -> Values:
    values = _gemma(said)
    near = said.real("rope.freq_base_swa", 10_000.0)
    return values | {
        "final_logit_softcapping": said.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": said.size("attention.sliding_window"),
        "layer_types": _alternating(said, values, 6),
        "query_pre_attn_scalar": _query_scale(said, values, 62),
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
    }


def _alternating(said: _Said, values: Values, period: int) -> list[str]:
    """Every `period`-th layer attends to all positions, the others to a window."""
    said.must_be("attention.sliding_window_pattern", period)
    layers = range(1, values["num_hidden_layers"] + 1)
    return ["full_attention" if layer % period == 0 else "sliding_attention" for layer in layers]


def _query_scale(said: _Said, values: Values, largest: int) -> float:
    """Queries are divided by its root. Conversions do not write it: it is the length of a head, but for the largest model of
    the family, which goes by its layers."""
    heads = values["num_attention_heads"]
    usual = values["hidden_size"] // heads if values["num_hidden_layers"] == largest else values["head_dim"]
    scale = said.real("attention.scale", usual**-0.5)
    if not LEAST_SCALE <= scale <= 1:
        raise said.bad("attention.scale", scale, f"from {LEAST_SCALE:g} to 1")
    whole = round(scale**-2)  # what it was before it was rounded to 32 bits
    return whole if math.isclose(whole**-0.5, scale, rel_tol=1e-6) else scale**-2


def _phi3(said: _Said) -> Values:
    head_dim = _plain_heads(said)
    values = _decoder(said) | _rms(said)
    del values["head_dim"]
    hidden = values["hidden_size"]
    rows = values["num_attention_heads"] + 2 * values["num_key_value_heads"]
    said.tensor("blk.0.attn_qkv.weight", rows * head_dim, hidden)
    said.tensor("blk.0.ffn_up.weight", 2 * values["intermediate_size"], hidden)
    window = said.whole("attention.sliding_window", 0)
    rotary = {"partial_rotary_factor": 1.0, **_rotary(said, head_dim, partial=True)}
    whole = values["max_position_embeddings"]
    return values | {
        "hidden_act": "silu",
        "rope_parameters": rotary,
        "original_max_position_embeddings": rotary.get("original_max_position_embeddings", whole),
        "sliding_window": window or None,
    }


def _gpt2(said: _Said) -> Values:
    head_dim = _plain_heads(said)
    values = _decoder(said)
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


ARCHITECTURES: Mapping[str, tuple[str, Callable[[_Said], Values]]] = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _qwen2),
    "qwen3": ("qwen3", _qwen3),
    "gemma": ("gemma", _gemma),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "phi3": ("phi3", _phi3),
    "gpt2": ("gpt2", _gpt2),
}
# Those with experts in every layer.
MIXTURES: Mapping[str, tuple[str, Callable[[_Said], Values]]] = {
    "llama": ("mixtral", _mixtral),
    "qwen2moe": ("qwen2_moe", _qwen2_moe),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "olmoe": ("olmoe", _olmoe),
    "gpt-oss": ("gpt_oss", _gpt_oss),
}
