"""Experts that a model runs in a loop over those that any position is routed to, as batched products without a loop.

transformers has batched products for most of its mixtures and only a loop for a few, such as those in which some experts are identities.
While a model is exported, products replace the loop of a layer that has the usual matrices and arguments, but only where they give the same
numbers as its loop in a trial with small matrices. Other layers stay as they are and are refused for their loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_MATRICES = {"gate_up_proj", "down_proj"}
_STACKED = {"w1", "v1", "w2"}  # matrices of all experts, stacked along rows in a part of the layer
_TRIAL_WIDTH, _TRIAL_INNER = 3, 2  # sizes of the trial matrices
_TOLERANCE = 1e-5  # of the largest number


def without_loops(module: nn.Module) -> AbstractContextManager[None]:
    """While open, such layers of the module run as products."""
    return replaced_forward(module, _is_candidate, _agrees, _products)


@contextmanager
def replaced_forward(
    module: nn.Module,
    is_candidate: Callable[[nn.Module], bool],
    agrees: Callable[[nn.Module], bool],
    forward: Callable[..., Any],
) -> Iterator[None]:
    """While open, candidates in the module run `forward` if all candidates of their class agree with it."""
    kinds: dict[type, list[nn.Module]] = {}
    for part in module.modules():
        if is_candidate(part):
            kinds.setdefault(type(part), []).append(part)
    replaced: list[Any] = [kind for kind, parts in kinds.items() if all(map(agrees, parts))]
    originals = [kind.forward for kind in replaced]
    for kind in replaced:
        kind.forward = forward
    try:
        yield
    finally:
        for kind, original in zip(replaced, originals, strict=True):
            kind.forward = original


def _is_candidate(part: nn.Module) -> bool:
    forward: Any = type(part).forward
    if hasattr(forward, "__wrapped__") or tuple(inspect.signature(forward).parameters)[1:] != _ARGUMENTS:
        return False  # wrapped: transformers selects the implementation
    matrices = _parameters(part)
    if part._buffers or (inner := _stacked_part(part)) is not None:
        return not part._buffers and not matrices and callable(getattr(inner, "activation_fn", None))
    if matrices.keys() != _MATRICES or not callable(getattr(part, "act_fn", None)):
        return False
    up, down = matrices["gate_up_proj"], matrices["down_proj"]
    return up.dim() == down.dim() == 3 and up.shape[0] >= down.shape[0]


def _parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in part._parameters.items() if value is not None}


def _stacked_part(part: nn.Module) -> nn.Module | None:
    """The only part of a layer, if it has the matrices of all experts stacked along rows."""
    inner = next(iter(part._modules.values()), None)
    if len(part._modules) != 1 or inner is None or not isinstance(getattr(part, "num_experts", None), int):
        return None
    return inner if _parameters(inner).keys() == _STACKED and not inner._buffers else None


def _products(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states (.., width), top_k_index and top_k_weights (positions, k) -> (.., width). Experts beyond those that have a second matrix
    are identities."""
    (positions, k), width = top_k_index.shape, hidden_states.shape[-1]
    chosen = top_k_index.reshape(-1)
    rows = hidden_states.reshape(-1, width).repeat_interleave(k, 0)
    inner = _stacked_part(self)
    if inner is None:
        outputs = _paired_experts(self, rows, chosen)
    else:
        outputs = _stacked_experts(inner, self.num_experts, rows, chosen)
    outputs = (outputs * top_k_weights.reshape(-1, 1)).to(hidden_states.dtype)
    return outputs.view(positions, k, -1).sum(1).view(hidden_states.shape)


def _paired_experts(layer: Any, rows: Tensor, chosen: Tensor) -> Tensor:
    count = layer.down_proj.shape[0]
    ids = chosen.clamp(max=count - 1)
    gate_and_up = torch.bmm(layer.gate_up_proj[ids], rows.unsqueeze(-1)).squeeze(-1)
    gate, up = gate_and_up.chunk(2, dim=-1)
    outputs = torch.bmm(layer.down_proj[ids], (layer.act_fn(gate) * up).unsqueeze(-1)).squeeze(-1)
    if layer.gate_up_proj.shape[0] > count:
        outputs = torch.where((chosen >= count).unsqueeze(-1), rows, outputs)
    return outputs


def _stacked_experts(inner: Any, count: int, rows: Tensor, chosen: Tensor) -> Tensor:
    gates, ups, down = (getattr(inner, name).unflatten(0, (count, -1))[chosen] for name in ("w1", "v1", "w2"))
    gate, up = (torch.bmm(matrices, rows.unsqueeze(-1)).squeeze(-1) for matrices in (gates, ups))
    return torch.bmm((inner.activation_fn(gate) * up).unsqueeze(1), down).squeeze(1)


def _agrees(part: nn.Module) -> bool:
    """Whether the loop and the products give the same numbers, for every expert."""
    generator = torch.Generator().manual_seed(1)
    trial, count = _trial_layer(part, generator)
    chosen = torch.stack([torch.randperm(count, generator=generator) for _ in range(2)], 1)
    inputs = (
        torch.randn(count, _TRIAL_WIDTH, generator=generator),
        chosen,
        torch.rand(count, 2, generator=generator),
    )
    try:
        with torch.no_grad():
            expected, actual = (
                type(part).forward(trial, *inputs).view(-1, _TRIAL_WIDTH),
                _products(trial, *inputs),
            )
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):  # a layer of another form
        return False
    return expected.shape == actual.shape and bool(
        (expected - actual).abs().max() <= _TOLERANCE * expected.abs().max()
    )


def _trial_layer(part: nn.Module, rng: torch.Generator) -> tuple[Any, int]:
    """A layer of the same kind with small matrices, and its number of experts."""
    trial: Any = copy.copy(part)
    inner = _stacked_part(part)
    if inner is None:
        total, count = (part._parameters[name].shape[0] for name in ("gate_up_proj", "down_proj"))  # type: ignore[union-attr]
        trial._parameters = {
            "gate_up_proj": nn.Parameter(torch.randn(total, 2 * _TRIAL_INNER, _TRIAL_WIDTH, generator=rng)),
            "down_proj": nn.Parameter(torch.randn(count, _TRIAL_WIDTH, _TRIAL_INNER, generator=rng)),
        }
        return trial, total
    total = trial.num_experts
    small: Any = copy.copy(inner)
    shape = (total * _TRIAL_INNER, _TRIAL_WIDTH)
    small._parameters = {n: nn.Parameter(torch.randn(shape, generator=rng)) for n in sorted(_STACKED)}
    trial._modules = dict.fromkeys(part._modules, small)
    for each in (trial, small):
        each.hidden_size, each.ffn_hidden_size = _TRIAL_WIDTH, _TRIAL_INNER
    return trial, total
