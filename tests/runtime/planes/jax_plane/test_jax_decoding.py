"""Sessions over stages of torch and of JAX in turn say the tokens of a torch plane alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from support import families

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.peer.plane_choice import JAX, TORCH, choose
from fusion.runtime.planes.plane import DecodingStage, Piece, Plane

pytest.importorskip("jax", reason="the extra jax is not installed")

from fusion.runtime.planes.jax_plane.jax_cache import capacity_for, row_count

POSITIONS = 96
B, S = symbol("batch"), symbol("sequence")
PROMPT = [(7 * i * i + 3) % 256 for i in range(21)]


@pytest.fixture(scope="module")
def both() -> tuple[Plane, Plane]:
    return choose(TORCH, "cpu", 1), choose(JAX, "cpu", 1)


def stages_of(family: str, planes: Sequence[Plane], count: int) -> list[DecodingStage]:
    graph, module = families.made(family, positions=POSITIONS)
    variables = variables_from_module(module)
    cuts = [len(graph.nodes) * i // count for i in range(1, count)]
    return [planes[i % len(planes)].decoding(s, variables) for i, s in enumerate(split(graph, cuts))]


def logits(stages: Sequence[DecodingStage], name: str, start: int, ids: Sequence[int]) -> torch.Tensor:
    values = {"input_ids": torch.tensor([ids]), "position_ids": torch.arange(start, start + len(ids))[None]}
    for stage in stages:
        values.update(stage.run([Piece(name, start, values)])[0])
    return values["result/0"]


def greedy(stages: Sequence[DecodingStage], name: str, count: int, chunk: int = 8) -> list[int]:
    for stage in stages:
        stage.open(name, POSITIONS)
    at, told = 0, list(PROMPT)
    while len(told) < len(PROMPT) + count:
        ids = told[at : min(at + chunk, len(PROMPT))] if at < len(PROMPT) else told[at:]
        found = logits(stages, name, at, ids)
        at += len(ids)
        if at >= len(PROMPT):
            told.append(int(found[0, -1].argmax() if found.dim() == 3 else found[0].argmax()))
    return told[len(PROMPT) :]


FAMILIES = ["mixtral"]
OTHERS = ["llama", "gpt2", "mistral-windowed", "gemma2", "bloom", "gpt-oss", "qwen3-moe", "neox"]


@pytest.mark.heavy
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in OTHERS)])
def test_greedy_answers_of_mixed_stages_are_those_of_torch(family: str, both: tuple[Plane, Plane]) -> None:
    """A prompt in chunks, then token by token, past where memory grows."""
    wanted = greedy(stages_of(family, both[:1], 2), "a", 50)
    mixed = stages_of(family, both, 2)
    assert greedy(mixed, "a", 50) == wanted
    assert len(set(wanted)) > 5
    assert all(stage.used_bytes() > 0 for stage in mixed)


@pytest.mark.slow
def test_in_bfloat16_stages_of_jax_are_as_far_from_exact_logits_as_those_of_torch(
    both: tuple[Plane, Plane],
) -> None:
    """Tokens need not be the same: each plane rounds in places of its own."""
    module = copy.deepcopy(families.made("llama-bfloat16", positions=POSITIONS)[1]).float()
    with torch.no_grad():
        exact = module(torch.tensor([PROMPT])).logits[0]
    far = []
    for plane in both:
        stages = stages_of("llama-bfloat16", [plane], 2)
        for stage in stages:
            stage.open("a", POSITIONS)
        found = torch.stack([logits(stages, "a", at, [each]).flatten() for at, each in enumerate(PROMPT)])
        far.append(float((found.float() - exact).norm() / exact.norm()))
    assert far[1] < 2 * far[0] < 0.1


@pytest.mark.heavy
def test_a_session_goes_on_from_what_was_kept_copied_or_run_again(both: tuple[Plane, Plane]) -> None:
    (stage,) = stages_of("llama", both[1:], 1)
    wanted = greedy([stage], "whole", 12)
    text = [*PROMPT, *wanted]
    held, kept_bytes = stage.retain("whole", 1, 24)
    assert (held, kept_bytes) == (24, stage.retained_bytes())

    def last(name: str, start: int) -> int:
        return int(logits([stage], name, start, text[start:-1])[0, -1].argmax())

    stage.open("copied", POSITIONS)
    assert stage.copy(1, "copied", 18) == 18
    assert stage.resume("moved", POSITIONS, 1, 99) == 24
    assert stage.retained_bytes() == 0
    assert [last("copied", 18), last("moved", 24), last("moved", 20)] == [wanted[-1]] * 3
    stage.open("fresh", POSITIONS)
    assert stage.copy("moved", "fresh", 17) == 17
    assert last("fresh", 17) == wanted[-1]
    assert stage.reserve("fresh", 70) and not stage.reserve("fresh", 70)
    with pytest.raises(ValueError, match="cannot go on at position"):
        logits([stage], "fresh", 60, [1])
    with pytest.raises(ValueError, match="room for 96 positions"):
        logits([stage], "fresh", 30, [1] * 70)
    with pytest.raises(ValueError, match="is not open"):
        logits([stage], "nobody", 0, [1])
    with pytest.raises(ValueError, match="one piece at a time"):
        stage.run([Piece("fresh", 0, {}), Piece("fresh", 0, {})])
    assert last("fresh", 17) == wanted[-1]  # nothing of that counted
    stage.close("fresh"), stage.forget(7), stage.clear()
    assert stage.used_bytes() == 0
    assert stage.copy("moved", "gone", 3) == 0
    assert not stage.batched


@pytest.mark.heavy
def test_selected_keys_are_those_of_torch(both: tuple[Plane, Plane]) -> None:
    """Also numbers that are no place, and places of later positions."""
    wide = {name: TensorType((B, heads, S, 8), "float32") for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    types = {**wide, "at": TensorType((B, 1, S, 5), "int64")}
    args = (*map(Ref, types), 0, None)
    node = Node("seen", "fusion.cached_attention_selected", args, (types["q"],))
    inputs = tuple(Input(name, type_) for name, type_ in types.items())
    (stage,) = split(Graph(inputs, (), (node,), (Ref("seen"),), ("batch", "sequence")), [])
    draw = torch.Generator().manual_seed(1)
    given = {n: torch.randn(1, t.shape[1], 9, 8, generator=draw) for n, t in wide.items()}
    places = torch.randint(-3, 30, (1, 1, 9, 5), generator=draw)
    places[..., 0] = torch.arange(9)  # itself
    given["at"] = places
    found = []
    for plane in both:
        decoding = plane.decoding(stage, {})
        decoding.open("a", POSITIONS)
        pieces = [Piece("a", a, {n: v[:, :, a:b] for n, v in given.items()}) for a, b in ((0, 5), (5, 6))]
        found.append(torch.cat([decoding.run([piece])[0]["result/0"] for piece in pieces], 2))
    torch.testing.assert_close(found[1], found[0])


def test_few_sizes_are_compiled() -> None:
    assert [row_count(n) for n in (1, 2, 3, 5, 8, 500)] == [1, 2, 4, 8, 8, 512]
    assert [capacity_for(n) for n in (0, 1, 64, 65, 96, 97, 2049)] == [0, 64, 64, 96, 96, 128, 3072]
    assert all(capacity_for(n) >= n for n in range(4000))
    assert len({capacity_for(n) for n in range(1, 100_000)}) < 25


def test_what_an_encoder_makes_is_refused(both: tuple[Plane, Plane]) -> None:
    type_ = TensorType((1, symbol("source")), "float32")
    node = Node("made", "aten.relu", (Ref("source_features"),), (type_,))
    graph = Graph((Input("source_features", type_),), (), (node,), (Ref("made"),), ("source",))
    with pytest.raises(GraphError, match=r"fusion\.source_attention"):
        both[1].decoding(split(graph, [])[0], {})
