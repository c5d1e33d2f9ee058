"""Two small models trained on the same corpus, the bytes of this Python's own modules: one to serve, and a draft model of a tenth
of its size."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
MODULES = (
    "argparse",
    "ast",
    "inspect",
    "pathlib",
    "socket",
    "subprocess",
    "tarfile",
    "threading",
    "typing",
    "zipfile",
)
# hidden size, intermediate size, layers, heads
SIZES = {"code": (128, 352, 4, 4), "draft": (56, 120, 2, 2)}
STEPS, SAMPLES, LENGTH, LEARNING_RATE = 600, 8, 128, 3e-3
POSITIONS = 512


def corpus() -> torch.Tensor:
    """The concatenated bytes of all modules, as ids."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / f"{name}.py").read_bytes() for name in MODULES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def save_code_model(path: Path, size: str, *, steps: int = STEPS, seed: int = 0) -> None:
    """Train the model of that size, the same for the same `seed`. Does nothing if the directory has one already."""
    if (path / "config.json").is_file():
        return
    hidden, intermediate, layers, heads = SIZES[size]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=heads, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, bos_token_id=None,
                eos_token_id=None,
            )
        )  # fmt: skip
        _train(model, corpus(), steps)
    torch.set_num_threads(threads)
    model.save_pretrained(path)


def _train(model: LlamaForCausalLM, text: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (SAMPLES,))
        ids = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50, (steps - step) / (0.5 * steps) + 0.02)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
