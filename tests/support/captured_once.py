"""Captures of small models, each done once in a run of the tests, for tests of what follows the capture.

One `torch.export` takes seconds of a core, so the workers of a run share their graphs in a folder of that run. Tests of the
capture itself call it directly.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.turns import TURNS, turn
from torch import nn

from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture import capture
from fusion.runtime.capture.exporting.tensors import tensors_of
from fusion.runtime.capture.models import GPT

_made: dict[str, Graph] = {}
_capture_language_model = capture.capture_language_model
_capture_encoder_decoder = capture.capture_encoder_decoder


def once(name: str, make: Callable[[], Graph]) -> Graph:
    """The result of `make`, which must be the same for the same name in all tests of a run."""
    key = hashlib.sha256(name.encode()).hexdigest()
    if key not in _made:
        _made[key] = _shared(Path(os.environ[TURNS], key), make) if TURNS in os.environ else make()
    return _made[key]


def _shared(folder: Path, make: Callable[[], Graph]) -> Graph:
    folder.mkdir(exist_ok=True)
    with turn(folder, alone=True):  # whoever wants it too waits for it
        path = folder / "graph"
        if path.exists():
            return serialise.decode(path.read_bytes())
        graph = make()
        path.write_bytes(serialise.encode(graph))
        return graph


def captured_once(module: nn.Module, *, training: bool, maximum_sequence: int) -> Graph:
    """`capture_language_model`, once for each configuration and tables of a module: its graph does not depend on the values of
    parameters."""
    return once(
        f"{_described(module)}, training {training}, {maximum_sequence}",
        lambda: _capture_language_model(module, training=training, maximum_sequence=maximum_sequence),
    )


def source_captured_once(
    module: nn.Module, *, maximum_sequence: int, maximum_source: int, features: int = 0
) -> Graph:
    """`capture_encoder_decoder`, once for each configuration and tables of a module."""
    sizes = {"maximum_sequence": maximum_sequence, "maximum_source": maximum_source, "features": features}
    return once(f"{_described(module)}, {sizes}", lambda: _capture_encoder_decoder(module, **sizes))


def _described(module: Any) -> str:
    """Everything in a built-in model, or one of transformers, on which a capture depends."""
    if isinstance(module, GPT):
        configuration = repr(module.config)
    else:
        config = module.config
        attention = config._attn_implementation
        config = config.to_dict()
        # What is filled in when it is saved; of the dtype the tensors tell.
        for of_its_files in (
            "_name_or_path", "architectures", "transformers_version", "dtype", "quantization_config",
        ):  # fmt: skip
            config.pop(of_its_files, None)
        configuration = f"{attention}, {sorted((k, repr(v)) for k, v in config.items())}"
    first: dict[int, str] = {}
    tensors = []
    for name, tensor in tensors_of(module):
        value = ""
        if not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            value = hashlib.sha256(
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            ).hexdigest()
        kind = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, value)
        tensors.append((name, first.setdefault(id(tensor), name), *kind))
    return f"{type(module).__qualname__}, {configuration}, {tensors}"


def capture_once(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Replace the capture functions in these Python modules by those that capture once."""
    for module in modules:
        monkeypatch.setattr(module, "capture_language_model", captured_once)
