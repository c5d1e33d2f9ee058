"""Operators that contract a dimension: products, look-ups, norms, attention, experts and recurrences, in JAX.

Products are in full float32: `fusion.runtime.planes.jax_plane.library` configures that, as some devices default to fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

Function = Callable[..., Any]
# Up to so many rows, each gathers its expert's matrix; above, every matrix is multiplied with all rows.
_MAX_GATHERED_ROWS = 8


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    # `x @ weight.T` would have each microbatch keep a transposed copy of the weight for its backward pass.
    output = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return output if bias is None else output + bias


def _addmm(added: Array, a: Array, b: Array, beta: Any, alpha: Any) -> Array:
    product = alpha * (a @ b)
    return product if beta == 0 else beta * added + product  # also drops NaN, as in torch


def _embedding(weight: Array, ids: Array, padding: int, by_frequency: bool) -> Array:
    rows = jnp.take(weight, ids, axis=0)
    fixed = lax.stop_gradient(rows)
    if by_frequency:  # the gradient of a row, divided by its look-ups
        counts = jnp.zeros(weight.shape[0], rows.dtype).at[ids].add(1)[ids][..., None]
        rows = rows / counts + (fixed - fixed / counts)
    return jnp.where((ids == padding)[..., None], fixed, rows) if padding >= 0 else rows


def at_least_float32(x: Array) -> Array:
    """`x` in float32 at least, for norms, softmaxes and running sums."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _normed(x: Array, axes: Sequence[int], eps: float) -> Array:
    centred = x - jnp.mean(x, axes, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, axes, keepdims=True) + eps)


def _layer_norm(x: Array, over: Sequence[int], weight: Array | None, bias: Array | None, eps: float) -> Array:
    output = _normed(at_least_float32(x), range(x.ndim - len(over), x.ndim), eps)
    output = output if weight is None else output * weight
    return output if bias is None else output + bias


def _rms_norm(x: Array, over: Sequence[int], weight: Array | None, eps: float | None) -> Array:
    wide_x = at_least_float32(x)
    mean = jnp.mean(wide_x * wide_x, range(x.ndim - len(over), x.ndim), keepdims=True)
    output = wide_x * lax.rsqrt(mean + (jnp.finfo(wide_x.dtype).eps if eps is None else eps))
    return output if weight is None else output * weight


def _by_channel(values: Array, rank: int) -> Array:
    return values.reshape(1, -1, *[1] * (rank - 2))


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * _by_channel(weight, x.ndim)
    return x if bias is None else x + _by_channel(bias, x.ndim)


def _group_norm(x: Array, groups: int, weight: Array | None, bias: Array | None, eps: float) -> Array:
    parts = at_least_float32(x).reshape(x.shape[0], groups, -1)
    return _affine(_normed(parts, (2,), eps).reshape(x.shape), weight, bias)


def batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array | None,
    variance: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array | None, Array | None]:
    """The result and the new running statistics; None where there are none, or they do not change."""
    wide_x = at_least_float32(x)
    if not training:
        assert mean is not None and variance is not None
        scaled = (wide_x - _by_channel(mean, x.ndim)) * lax.rsqrt(_by_channel(variance, x.ndim) + eps)
        return _affine(scaled, weight, bias), None, None
    axes = (0, *range(2, x.ndim))
    output = _affine(_normed(wide_x, axes, eps), weight, bias)
    if mean is None or variance is None:
        return output, None, None
    count = prod(x.shape[axis] for axis in axes)
    detached = lax.stop_gradient(wide_x)
    sample_variance = jnp.var(detached, axes) * (count / max(1, count - 1))
    return (
        output,
        (1 - momentum) * mean + momentum * jnp.mean(detached, axes),
        (1 - momentum) * variance + momentum * sample_variance,
    )


def attention_weights(scores: Array) -> Array:
    """Softmax in float32 at least; a row that is masked everywhere gives zeros, as in PyTorch."""
    scores = at_least_float32(scores)
    maximum = jnp.max(scores, -1, keepdims=True)
    exponentials = jnp.exp(scores - lax.stop_gradient(jnp.where(jnp.isfinite(maximum), maximum, 0)))
    total = jnp.sum(exponentials, -1, keepdims=True)
    return exponentials / jnp.where(total == 0, 1, total)


