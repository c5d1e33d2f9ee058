"""Families that transformers knows: what is retained of one turn gives the next one the tokens that a fresh session gives."""

from __future__ import annotations

import pytest
import torch
from support.families import greedy, made

from fusion.dag.cutting.cuts import split
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

CACHED = ["llama", "gpt2", "mistral-windowed", "qwen3", "mistral", "phi", "neox"]
QUICK = {"llama", "mistral-windowed"}
# As the windowed one without a window, as gpt2 with a rotary part, as llama with norms of queries and keys.
LIKE_OTHERS = {"mistral", "phi", "neox", "qwen3"}
FAMILIES = [
    pytest.param(f, marks=() if f in QUICK else pytest.mark.slow if f in LIKE_OTHERS else pytest.mark.heavy)
    for f in CACHED
]
POSITIONS = 128
BLOCK = 16


def answer(stages: list[TorchDecodingStage], name: str, tokens: list[int], start: int, new: int) -> list[int]:
    """Greedy, of a session that holds `start` positions: a chunk of the prompt, then token by token."""
    tokens, at = list(tokens), start
    for _ in range(new):
        values = {
            "input_ids": torch.tensor([tokens[at:]]),
            "position_ids": torch.arange(at, len(tokens))[None],
        }
        for stage in stages:
            values.update(*stage.run([Piece(name, at, values)]))
        at = len(tokens)
        tokens.append(int(values["result/0"][0, -1].argmax()))
    return tokens[-new:]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_turns_of_a_chat_and_another_that_begins_alike(family: str) -> None:
    graph, module = made(family, positions=POSITIONS)
    variables = variables_from_module(module)
    stages = [TorchDecodingStage(part, variables) for part in split(graph, [len(graph.nodes) // 2])]
    tokens = [(13 * i) % 256 for i in range(37)]
    for stage in stages:
        stage.open("0", POSITIONS)
    start = 0
    for number in range(3):
        found = answer(stages, str(number), tokens, start, 12)
        assert found == greedy(module, tokens, 12)[0]
        tokens += [*found, 7, number]
        start = (len(tokens) - 3) // BLOCK * BLOCK
        for stage in stages:
            assert stage.retain(str(number), number, start)[0] == start
            stage.open(f"other {number}", POSITIONS)
            assert stage.copy(number, f"other {number}", 2 * BLOCK) == 2 * BLOCK
            assert stage.resume(str(number + 1), POSITIONS, number, start) == start
        other = [*tokens[: 2 * BLOCK], 9, number, 3]
        assert answer(stages, f"other {number}", other, 2 * BLOCK, 9) == greedy(module, other, 9)[0]


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["openai-gpt"])
def test_without_a_cache_nothing_is_retained(family: str) -> None:
    graph, module = made(family, positions=POSITIONS)
    [part] = split(graph, [])
    stage = TorchDecodingStage(part, variables_from_module(module))
    stage.open("a", POSITIONS)
    assert answer([stage], "a", [1, 2, 3], 0, 1)
    assert not stage.has_cache and stage.retain("a", 0, 3) == (0, 0) and not stage.used_bytes()
