"""A GGUF file on three peers, by the commands: text in and out through its own tokenizer, a chat through its own template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import gguf_files
from support.families import build, config, greedy
from support.source_tokenizer import tokenizer_of_sources

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STAGES, NEW = 3, 48
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}<s>"


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_file_is_served_and_answers_as_the_model_with_its_weights(
    kind: str, peers: Any, tmp_path: Path
) -> None:
    swarm = peers.swarm(STAGES)
    tokenizer = tokenizer_of_sources()
    special = {"<s>": gguf_files.CONTROL, "</s>": gguf_files.CONTROL}
    tokenizer.add_special_tokens(list(special))
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    llama = config("llama")
    llama.vocab_size = len(vocabulary)
    path = tmp_path / "model.gguf"
    write = gguf_files.byte_level(
        vocabulary, gguf_files.merges_of(tokenizer), "gpt-2", kinds=special, template=TEMPLATE, eos="</s>"
    )
    held = gguf_files.write(path, build(llama), kind, tokenizer=write)
    end = tokenizer.token_to_id("</s>")

    def wanted(prompt: list[int]) -> list[int]:
        tokens, _ = greedy(held, prompt, NEW)
        return tokens[: tokens.index(end)] if end in tokens else tokens

    home = str(swarm[0].home)
    records = peers.run("serve", str(path), "--name", "small", "--stages", str(STAGES), "--home", home)
    assert [record["event"] for record in records] == ["launched", "held", "token", "serving"]
    text = "def open(name):\n    return "
    ask = ("generate", "--model", "small", "--max-tokens", str(NEW), "--home", str(swarm[1].home))
    [record] = peers.run(*ask, text)
    assert len(set(record["route"])) == STAGES
    tokens = wanted(tokenizer.encode(text).ids)
    assert record["tokens"] == tokens and record["text"] == tokenizer.decode(tokens)
    [record] = peers.run(*ask, "--prompt-ids", "1,2,3")
    assert record["tokens"] == wanted([1, 2, 3])