def grouped(values: Array, heads: int) -> Array:
    """Keys or values (..., key heads, length, width), repeated for the query heads that share them."""
    return values if values.shape[-3] == heads else jnp.repeat(values, heads // values.shape[-3], -3)


def plain_scores(query: Array, key: Array, scale: float | None) -> Array:
    """Scaled scores of queries and keys, in float32 at least: float16 overflows before scaling."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    products = jnp.matmul(query, jnp.swapaxes(key, -1, -2), preferred_element_type=dtype)
    return products * (query.shape[-1] ** -0.5 if scale is None else scale)


def attention(
    query: Array,  # (..., heads, length, width)
    key: Array,
    value: Array,
    mask: Array | None,
    dropped: Function | None,  # applies dropout to the weights
    causal: bool,
    scale: float | None,
    groups: bool,
) -> Array:
    if groups:
        key, value = grouped(key, query.shape[-3]), grouped(value, query.shape[-3])
    scores = plain_scores(query, key, scale)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_)), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask
    weights = attention_weights(scores)
    weights = weights if dropped is None else dropped(weights)
    return weights.astype(value.dtype) @ value


def _expert_linear(
    x: Array,  # (rows, in)
    ids: Array,  # (rows)
    weight: Array,  # (held, out, in), or (held, in, out) if `transposed`
    bias: Array | None,
    first: int,
    of: int,
    transposed: bool,
) -> Array:
    held = weight.shape[0]
    local_ids = ids - first
    is_held = (local_ids >= 0) & (local_ids < held)
    expert_index = jnp.where(is_held, local_ids, 0)
    if not transposed:
        weight = jnp.swapaxes(weight, 1, 2)
    if x.shape[0] <= _MAX_GATHERED_ROWS:
        output = jnp.einsum("ri,rio->ro", x, weight[expert_index])
    else:
        # One matrix after another, so that only one product is in memory.
        def add(total: Array, expert: tuple[Array, Array]) -> tuple[Array, None]:
            number, matrix = expert
            return total + jnp.where((expert_index == number)[:, None], x, 0) @ matrix, None

        zeros = jnp.zeros((x.shape[0], weight.shape[2]), x.dtype)
        output, _ = lax.scan(add, zeros, (jnp.arange(held), weight))
    output = output if bias is None else output + bias[expert_index]
    return jnp.where(is_held[:, None], output, 0)


def _recurrence(
    query: Array,  # (batch, key heads, length, width)
    key: Array,
    value: Array,  # (batch, heads, length, width')
    decay: Array,  # (batch, heads, length, width or 1)
    beta: Array | None,  # (batch, heads, length, 1)
    rates: Array | None,  # (heads, width)
) -> Array:
    heads = value.shape[1]
    by_position = [
        jnp.moveaxis(each.astype(jnp.float32), 2, 0)
        for each in (
            *(jnp.repeat(each, heads // key.shape[1], 1) for each in (query, key)),
            value,
            decay,
            jnp.ones_like(value[..., :1]) if beta is None else beta,
        )
    ]

    def step(state: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, new, log_decay, beta_at = at
        state = state * jnp.exp(log_decay if rates is None else log_decay * rates)[..., None]
        if beta is not None:
            new = (new - jnp.einsum("bhwv,bhw->bhv", state, key)) * beta_at
        state = state + key[..., None] * new[..., None, :]
        return state, jnp.einsum("bhwv,bhw->bhv", state, query)

    initial = jnp.zeros((*value.shape[:2], key.shape[3], value.shape[3]), jnp.float32)
    _, outputs = lax.scan(step, initial, tuple(by_position))
    return jnp.moveaxis(outputs, 0, 2)


def _plain_attention(query: Array, key: Array, value: Array, mask: Any, _: float, *rest: Any) -> Array:
    return attention(query, key, value, mask, None, *rest)


CONTRACTING: Mapping[str, Function] = {
    "aten.linear": _linear,
    "aten.matmul": jnp.matmul,
    "aten.mm": jnp.matmul,
    "aten.bmm": jnp.matmul,
    "aten.addmm": _addmm,
    "aten.baddbmm": _addmm,
    "aten.embedding": _embedding,
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _rms_norm,
    "aten.group_norm": _group_norm,
    "aten.batch_norm": lambda *args: batch_norm(*args)[0],
    "aten.scaled_dot_product_attention": _plain_attention,
    "fusion.expert_linear": _expert_linear,
    "fusion.recurrence": _recurrence,
}
