"""Decoding with a KV cache, cut in three, against transformers: token-identical, and logits of a full recomputation."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from support.captured_once import captured_once
from support.devices import DEVICES, decoding
from support.families import build, config, exported, greedy, made

from fusion.dag.cutting.cuts import crossings, split
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.rewrites.expert_groups import group_experts, part_of
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

NEW = 32
LONGEST = 200


def staged(family: str, cache: str, cuts: int, device: str = "cpu") -> list[TorchDecodingStage]:
    graph, model = made(family, cache)
    at = sorted(random.Random(0).sample(range(1, len(graph.nodes)), cuts))
    variables = variables_from_module(model)
    return [decoding(s, variables, device) for s in split(graph, at)]


def run(stages: list[TorchDecodingStage], start: int, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (vocabulary,) of the last position."""
    positions = torch.arange(start, start + tokens.shape[1])[None]
    values = {"input_ids": tokens, "position_ids": positions}
    for stage in stages:
        values.update(*stage.run([Piece("s", start, values)]))
    assert values["result/0"].shape[1] == 1
    return values["result/0"][0, -1].cpu()


GATE = [
    "llama",
    "gpt2",
    "mistral-windowed",
    "mixtral",
    "bloom",
    "gemma2",
    "qwen3-next",
]
SLOW = [
    "qwen3",
    "mistral",
    "phi",
    "neox",
    "gpt-oss",
    "mpt",
    "falcon",
    "falcon-alibi",
    "gptj",
    "codegen",
    "gptneo",
    "opt",
    "xglm",
    "gemma3",
    "cohere2",
    "deepseek-v32",
]
EXPERTS = ["qwen3-moe", "qwen2-moe", "olmoe", "granite-moe", "deepseek-v3", "glm-moe-dsa", "longcat-flash"]
STATES = ["kimi-linear", "mamba", "mamba2"]
EAGER = ["llama", "gpt2", "neox", "falcon-alibi"]  # families whose attention can be written out as well


def slow(names: list[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "family", [*GATE, *slow([*SLOW, *EXPERTS, *STATES, *(f"{name}, eager" for name in EAGER)])]
)
def test_cached_decoding_is_token_identical_to_generate(family: str, device: str) -> None:
    _, model = exported(family)
    stages = staged(family, "kv", 2, device)
    model = copy.deepcopy(model).to(device)
    torch.manual_seed(1)
    answers = []
    for length in (1, 7, 100):
        prompt = torch.randint(0, 256, (1, length))
        wanted, full = greedy(model, prompt[0].tolist(), NEW)
        for stage in stages:
            stage.open("s", LONGEST)
        pieces = [prompt[:, i : i + 48] for i in range(0, length, 48)]
        found: list[int] = []
        at = 0
        for i in range(NEW):
            for piece in pieces:
                logits = run(stages, at, piece)
                at += piece.shape[1]
            assert (logits - full[i]).abs().max() <= (1e-4 if device == "cpu" else 2e-4)
            found.append(int(logits.argmax()))
            pieces = [torch.tensor([found[-1:]])]
        assert found == wanted
        answers.append(found)
    assert max(len(set(answer)) for answer in answers) >= 10


@pytest.mark.parametrize("peers", [2, 4])
def test_a_layer_cut_by_its_experts_gives_the_same_tokens_and_sends_what_is_counted(peers: int) -> None:
    configuration = config("mixtral")
    configuration.num_hidden_layers, configuration.num_local_experts = 1, 16
    model = build(configuration)
    captured = captured_once(model, training=False, maximum_sequence=256)
    graph = group_experts(serving_graph(captured, maximum_sequence=256), peers)
    repeats = [i for i, node in enumerate(graph.nodes) if node.op == "aten.repeat_interleave.self_int"]
    cuts = repeats[1:]  # the rows are repeated where each group begins
    variables = variables_from_module(model)
    for variable in graph.variables:
        if (part := part_of(variable.name)) is not None:
            variables[variable.name] = variables[part.name][part.start : part.stop]
    stages = [TorchDecodingStage(stage, variables) for stage in split(graph, cuts)]
    assert len(stages) == peers and all(stage.batched for stage in stages)
    held = [[v for v in s.stage.graph.variables if part_of(v.name) is not None] for s in stages]
    assert [[v.type.shape[0] for v in each] for each in held] == [[16 // peers] * 2] * peers
    for stage in stages:
        stage.open("s", LONGEST)
    prompt = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    wanted, _ = greedy(model, prompt[0].tolist(), 16)
    found: list[int] = []
    tokens, at = prompt, 0
    for _ in wanted:
        count = tokens.shape[1]
        values = {"input_ids": tokens, "position_ids": torch.arange(at, at + count)[None]}
        for stage in stages:
            values.update(*stage.run([Piece("s", at, values)]))
        sizes = {"batch": 1, "sequence": count}
        for i, cut in enumerate(cuts):
            over = [e for s in stages for e in s.stage.sends if e.producer <= i < max(e.consumers)]
            assert sum(values[e.name].nbytes for e in over) == crossings(graph, sizes)[0][cut]
        found.append(int(values["result/0"][0, -1].argmax()))
        at, tokens = at + count, torch.tensor([found[-1:]])
    assert found == wanted


@pytest.mark.parametrize("family", ["openai-gpt"])
def test_an_attention_that_is_not_recognised_is_refused_and_recomputed_exactly(family: str) -> None:
    _, model = exported(family)
    torch.manual_seed(1)
    with pytest.raises(UnsupportedModel, match="no KV cache for this model") as refusal:
        staged(family, "kv", cuts=0)
    assert "\n" not in str(refusal.value)
    stages = staged(family, "recompute", cuts=2)
    for stage in stages:
        stage.open("s", LONGEST)
    tokens = torch.randint(0, 256, (1, 9))
    for _ in range(5):
        with torch.inference_mode():
            wanted = model(tokens, use_cache=False).logits[0, -1]
        logits = run(stages, 0, tokens)
        assert (logits - wanted).abs().max() <= 1e-4
        tokens = torch.cat([tokens, logits.argmax().view(1, 1)], 1)
