"""Sessions that run together get what they would get alone, bit for bit, whoever else is there."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
import torch
from support import families
from support.captured_once import captured_once
from support.devices import DEVICES, decoding

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.cutting.positional import keeps_last
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.products.packed import packable, row_by_row
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

CACHED = [
    "llama", "gpt2", "mistral-windowed", "qwen3", "mistral", "phi", "neox", "mixtral", "bloom", "gemma2", "llama-bfloat16",
]  # fmt: skip
QUICK = {"llama", "gpt2"}
FAMILIES = [
    pytest.param(
        f, marks=() if f in QUICK else pytest.mark.heavy if f == "llama-bfloat16" else pytest.mark.slow
    )
    for f in CACHED
]
POSITIONS = 96

Values = dict[str, torch.Tensor]


def stages_of(family: str, count: int, device: str = "cpu") -> list[TorchDecodingStage]:
    graph, module = families.made(family, positions=POSITIONS)
    variables = variables_from_module(module)
    cuts = [len(graph.nodes) * i // count for i in range(1, count)]
    return [decoding(stage, variables, device) for stage in split(graph, cuts)]


def run(
    stages: list[TorchDecodingStage], chunks: dict[str, tuple[int, list[int]]], singly: Collection[str] = ()
) -> dict[str, Values]:
    """A chunk of each session through all stages: start and token ids -> everything that was made."""
    values: dict[str, Values] = {
        name: {
            "input_ids": torch.tensor([ids]),
            "position_ids": torch.arange(start, start + len(ids))[None],
        }
        for name, (start, ids) in chunks.items()
    }
    for stage in stages:
        pieces = [
            Piece(name, at, values[name], name in singly, len(ids) if name in singly else 1)
            for name, (at, ids) in chunks.items()
        ]
        for name, made in zip(chunks, stage.run(pieces), strict=True):
            values[name].update({key: value.cpu() for key, value in made.items()})
    return values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_in_any_company(family: str, device: str) -> None:
    """Eight unlike sessions that come and go, prefilled in chunks of their own, over two stages."""
    stages = stages_of(family, 2, device)
    chance = random.Random(7)
    texts = {f"s{i}": [chance.randrange(256) for _ in range(chance.randrange(2, 60))] for i in range(8)}
    chunks: dict[str, list[tuple[int, list[int]]]] = {}
    for name, ids in texts.items():
        at, chunks[name] = 0, []
        while at < len(ids):
            length = chance.choice([1, 1, 1, 2, 5, 17])
            chunks[name].append((at, ids[at : at + length]))
            at += length
    alone: dict[str, list[Values]] = {}
    for name in texts:
        for stage in stages:
            stage.open(name, POSITIONS)
        alone[name] = [run(stages, {name: chunk})[name] for chunk in chunks[name]]
        for stage in stages:
            stage.close(name)
            stage.open(name, POSITIONS)
    waiting = {name: list(enumerate(chunks[name])) for name in texts}
    together = 0
    while waiting:
        here = chance.sample(sorted(waiting), chance.randrange(1, len(waiting) + 1))
        turn = {name: waiting[name].pop(0) for name in here}
        made = run(stages, {name: chunk for name, (_, chunk) in turn.items()})
        together += len(here) > 1
        for name, (number, _) in turn.items():
            for key, value in alone[name][number].items():
                assert torch.equal(made[name][key], value), (family, name, number, key)
        waiting = {name: left for name, left in waiting.items() if left}
    assert together > 5
    assert all(stage.batched for stage in stages)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_run_singly_are_those_of_runs_of_one(family: str, device: str) -> None:
    """What guesses rest on: any number of positions, cut back anywhere, beside others."""
    stages = stages_of(family, 2, device)
    chance = random.Random(11)
    ids = [chance.randrange(256) for _ in range(70)]
    for stage in stages:
        for name in ("alone", "guessed", "other"):
            stage.open(name, POSITIONS)
    run(stages, {"alone": (0, ids[:20]), "guessed": (0, ids[:20])})
    alone = [run(stages, {"alone": (at, ids[at : at + 1])})["alone"] for at in range(20, 70)]
    at, beside = 20, 0
    while at < 70:
        count = min(chance.randrange(1, 17), 70 - at)
        wrong = chance.randrange(count)  # guesses that are dropped afterwards
        given = ids[at : at + count] + [chance.randrange(256) for _ in range(wrong)]
        chunks = {"guessed": (at, given)}
        if beside < 60:
            chunks["other"] = (beside, [chance.randrange(256) for _ in range(3)])
            beside += 3
        made = run(stages, chunks, singly={"guessed"})["guessed"]
        assert made["result/0"].shape[1] == len(given)
        for n in range(count):
            for key, value in alone[at + n - 20].items():
                axis = 1
                shapes = zip(made[key].shape, value.shape, strict=True)
                axis = next((d for d, (m, v) in enumerate(shapes) if m != v), None)
                one = made[key] if axis is None else made[key].narrow(axis, n, 1)
                assert torch.equal(one, value), (family, at, n, key)
        at += count


def test_a_prompt_in_half_precision_may_not_be_cut_anywhere() -> None:
    for family, agree in (("llama", True), ("llama-bfloat16", False)):
        graph, module = families.made(family, positions=POSITIONS)
        cuts = legal_cuts(graph)[:1]  # the first stage is an embedding alone
        found = [TorchDecodingStage(each, variables_from_module(module)) for each in split(graph, cuts)]
        assert not found[0].has_cache and [stage.chunk_invariant for stage in found] == [agree] * 2


def test_stages_run_sessions_together_wherever_they_are_cut() -> None:
    """Next to nothing crosses a cut behind the last position, so a placement would choose it."""
    graph, module = families.made("llama", positions=POSITIONS)
    variables = variables_from_module(module)
    last = next(i for i, node in enumerate(graph.nodes) if keeps_last(graph, node))
    cuts = legal_cuts(graph)
    assert max(cuts) == last < len(graph.nodes) - 1
    assert all(TorchDecodingStage(stage, variables).batched for stage in split(graph, (cuts[0], cuts[-1])))


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["openai-gpt"])
def test_models_without_a_cache_run_one_after_another(family: str) -> None:
    stages = stages_of(family, 1)
    assert not stages[0].batched
    for name in "ab":
        stages[0].open(name, POSITIONS)
    alone = run(stages, {"a": (0, [1, 2, 3])})["a"]["result/0"]
    with pytest.raises(ValueError, match="singly"):
        run(stages, {"a": (3, [4, 5])}, singly={"a"})
    both = run(stages, {"a": (0, [1, 2, 3]), "b": (0, [4, 5, 6, 7])})
    assert torch.equal(both["a"]["result/0"], alone) and both["b"]["result/0"].shape == (1, 1, 256)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "family", ["qwen3-next", pytest.param("mamba", marks=pytest.mark.slow), "mamba2"]
)  # the first has a gate of one number a position
def test_models_with_states_run_together(family: str) -> None:
    stages = stages_of(family, 1)
    assert stages[0].batched
    ids = [(7 * i * i + 3) % 256 for i in range(30)]
    for name in "abc":
        stages[0].open(name, POSITIONS)
    whole = [run(stages, {"a": (i, [token])})["a"]["result/0"] for i, token in enumerate(ids)]
    run(stages, {"b": (0, ids[:5]), "c": (0, ids[3:20])})
    tried = run(stages, {"b": (5, [*ids[5:12], 1, 2]), "c": (17, ids[:1])}, singly={"b"})["b"]["result/0"]
    assert torch.equal(tried[:, :7], torch.cat(whole[5:12], 1))
    rest = run(stages, {"c": (18, [4]), "b": (12, ids[12:])})["b"]["result/0"]
    stages[0].open("alone", POSITIONS)
    run(stages, {"alone": (0, ids[:5])})
    run(stages, {"alone": (5, [*ids[5:12], 1, 2])}, singly={"alone"})
    assert torch.equal(rest, run(stages, {"alone": (12, ids[12:])})["alone"]["result/0"])


def test_one_that_fails_leaves_the_others_as_they_were() -> None:
    stages = stages_of("llama", 1)
    for name in "ab":
        stages[0].open(name, POSITIONS)
    run(stages, {"a": (0, [1, 2])})
    with pytest.raises(ValueError, match="cannot go on at position 5"):
        run(stages, {"a": (2, [3]), "b": (5, [4])})
    with pytest.raises(ValueError, match="one piece at a time"):
        stages[0].run([Piece("a", 2, {}), Piece("a", 3, {})])
    after = run(stages, {"a": (2, [3])})["a"]["result/0"]
    stages[0].open("c", POSITIONS)
    run(stages, {"c": (0, [1, 2])})
    assert torch.equal(run(stages, {"c": (2, [3])})["c"]["result/0"], after)


def test_a_matrix_that_is_an_embedding_as_well_multiplies_row_by_row() -> None:
    torch.manual_seed(0)
    module = GPT(GPTConfig(vocabulary=32, blocks=1, width=16, heads=2, sequence=32))
    graph = serving_graph(captured_once(module, training=False, maximum_sequence=32))
    tied = {n.args[1].name for n in graph.nodes if n.op == "aten.linear"} - set(packable(graph))  # type: ignore[union-attr]
    assert len(tied) <= 1
    rows, matrix = torch.randn(1, 5, 16), torch.randn(32, 16)
    found = row_by_row(rows, matrix, None)
    torch.testing.assert_close(found, torch.nn.functional.linear(rows, matrix))
    assert torch.equal(row_by_row(rows[:, 2:3], matrix, None), found[:, 2:3])
