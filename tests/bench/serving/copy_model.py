"""A small model that has learned to copy: documents of random tokens, each followed by a copy in which one token is renamed.
Its answers are as predictable from the prompt as quoting, reformatting and renaming are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
SEPARATOR, OLD_NAME, NEW_NAME, FIRST_WORD = 0, 1, 2, 3
RENAMED_SHARE = 1 / 16
STEPS, TOKENS_A_STEP, LEARNING_RATE = 900, 1024, 4e-3
LONGEST_LEARNED = 96
POSITIONS = 1024


def save_copy_model(path: Path, *, steps: int = STEPS, seed: int = 0) -> None:
    """Train the model, in half a minute of a core, the same for the same `seed`. Does nothing if the directory has one already."""
    if (path / "config.json").is_file():
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
        _train(model, steps, Random(seed))
    torch.set_num_threads(threads)
    model.save_pretrained(path)


def _train(model: LlamaForCausalLM, steps: int, random: Random) -> None:
    draws = torch.Generator().manual_seed(random.randrange(1 << 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(steps):
        # Short documents first, which are learned from sooner.
        length = random.randint(8, min(LONGEST_LEARNED, 12 + step // 8))
        ids = _documents(max(4, TOKENS_A_STEP // (2 * length)), length, draws)
        logits = model(ids[:, :-1], use_cache=False).logits[:, length + 1 :]
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, length + 2 :].flatten())
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50, (steps - step) / (0.3 * steps) + 0.02)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _documents(count: int, length: int, draws: torch.Generator) -> torch.Tensor:
    """Random documents with their copies, (count, 2 * length + 2) token ids."""
    words = torch.randint(FIRST_WORD, VOCABULARY, (count, length), generator=draws)
    named = torch.rand(count, length, generator=draws) < RENAMED_SHARE
    separator = torch.full((count, 1), SEPARATOR)
    before, after = (torch.where(named, name, words) for name in (OLD_NAME, NEW_NAME))
    return torch.cat([separator, before, separator, after], 1)


def document(length: int, seed: int, *, rename: bool) -> tuple[list[int], list[int]]:
    """A prompt and its right answer. `rename`: the copy differs in one token of sixteen."""
    random = Random(seed)
    words = [random.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)]
    if rename:
        words = [OLD_NAME if random.random() < RENAMED_SHARE else word for word in words]
    copy = [NEW_NAME if word == OLD_NAME else word for word in words]
    return [SEPARATOR, *words, SEPARATOR], copy


def share_copied(answer: Sequence[int], asked: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(answer, asked, strict=False)) / max(1, len(answer))
