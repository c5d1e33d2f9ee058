"""Mixtures that give every position to every expert, times a score that is zero for all but a few, as products with those few alone.

What an expert makes of zeros is zero. So has Llama 4 it, whose positions lie one expert behind the other meanwhile, where no cache can tell
them apart. While a model is exported, the products stand in for a layer that has the usual parts; but only where they give the same numbers
as the layer when they are tried, on small matrices in the place of its own.
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
_HELD = {"gate_up_proj", "down_proj"}
_WIDTH, _INNER, _POSITIONS = 3, 2, 16  # of what is tried
_NEAR = 1e-5  # of the largest number


def with_chosen_alone(module: nn.Module) -> AbstractContextManager[None]:
    """While open, such layers of the module run with the experts that are chosen."""
    return replaced_forward(module, _looks_like_it, _agrees, _products)


def _looks_like_it(part: nn.Module) -> bool:
    if part._modules.keys() != _PARTS or part._parameters or part._buffers:
        return False
    experts, router = (part._modules[name] for name in ("experts", "router"))
    given = tuple(inspect.signature(type(part).forward).parameters)[1:]
    return (
        given == ("hidden_states",)
        and isinstance(getattr(part, "top_k", None), int)
        and isinstance(router, nn.Linear)
        and experts is not None
        and experts._parameters.keys() == _HELD
        and callable(getattr(experts, "act_fn", None))
    )


def _products(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """hidden_states (.., width); the sum (positions, width) of the shared expert and those that are chosen, and the router's logits."""
    experts = self.experts
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = self.router(rows)
    scores, ids = torch.topk(scores, self.top_k, dim=-1)
    chosen = ids.reshape(-1)
    given = rows.repeat_interleave(self.top_k, 0) * scores.reshape(-1, 1)
    both = torch.bmm(given.unsqueeze(1), experts.gate_up_proj[chosen]).squeeze(1)
    gate, up = both.chunk(2, dim=-1)
    made = torch.bmm((up * experts.act_fn(gate)).unsqueeze(1), experts.down_proj[chosen]).squeeze(1)
    return self.shared_expert(rows) + made.view(*ids.shape, -1).sum(1), logits


def _agrees(part: nn.Module) -> bool:
    """Whether the layer gives what the products give."""
    draw = torch.Generator().manual_seed(1)
    tried = _small(part, draw)
    given = torch.randn(1, _POSITIONS, _WIDTH, generator=draw)
    try:
        with torch.no_grad():
            theirs, ours = type(part).forward(tried, given), _products(tried, given)
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):  # of another form
        return False
    if not isinstance(theirs, tuple) or len(theirs) != len(ours):
        return False
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= _NEAR * a.abs().max())
        for a, b in zip(theirs, ours, strict=True)
    )


def _small(part: nn.Module, draw: torch.Generator) -> Any:
    """A layer of the same kind with small matrices, and as many experts."""
    tried: Any = copy.copy(part)
    experts, router = (copy.copy(part._modules[name]) for name in ("experts", "router"))
    assert experts is not None and router is not None
    count = experts._parameters["down_proj"].shape[0]  # type: ignore[union-attr]
    shapes = {"gate_up_proj": (_WIDTH, 2 * _INNER), "down_proj": (_INNER, _WIDTH)}
    experts._parameters = {
        name: nn.Parameter(torch.randn(count, *shape, generator=draw)) for name, shape in shapes.items()
    }
    router._parameters = {"weight": nn.Parameter(torch.randn(count, _WIDTH, generator=draw)), "bias": None}
    shared = nn.Linear(_WIDTH, _WIDTH)
    tried._modules = {"experts": experts, "router": router, "shared_expert": shared}
    for each in (tried, experts):
        for name in ("hidden_dim", "hidden_size"):
            if hasattr(each, name):
                setattr(each, name, _WIDTH)
    return tried
