"""Operators that work on each element by itself, in JAX.

What is written out here has PyTorch's gradient where a function has a corner: at the bounds of a clamp, at zero.
A result is cast to the dtype that the op-set infers by whoever calls these (`fusion.runtime.planes.jax_plane.program`).
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


def between(x: Array, low: Any, high: Any) -> Array:
    """`x`, where it is outside replaced by the bound, whose gradient it has: a value on the bound counts as inside."""
    if low is not None:
        x = jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def strictly_between(x: Array, low: Any, high: Any) -> Array:
    """The same, a value on the bound counting as outside."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def distance(x: Array) -> Array:
    """|x|, whose gradient at zero is zero."""
    return x * lax.stop_gradient(jnp.sign(x))


def _atan2(x: Array, other: Array) -> Array:
    """With the gradient zero where both are zero."""
    x, other = _floats(x), _floats(other)
    nowhere = (x == 0) & (other == 0)
    found = jnp.arctan2(x, jnp.where(nowhere, 1, other))
    return jnp.where(nowhere, lax.stop_gradient(jnp.arctan2(x, other)), found)


def _add(x: Any, other: Any, alpha: Any) -> Any:
    return x + other if alpha == 1 else x + alpha * other


def _sub(x: Any, other: Any, alpha: Any) -> Any:
    return x - other if alpha == 1 else x - alpha * other


def _log2(x: Array) -> Array:
    """Of a power of two its exponent, which a quotient of logarithms may miss by a bit: models round it down."""
    found = jnp.log2(x)
    whole = jnp.round(found)
    exact = jnp.isfinite(found) & (jnp.ldexp(jnp.ones_like(x), whole.astype(jnp.int32)) == x)
    return found + lax.stop_gradient(jnp.where(exact, whole - found, 0))


def _softplus(x: Array, beta: Any, threshold: Any) -> Array:
    scaled = x * beta
    # An exponential beyond what floats hold has no gradient either
    low = jnp.where(scaled > threshold, 0.0, scaled)
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(low)) / beta)


