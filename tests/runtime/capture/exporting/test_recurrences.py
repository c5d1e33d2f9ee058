"""The functions of transformers that one operator stands for give its numbers; others are left as they are."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

from fusion.runtime.capture.capture import capture_language_model
from fusion.runtime.capture.exporting import recurrences
from fusion.runtime.capture.exporting.recurrences import _agrees, recurrences_as_operator
from fusion.runtime.job.errors import CaptureError

pytest.importorskip("transformers")

FUNCTIONS = [
    ("qwen3_next", "torch_chunk_gated_delta_rule"),
    ("kimi_linear", "chunk_kimi_delta_attention"),
    ("mamba", "mamba_selective_scan"),
    ("mamba2", "mamba2_chunk_scan"),
    ("recurrent_gemma", "RecurrentGemmaRglru._rnn_scan"),
]
LAYER = "MiniMaxLightningAttention"


def found(family: str, name: str) -> Callable[..., Any]:
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    function: Callable[..., Any] = attrgetter(name)(code)
    return function


@pytest.mark.parametrize(("family", "name"), FUNCTIONS)
def test_the_operator_gives_what_the_function_gives(family: str, name: str) -> None:
    assert _agrees(found(family, name))


@pytest.mark.parametrize(("family", "name"), FUNCTIONS)
def test_what_gives_other_numbers_is_left_as_it_is(family: str, name: str) -> None:
    function = found(family, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        result = inspect.unwrap(function)(*args, **kwargs)
        return (result[0] * 1.0001, *result[1:]) if isinstance(result, tuple) else result * 1.0001

    other.__name__, other.__wrapped__ = function.__name__, None  # type: ignore[attr-defined]
    del other.__wrapped__  # type: ignore[attr-defined]
    assert not _agrees(other)


def test_a_layer_that_runs_its_recurrence_in_blocks_is_tried_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer: Any = found("minimax", LAYER)
    assert _agrees.__wrapped__(layer.forward)
    factors = layer.decay_factors
    monkeypatch.setattr(
        layer, "decay_factors", lambda *given: tuple(1.0001 * each for each in factors(*given))
    )
    assert not _agrees.__wrapped__(layer.forward)


class Scans(nn.Module):
    """A layer whose code is of this module, and calls a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids).transpose(1, 2)
        scan = globals()["mamba_selective_scan"]
        scanned: torch.Tensor = scan(x, x, -torch.ones(8, 2), x[:, :2], x[:, 2:4])
        return scanned.transpose(1, 2)


@pytest.mark.heavy
def test_a_function_is_replaced_while_the_model_is_captured_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scan = found("mamba", "mamba_selective_scan")
    monkeypatch.setitem(globals(), "mamba_selective_scan", scan)
    graph = capture_language_model(Scans(), training=False, maximum_sequence=32)
    assert [node.op for node in graph.nodes].count("fusion.recurrence") == 1
    assert globals()["mamba_selective_scan"] is scan
    with pytest.raises(CaptureError, match="does not leave the size of sequence free"):  # it has no gradient
        capture_language_model(Scans(), training=True, maximum_sequence=32)
    monkeypatch.setattr(recurrences, "_agrees", lambda _: False)
    with pytest.raises(CaptureError, match="does not leave the size of sequence free"):
        capture_language_model(Scans(), training=False, maximum_sequence=32)


def test_a_state_or_several_sequences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scan, rule = found("mamba", "mamba_selective_scan"), found("qwen3_next", "torch_chunk_gated_delta_rule")
    monkeypatch.setitem(globals(), "mamba_selective_scan", scan)
    monkeypatch.setitem(globals(), "torch_chunk_gated_delta_rule", rule)
    x, g = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2)
    with recurrences_as_operator(Scans().eval()):
        with pytest.raises(CaptureError, match="keeps a state"):
            globals()["mamba_selective_scan"](g, g, g[0], g, g, return_last_state=True)
        with pytest.raises(CaptureError, match="keeps a state"):
            globals()["torch_chunk_gated_delta_rule"](x, x, x, g, g, output_final_state=True)
        with pytest.raises(CaptureError, match="several sequences"):
            globals()["torch_chunk_gated_delta_rule"](x, x, x, g, g, cu_seqlens=torch.tensor([0, 4]))
