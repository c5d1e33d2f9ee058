"""Linear attention and state-space recurrences, which transformers runs as a loop over the sequence, as one operator.

transformers writes each kind of recurrence as a function, or as a method of a layer, for use without a fused kernel. Its loop over chunks or
positions fixes the length of the sequence. While a model is exported, `fusion.recurrence`, with the steps before and after it, replaces
those functions that give the same numbers in a trial. Others are exported as they are, and refused for their loop.
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
_TRIAL_LENGTH = 70  # positions, more than one chunk of 64
_TOLERANCE = 1e-5  # relative to the largest number of the result
_STATE_KEPT = "the model keeps a state beside its cache, which a graph has no place for"


@contextmanager
def recurrences_as_operator(module: nn.Module) -> Iterator[None]:
    """While open, known recurrences in the code of the module's parts are one operator. In training mode they stay as they are, as the operator
    has no gradient: such a model is refused for its loop."""
    if module.training:
        yield
        return
    modules = {type(part).__module__ for part in module.modules()}
    candidates: list[tuple[Any, str, Any]] = [
        (sys.modules[name], attribute, function)
        for name in sorted(modules & sys.modules.keys())
        for attribute, function in sorted(vars(sys.modules[name]).items(), key=lambda item: item[0])
        if inspect.isfunction(function) and function.__name__ in _FUNCTIONS
    ]
    kinds: list[Any] = sorted({type(part) for part in module.modules()}, key=lambda kind: kind.__qualname__)
    candidates += [
        (kind, attribute, method)
        for kind in kinds
        for attribute, method in sorted(vars(kind).items())
        if attribute in _METHODS or (attribute == "forward" and vars(kind).keys() >= _LIGHTNING_METHODS)
    ]
    replaced = [(owner, name, function) for owner, name, function in candidates if _agrees(function)]
    for owner, name, function in replaced:
        setattr(owner, name, _replaced(function))
    try:
        yield
    finally:
        for owner, name, function in replaced:
            setattr(owner, name, function)


class _Replacement(NamedTuple):
    function: Callable[..., Any]
    example: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def _replacement_of(function: Callable[..., Any]) -> _Replacement:
    original = inspect.unwrap(function)
    if original.__name__ == "forward":  # of a layer: the trial makes one of its class
        return _Replacement(_lightning, lambda: _lightning_example(original))
    return {**_FUNCTIONS, **_METHODS}[original.__name__]


def _replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    replacement = _replacement_of(function).function
    original = inspect.unwrap(function)
    signature = inspect.signature(original)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments.get("kwargs", {})
        if options.get("cu_seqlens") is not None or options.get("seq_idx") is not None:
            raise CaptureError("the model runs several sequences as one, and says where each ends")
        return replacement(original, **bound.arguments)

    return run


@cache
def _agrees(function: Callable[..., Any]) -> bool:
    """Whether the function and the operator give the same numbers, on inputs for which every step matters."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        try:
            args, kwargs = _replacement_of(function).example()
            expected, actual = (
                _first(f(*args, **kwargs)) for f in (inspect.unwrap(function), _replaced(function))
            )
        except (TypeError, AttributeError, KeyError, RuntimeError, ValueError):  # of another version
            return False
    same_type = expected.shape == actual.shape and expected.dtype == actual.dtype
    return same_type and bool((expected - actual).abs().max() <= _TOLERANCE * expected.abs().max())


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


