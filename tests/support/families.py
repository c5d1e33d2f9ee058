"""Small language models with random weights, of the families that transformers knows."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from support.captured_once import captured_once

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.serving_graph import serving_graph

VOCABULARY = 256
POSITIONS = 256
RECOMPUTED = frozenset({"openai-gpt"})  # their attention is not recognised
WINDOW = 16  # of "mistral-windowed": far fewer positions than an answer has

# Weights this wide make answers that vary (twice as wide, and rounding alone moves float32 logits by 1e-4, whoever
# computes them); no token ends an answer.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "initializer_range": 0.22,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SMALL: dict[str, Any] = {
    **COMMON, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {**GROUPED, "intermediate_size": 48}
# With so many heads hardly any two keys are as good as each other.
INDEXER: dict[str, Any] = {"index_topk": 24, "index_n_heads": 32, "index_head_dim": 16}
GPT: dict[str, Any] = {**COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
FALCON: dict[str, Any] = {
    **COMMON, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": POSITIONS,
}  # fmt: skip


def config(family: str) -> Any:
    match family:
        case "llama":
            return transformers.LlamaConfig(**GROUPED)
        case "qwen3":
            return transformers.Qwen3Config(**GROUPED, head_dim=16)
        case "llama-bfloat16":
            return transformers.LlamaConfig(**GROUPED, dtype="bfloat16")
        case "llama-yarn":  # answers go beyond the positions that its frequencies are stretched from
            yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4}
            return transformers.LlamaConfig(**GROUPED, rope_parameters={"rope_theta": 10000.0, **yarn})
        case "llama-dynamic":  # served for as many positions as have the frequencies that it begins with
            dynamic = {"rope_type": "dynamic", "factor": 4.0}
            return transformers.LlamaConfig(**GROUPED, rope_parameters={"rope_theta": 10000.0, **dynamic})
        case "gpt2":
            return transformers.GPT2Config(**GPT)
        case "mistral":
            return transformers.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=None)
        case "mistral-windowed":
            return transformers.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=WINDOW)
        case "phi":
            return transformers.PhiConfig(**SMALL)
        case "neox":
            return transformers.GPTNeoXConfig(**SMALL)
        case "bloom":  # ALiBi: a bias by distance
            wide = {**COMMON, "initializer_range": 0.2}
            return transformers.BloomConfig(
                **wide, hidden_size=64, n_layer=3, n_head=4, tie_word_embeddings=False
            )
        case "mixtral":
            return transformers.MixtralConfig(
                **{**EXPERTS, "intermediate_size": 96}, num_local_experts=6, num_experts_per_tok=2
            )
        case "qwen3-moe":
            return transformers.Qwen3MoeConfig(
                **EXPERTS, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3
            )
        case "qwen2-moe":  # an expert that every position goes to
            return transformers.Qwen2MoeConfig(
                **EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=8,
                num_experts_per_tok=3,
            )  # fmt: skip
        case "olmoe":
            return transformers.OlmoeConfig(**EXPERTS, num_experts=8, num_experts_per_tok=3)
        case "granite-moe":
            return transformers.GraniteMoeConfig(
                **EXPERTS, num_local_experts=6, num_experts_per_tok=2, logits_scaling=4.0
            )
        case (
            "deepseek-v3"
        ):  # latent attention, experts chosen among groups of them, one that every position goes to
            return transformers.DeepseekV3Config(
                **{**EXPERTS, "num_key_value_heads": 4}, moe_intermediate_size=32, n_routed_experts=8, n_group=4,
                topk_group=2, num_experts_per_tok=3, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
                qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_shared_experts=1,
            )  # fmt: skip
        case "deepseek-v32":  # an indexer selects the keys: fewer than answers have
            return transformers.DeepseekV32Config(
                **{**EXPERTS, "num_hidden_layers": 2, "num_key_value_heads": 4}, moe_intermediate_size=32,
                n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
                q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
                n_shared_experts=1, **INDEXER,
            )  # fmt: skip
        case "glm-moe-dsa":  # the same, of which every other layer takes the selection of the one before
            return transformers.GlmMoeDsaConfig(
                **{**EXPERTS, "num_hidden_layers": 2, "num_key_value_heads": 4}, moe_intermediate_size=32,
                n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
                qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_shared_experts=1,
                indexer_types=["full", "shared"], **INDEXER,
            )  # fmt: skip
        case "longcat-flash":  # a loop over experts, of which some give what they are given
            return transformers.LongcatFlashConfig(
                **{**COMMON, "initializer_range": 0.2}, hidden_size=64, num_layers=2, num_hidden_layers=4,
                num_attention_heads=4, max_position_embeddings=POSITIONS, ffn_hidden_size=96, q_lora_rank=16,
                kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, head_dim=8, v_head_dim=16, qk_head_dim=16,
                moe_topk=3, n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=32,
            )  # fmt: skip
        case "gpt-oss":  # sinks, biased experts, every other layer sees a window
            return transformers.GptOssConfig(
                **{**EXPERTS, "num_hidden_layers": 2}, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
                tie_word_embeddings=False,
            )  # fmt: skip
        case "qwen3-next":  # gated delta rule but in every other layer, experts
            return transformers.Qwen3NextConfig(
                **{**EXPERTS, "num_hidden_layers": 2}, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=32, shared_expert_intermediate_size=32,
                layer_types=["linear_attention", "full_attention"],
            )  # fmt: skip
        case "kimi-linear":  # the same, decaying by itself in each width
            more = {**EXPERTS, "num_hidden_layers": 2, "num_key_value_heads": 4}
            return transformers.KimiLinearConfig(
                **more, linear_num_heads=4, linear_head_dim=8, kv_lora_rank=16, q_lora_rank=None,
                qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=32, layer_types=["linear_attention", "full_attention"],
            )  # fmt: skip
        case "mamba":
            small = {**COMMON, "hidden_size": 64, "num_hidden_layers": 2}
            return transformers.MambaConfig(**small, state_size=8, time_step_rank=8)
        case "mamba2":
            small = {**COMMON, "hidden_size": 64, "num_hidden_layers": 2}
            return transformers.Mamba2Config(
                **small, state_size=16, num_heads=64, head_dim=2, n_groups=4, chunk_size=16
            )
        case "mpt":  # ALiBi, from a table of its own; its code is another at the length of that table
            return transformers.MptConfig(
                **COMMON, d_model=64, n_layers=3, n_heads=4, expansion_ratio=2, max_seq_len=POSITIONS + 1
            )
        case "falcon":
            return transformers.FalconConfig(**FALCON)
        case "falcon-alibi":  # in bfloat16, whatever the model is in
            return transformers.FalconConfig(**FALCON, alibi=True)
        case "gptj":
            return transformers.GPTJConfig(**GPT, rotary_dim=8)
        case "codegen":
            return transformers.CodeGenConfig(**GPT, rotary_dim=8)
        case "gptneo":  # masks from tables; every other layer sees a window
            return transformers.GPTNeoConfig(
                **COMMON, hidden_size=64, num_layers=4, num_heads=4, intermediate_size=128, window_size=WINDOW,
                attention_types=[[["global", "local"], 2]], max_position_embeddings=POSITIONS + 1,
            )  # fmt: skip
        case "opt":
            return transformers.OPTConfig(
                **COMMON, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=3,
                num_attention_heads=4, max_position_embeddings=POSITIONS, init_std=0.22,
            )  # fmt: skip
        case "xglm":
            padded = {
                **COMMON,
                "pad_token_id": 1,
                "tie_word_embeddings": False,
            }  # its positions leave room for it
            return transformers.XGLMConfig(
                **padded, d_model=64, ffn_dim=128, num_layers=3, attention_heads=4,
                max_position_embeddings=POSITIONS, init_std=0.22,
            )  # fmt: skip
        case "openai-gpt":  # hides later positions with -10000, which is not enough
            wider = {**GPT, "n_positions": POSITIONS + 1, "tie_word_embeddings": False}
            return transformers.OpenAIGPTConfig(**wider)
        case "gemma2":  # caps its attention scores, and every other layer sees a window
            return transformers.Gemma2Config(
                **GROUPED, head_dim=16, sliding_window=WINDOW, tie_word_embeddings=False
            )
        case "gemma3":
            more = {**GROUPED, "num_hidden_layers": 6, "tie_word_embeddings": False}
            return transformers.Gemma3TextConfig(**more, head_dim=16, sliding_window=WINDOW)
        case "cohere2":
            more = {**GROUPED, "num_hidden_layers": 4}
            return transformers.Cohere2Config(**more, sliding_window=WINDOW)
    raise ValueError(family)


def build(configuration: Any, seed: int = 1, attention: str | None = None) -> Any:
    """The causal language model of this configuration with random weights, in evaluation mode. `attention` replaces the
    model's implementation of attention ("eager": written out)."""
    torch.manual_seed(seed)
    given = {} if attention is None else {"attn_implementation": attention}
    module = transformers.AutoModelForCausalLM.from_config(configuration, **given)  # type: ignore[no-untyped-call]
    return module.eval()


