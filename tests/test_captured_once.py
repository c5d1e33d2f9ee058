"""A graph that is captured once in a run is the one of its module, and the workers of a run hand it to each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import captured_once
from support.turns import TURNS

from fusion.dag.ir.graph import Graph, Input, Ref, TensorType
from fusion.runtime.capture.models import GPT
from fusion.runtime.job.spec import GPTConfig


def graph(width: int) -> Graph:
    return Graph((Input("x", TensorType((width,), "float32")),), (), (), (Ref("x"),))


def test_what_one_worker_made_another_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TURNS, str(tmp_path))
    made: list[int] = []

    def make(width: int) -> Graph:
        made.append(width)
        return graph(width)

    for worker in range(2):
        monkeypatch.setattr(captured_once, "_made", {})
        assert captured_once.once("three", lambda: make(3)) == graph(3), worker
        assert captured_once.once("four", lambda: make(4)) == graph(4), worker
        assert captured_once.once("four", lambda: make(5)) == graph(4), worker
    assert made == [3, 4]


def test_modules_are_told_apart_by_all_that_their_graphs_depend_on() -> None:
    small = GPTConfig(blocks=1, width=8, heads=1, sequence=8)
    frozen = GPT(small)
    next(frozen.parameters()).requires_grad_(False)
    tables = [torch.nn.Module(), torch.nn.Module()]
    modules = [GPT(small), GPT(GPTConfig(blocks=2, width=8, heads=1, sequence=8)), frozen, GPT(small).half()]
    assert len({captured_once._described(module) for module in modules}) == len(modules)
    assert captured_once._described(GPT(small)) == captured_once._described(GPT(small))
    for number, module in enumerate(tables):
        module.register_buffer("mask", torch.tensor([number]))
        module.config = _Config()  # type: ignore[assignment]
    assert captured_once._described(tables[0]) != captured_once._described(tables[1])


class _Config:
    _attn_implementation = "sdpa"

    def to_dict(self) -> dict[str, object]:
        return {"_name_or_path": id(self)}