def _elu(x: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    low = jnp.where(x > 0, 0.0, x)
    return jnp.where(x > 0, x * scale, alpha * scale * jnp.expm1(low * input_scale))


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
    """Of whole numbers, those in float32, as functions whose values are not whole take them."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _of_floats(function: Function) -> Function:
    return lambda x: function(_floats(x))


def _whole(function: Function) -> Function:
    """A rounding, which leaves whole numbers as they are."""
    return lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _both(name: str, function: Function) -> dict[str, Function]:
    return {f"aten.{name}.Tensor": function, f"aten.{name}.Scalar": function}


def _bits(on_bits: Function, on_truths: Function) -> Function:
    def bits(x: Array, other: Any) -> Array:
        both = jnp.asarray(x), jnp.asarray(other)
        truths = all(each.dtype == jnp.bool_ for each in both)
        return on_truths(*both) if truths else on_bits(*both)

    return bits


_AND = _bits(jnp.bitwise_and, jnp.logical_and)
_OR = _bits(jnp.bitwise_or, jnp.logical_or)

POINTWISE: Mapping[str, Function] = {
    "aten.neg": jnp.negative,
    "aten.sign": jnp.sign,
    "aten.abs": distance,
    "aten.relu": lambda x: jnp.where(x <= 0, jnp.zeros_like(x), x),  # not a number stays one
    "aten.exp": _of_floats(jnp.exp),
    "aten.sqrt": _of_floats(jnp.sqrt),
    "aten.rsqrt": _of_floats(lambda x: 1 / jnp.sqrt(x)),
    "aten.reciprocal": _of_floats(lambda x: 1 / x),
    "aten.sigmoid": _of_floats(jax.nn.sigmoid),
    "aten.tanh": _of_floats(jnp.tanh),
    "aten.log": _of_floats(jnp.log),
    "aten.log1p": _of_floats(jnp.log1p),
    "aten.log2": _of_floats(_log2),
    "aten.sin": _of_floats(jnp.sin),
    "aten.cos": _of_floats(jnp.cos),
    "aten.erf": _of_floats(special.erf),
    "aten.erfc": _of_floats(special.erfc),
    "aten.erfinv": _of_floats(special.erfinv),
    "aten.exp2": _of_floats(lambda x: 2.0**x),
    "aten.tan": _of_floats(jnp.tan),
    "aten.sinh": _of_floats(jnp.sinh),
    "aten.cosh": _of_floats(jnp.cosh),
    "aten.asin": _of_floats(jnp.arcsin),
    "aten.acos": _of_floats(jnp.arccos),
    "aten.atan": _of_floats(jnp.arctan),
    "aten.asinh": _of_floats(jnp.arcsinh),
    "aten.acosh": _of_floats(jnp.arccosh),
    "aten.atanh": _of_floats(jnp.arctanh),
    "aten.log10": _of_floats(jnp.log10),
    "aten.expm1": _of_floats(jnp.expm1),
    "aten.silu": lambda x: x * jax.nn.sigmoid(x),
    "aten.mish": lambda x: x * jnp.tanh(_softplus(x, 1, 20)),
    "aten.hardswish": _hardswish,
    "aten.hardsigmoid": lambda x: strictly_between(x + 3, 0.0, 6.0) / 6,
    "aten.log_sigmoid": jax.nn.log_sigmoid,
    "aten.relu6": lambda x: strictly_between(x, 0, 6),
    "aten.selu": lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE),
    "aten.floor": _whole(jnp.floor),
    "aten.ceil": _whole(jnp.ceil),
    "aten.round": _whole(jnp.round),
    "aten.trunc": _whole(jnp.trunc),
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
    "aten.hardtanh": strictly_between,
    "aten.threshold": lambda x, threshold, value: jnp.where(x <= threshold, value, x),
    "aten.prelu": _prelu,
    "aten.clamp": between,
    "aten.clamp.Tensor": between,
    "aten.clamp_min": lambda x, low: between(x, low, None),
    "aten.clamp_max": lambda x, high: between(x, None, high),
    **_both("add", _add),
    **_both("sub", _sub),
    **_both("rsub", lambda x, other, alpha: _sub(other, x, alpha)),
    **_both("mul", lambda x, other: x * other),
    **_both("div", lambda x, other: _floats(x) / other),
    **_both("remainder", jnp.remainder),
    **_both("fmod", jnp.fmod),
    "aten.floor_divide": jnp.floor_divide,
    "fusion.div_floor": jnp.floor_divide,
    "fusion.div_trunc": div_trunc,
    "aten.pow.Tensor_Scalar": lambda x, exponent: x**exponent,
    "aten.pow.Tensor_Tensor": lambda x, exponent: x**exponent,
    "aten.pow.Scalar": lambda base, x: base**x,
    "aten.maximum": jnp.maximum,
    "aten.minimum": jnp.minimum,
    "aten.atan2": _atan2,
    **_both("eq", jnp.equal),
    **_both("ne", jnp.not_equal),
    **_both("lt", jnp.less),
    **_both("le", jnp.less_equal),
    **_both("gt", jnp.greater),
    **_both("ge", jnp.greater_equal),
    "aten.logical_and": jnp.logical_and,
    "aten.logical_or": jnp.logical_or,
    "aten.logical_xor": jnp.logical_xor,
    **_both("bitwise_and", _AND),
    **_both("bitwise_or", _OR),
    **_both("bitwise_xor", _bits(jnp.bitwise_xor, jnp.logical_xor)),
    **_both("__and__", _AND),
    **_both("__or__", _OR),
    **{f"aten.where.{name}": jnp.where for name in ("self", "ScalarOther", "ScalarSelf", "Scalar")},
    "aten.masked_fill.Scalar": lambda x, mask, value: jnp.where(mask, value, x),
    "aten.masked_fill.Tensor": lambda x, mask, value: jnp.where(mask, value, x),
    "aten.lerp.Scalar": _lerp,
    "aten.lerp.Tensor": _lerp,
    "aten.addcmul": lambda x, a, b, value: x + value * a * b,
    "aten.addcdiv": lambda x, a, b, value: x + value * a / b,
    # Casts: to the dtype of the result, which all are cast to.
    "aten.to.dtype": lambda x, _: x,
    "aten.type_as": lambda x, _: x,
    KEEP: lambda buffer, value: value,
    BY_MODE: lambda training, evaluated: training,
    "aten.copy": lambda x, source: jnp.broadcast_to(source, x.shape),
    "aten.fill.Scalar": lambda x, value: jnp.full(x.shape, value),
    "aten.fill.Tensor": lambda x, value: jnp.broadcast_to(value, x.shape),
    "aten.dropout": lambda x, *_: x,
}
