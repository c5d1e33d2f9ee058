"""A small model that can be chatted with, as Hugging Face stores one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.families import build, config
from support.source_tokenizer import tokenizer_of_sources
from tokenizers import AddedToken, Tokenizer, processors

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    """One that begins each text with <s>, as Llama's does, unless it is told not to."""
    made = tokenizer_of_sources()
    made.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<s>", "<|im_start|>", "<|im_end|>")]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def save_model(directory: Path, made: Tokenizer, positions: int | None = None) -> Any:
    """A small llama with that tokenizer and TEMPLATE."""
    llama = config("llama")
    if positions is not None:
        llama.max_position_embeddings = positions
    llama.vocab_size = made.get_vocab_size()
    model = build(llama)
    model.save_pretrained(directory)
    made.save(str(directory / "tokenizer.json"))
    about = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return model
