"""Small encoder-decoders of transformers with random weights that make answers vary, and the answers of their `generate()`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from support.captured_once import source_captured_once

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.serving_graph import serving_graph

VOCABULARY = 120
POSITIONS = 128
FRAMES, CHANNELS = 60, 8
START, END = 3, 2


def build(family: str, **more: Any) -> Any:
    """A module of "bart", "m2m_100", "mvp", "t5", "t5gemma" or "whisper", with POSITIONS positions at most, and FRAMES of
    features."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END, "decoder_start_token_id": START}
    common = {"vocab_size": VOCABULARY, "d_model": 32, "tie_word_embeddings": False} | tokens | more
    layers = {f"{half}_{part}": n for half in ("encoder", "decoder") for part, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    torch.manual_seed(3)
    if family == "t5":
        config = transformers.T5Config(
            d_kv=8, d_ff=48, num_layers=2, num_heads=4, n_positions=POSITIONS,
            relative_attention_num_buckets=8, relative_attention_max_distance=20, **common,
        )  # fmt: skip
        model: Any = transformers.T5ForConditionalGeneration(config)
    elif family == "bart":
        config = transformers.BartConfig(
            max_position_embeddings=POSITIONS, forced_eos_token_id=None, **layers, **common
        )
        model = transformers.BartForConditionalGeneration(config)
    elif family == "mvp":  # which writes its attention out
        config = transformers.MvpConfig(
            max_position_embeddings=POSITIONS, forced_eos_token_id=None, **layers, **common
        )
        model = transformers.MvpForConditionalGeneration(config)
    elif family == "t5gemma":  # which caps its scores, and hides padding where it is given no mask
        half = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "attn_logit_softcapping": 5.0,
            "max_position_embeddings": POSITIONS,
        } | tokens  # fmt: skip
        del half["decoder_start_token_id"]
        config = transformers.T5GemmaConfig(
            encoder=half, decoder=half, vocab_size=VOCABULARY, tie_word_embeddings=False, **tokens, **more
        )
        model = transformers.T5GemmaForConditionalGeneration(config)
    elif family == "m2m_100":
        config = transformers.M2M100Config(max_position_embeddings=POSITIONS, **layers, **common)
        model = transformers.M2M100ForConditionalGeneration(config)
    else:
        config = transformers.WhisperConfig(
            max_source_positions=FRAMES // 2, max_target_positions=POSITIONS, num_mel_bins=CHANNELS, **layers, **common
        )  # fmt: skip
        model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * _spread(name, parameter))
        if family == "t5":  # tied: where what a token brings outweighs the rest, it is said again and again
            model.shared.weight.mul_(0.1)
            model.shared.weight[END] = 0.0  # and nothing ends early
    if family in ("bart", "m2m_100", "mvp"):  # one that is tied says the same token again and again
        drawn = torch.randn(config.vocab_size, config.d_model, generator=torch.Generator().manual_seed(0))
        model.lm_head.weight = torch.nn.Parameter(drawn)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=START, pad_token_id=0, eos_token_id=END
    )
    return model.eval()


def _spread(name: str, parameter: torch.Tensor) -> float:
    """The scale of the noise that is added to each initial parameter, so that a test notices if one of them is not used."""
    if parameter.dim() == 1:
        return 0.1
    if "relative" in name:
        return 2.0
    return 1.0 if "embed" in name or "shared" in name else parameter.shape[-1] ** -0.5


@functools.cache
def made(family: str) -> tuple[Graph, Any]:
    """The serving graph of the family, and its module."""
    model = build(family)
    sizes = {"maximum_sequence": POSITIONS, "maximum_source": POSITIONS}
    if family == "whisper":
        sizes["maximum_source"] = FRAMES
    captured = source_captured_once(model, **sizes, features=CHANNELS if family == "whisper" else 0)
    return serving_graph(captured, **sizes), model


def source(family: str, length: int, seed: int = 0) -> torch.Tensor:
    """(1, length) token ids, or (1, CHANNELS, FRAMES) features."""
    draw = torch.Generator().manual_seed(seed)
    if family == "whisper":
        return torch.randn(1, CHANNELS, FRAMES, generator=draw)
    return torch.randint(4, VOCABULARY, (1, length), generator=draw)


def generated(model: Any, given: torch.Tensor, new: int, **more: Any) -> list[int]:
    """The greedy tokens of `generate()` after START, with the end token if it is reached."""
    features = given.is_floating_point()
    with torch.inference_mode():
        found = model.generate(
            given, max_new_tokens=new, min_new_tokens=new, eos_token_id=None, do_sample=False, **more
        )
    return [int(token) for token in found[0, 0 if features else 1 :]]  # Whisper's own leaves START out


def logits(model: Any, given: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """The logits (positions, vocabulary), computed over the whole sequence at once."""
    name = "input_features" if given.is_floating_point() else "input_ids"
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=given.device)
        found: torch.Tensor = model(
            **{name: given},
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones_like(ids),
            use_cache=False,
        ).logits[0]
    return found
