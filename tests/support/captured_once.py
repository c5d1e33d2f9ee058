"""Captures of the built-in model, each made once in a process: for tests of what comes after the capture."""

from __future__ import annotations

from typing import Any

import pytest

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.models import GPT
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.placing import offline_graph

capture = offline_graph.capture_language_model
_made: dict[tuple[GPTConfig, bool, int], Graph] = {}


def captured_once(module: Any, *, training: bool, maximum_sequence: int) -> Graph:
    """As `capture_language_model`, of which a graph is all that its configuration says: weights are no part of it."""
    if not isinstance(module, GPT):
        return capture(module, training=training, maximum_sequence=maximum_sequence)
    key = (module.config, training, maximum_sequence)
    if key not in _made:
        _made[key] = capture(module, training=training, maximum_sequence=maximum_sequence)
    return _made[key]


def capture_once(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Let these modules, which capture, do so once for each configuration."""
    for module in modules:
        monkeypatch.setattr(module, "capture_language_model", captured_once)