@functools.cache
def exported(family: str) -> tuple[Graph, Any]:
    """The whole graph of a small model of this family, and the model, which no test may change.
    "llama, eager" is a llama that writes its attention out."""
    name, _, attention = family.partition(", ")
    model = build(config(name), attention=attention or None)
    return captured_once(model, training=False, maximum_sequence=POSITIONS), model


@functools.cache
def made(family: str, cache: str = "", positions: int = POSITIONS) -> tuple[Graph, Any]:
    """`exported`, rewritten for answers of at most so many positions; by default with the family's kind of cache."""
    graph, model = exported(family)
    kind = cache or ("recompute" if family in RECOMPUTED else "kv")
    return serving_graph(graph, cache=kind, maximum_sequence=positions), model  # type: ignore[arg-type]


def greedy(model: Any, prompt: list[int], new: int, **settings: Any) -> tuple[list[int], torch.Tensor]:
    """The answer of `generate()` with these settings, and the logits (new, vocabulary) of its tokens, computed over the whole
    sequence at once."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        whole = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **settings
        )
        logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return whole[0, len(prompt) :].tolist(), logits.cpu()


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether the model, given the prompt and the answer at once, has chosen each token of the answer: what `generate()` would give,
    for the price of one pass."""
    with torch.inference_mode():
        ids = torch.tensor([prompt + answer], device=model.device)
        chosen = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
    return bool(chosen.tolist() == answer)
