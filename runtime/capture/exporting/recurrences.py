"""Linear attention and state spaces: what transformers runs a loop over a sequence for, as one operator.

transformers writes each sort of recurrence as a function of its own, or as a method of a layer, for want of a kernel.
It goes through chunks or positions in a loop, which leaves the length of a sequence no longer free. While a model is exported,
`fusion.recurrence` stands in their place, with the steps that they take before and after; but only in those that give
the same numbers as here when they are tried. Others are exported as they are, and refused for their loop.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.recurrence import recurrence

Tensor = torch.Tensor
_TRIED = 70  # positions: more than a chunk of 64
_NEAR = 1e-5  # of the largest number that a function gives
_STATES = "the model keeps a state beside its cache, which a graph has no place for"


@contextmanager
def one_operator(module: nn.Module) -> Iterator[None]:
    """While open, the recurrences that are known here are one operator in the code of every part of a module. In training mode
    they stay as they are, as the operator has no gradient: such a model is refused for its loop."""
    if module.training:
        yield
        return
    code = {type(part).__module__ for part in module.modules()}
    found: list[tuple[Any, str, Any]] = [
        (sys.modules[name], attribute, function)
        for name in sorted(code & sys.modules.keys())
        for attribute, function in sorted(vars(sys.modules[name]).items(), key=lambda item: item[0])
        if inspect.isfunction(function) and function.__name__ in _KNOWN
    ]
    kinds: list[Any] = sorted({type(part) for part in module.modules()}, key=lambda kind: kind.__qualname__)
    found += [
        (kind, attribute, method)
        for kind in kinds
        for attribute, method in sorted(vars(kind).items())
        if attribute in _METHODS or (attribute == "forward" and vars(kind).keys() >= _BLOCKS)
    ]
    replaced = [(where, name, function) for where, name, function in found if _agrees(function)]
    for where, name, function in replaced:
        setattr(where, name, _in_place_of(function))
    try:
        yield
    finally:
        for where, name, function in replaced:
            setattr(where, name, function)


class _Known(NamedTuple):
    ours: Callable[..., Any]
    example: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def _known(function: Callable[..., Any]) -> _Known:
    plain = inspect.unwrap(function)
    if plain.__name__ == "forward":  # of a layer, which is tried with one of its own kind
        return _Known(_lightning, lambda: _lightning_example(plain))
    return {**_KNOWN, **_METHODS}[plain.__name__]


def _in_place_of(function: Callable[..., Any]) -> Callable[..., Any]:
    ours = _known(function).ours
    plain = inspect.unwrap(function)
    signature = inspect.signature(plain)

    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        more = given.arguments.get("kwargs", {})
        if more.get("cu_seqlens") is not None or more.get("seq_idx") is not None:
            raise CaptureError("the model runs several sequences as one, and says where each ends")
        return ours(plain, **given.arguments)

    return called


@cache
def _agrees(function: Callable[..., Any]) -> bool:
    """Whether it gives what the operator gives, on numbers that every step of it matters for."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        try:
            args, kwargs = _known(function).example()
            theirs, ours = (
                _first(f(*args, **kwargs)) for f in (inspect.unwrap(function), _in_place_of(function))
            )
        except (TypeError, AttributeError, KeyError, RuntimeError, ValueError):  # of another version
            return False
    same = theirs.shape == ours.shape and theirs.dtype == ours.dtype
    return same and bool((theirs - ours).abs().max() <= _NEAR * theirs.abs().max())


def _first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


@cache
def _operator() -> Any:
    """`fusion.recurrence` for torch, which export leaves whole."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, rates: Tensor | None
    ) -> Tensor:
        return recurrence(query, key, value, decay, beta, rates)

    schema = "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor? rates) -> Tensor"
    made = torch.library.custom_op("fusion::recurrence", run, mutates_args=(), schema=schema)
    made.register_fake(lambda query, key, value, *_: value.new_empty(value.shape, dtype=torch.float32))
    return made


def _delta_rule(
    plain: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Gated DeltaNet, and Kimi Delta Attention, whose `g` is of each width: (batch, length, heads, ...)."""
    if initial_state is not None or output_final_state:
        raise CaptureError(_STATES)
    dtype = query.dtype
    query, key, value, g, beta = (t.transpose(1, 2).float() for t in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        norm = plain.__globals__["l2norm"]
        query, key = norm(query, dim=-1, eps=1e-6), norm(key, dim=-1, eps=1e-6)
    query = query * query.shape[-1] ** -0.5
    decay = g if g.dim() == 4 else g.unsqueeze(-1)
    seen = _operator()(query, key, value, decay, beta.unsqueeze(-1), None)
    return seen.transpose(1, 2).to(dtype).contiguous(), None


def _selective_scan(
    _: Any, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, delta_softplus: bool, return_last_state: bool, **__: Any,
) -> Tensor:  # fmt: skip
    """Mamba: hidden states and dt (batch, channels, length), A (channels, width), B and C (batch, width, length). Each
    channel is a head."""
    if return_last_state:
        raise CaptureError(_STATES)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    key, query = (t.transpose(1, 2).unsqueeze(1) for t in (B, C))
    value = (dt.float() * hidden_states.float()).unsqueeze(-1)
    seen = _operator()(query, key, value, dt.unsqueeze(-1), None, A)
    scan: Tensor = seen.squeeze(-1).to(hidden_states.dtype)
    if D is not None:
        scan = scan + hidden_states * D[None, :, None]
    return scan if z is None else scan * functional.silu(z)


def _chunk_scan(
    _: Any, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    initial_states: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], return_final_states: bool, **__: Any,
) -> Tensor:  # fmt: skip
    """Mamba-2: hidden states (batch, length, heads, width'), dt (batch, length, heads), A (heads), B and C (batch, length, key
    heads, width)."""
    if initial_states is not None or return_final_states:
        raise CaptureError(_STATES)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    least, most = dt_limit
    if least > 0 or most < inf or not dt_softplus:
        dt = torch.clamp(dt, min=least, max=None if most == inf else most)
    hidden_states = hidden_states.float()
    value = hidden_states * dt[..., None].float()
    decay = (A.float() * dt.float()).unsqueeze(-1)
    query, key, value, decay = (t.float().transpose(1, 2) for t in (C, B, value, decay))
    seen: Tensor = _operator()(query, key, value, decay, None, None).transpose(1, 2)
    if D is not None:
        seen = seen + D[..., None] * hidden_states
    return seen.contiguous()


