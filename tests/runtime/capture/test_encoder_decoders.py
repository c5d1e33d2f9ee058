"""Encoder-decoders by two graphs, cut in three: the encoder once for a session, then a position at a time, against
`generate()`."""

from __future__ import annotations

import random

import pytest
import torch
from support.encoder_decoders import POSITIONS, START, VOCABULARY, build, generated, logits, made, source

from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.source import halves
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.opset import needed_version
from fusion.runtime.capture.capture import capture_encoder_decoder, variables_from_module
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

pytestmark = pytest.mark.heavy

NEW = 40
Stages = list[TorchDecodingStage]


def staged(family: str, seed: int) -> Stages:
    graph, model = made(family)
    cuts = sorted(random.Random(seed).sample(range(1, len(graph.nodes)), 2))
    return [TorchDecodingStage(stage, variables_from_module(model)) for stage in split(graph, cuts)]


def opened(stages: Stages, session: str, given: torch.Tensor) -> None:
    length = given.shape[-1]
    values = {"source_features" if given.is_floating_point() else "source_ids": given}
    for stage in stages:
        stage.open(session, POSITIONS, length)
        values.update(*stage.run([Piece(session, -length, values)]))


def run(stages: Stages, *pieces: tuple[str, int, list[int]]) -> list[torch.Tensor]:
    """Logits (vocabulary) of the last position of each piece: session, start and tokens."""
    values = [
        {"input_ids": torch.tensor([ids]), "position_ids": torch.arange(at, at + len(ids))[None]}
        for _, at, ids in pieces
    ]
    for stage in stages:
        each = [Piece(name, at, known) for (name, at, _), known in zip(pieces, values, strict=True)]
        for known, made_here in zip(values, stage.run(each), strict=True):
            known.update(made_here)
    return [known["result/0"][0, -1] for known in values]


@pytest.mark.parametrize(
    "family",
    [
        "t5",
        "m2m_100",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bart", "whisper", "mvp", "t5gemma")),
    ],
)
def test_decoding_is_token_identical_to_generate(family: str) -> None:
    graph, model = made(family)
    assert needed_version(graph) == 2  # peers that know no encoder are not asked
    varied = 0
    for seed, length in enumerate((1, 9, 60)):
        stages, given = staged(family, seed), source(family, length, seed)
        wanted = generated(model, given, NEW)
        full = logits(model, given, [START, *wanted])
        opened(stages, "s", given)
        found, row = [START], torch.empty(0)
        for at in range(NEW):
            (row,) = run(stages, ("s", at, found[-1:]))
            assert (row - full[at]).abs().max() <= 1e-4 * max(1.0, float(full.abs().max()))
            found.append(int(row.argmax()))
        assert found[1:] == wanted
        varied = max(varied, len(set(found)))
        # Said again in one piece, as after a peer has gone, and other tokens than the model would choose.
        draw = torch.Generator().manual_seed(seed)
        other = [START, *torch.randint(4, VOCABULARY, (70,), generator=draw).tolist()]
        for tokens in (found[:-1], other):
            (again,) = run(stages, ("s", 0, tokens))
            assert torch.allclose(again, logits(model, given, tokens)[-1], atol=1e-4)
    assert varied >= 10


@pytest.mark.parametrize("family", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_sessions_that_run_together_get_the_bits_that_they_get_alone(family: str) -> None:
    stages = staged(family, 5)
    assert all(stage.batched for stage in stages)
    tokens = {"a": [START, 7, 9], "b": [START, 11], "c": [START]}
    alone = {}
    for seed, (name, ids) in enumerate(tokens.items()):
        opened(stages, name, source(family, 5 + seed, seed))
        alone[name] = run(stages, (name, 0, ids))
        opened(stages, name, source(family, 5 + seed, seed))
    for name, row in zip(tokens, run(stages, *((name, 0, ids) for name, ids in tokens.items())), strict=True):
        assert torch.equal(row, alone[name][0])
    assert not torch.equal(alone["a"][0], alone["b"][0])


def test_memory_counts_the_source_and_it_is_not_retained() -> None:
    stages = staged("t5", 0)
    for stage in stages:
        stage.open("s", POSITIONS, 10)
    ten = sum(stage.used_bytes() for stage in stages)
    for stage in stages:
        stage.open("s", POSITIONS, 11)
    assert sum(stage.used_bytes() for stage in stages) - ten == 2 * 2 * 32 * 4  # layers, keys and values
    opened(stages, "s", source("t5", 11))
    run(stages, ("s", 0, [START]))
    assert all(stage.retain("s", 1, 1) == (0, 0) for stage in stages)


def test_a_session_without_its_source_is_refused() -> None:
    stages = staged("t5", 0)
    for stage in stages:
        stage.open("s", POSITIONS, 4)
    with pytest.raises(ValueError, match="source has not been run"):
        run(stages, ("s", 0, [START]))
    with pytest.raises(ValueError, match="4 positions, not 5"):
        stages[0].run([Piece("s", -5, {"source_ids": torch.zeros(1, 5, dtype=torch.int64)})])


def test_every_value_is_in_one_half() -> None:
    graph, _ = made("t5")
    for cut in range(1, len(graph.nodes)):
        for stage in split(graph, [cut]):
            both = halves(stage)
            assert both is not None
            assert all("sequence" not in str(t) for t in both.encode.graph.types.values())
            assert not {n.name for n in both.encode.graph.nodes} & {
                n.name for n in both.decode.graph.nodes
            } - {n.name for n in graph.nodes if not list(n.refs())}


@pytest.mark.slow
def test_written_out_attention_to_the_source_rounds_as_that_of_the_model() -> None:
    """In bfloat16, where the steps of a fused kernel would give other bits."""
    model = build("mvp").to(torch.bfloat16)
    sizes = {"maximum_sequence": POSITIONS, "maximum_source": POSITIONS}
    graph = serving_graph(capture_encoder_decoder(model, **sizes), **sizes)
    stages = [TorchDecodingStage(stage, variables_from_module(model)) for stage in split(graph, ())]
    given = source("mvp", 30)
    with torch.inference_mode():
        whole = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=20, min_new_tokens=20, eos_token_id=None,
            do_sample=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    opened(stages, "s", given)
    exact = all(stage.least_rows == 1 for stage in stages)
    for at, theirs in enumerate(whole.logits):
        (ours,) = run(stages, ("s", at, [int(whole.sequences[0, at])]))
        assert torch.equal(ours, theirs[0].to(ours.dtype)) or not exact
        assert int(ours.argmax()) == int(whole.sequences[0, at + 1])


@pytest.mark.slow
def test_attention_that_is_written_out_beside_a_learned_bias_keeps_a_cache() -> None:
    model = build("t5", attn_implementation="eager")
    sizes = {"maximum_sequence": POSITIONS, "maximum_source": POSITIONS}
    graph = capture_encoder_decoder(model, **sizes)
    stages = [
        TorchDecodingStage(stage, variables_from_module(model))
        for stage in split(serving_graph(graph, **sizes), ())
    ]
    given = source("t5", 9)
    wanted = generated(model, given, NEW)
    full = logits(model, given, [START, *wanted])
    opened(stages, "s", given)
    for at, token in enumerate([START, *wanted]):
        (row,) = run(stages, ("s", at, [token]))
        assert torch.allclose(row, full[at], atol=1e-4)
    with pytest.raises(UnsupportedModel, match="with a KV cache or not at all"):
        serving_graph(graph, cache="recompute")
