"""Elementwise operators in JAX.

Functions with a corner (at the bounds of a clamp, at zero) are written out to have PyTorch's gradient there. The caller
(`fusion.runtime.planes.jax_plane.program`) casts results to the dtype that the op-set infers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy import special

from fusion.dag.ir.opset_pointwise import BY_MODE, KEEP

Function = Callable[..., Any]
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def clamp(x: Array, low: Any, high: Any) -> Array:
    """`x` clamped to the bounds. The gradient is that of `x` on and between the bounds, and that of the bound outside."""
    if low is not None:
        x = jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def open_clamp(x: Array, low: Any, high: Any) -> Array:
    """The same, but on a bound the gradient is that of the bound."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def absolute(x: Array) -> Array:
    """|x|, with gradient zero at zero."""
    return x * lax.stop_gradient(jnp.sign(x))


def _atan2(x: Array, other: Array) -> Array:
    """atan2, with gradient zero where both are zero."""
    x, other = _floats(x), _floats(other)
    at_origin = (x == 0) & (other == 0)
    angle = jnp.arctan2(x, jnp.where(at_origin, 1, other))
    return jnp.where(at_origin, lax.stop_gradient(jnp.arctan2(x, other)), angle)


def _add(x: Any, other: Any, alpha: Any) -> Any:
    return x + other if alpha == 1 else x + alpha * other


def _sub(x: Any, other: Any, alpha: Any) -> Any:
    return x - other if alpha == 1 else x - alpha * other


def _log2(x: Array) -> Array:
    """log2, exact for powers of two, as models round it down; a quotient of logarithms may miss by a bit."""
    logarithm = jnp.log2(x)
    rounded = jnp.round(logarithm)
    exact = jnp.isfinite(logarithm) & (jnp.ldexp(jnp.ones_like(x), rounded.astype(jnp.int32)) == x)
    return logarithm + lax.stop_gradient(jnp.where(exact, rounded - logarithm, 0))


def _softplus(x: Array, beta: Any, threshold: Any) -> Array:
    scaled = x * beta
    # An exponential that overflows has no gradient either
    small = jnp.where(scaled > threshold, 0.0, scaled)
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(small)) / beta)


def _elu(x: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    negative = jnp.where(x > 0, 0.0, x)
    return jnp.where(x > 0, x * scale, alpha * scale * jnp.expm1(negative * input_scale))


def _hardswish(x: Array) -> Array:
    return jnp.where(x <= -3, 0.0, jnp.where(x < 3, x * (x + 3) / 6, x))


def _prelu(x: Array, weight: Array) -> Array:
    if weight.size > 1:
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return jnp.where(x > 0, x, weight.reshape(()) * x if weight.size == 1 else weight * x)


def _lerp(x: Array, end: Array, weight: Any) -> Array:
    return jnp.where(jnp.abs(weight) < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight))


def div_trunc(x: Array, other: Any) -> Array:
    other = jnp.asarray(other)
    if jnp.issubdtype(jnp.result_type(x, other), jnp.floating):
        return jnp.trunc(x / other)
    dtype = jnp.result_type(x, other)
    both = jnp.broadcast_arrays(x.astype(dtype), other.astype(dtype))
    return lax.div(*both)