def _gated_unit(
    _: Any, hidden_states: Tensor, recurrent_gate: Tensor, recurrent_states: Tensor | None, **__: Any
) -> tuple[Tensor, None]:
    """The RG-LRU of RecurrentGemma: hidden states and gate (batch, length, channels). Each channel is a head, whose state is one number.
    That a sequence begins at position 0, `reset` says as well."""
    if recurrent_states is not None:
        raise CaptureError(_STATES)
    value = hidden_states.transpose(1, 2).unsqueeze(-1)
    gate = recurrent_gate.transpose(1, 2).unsqueeze(-1).float()
    one = torch.ones_like(gate)
    decay = gate.clamp(min=torch.finfo(torch.float32).tiny).log()
    seen = _operator()(one, one, value, decay, None, None)
    return seen.squeeze(-1).transpose(1, 2).to(hidden_states.dtype), None


def _lightning(plain: Any, self: Any, hidden_states: Tensor, attention_mask: Tensor | None, cache: Any, **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Lightning attention of MiniMax: all of a layer, (batch, length, width), as its loop goes over blocks of the sequence."""
    if cache is not None:
        raise CaptureError(_STATES)
    batch, length, _width = hidden_states.shape
    heads, width = self.num_attention_heads, self.head_dim
    rows = self.act_fn(self.qkv_proj(hidden_states))
    rows = plain.__globals__["apply_mask_to_padding_states"](rows, attention_mask)
    rows = rows.reshape(batch, length, heads, 3 * width)
    query, key, value = (part.transpose(1, 2) for part in torch.split(rows, width, dim=3))
    decay = (-self.slope_rate.float()).expand(batch, heads, length, 1)
    seen = _operator()(query, key, value, decay, None, None).to(hidden_states.dtype)
    seen = self.norm(seen.transpose(1, 2).reshape(batch, length, heads * width))
    return self.out_proj(functional.sigmoid(self.output_gate(hidden_states)) * seen), None


def _delta_example(by_width: bool) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    keys = 4 if by_width else 2
    query, key = torch.randn(2, 2, _TRIED, keys, 8)
    value, g = torch.randn(2, _TRIED, 4, 6), -torch.rand(2, _TRIED, 4, *([8] if by_width else []))
    beta = torch.rand(2, _TRIED, 4)
    return (query, key, value), {"g": g, "beta": beta, "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}  # fmt: skip


def _selective_example() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    hidden, dt, z = torch.randn(3, 2, 6, _TRIED)
    b, c = torch.randn(2, 2, 4, _TRIED)
    named = {"D": torch.randn(6), "z": z, "delta_bias": torch.randn(6), "delta_softplus": True}
    return (hidden, dt, -torch.rand(6, 4), b, c), named


def _chunk_example() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    hidden, dt = torch.randn(2, _TRIED, 4, 6), torch.randn(2, _TRIED, 4)
    b, c = torch.randn(2, 2, _TRIED, 2, 8)
    named = {"D": torch.randn(4), "dt_bias": torch.randn(4), "dt_softplus": True, "dt_limit": (0.1, 1.0)}
    return (hidden, dt, -torch.rand(4), b, c), {"chunk_size": 16, **named}


def _gated_example() -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden, gate = torch.randn(2, _TRIED, 6), torch.rand(2, _TRIED, 6)
    reset = (torch.arange(_TRIED) == 0).expand(2, _TRIED)[:, :, None]
    return (None, hidden, gate, reset, None), {}


def _lightning_example(plain: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    config = SimpleNamespace(
        hidden_size=8, head_dim=4, num_attention_heads=2, num_hidden_layers=3, block_size=16, hidden_act="silu",
        layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    layer = plain.__globals__[plain.__qualname__.rpartition(".")[0]](config, 1)
    return (layer, torch.randn(2, _TRIED, 8), None, None), {}


_BLOCKS = {"get_slope_rate", "decay_factors"}  # methods of a layer of lightning attention
_METHODS: Mapping[str, _Known] = {"_rnn_scan": _Known(_gated_unit, _gated_example)}
_KNOWN: Mapping[str, _Known] = {
    "torch_chunk_gated_delta_rule": _Known(_delta_rule, lambda: _delta_example(False)),
    "chunk_kimi_delta_attention": _Known(_delta_rule, lambda: _delta_example(True)),
    "mamba_selective_scan": _Known(_selective_scan, _selective_example),
    "mamba2_chunk_scan": _Known(_chunk_scan, _chunk_example),
}