@cache
def _operator() -> Any:
    """`fusion.recurrence` as a torch operator, which an export keeps whole."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, rates: Tensor | None
    ) -> Tensor:
        return recurrence(query, key, value, decay, beta, rates)

    schema = "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor? rates) -> Tensor"
    operator = torch.library.custom_op("fusion::recurrence", run, mutates_args=(), schema=schema)
    operator.register_fake(lambda query, key, value, *_: value.new_empty(value.shape, dtype=torch.float32))
    return operator


def _delta_rule(
    original: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Gated DeltaNet: (batch, length, heads, ...); and Kimi Delta Attention, whose `g` has a decay for each key channel."""
    if initial_state is not None or output_final_state:
        raise CaptureError(_STATE_KEPT)
    dtype = query.dtype
    query, key, value, g, beta = (t.transpose(1, 2).float() for t in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        norm = original.__globals__["l2norm"]
        query, key = norm(query, dim=-1, eps=1e-6), norm(key, dim=-1, eps=1e-6)
    query = query * query.shape[-1] ** -0.5
    decay = g if g.dim() == 4 else g.unsqueeze(-1)
    output = _operator()(query, key, value, decay, beta.unsqueeze(-1), None)
    return output.transpose(1, 2).to(dtype).contiguous(), None


def _selective_scan(
    _: Any, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, delta_softplus: bool, return_last_state: bool, **__: Any,
) -> Tensor:  # fmt: skip
    """Mamba: hidden states and dt (batch, channels, length), A (channels, width), B and C (batch, width, length). Each
    channel is a head."""
    if return_last_state:
        raise CaptureError(_STATE_KEPT)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    key, query = (t.transpose(1, 2).unsqueeze(1) for t in (B, C))
    value = (dt.float() * hidden_states.float()).unsqueeze(-1)
    output = _operator()(query, key, value, dt.unsqueeze(-1), None, A)
    scan: Tensor = output.squeeze(-1).to(hidden_states.dtype)
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
        raise CaptureError(_STATE_KEPT)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    low, high = dt_limit
    if low > 0 or high < inf or not dt_softplus:
        dt = torch.clamp(dt, min=low, max=None if high == inf else high)
    hidden_states = hidden_states.float()
    value = hidden_states * dt[..., None].float()
    decay = (A.float() * dt.float()).unsqueeze(-1)
    query, key, value, decay = (t.float().transpose(1, 2) for t in (C, B, value, decay))
    output: Tensor = _operator()(query, key, value, decay, None, None).transpose(1, 2)
    if D is not None:
        output = output + D[..., None] * hidden_states
    return output.contiguous()


def _gated_unit(
    _: Any, hidden_states: Tensor, recurrent_gate: Tensor, recurrent_states: Tensor | None, **__: Any
) -> tuple[Tensor, None]:
    """The RG-LRU of RecurrentGemma: hidden states and gate (batch, length, channels). Each channel is a head with a state of one number.
    `reset` only says that a sequence begins at position 0."""
    if recurrent_states is not None:
        raise CaptureError(_STATE_KEPT)
    value = hidden_states.transpose(1, 2).unsqueeze(-1)
    gate = recurrent_gate.transpose(1, 2).unsqueeze(-1).float()
    one = torch.ones_like(gate)
    decay = gate.clamp(min=torch.finfo(torch.float32).tiny).log()
    output = _operator()(one, one, value, decay, None, None)
    return output.squeeze(-1).transpose(1, 2).to(hidden_states.dtype), None


def _lightning(original: Any, self: Any, hidden_states: Tensor, attention_mask: Tensor | None, cache: Any, **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Lightning attention of MiniMax, the whole layer (batch, length, width): its loop goes over blocks of the sequence."""
    if cache is not None:
        raise CaptureError(_STATE_KEPT)
    batch, length, _width = hidden_states.shape
    heads, width = self.num_attention_heads, self.head_dim
    rows = self.act_fn(self.qkv_proj(hidden_states))
    rows = original.__globals__["apply_mask_to_padding_states"](rows, attention_mask)
    rows = rows.reshape(batch, length, heads, 3 * width)
    query, key, value = (part.transpose(1, 2) for part in torch.split(rows, width, dim=3))
    decay = (-self.slope_rate.float()).expand(batch, heads, length, 1)
    output = _operator()(query, key, value, decay, None, None).to(hidden_states.dtype)
    output = self.norm(output.transpose(1, 2).reshape(batch, length, heads * width))
    return self.out_proj(functional.sigmoid(self.output_gate(hidden_states)) * output), None


def _delta_example(per_channel: bool) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    keys = 4 if per_channel else 2
    query, key = torch.randn(2, 2, _TRIAL_LENGTH, keys, 8)
    value, g = (
        torch.randn(2, _TRIAL_LENGTH, 4, 6),
        -torch.rand(2, _TRIAL_LENGTH, 4, *([8] if per_channel else [])),
    )
    beta = torch.rand(2, _TRIAL_LENGTH, 4)
    return (query, key, value), {"g": g, "beta": beta, "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}  # fmt: skip


def _selective_example() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    hidden, dt, z = torch.randn(3, 2, 6, _TRIAL_LENGTH)
    b, c = torch.randn(2, 2, 4, _TRIAL_LENGTH)
    named = {"D": torch.randn(6), "z": z, "delta_bias": torch.randn(6), "delta_softplus": True}
    return (hidden, dt, -torch.rand(6, 4), b, c), named


def _chunk_example() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    hidden, dt = torch.randn(2, _TRIAL_LENGTH, 4, 6), torch.randn(2, _TRIAL_LENGTH, 4)
    b, c = torch.randn(2, 2, _TRIAL_LENGTH, 2, 8)
    named = {"D": torch.randn(4), "dt_bias": torch.randn(4), "dt_softplus": True, "dt_limit": (0.1, 1.0)}
    return (hidden, dt, -torch.rand(4), b, c), {"chunk_size": 16, **named}


def _gated_example() -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden, gate = torch.randn(2, _TRIAL_LENGTH, 6), torch.rand(2, _TRIAL_LENGTH, 6)
    reset = (torch.arange(_TRIAL_LENGTH) == 0).expand(2, _TRIAL_LENGTH)[:, :, None]
    return (None, hidden, gate, reset, None), {}


def _lightning_example(original: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    config = SimpleNamespace(
        hidden_size=8, head_dim=4, num_attention_heads=2, num_hidden_layers=3, block_size=16, hidden_act="silu",
        layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    layer = original.__globals__[original.__qualname__.rpartition(".")[0]](config, 1)
    return (layer, torch.randn(2, _TRIAL_LENGTH, 8), None, None), {}


_LIGHTNING_METHODS = {"get_slope_rate", "decay_factors"}  # by which a lightning attention layer is recognised
_METHODS: Mapping[str, _Replacement] = {"_rnn_scan": _Replacement(_gated_unit, _gated_example)}
_FUNCTIONS: Mapping[str, _Replacement] = {
    "torch_chunk_gated_delta_rule": _Replacement(_delta_rule, lambda: _delta_example(False)),
    "chunk_kimi_delta_attention": _Replacement(_delta_rule, lambda: _delta_example(True)),
    "mamba_selective_scan": _Replacement(_selective_scan, _selective_example),
    "mamba2_chunk_scan": _Replacement(_chunk_scan, _chunk_example),
}
