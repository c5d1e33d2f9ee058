"""Encoders that pad a source to whole blocks: captured with its length free, and run at lengths before, at and behind their ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.opset import needed_version
from fusion.runtime.capture.capture import capture_encoder_decoder, variables_from_module
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

BLOCK, WIDTH, VOCABULARY = 4, 8, 20
SIZES = {"maximum_sequence": 32, "maximum_source": 32}


class Blockwise(nn.Module):
    """Positions of a source see those of their block, and a position of an answer sees all of these."""

    def __init__(self, pad: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.pad = pad

    def padding(self, length: Any) -> Any:
        if self.pad == "to the block":
            return -length % BLOCK
        if self.pad == "around":
            return (BLOCK - length % BLOCK) % BLOCK
        return BLOCK - length % BLOCK  # a block more than there has to be

    def encoded(self, ids: torch.Tensor) -> torch.Tensor:
        x, hidden = self.embedding(ids), torch.zeros(ids.shape, dtype=torch.bool)
        batch, length = ids.shape
        if length % BLOCK != 0:
            more = self.padding(length)
            x, hidden = functional.pad(x, (0, 0, 0, more)), functional.pad(hidden, (0, more), value=True)
        blocks = x.reshape(batch, x.shape[1] // BLOCK, BLOCK, WIDTH)
        scores = blocks @ blocks.transpose(-1, -2)
        scores = scores.masked_fill(hidden.reshape(batch, -1, 1, BLOCK), -1e10)
        mixed = (scores.softmax(-1) @ blocks).reshape(batch, -1, WIDTH)
        if self.pad == "around" and (more := self.padding(length)) > 0:
            return mixed[:, :-more]
        return mixed[:, :length]

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor, use_cache: bool) -> Any:
        memory = self.encoded(input_ids).unsqueeze(1)
        x = self.embedding(decoder_input_ids).unsqueeze(1)
        x = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        x = x + functional.scaled_dot_product_attention(x, memory, memory)
        return SimpleNamespace(logits=self.head(x.squeeze(1)))


@pytest.mark.parametrize("pad", ["to the block", "around", "a block more"])
def test_the_graph_gives_what_the_module_gives_at_every_length(pad: str) -> None:
    model = Blockwise(pad).eval()
    captured = capture_encoder_decoder(model, **SIZES)
    assert needed_version(captured) == 3  # peers that know no numbers of blocks are not asked
    graph = serving_graph(captured, **SIZES)
    values = variables_from_module(model)
    stages = [TorchDecodingStage(stage, values) for stage in split(graph, [len(graph.nodes) // 2])]
    for length in (1, 3, 4, 5, 8, 11, 32):
        given = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
        inputs = {"source_ids": given}
        for stage in stages:
            stage.open("s", 8, length)
            inputs.update(*stage.run([Piece("s", -length, inputs)]))
        answer = torch.tensor([[3, 1, 4, 1, 5]])
        with torch.no_grad():
            wanted = model(given, answer, use_cache=False).logits
        inputs = {"input_ids": answer, "position_ids": torch.arange(5)[None]}
        for stage in stages:
            inputs.update(*stage.run([Piece("s", 0, inputs)]))
            stage.close("s")
        assert torch.allclose(inputs["result/0"][0, -1], wanted[0, -1], atol=1e-5)


class OtherwiseWhenLong(Blockwise):
    def __init__(self, most: int) -> None:
        super().__init__("to the block")
        self.most = most

    def encoded(self, ids: torch.Tensor) -> torch.Tensor:
        long = (ids.shape[1] + 3) // BLOCK > self.most
        return super().encoded(ids) * (2 if long else 1)


@pytest.mark.parametrize("most", [2, 7])
def test_code_that_does_otherwise_with_more_blocks_is_refused(most: int) -> None:
    with pytest.raises(CaptureError, match=r"does not leave the size of source free, at .*test_blocks\.py"):
        capture_encoder_decoder(OtherwiseWhenLong(most).eval(), **SIZES)
