"""Experts whose rows a model sorts by expert. How many rows an expert gets depends on data, which no shape tells.

A layer of JetMoE has a router and two stacks of expert matrices, for input and output; in its attention, `map` and `reduce` lie on either
side of the attention itself. While a model is exported, each row is multiplied in place with the matrices that it is routed to, but only in
layers where this gives the same numbers in a trial with a small layer. Others stay as they are, and are refused for their sizes.
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
_TOLERANCE = 1e-5  # of the largest number
_TRIAL_CONFIG: Mapping[str, Any] = {
    "hidden_size": 6, "intermediate_size": 4, "kv_channels": 2, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "activation_function": "silu",
}  # fmt: skip


@contextmanager
def without_sorting(module: nn.Module) -> Iterator[None]:
    """While open, such layers of the module multiply rows in place and do not sort them."""
    kinds = {type(part) for part in module.modules() if part._modules.keys() >= _PARTS}
    replaced = [
        (kind, methods) for kind in kinds if (methods := _replacements(kind)) and _agrees(kind, methods)
    ]
    originals = [(kind, name, getattr(kind, name)) for kind, methods in replaced for name in methods]
    for kind, methods in replaced:
        for name, method in methods.items():
            setattr(kind, name, method)
    try:
        yield
    finally:
        for kind, name, method in originals:
            setattr(kind, name, method)


def _replacements(kind: Any) -> Mapping[str, Callable[..., Any]]:
    """The replacement of each method of a class of layers, by name."""
    if {"map", "reduce"} <= vars(kind).keys():
        return {"map": _map, "reduce": _reduce}
    return {"forward": _forward} if "forward" in vars(kind) else {}


def _routed(router: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows (rows, width) -> the experts of each row and their weights, (rows * k), and the router's logits."""
    logits = router.layer(rows).float()
    highest, chosen = logits.topk(router.top_k, dim=1)
    return chosen.flatten(), torch.softmax(highest, dim=1).type_as(rows).flatten(), logits


def _product(experts: Any, rows: Tensor, chosen: Tensor) -> Tensor:
    return torch.bmm(experts.weight[chosen], rows.unsqueeze(-1)).squeeze(-1)


def _forward(self: Any, layer_input: Tensor) -> Tensor:
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, gates, _ = _routed(self.router, rows)
    gate_and_up = _product(self.input_linear, rows.repeat_interleave(self.router.top_k, 0), chosen)
    gate, up = gate_and_up.chunk(2, dim=-1)
    return _summed_outputs(self, self.activation(gate) * up, chosen, gates, layer_input)


def _map(self: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, Any]:
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, gates, logits = _routed(self.router, rows)
    outputs = _product(self.input_linear, rows.repeat_interleave(self.router.top_k, 0), chosen)
    return outputs.view(*layer_input.shape[:-1], self.router.top_k, -1), logits, (chosen, gates)


def _reduce(self: Any, layer_input: Tensor, topo_info: Any) -> Tensor:
    chosen, gates = topo_info
    return _summed_outputs(
        self, layer_input.reshape(-1, layer_input.shape[-1]), chosen, gates, layer_input[..., 0, :]
    )


def _summed_outputs(self: Any, inner: Tensor, chosen: Tensor, gates: Tensor, like: Tensor) -> Tensor:
    """The weighted sum of each row's experts, in the shape of `like` but for its width."""
    outputs = _product(self.output_linear, inner, chosen) * gates[:, None]
    total = outputs.view(-1, self.router.top_k, outputs.shape[-1]).sum(1)
    biased: Tensor = total.view(*like.shape[:-1], -1) + self.bias
    return biased


def _agrees(kind: Any, replacements: Mapping[str, Callable[..., Any]]) -> bool:
    """Whether a small layer gives the same numbers with the replacements."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        try:
            layer = kind(SimpleNamespace(**_TRIAL_CONFIG)).float()
            for parameter in layer.parameters():
                parameter.normal_()
            inputs = torch.randn(2, 9, _TRIAL_CONFIG["hidden_size"])
            expected = _run(
                {name: inspect.unwrap(getattr(kind, name)) for name in replacements}, layer, inputs
            )
            actual = _run(replacements, layer, inputs)
        except (TypeError, AttributeError, RuntimeError, ValueError, KeyError):  # a layer of another form
            return False
    return expected.shape == actual.shape and bool(
        (expected - actual).abs().max() <= _TOLERANCE * expected.abs().max()
    )


def _run(methods: Mapping[str, Callable[..., Any]], layer: Any, inputs: Tensor) -> Tensor:
    if "forward" in methods:
        output: Tensor = methods["forward"](layer, inputs)
        return output
    inner, _, info = methods["map"](layer, inputs)
    result: Tensor = methods["reduce"](layer, functional.silu(inner), info)
    return result