def _floats(x: Array) -> Array:
    """Integers as float32, for functions with real values."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _on_floats(function: Function) -> Function:
    return lambda x: function(_floats(x))


def _rounding(function: Function) -> Function:
    """A rounding function that leaves integers as they are."""
    return lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _tensor_and_scalar(name: str, function: Function) -> dict[str, Function]:
    return {f"aten.{name}.Tensor": function, f"aten.{name}.Scalar": function}


def _bitwise(on_bits: Function, on_booleans: Function) -> Function:
    def bits(x: Array, other: Any) -> Array:
        both = jnp.asarray(x), jnp.asarray(other)
        booleans = all(each.dtype == jnp.bool_ for each in both)
        return on_booleans(*both) if booleans else on_bits(*both)

    return bits


_AND = _bitwise(jnp.bitwise_and, jnp.logical_and)
_OR = _bitwise(jnp.bitwise_or, jnp.logical_or)

POINTWISE: Mapping[str, Function] = {
    "aten.neg": jnp.negative,
    "aten.sign": jnp.sign,
    "aten.abs": absolute,
    "aten.relu": lambda x: jnp.where(x <= 0, jnp.zeros_like(x), x),  # NaN stays NaN
    "aten.exp": _on_floats(jnp.exp),
    "aten.sqrt": _on_floats(jnp.sqrt),
    "aten.rsqrt": _on_floats(lambda x: 1 / jnp.sqrt(x)),
    "aten.reciprocal": _on_floats(lambda x: 1 / x),
    "aten.sigmoid": _on_floats(jax.nn.sigmoid),
    "aten.tanh": _on_floats(jnp.tanh),
    "aten.log": _on_floats(jnp.log),
    "aten.log1p": _on_floats(jnp.log1p),
    "aten.log2": _on_floats(_log2),
    "aten.sin": _on_floats(jnp.sin),
    "aten.cos": _on_floats(jnp.cos),
    "aten.erf": _on_floats(special.erf),
    "aten.erfc": _on_floats(special.erfc),
    "aten.erfinv": _on_floats(special.erfinv),
    "aten.exp2": _on_floats(lambda x: 2.0**x),
    "aten.tan": _on_floats(jnp.tan),
    "aten.sinh": _on_floats(jnp.sinh),
    "aten.cosh": _on_floats(jnp.cosh),
    "aten.asin": _on_floats(jnp.arcsin),
    "aten.acos": _on_floats(jnp.arccos),
    "aten.atan": _on_floats(jnp.arctan),
    "aten.asinh": _on_floats(jnp.arcsinh),
    "aten.acosh": _on_floats(jnp.arccosh),
    "aten.atanh": _on_floats(jnp.arctanh),
    "aten.log10": _on_floats(jnp.log10),
    "aten.expm1": _on_floats(jnp.expm1),
    "aten.silu": lambda x: x * jax.nn.sigmoid(x),
    "aten.mish": lambda x: x * jnp.tanh(_softplus(x, 1, 20)),
    "aten.hardswish": _hardswish,
    "aten.hardsigmoid": lambda x: open_clamp(x + 3, 0.0, 6.0) / 6,
    "aten.log_sigmoid": jax.nn.log_sigmoid,
    "aten.relu6": lambda x: open_clamp(x, 0, 6),
    "aten.selu": lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE),
    "aten.floor": _rounding(jnp.floor),
    "aten.ceil": _rounding(jnp.ceil),
    "aten.round": _rounding(jnp.round),
    "aten.trunc": _rounding(jnp.trunc),
    "aten.logical_not": jnp.logical_not,
    "aten.isnan": lambda x: jnp.isnan(_floats(x)),
    "aten.isinf": lambda x: jnp.isinf(_floats(x)),
    "aten.isfinite": lambda x: jnp.isfinite(_floats(x)),
    "aten.bitwise_not": lambda x: jnp.logical_not(x) if x.dtype == jnp.bool_ else jnp.bitwise_not(x),
    "aten.square": jnp.square,
    "aten.gelu": lambda x: x * 0.5 * (1 + special.erf(x * 2**-0.5)),
    "fusion.gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "aten.softplus": _softplus,
    "aten.leaky_relu": lambda x, slope: jnp.where(x > 0, x, x * slope),
    "aten.elu": _elu,
    "aten.celu": lambda x, alpha: _elu(x, alpha, 1, 1 / alpha),
    "aten.hardtanh": open_clamp,
    "aten.threshold": lambda x, threshold, value: jnp.where(x <= threshold, value, x),
    "aten.prelu": _prelu,
    "aten.clamp": clamp,
    "aten.clamp.Tensor": clamp,
    "aten.clamp_min": lambda x, low: clamp(x, low, None),
    "aten.clamp_max": lambda x, high: clamp(x, None, high),
    **_tensor_and_scalar("add", _add),
    **_tensor_and_scalar("sub", _sub),
    **_tensor_and_scalar("rsub", lambda x, other, alpha: _sub(other, x, alpha)),
    **_tensor_and_scalar("mul", lambda x, other: x * other),
    **_tensor_and_scalar("div", lambda x, other: _floats(x) / other),
    **_tensor_and_scalar("remainder", jnp.remainder),
    **_tensor_and_scalar("fmod", jnp.fmod),
    "aten.floor_divide": jnp.floor_divide,
    "fusion.div_floor": jnp.floor_divide,
    "fusion.div_trunc": div_trunc,
    "aten.pow.Tensor_Scalar": lambda x, exponent: x**exponent,
    "aten.pow.Tensor_Tensor": lambda x, exponent: x**exponent,
    "aten.pow.Scalar": lambda base, x: base**x,
    "aten.maximum": jnp.maximum,
    "aten.minimum": jnp.minimum,
    "aten.atan2": _atan2,
    **_tensor_and_scalar("eq", jnp.equal),
    **_tensor_and_scalar("ne", jnp.not_equal),
    **_tensor_and_scalar("lt", jnp.less),
    **_tensor_and_scalar("le", jnp.less_equal),
    **_tensor_and_scalar("gt", jnp.greater),
    **_tensor_and_scalar("ge", jnp.greater_equal),
    "aten.logical_and": jnp.logical_and,
    "aten.logical_or": jnp.logical_or,
    "aten.logical_xor": jnp.logical_xor,
    **_tensor_and_scalar("bitwise_and", _AND),
    **_tensor_and_scalar("bitwise_or", _OR),
    **_tensor_and_scalar("bitwise_xor", _bitwise(jnp.bitwise_xor, jnp.logical_xor)),
    **_tensor_and_scalar("__and__", _AND),
    **_tensor_and_scalar("__or__", _OR),
    **{f"aten.where.{name}": jnp.where for name in ("self", "ScalarOther", "ScalarSelf", "Scalar")},
    "aten.masked_fill.Scalar": lambda x, mask, value: jnp.where(mask, value, x),
    "aten.masked_fill.Tensor": lambda x, mask, value: jnp.where(mask, value, x),
    "aten.lerp.Scalar": _lerp,
    "aten.lerp.Tensor": _lerp,
    "aten.addcmul": lambda x, a, b, value: x + value * a * b,
    "aten.addcdiv": lambda x, a, b, value: x + value * a / b,
    # Casts do nothing here: the caller casts every result.
    "aten.to.dtype": lambda x, _: x,
    "aten.type_as": lambda x, _: x,
    KEEP: lambda buffer, value: value,
    BY_MODE: lambda training, evaluated: training,
    "aten.copy": lambda x, source: jnp.broadcast_to(source, x.shape),
    "aten.fill.Scalar": lambda x, value: jnp.full(x.shape, value),
    "aten.fill.Tensor": lambda x, value: jnp.broadcast_to(value, x.shape),
    "aten.dropout": lambda x, *_: x,
}
