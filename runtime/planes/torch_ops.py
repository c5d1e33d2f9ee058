"""The op-set in torch: how generated code calls each operator.

Most operators are called through torch's dispatcher, with arguments by name. Frequent ones have a shorter call below: in decoding,
the Python code around a call is most of its cost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from fusion.dag.ir.opset import OPSET
from fusion.dag.ir.opset_pointwise import BY_MODE, KEEP
from fusion.dag.ir.opset_spec import OpSpec
from fusion.runtime.planes.dropout import dropout, dropout_attention
from fusion.runtime.planes.products.experts import expert_linear
from fusion.runtime.planes.products.quantised import embedding, linear
from fusion.runtime.planes.products.quantised_experts import expert_linear as quantised_expert_linear
from fusion.runtime.planes.recurrence import recurrence
from fusion.runtime.planes.sequences import (
    cached_attention,
    cached_attention_relative,
    cached_attention_scored,
    cached_attention_selected,
    cached_convolution,
    cached_recurrence,
    cached_selection,
    source_attention,
    source_attention_scored,
)

Args = tuple[Any, ...]  # positional and complete, in the order of the op-set's parameters
Call = tuple[Callable[..., Any], Args, dict[str, Any]]
CallMaker = Callable[[Args], Call]

# Operators that also take the state of the run and the number of the node.
STATEFUL: Mapping[str, Callable[..., torch.Tensor]] = {
    "fusion.dropout": dropout,
    "fusion.dropout_attention": dropout_attention,
    "fusion.cached_attention": cached_attention,
    "fusion.cached_attention_scored": cached_attention_scored,
    "fusion.cached_attention_relative": cached_attention_relative,
    "fusion.cached_selection": cached_selection,
    "fusion.cached_attention_selected": cached_attention_selected,
    "fusion.cached_convolution": cached_convolution,
    "fusion.cached_recurrence": cached_recurrence,
    "fusion.source_attention": source_attention,
    "fusion.source_attention_scored": source_attention_scored,
}


def torch_call(op: str, args: Args, device: torch.device) -> Call:
    """The call that computes `op` on `args`; tensors are made on `device`. KeyError for an op without one."""
    if op in _CALLS:
        return _CALLS[op](args)
    dispatched = _DISPATCHED[op]
    by_name = dict(zip((p.name for p in OPSET[op].parameters), args, strict=True))
    keywords = {name: by_name[name] for name in dispatched.keywords if by_name[name] is not None}
    keywords.update(dispatched.constants)
    if OPSET[op].family == "make" and "self" not in by_name:
        keywords["device"] = device
    return dispatched.target, tuple(by_name[name] for name in dispatched.positional), keywords


def returns_several(op: str) -> bool:
    """Whether the call returns a list or tuple of tensors, even of one."""
    dispatched = _DISPATCHED.get(op)
    if dispatched is None:
        return False
    returns = dispatched.target._schema.returns
    return len(returns) != 1 or str(returns[0].type) != "Tensor"


def _plain(function: Callable[..., Any]) -> CallMaker:
    return lambda args: (function, args, {})


def _arithmetic(short: Callable[..., Any], long: Callable[..., Any]) -> CallMaker:
    """self, other, alpha: the Python operator where alpha is 1."""
    return lambda args: (short, args[:2], {}) if args[2] == 1 else (long, args[:2], {"alpha": args[2]})


def _with_dtype(function: Callable[..., Any]) -> CallMaker:
    """..., dtype: left out where it is None."""
    return lambda args: (function, args[:-1], {} if args[-1] is None else {"dtype": args[-1]})


def _attention(args: Args) -> Call:
    query, key, value, mask, _, causal, scale, grouped = args
    named = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
    return (
        functional.scaled_dot_product_attention,
        (query, key, value),
        {name: value for name, value in named.items() if value is not None and value is not False},
    )


def _slice(args: Args) -> Call:
    tensor, dim, start, end, step = args
    if type(dim) is int and dim >= 0:
        return operator.getitem, (tensor, (*[slice(None)] * dim, slice(start, end, step))), {}
    return torch.ops.aten.slice.Tensor, args, {}


def _div_trunc(x: torch.Tensor, other: Any) -> torch.Tensor:
    """The quotient of the minimum integer and -1 wraps around, as sums do. The library leaves that to the processor, where it is an error
    that ends the process."""
    if torch.result_type(x, other).is_floating_point:
        return torch.div(x, other, rounding_mode="trunc")
    if not isinstance(other, torch.Tensor):
        negates = other == -1 and x.dtype.is_signed
        quotient = torch.div(x, 1 if negates else other, rounding_mode="trunc")
        return -quotient if negates else quotient
    if not other.dtype.is_signed:  # its -1 is 255
        return torch.div(x, other, rounding_mode="trunc")
    negated = other == -1
    quotient = torch.div(x, other.masked_fill(negated, 1), rounding_mode="trunc")
    return torch.where(negated, -quotient, quotient)


def _copied(like: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The result of torch's `copy`, which has no gradient."""
    return source.to(like.dtype).expand(like.shape)


