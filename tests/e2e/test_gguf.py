"""A GGUF file on three peers, by the commands: text in and out through its own tokenizer, a chat through its own template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import gguf_files
from support.families import build, config, greedy
from support.source_tokenizer import tokenizer_of_sources

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STAGES, NEW = 3, 48
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}<s>"
WIDTH = 256  # a block of Q4_K
CASES = [
    ("llama", "F16"),
    ("llama", "Q8_0"),
    ("qwen3", "Q4_K"),
    ("gemma2", "Q4_0"),
    ("mixtral", "Q8_0"),
    ("qwen3-moe", "Q4_K"),
]


def varied(family: str, vocabulary: int) -> Any:
    """A model of matrices as wide as a block, that answers with many different tokens."""
    wide = config(family)
    wide.vocab_size, wide.hidden_size, wide.intermediate_size = vocabulary, WIDTH, WIDTH
    wide.num_hidden_layers, wide.initializer_range = 2, 0.11
    wide.head_dim = WIDTH // wide.num_attention_heads
    if (
        family == "gemma2"
    ):  # files of it have one matrix for the embedding and the head, and scale scores by the width of a head
        wide.tie_word_embeddings, wide.layer_types = True, wide.layer_types[:2]
        wide.query_pre_attn_scalar = wide.head_dim
    if family == "qwen3-moe":
        wide.moe_intermediate_size, wide.norm_topk_prob = WIDTH, True
    model = build(wide)
    if family == "gemma2":  # else it would answer what it was given
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.05)
    return model


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_file_is_served_and_answers_as_the_model_with_its_weights(
    family: str, kind: str, peers: Any, tmp_path: Path
) -> None:
    swarm = peers.swarm(STAGES)
    tokenizer = tokenizer_of_sources()
    special = {"<s>": gguf_files.CONTROL, "</s>": gguf_files.CONTROL}
    tokenizer.add_special_tokens(list(special))
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    path = tmp_path / "model.gguf"
    write = gguf_files.byte_level(
        vocabulary, gguf_files.merges_of(tokenizer), "gpt-2", kinds=special, template=TEMPLATE, eos="</s>"
    )
    held = gguf_files.write(path, varied(family, len(vocabulary)), kind, tokenizer=write)
    end = tokenizer.token_to_id("</s>")

    def wanted(prompt: list[int]) -> list[int]:
        tokens, _ = greedy(held, prompt, NEW)
        assert len(set(tokens)) >= 6
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens

    home = str(swarm[0].home)
    records = peers.run("serve", str(path), "--name", "small", "--stages", str(STAGES), "--home", home)
    assert [record["event"] for record in records] == ["launched", "held", "token", "serving"]
    text = "def open(name):\n    return "
    ask = ("generate", "--model", "small", "--max-tokens", str(NEW), "--home", str(swarm[1].home))
    [record] = peers.run(*ask, text)
    assert len(set(record["route"])) == STAGES
    tokens = wanted(tokenizer.encode(text).ids)
    assert record["tokens"] == tokens and record["text"] == tokenizer.decode(tokens)
    for length in (1, 7, 100):
        prompt = torch.randint(0, end - 1, (length,), generator=torch.Generator().manual_seed(length))
        [record] = peers.run(*ask, "--prompt-ids", ",".join(map(str, prompt.tolist())))
        assert record["tokens"] == wanted(prompt.tolist()), length
    said = text.splitlines()[0]
    chat = (sys.executable, "-m", "fusion.cli.main", "chat", "small", "--max-tokens", str(NEW), "--json")
    done = subprocess.run(
        [*chat, "--home", home], input=f"{said}\n".encode(), capture_output=True, check=True, timeout=300
    )
    assert json.loads(done.stdout)["tokens"] == wanted(tokenizer.encode(f"<s>{said}</s><s>").ids)
