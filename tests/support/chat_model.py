"""A small model that can be chatted with, as Hugging Face stores one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.families import build, config, greedy
from support.source_tokenizer import tokenizer_of_sources
from tokenizers import AddedToken, Tokenizer, processors

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    """A tokenizer that begins each text with <s>, as Llama's does, unless `add_special_tokens` is false."""
    made = tokenizer_of_sources()
    made.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<s>", "<|im_start|>", "<|im_end|>")]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def save_model(directory: Path, made: Tokenizer, positions: int | None = None, layers: int = 3) -> Any:
    """A small llama with that tokenizer and TEMPLATE."""
    llama = config("llama")
    llama.num_hidden_layers = layers
    if positions is not None:
        llama.max_position_embeddings = positions
    llama.vocab_size = made.get_vocab_size()
    model = build(llama)
    model.save_pretrained(directory)
    made.save(str(directory / "tokenizer.json"))
    about = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return model


def chat_prompt(made: Tokenizer, said: Sequence[tuple[str, str]]) -> list[int]:
    """The tokens of a chat, (role, text) each, as TEMPLATE writes it."""
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    ids: list[int] = made.encode(f"<s>{turns}<|im_start|>assistant\n", add_special_tokens=False).ids
    return ids


def teach(model: Any, made: Tokenizer, text: str, prompt: list[int], index: int) -> None:
    """Make the model choose `text`, which is one token of `made`, in place of token number `index` of its greedy answer to
    `prompt`, wherever it would choose that token."""
    instead, new = greedy(model, prompt, index + 1)[0][index], made.token_to_id(text)
    into, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        into[new], out[new] = into[instead], 1.001 * out[instead]
    assert greedy(model, prompt, index + 1)[0][index] == new, "its logit is below zero: take another index"