def _scattering(function: Callable[..., torch.Tensor]) -> CallMaker:
    """self, dim, index, src: a larger source is cut to the index, as the library has a gradient for equal shapes only."""

    def scattered(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.shape != index.shape:
            source = source[tuple(map(slice, index.shape))]
        return function(x, dim, index, source)

    return _plain(scattered)


_CALLS: dict[str, CallMaker] = {
    "aten.scatter.src": _scattering(torch.scatter),
    "aten.scatter_add": _scattering(torch.scatter_add),
    KEEP: lambda args: (torch.ops.aten.alias.default, args[1:], {}),
    BY_MODE: lambda args: (torch.ops.aten.alias.default, args[:1], {}),
    "aten.copy": _plain(_copied),
    "aten.linear": _plain(torch._C._nn.linear),
    "aten.embedding": lambda args: (torch.embedding, (*args[:3], args[3], False), {}),
    "aten.layer_norm": lambda args: (torch.layer_norm, (*args, False), {}),
    "aten.rms_norm": _plain(torch.rms_norm),
    "aten.matmul": _plain(torch.matmul),
    "aten.scaled_dot_product_attention": _attention,
    "fusion.expert_linear": _plain(expert_linear),
    "fusion.recurrence": _plain(recurrence),
    "aten.silu": _plain(torch._C._nn.silu),
    "aten.gelu": _plain(torch._C._nn.gelu),
    "fusion.gelu_tanh": lambda args: (torch._C._nn.gelu, args, {"approximate": "tanh"}),
    "fusion.div_floor": lambda args: (torch.div, args, {"rounding_mode": "floor"}),
    "fusion.div_trunc": _plain(_div_trunc),
    "fusion.linear_int8": _plain(linear),
    "fusion.linear_int4": _plain(linear),
    "fusion.expert_linear_int8": _plain(quantised_expert_linear),
    "fusion.expert_linear_int4": _plain(quantised_expert_linear),
    "fusion.embedding_int8": _plain(embedding),
    "fusion.embedding_int4": _plain(embedding),
    "aten.add.Tensor": _arithmetic(operator.add, torch.add),
    "aten.sub.Tensor": _arithmetic(operator.sub, torch.sub),
    "aten.mul.Tensor": _plain(operator.mul),
    "aten.div.Tensor": _plain(operator.truediv),
    "aten.eq.Tensor": _plain(torch.eq),
    "aten.ne.Tensor": _plain(torch.ne),
    "aten.lt.Tensor": _plain(torch.lt),
    "aten.le.Tensor": _plain(torch.le),
    "aten.gt.Tensor": _plain(torch.gt),
    "aten.ge.Tensor": _plain(torch.ge),
    "aten.remainder.Tensor": _plain(torch.remainder),
    "aten.fmod.Tensor": _plain(torch.fmod),
    "aten.bitwise_and.Tensor": _plain(torch.bitwise_and),
    "aten.bitwise_or.Tensor": _plain(torch.bitwise_or),
    "aten.bitwise_xor.Tensor": _plain(torch.bitwise_xor),
    "aten.__and__.Tensor": _plain(operator.and_),
    "aten.__or__.Tensor": _plain(operator.or_),
    "aten.neg": _plain(operator.neg),
    "aten.pow.Tensor_Scalar": _plain(torch.pow),
    "aten.rsqrt": _plain(torch.rsqrt),
    "aten.tanh": _plain(torch.tanh),
    "aten.relu": _plain(torch.relu),
    "aten.sin": _plain(torch.sin),
    "aten.cos": _plain(torch.cos),
    "aten.mean.dim": _with_dtype(torch.mean),
    "aten.softmax.int": _with_dtype(torch.softmax),
    # A tensor that capture saw as contiguous need not be so here: capture drops aten.contiguous and aten.clone.
    "aten.view": _plain(torch.reshape),
    "aten._unsafe_view": _plain(torch.reshape),
    "aten.reshape": _plain(torch.reshape),
    "aten.transpose.int": _plain(torch.transpose),
    "aten.permute": _plain(torch.permute),
    "aten.unsqueeze": _plain(torch.unsqueeze),
    "aten.cat": _plain(torch.cat),
    "aten.slice.Tensor": _slice,
    "aten.where.self": _plain(torch.where),
    "aten.where.ScalarOther": _plain(torch.where),
    "aten.where.ScalarSelf": _plain(torch.where),
    "aten.where.Scalar": _plain(torch.where),
}


@dataclass(frozen=True)
class _Dispatched:
    target: Any
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    constants: Mapping[str, Any]


# Parameters that torch insists on and that change no value.
_REQUIRED: Mapping[str, Any] = {"cudnn_enabled": True}


def _dispatched(spec: OpSpec) -> _Dispatched | None:
    """torch's operator of that name, and which parameters it takes by position and by keyword."""
    namespace, packet, *overload = spec.name.split(".")
    if namespace != "aten":
        return None
    target = getattr(getattr(torch.ops.aten, packet), *overload or ("default",))
    parameters = [p.name for p in spec.parameters]
    schema = target._schema.arguments
    required = {a.name for a in schema if not a.has_default_value()} - set(parameters)
    assert required <= _REQUIRED.keys(), f"{spec.name} needs {required}"
    positional = []
    for name, argument in zip(parameters, schema, strict=False):
        if argument.kwarg_only or argument.name != name:
            break
        positional.append(name)
    constants = {name: _REQUIRED[name] for name in required}
    return _Dispatched(target, tuple(positional), tuple(parameters[len(positional) :]), constants)


# Built from the names of the op-set, which are constants of this program, not from names of a graph.
_DISPATCHED = {name: call for name, spec in OPSET.items() if (call := _dispatched(spec)) is not None}
