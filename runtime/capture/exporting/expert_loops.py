"""Experts that a model runs in a loop over those that any position goes to, as products of batches without one.

transformers has such products for most of its mixtures, and a loop alone for a few: where some experts give what they are given, say.
While a model is exported, products stand in for the loop of a layer that has the usual matrices and the usual arguments; but only where
they give the same numbers as its loop when they are tried, on small matrices in the place of its own. Others stay as they are, and are
refused for their loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_GIVEN = ("hidden_states", "top_k_index", "top_k_weights")
_HELD = {"gate_up_proj", "down_proj"}
_STACKED = {"w1", "v1", "w2"}  # the matrices of all experts one below the other, in a part of the layer's
_WIDTH, _INNER = 3, 2  # of the matrices that are tried
_NEAR = 1e-5  # of the largest number


def without_loops(module: nn.Module) -> AbstractContextManager[None]:
    """While open, such layers of the module run as products."""
    return replaced_forward(module, _looks_like_it, _agrees, _products)


@contextmanager
def replaced_forward(
    module: nn.Module,
    is_candidate: Callable[[nn.Module], bool],
    agrees: Callable[[nn.Module], bool],
    forward: Callable[..., Any],
) -> Iterator[None]:
    """While open, candidates in the module run `forward`, those of a class of which all agree with it."""
    kinds: dict[type, list[nn.Module]] = {}
    for part in module.modules():
        if is_candidate(part):
            kinds.setdefault(type(part), []).append(part)
    found: list[Any] = [kind for kind, parts in kinds.items() if all(map(agrees, parts))]
    plain = [kind.forward for kind in found]
    for kind in found:
        kind.forward = forward
    try:
        yield
    finally:
        for kind, own in zip(found, plain, strict=True):
            kind.forward = own


def _looks_like_it(part: nn.Module) -> bool:
    forward: Any = type(part).forward
    if hasattr(forward, "__wrapped__") or tuple(inspect.signature(forward).parameters)[1:] != _GIVEN:
        return False  # wrapped: transformers chooses how it runs
    held = _parameters(part)
    if part._buffers or (inner := _stacked(part)) is not None:
        return not part._buffers and not held and callable(getattr(inner, "activation_fn", None))
    if held.keys() != _HELD or not callable(getattr(part, "act_fn", None)):
        return False
    up, down = held["gate_up_proj"], held["down_proj"]
    return up.dim() == down.dim() == 3 and up.shape[0] >= down.shape[0]


def _parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in part._parameters.items() if value is not None}


def _stacked(part: nn.Module) -> nn.Module | None:
    """The part of a layer, its only one, that has the matrices of its experts one below the other."""
    inner = next(iter(part._modules.values()), None)
    if len(part._modules) != 1 or inner is None or not isinstance(getattr(part, "num_experts", None), int):
        return None
    return inner if _parameters(inner).keys() == _STACKED and not inner._buffers else None


def _products(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states (.., width), the others (positions, k). Experts beyond those that have a second matrix give what they
    are given."""
    (positions, k), width = top_k_index.shape, hidden_states.shape[-1]
    chosen = top_k_index.reshape(-1)
    rows = hidden_states.reshape(-1, width).repeat_interleave(k, 0)
    inner = _stacked(self)
    if inner is None:
        made = _of_pairs(self, rows, chosen)
    else:
        made = _of_stacks(inner, self.num_experts, rows, chosen)
    made = (made * top_k_weights.reshape(-1, 1)).to(hidden_states.dtype)
    return made.view(positions, k, -1).sum(1).view(hidden_states.shape)


def _of_pairs(layer: Any, rows: Tensor, chosen: Tensor) -> Tensor:
    count = layer.down_proj.shape[0]
    ids = chosen.clamp(max=count - 1)
    both = torch.bmm(layer.gate_up_proj[ids], rows.unsqueeze(-1)).squeeze(-1)
    gate, up = both.chunk(2, dim=-1)
    made = torch.bmm(layer.down_proj[ids], (layer.act_fn(gate) * up).unsqueeze(-1)).squeeze(-1)
    if layer.gate_up_proj.shape[0] > count:
        made = torch.where((chosen >= count).unsqueeze(-1), rows, made)
    return made


def _of_stacks(inner: Any, count: int, rows: Tensor, chosen: Tensor) -> Tensor:
    first, second, last = (
        getattr(inner, name).unflatten(0, (count, -1))[chosen] for name in ("w1", "v1", "w2")
    )
    gate, up = (torch.bmm(each, rows.unsqueeze(-1)).squeeze(-1) for each in (first, second))
    return torch.bmm((inner.activation_fn(gate) * up).unsqueeze(1), last).squeeze(1)


def _agrees(part: nn.Module) -> bool:
    """Whether the loop gives what the products give, for every expert."""
    draw = torch.Generator().manual_seed(1)
    tried, total = _small(part, draw)
    chosen = torch.stack([torch.randperm(total, generator=draw) for _ in range(2)], 1)
    given = (torch.randn(total, _WIDTH, generator=draw), chosen, torch.rand(total, 2, generator=draw))
    try:
        with torch.no_grad():
            theirs, ours = type(part).forward(tried, *given).view(-1, _WIDTH), _products(tried, *given)
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):  # of another form
        return False
    return theirs.shape == ours.shape and bool((theirs - ours).abs().max() <= _NEAR * theirs.abs().max())


def _small(part: nn.Module, draw: torch.Generator) -> tuple[Any, int]:
    """A layer of the same kind with small matrices, and how many experts it has."""
    tried: Any = copy.copy(part)
    inner = _stacked(part)
    if inner is None:
        total, count = (part._parameters[name].shape[0] for name in ("gate_up_proj", "down_proj"))  # type: ignore[union-attr]
        tried._parameters = {
            "gate_up_proj": nn.Parameter(torch.randn(total, 2 * _INNER, _WIDTH, generator=draw)),
            "down_proj": nn.Parameter(torch.randn(count, _WIDTH, _INNER, generator=draw)),
        }
        return tried, total
    total = tried.num_experts
    small: Any = copy.copy(inner)
    shape = (total * _INNER, _WIDTH)
    small._parameters = {n: nn.Parameter(torch.randn(shape, generator=draw)) for n in sorted(_STACKED)}
    tried._modules = dict.fromkeys(part._modules, small)
    for each in (tried, small):
        each.hidden_size, each.ffn_hidden_size = _WIDTH, _INNER
    return tried, total
