"""Experts that a model runs in a loop over those that any position goes to, as products of batches without one.

transformers has such products for most of its mixtures, and a loop alone for a few: where some experts give what they are given, say.
While a model is exported, products stand in for the loop of a layer that has the usual matrices and the usual arguments; but only where
they give the same numbers as its loop when they are tried, on small matrices in the place of its own. Others stay as they are, and are
refused for their loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_GIVEN = ("hidden_states", "top_k_index", "top_k_weights")
_HELD = {"gate_up_proj", "down_proj"}
_WIDTH, _INNER = 3, 2  # of the matrices that are tried
_NEAR = 1e-5  # of the largest number


@contextmanager
def without_loops(module: nn.Module) -> Iterator[None]:
    """While open, such layers of the module run as products."""
    kinds: dict[type, list[nn.Module]] = {}
    for part in module.modules():
        if _looks_like_it(part):
            kinds.setdefault(type(part), []).append(part)
    found: list[Any] = [kind for kind, parts in kinds.items() if all(map(_agrees, parts))]
    plain = [kind.forward for kind in found]
    for kind in found:
        kind.forward = _products
    try:
        yield
    finally:
        for kind, forward in zip(found, plain, strict=True):
            kind.forward = forward


def _looks_like_it(part: nn.Module) -> bool:
    forward: Any = type(part).forward
    held = {name: value for name, value in part._parameters.items() if value is not None}
    if held.keys() != _HELD or part._buffers or not callable(getattr(part, "act_fn", None)):
        return False
    if hasattr(forward, "__wrapped__") or tuple(inspect.signature(forward).parameters)[1:] != _GIVEN:
        return False  # wrapped: transformers chooses how it runs
    up, down = held["gate_up_proj"], held["down_proj"]
    return up.dim() == down.dim() == 3 and up.shape[0] >= down.shape[0]


def _products(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states (positions, width), the others (positions, k). Experts beyond those that have a second matrix give what they
    are given."""
    count, (positions, k) = self.down_proj.shape[0], top_k_index.shape
    chosen = top_k_index.reshape(-1)
    ids = chosen.clamp(max=count - 1)
    rows = hidden_states.repeat_interleave(k, 0)
    both = torch.bmm(self.gate_up_proj[ids], rows.unsqueeze(-1)).squeeze(-1)
    gate, up = both.chunk(2, dim=-1)
    inner = self.act_fn(gate) * up
    made = torch.bmm(self.down_proj[ids], inner.unsqueeze(-1)).squeeze(-1)
    if self.gate_up_proj.shape[0] > count:
        made = torch.where((chosen >= count).unsqueeze(-1), rows, made)
    made = (made * top_k_weights.reshape(-1, 1)).to(hidden_states.dtype)
    return made.view(positions, k, -1).sum(1)


def _agrees(part: nn.Module) -> bool:
    """Whether the loop gives what the products give, for every expert."""
    total, count = (part._parameters[name].shape[0] for name in ("gate_up_proj", "down_proj"))  # type: ignore[union-attr]
    draw = torch.Generator().manual_seed(1)
    tried: Any = copy.copy(part)
    tried._parameters = {
        "gate_up_proj": nn.Parameter(torch.randn(total, 2 * _INNER, _WIDTH, generator=draw)),
        "down_proj": nn.Parameter(torch.randn(count, _WIDTH, _INNER, generator=draw)),
    }
    chosen = torch.stack([torch.randperm(total, generator=draw) for _ in range(2)], 1)
    given = (torch.randn(total, _WIDTH, generator=draw), chosen, torch.rand(total, 2, generator=draw))
    try:
        with torch.no_grad():
            theirs, ours = type(part).forward(tried, *given), _products(tried, *given)
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):  # of another form
        return False
    return theirs.shape == ours.shape and bool((theirs - ours).abs().max() <= _NEAR * theirs.abs().max())
