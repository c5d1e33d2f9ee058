"""Mixtures that run every expert on every position, scaled by a score that is zero for all but a few, as products with those few alone.

This is exact where an expert maps zeros to zero, as in Llama 4. The dense form stacks all positions once for each expert, where a cache
could not tell them apart. While a model is exported, the products replace the forward of layers that have the usual parts, but only where
they give the same numbers as the layer in a trial with small matrices.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fusion.runtime.capture.exporting.expert_loops import replaced_forward

_PARTS = {"experts", "router", "shared_expert"}
_MATRICES = {"gate_up_proj", "down_proj"}
_TRIAL_WIDTH, _TRIAL_INNER, _TRIAL_POSITIONS = 3, 2, 16  # sizes of the trial
_TOLERANCE = 1e-5  # of the largest number


def without_dense_experts(module: nn.Module) -> AbstractContextManager[None]:
    """While open, such layers of the module run only the experts that a position is routed to."""
    return replaced_forward(module, _is_candidate, _agrees, _products)


def _is_candidate(part: nn.Module) -> bool:
    if part._modules.keys() != _PARTS or part._parameters or part._buffers:
        return False
    experts, router = (part._modules[name] for name in ("experts", "router"))
    arguments = tuple(inspect.signature(type(part).forward).parameters)[1:]
    return (
        arguments == ("hidden_states",)
        and isinstance(getattr(part, "top_k", None), int)
        and isinstance(router, nn.Linear)
        and experts is not None
        and experts._parameters.keys() == _MATRICES
        and callable(getattr(experts, "act_fn", None))
    )


def _products(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """hidden_states (.., width) -> the sum (positions, width) of the shared expert and the experts routed to, and the router's logits."""
    experts = self.experts
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = self.router(rows)
    scores, ids = torch.topk(scores, self.top_k, dim=-1)
    chosen = ids.reshape(-1)
    scaled = rows.repeat_interleave(self.top_k, 0) * scores.reshape(-1, 1)
    gate_and_up = torch.bmm(scaled.unsqueeze(1), experts.gate_up_proj[chosen]).squeeze(1)
    gate, up = gate_and_up.chunk(2, dim=-1)
    outputs = torch.bmm((up * experts.act_fn(gate)).unsqueeze(1), experts.down_proj[chosen]).squeeze(1)
    return self.shared_expert(rows) + outputs.view(*ids.shape, -1).sum(1), logits


def _agrees(part: nn.Module) -> bool:
    """Whether the layer and the products give the same numbers."""
    generator = torch.Generator().manual_seed(1)
    trial = _trial_layer(part, generator)
    inputs = torch.randn(1, _TRIAL_POSITIONS, _TRIAL_WIDTH, generator=generator)
    try:
        with torch.no_grad():
            expected, actual = type(part).forward(trial, inputs), _products(trial, inputs)
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):  # a layer of another form
        return False
    if not isinstance(expected, tuple) or len(expected) != len(actual):
        return False
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= _TOLERANCE * a.abs().max())
        for a, b in zip(expected, actual, strict=True)
    )


def _trial_layer(part: nn.Module, rng: torch.Generator) -> Any:
    """A layer of the same kind with small matrices, and as many experts."""
    trial: Any = copy.copy(part)
    experts, router = (copy.copy(part._modules[name]) for name in ("experts", "router"))
    assert experts is not None and router is not None
    count = experts._parameters["down_proj"].shape[0]  # type: ignore[union-attr]
    shapes = {"gate_up_proj": (_TRIAL_WIDTH, 2 * _TRIAL_INNER), "down_proj": (_TRIAL_INNER, _TRIAL_WIDTH)}
    experts._parameters = {
        name: nn.Parameter(torch.randn(count, *shape, generator=rng)) for name, shape in shapes.items()
    }
    router._parameters = {
        "weight": nn.Parameter(torch.randn(count, _TRIAL_WIDTH, generator=rng)),
        "bias": None,
    }
    shared = nn.Linear(_TRIAL_WIDTH, _TRIAL_WIDTH)
    trial._modules = {"experts": experts, "router": router, "shared_expert": shared}
    for each in (trial, experts):
        for name in ("hidden_dim", "hidden_size"):
            if hasattr(each, name):
                setattr(each, name, _TRIAL_WIDTH)
    return trial
