"""Serves models of GGUF files in three stages."""

from __future__ import annotations

import random

import torch
from support.families import POSITIONS

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.errors import UnsupportedModel
from fusion.runtime.capture import sources
from fusion.runtime.capture.quantised_weights import stored_model
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

NEW = 20  # tokens of an answer


def answer(
    served: sources.LanguageModel, prompt: list[int], new: int, kept: bool
) -> tuple[list[int], list[torch.Tensor]]:
    """The greedy tokens of three stages with the file's weights, and the logits (vocabulary,) of each token. `kept`: the
    stages keep the file's blocks as they are."""
    try:
        graph, cached = serving_graph(served.inference, maximum_sequence=POSITIONS), True
    except UnsupportedModel:
        graph, cached = serving_graph(served.inference, cache="recompute"), False
    read = served.read
    if kept and served.blocks is not None:
        graph, read = stored_model(graph, served.read, served.blocks)
        ops = {node.op for node in graph.nodes}
        assert any(op.startswith("fusion.linear_int") for op in ops) and "fusion.expert_linear" not in ops
    cuts = sorted(random.Random(0).sample(range(1, len(graph.nodes)), 2))
    stages = [TorchDecodingStage(part, read(part.graph.variables)) for part in split(graph, cuts)]
    for stage in stages:
        stage.open("s", POSITIONS)
    tokens, logits, start = list(prompt), [], 0
    for _ in range(new):
        values = {
            "input_ids": torch.tensor([tokens[start:]]),
            "position_ids": torch.arange(start, len(tokens))[None],
        }
        for stage in stages:
            values.update(*stage.run([Piece("s", start, values)]))
        logits.append(values["result/0"][0, -1])
        start = len(tokens) if cached else 0
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], logits
