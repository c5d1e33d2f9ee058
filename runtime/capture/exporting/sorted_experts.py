"""Experts whose rows a model sorts, so that those of each lie together: as many to an expert as its router says, which no shape tells.

A layer of JetMoE has a router, and matrices of experts for what goes in and for what comes out; attention may lie between the two, as
`map` and `reduce`. While a model is exported, each row goes with the matrices that it has chosen, where it is; but only in layers that give
the same numbers so when a small one of their kind is tried. Others stay as they are, and are refused for the sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_PARTS = {"router", "input_linear", "output_linear"}
_NEAR = 1e-5  # of the largest number
_SMALL: Mapping[str, Any] = {  # what a layer is made of by its configuration
    "hidden_size": 6, "intermediate_size": 4, "kv_channels": 2, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "activation_function": "silu",
}  # fmt: skip


@contextmanager
def without_sorting(module: nn.Module) -> Iterator[None]:
    """While open, such layers of the module do not sort."""
    kinds = {type(part) for part in module.modules() if part._modules.keys() >= _PARTS}
    found = [(kind, ours) for kind in kinds if (ours := _methods(kind)) and _agrees(kind, ours)]
    plain = [(kind, name, getattr(kind, name)) for kind, ours in found for name in ours]
    for kind, ours in found:
        for name, method in ours.items():
            setattr(kind, name, method)
    try:
        yield
    finally:
        for kind, name, method in plain:
            setattr(kind, name, method)


def _methods(kind: Any) -> Mapping[str, Callable[..., Any]]:
    """What stands in the place of the methods of a kind of layer."""
    if {"map", "reduce"} <= vars(kind).keys():
        return {"map": _map, "reduce": _reduce}
    return {"forward": _forward} if "forward" in vars(kind) else {}


def _routed(router: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The experts of each row of (rows, width) and what each counts, (rows * k); the router's logits."""
    logits = router.layer(rows).float()
    highest, chosen = logits.topk(router.top_k, dim=1)
    return chosen.flatten(), torch.softmax(highest, dim=1).type_as(rows).flatten(), logits


def _product(experts: Any, rows: Tensor, chosen: Tensor) -> Tensor:
    return torch.bmm(experts.weight[chosen], rows.unsqueeze(-1)).squeeze(-1)


def _forward(self: Any, layer_input: Tensor) -> Tensor:
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, gates, _ = _routed(self.router, rows)
    both = _product(self.input_linear, rows.repeat_interleave(self.router.top_k, 0), chosen)
    gate, up = both.chunk(2, dim=-1)
    return _merged(self, self.activation(gate) * up, chosen, gates, layer_input)


def _map(self: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, Any]:
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, gates, logits = _routed(self.router, rows)
    made = _product(self.input_linear, rows.repeat_interleave(self.router.top_k, 0), chosen)
    return made.view(*layer_input.shape[:-1], self.router.top_k, -1), logits, (chosen, gates)


def _reduce(self: Any, layer_input: Tensor, topo_info: Any) -> Tensor:
    chosen, gates = topo_info
    return _merged(
        self, layer_input.reshape(-1, layer_input.shape[-1]), chosen, gates, layer_input[..., 0, :]
    )


def _merged(self: Any, inner: Tensor, chosen: Tensor, gates: Tensor, like: Tensor) -> Tensor:
    """What the experts of each row give together, in the shape of `like` but for its width."""
    made = _product(self.output_linear, inner, chosen) * gates[:, None]
    total = made.view(-1, self.router.top_k, made.shape[-1]).sum(1)
    biased: Tensor = total.view(*like.shape[:-1], -1) + self.bias
    return biased


def _agrees(kind: Any, ours: Mapping[str, Callable[..., Any]]) -> bool:
    """Whether a small layer gives the same with `ours`."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        try:
            layer = kind(SimpleNamespace(**_SMALL)).float()
            for parameter in layer.parameters():
                parameter.normal_()
            given = torch.randn(2, 9, _SMALL["hidden_size"])
            theirs = _run({name: inspect.unwrap(getattr(kind, name)) for name in ours}, layer, given)
            made = _run(ours, layer, given)
        except (TypeError, AttributeError, RuntimeError, ValueError, KeyError):  # of another form
            return False
    return theirs.shape == made.shape and bool((theirs - made).abs().max() <= _NEAR * theirs.abs().max())


def _run(methods: Mapping[str, Callable[..., Any]], layer: Any, given: Tensor) -> Tensor:
    if "forward" in methods:
        made: Tensor = methods["forward"](layer, given)
        return made
    inner, _, info = methods["map"](layer, given)
    result: Tensor = methods["reduce"](layer, functional.silu(inner), info)
    return result
