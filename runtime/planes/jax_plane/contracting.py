"""Operators that contract a dimension: products, look-ups, norms, attention, experts, recurrences, in JAX.

Products are of full float32 numbers: `fusion.runtime.planes.jax_plane.library` says so to JAX, which on some devices takes fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

Function = Callable[..., Any]
# Rows of which each reads its own matrix of an expert, rather than all of them every matrix.
_GATHERED_ROWS = 8


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    # `x @ weight.T` would have each microbatch keep a transposed copy of the weight for its backward pass.
    made = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return made if bias is None else made + bias


def _added(added: Array, a: Array, b: Array, beta: Any, alpha: Any) -> Array:
    product = alpha * (a @ b)
    return product if beta == 0 else beta * added + product  # what is not a number is left out as well


def _embedding(weight: Array, ids: Array, padding: int, by_frequency: bool) -> Array:
    rows = jnp.take(weight, ids, axis=0)
    fixed = lax.stop_gradient(rows)
    if by_frequency:  # the gradient of a row over how often it was looked up
        counts = jnp.zeros(weight.shape[0], rows.dtype).at[ids].add(1)[ids][..., None]
        rows = rows / counts + (fixed - fixed / counts)
    return jnp.where((ids == padding)[..., None], fixed, rows) if padding >= 0 else rows


def wide(x: Array) -> Array:
    """In which norms, softmaxes and running sums are computed: float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _normed(x: Array, axes: Sequence[int], eps: float) -> Array:
    far = x - jnp.mean(x, axes, keepdims=True)
    return far * lax.rsqrt(jnp.mean(far * far, axes, keepdims=True) + eps)


def _layer_norm(x: Array, over: Sequence[int], weight: Array | None, bias: Array | None, eps: float) -> Array:
    made = _normed(wide(x), range(x.ndim - len(over), x.ndim), eps)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def _rms_norm(x: Array, over: Sequence[int], weight: Array | None, eps: float | None) -> Array:
    given = wide(x)
    mean = jnp.mean(given * given, range(x.ndim - len(over), x.ndim), keepdims=True)
    made = given * lax.rsqrt(mean + (jnp.finfo(given.dtype).eps if eps is None else eps))
    return made if weight is None else made * weight


def _by_channel(values: Array, rank: int) -> Array:
    return values.reshape(1, -1, *[1] * (rank - 2))


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * _by_channel(weight, x.ndim)
    return x if bias is None else x + _by_channel(bias, x.ndim)


def _group_norm(x: Array, groups: int, weight: Array | None, bias: Array | None, eps: float) -> Array:
    parts = wide(x).reshape(x.shape[0], groups, -1)
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
    """The result, and the running statistics after it, None where there are none or they stay."""
    given = wide(x)
    if not training:
        assert mean is not None and variance is not None
        scaled = (given - _by_channel(mean, x.ndim)) * lax.rsqrt(_by_channel(variance, x.ndim) + eps)
        return _affine(scaled, weight, bias), None, None
    axes = (0, *range(2, x.ndim))
    made = _affine(_normed(given, axes, eps), weight, bias)
    if mean is None or variance is None:
        return made, None, None
    count = prod(x.shape[axis] for axis in axes)
    seen = lax.stop_gradient(given)
    spread = jnp.var(seen, axes) * (count / max(1, count - 1))
    return (
        made,
        (1 - momentum) * mean + momentum * jnp.mean(seen, axes),
        (1 - momentum) * variance + momentum * spread,
    )


def attention_weights(scores: Array) -> Array:
    """A softmax in float32 at least, whose row is zeros where nothing may be seen, as PyTorch has it."""
    scores = wide(scores)
    most = jnp.max(scores, -1, keepdims=True)
    seen = jnp.exp(scores - lax.stop_gradient(jnp.where(jnp.isfinite(most), most, 0)))
    total = jnp.sum(seen, -1, keepdims=True)
    return seen / jnp.where(total == 0, 1, total)


def grouped(values: Array, heads: int) -> Array:
    """Keys or values (..., key heads, length, width), each head as often as queries share it."""
    return values if values.shape[-3] == heads else jnp.repeat(values, heads // values.shape[-3], -3)


def plain_scores(query: Array, key: Array, scale: float | None) -> Array:
    """Of each query with each key, in float32 at least: before they are scaled, float16 does not hold them."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    products = jnp.matmul(query, jnp.swapaxes(key, -1, -2), preferred_element_type=dtype)
    return products * (query.shape[-1] ** -0.5 if scale is None else scale)


def attention(
    query: Array,  # (..., heads, length, width)
    key: Array,
    value: Array,
    mask: Array | None,
    dropped: Function | None,  # what is left of the weights
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
    own = ids - first
    here = (own >= 0) & (own < held)
    safe = jnp.where(here, own, 0)
    if not transposed:
        weight = jnp.swapaxes(weight, 1, 2)
    if x.shape[0] <= _GATHERED_ROWS:
        made = jnp.einsum("ri,rio->ro", x, weight[safe])
    else:
        # Every row with every matrix, one after the other, so that no more than one product is there at once.
        def add(total: Array, expert: tuple[Array, Array]) -> tuple[Array, None]:
            number, matrix = expert
            return total + jnp.where((safe == number)[:, None], x, 0) @ matrix, None

        zeros = jnp.zeros((x.shape[0], weight.shape[2]), x.dtype)
        made, _ = lax.scan(add, zeros, (jnp.arange(held), weight))
    made = made if bias is None else made + bias[safe]
    return jnp.where(here[:, None], made, 0)


def _recurrence(
    query: Array,  # (batch, key heads, length, width)
    key: Array,
    value: Array,  # (batch, heads, length, width')
    decay: Array,  # (batch, heads, length, width or 1)
    beta: Array | None,  # (batch, heads, length, 1)
    rates: Array | None,  # (heads, width)
) -> Array:
    heads = value.shape[1]
    given = [
        jnp.moveaxis(each.astype(jnp.float32), 2, 0)
        for each in (
            *(jnp.repeat(each, heads // key.shape[1], 1) for each in (query, key)),
            value,
            decay,
            jnp.ones_like(value[..., :1]) if beta is None else beta,
        )
    ]

    def go(state: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, new, faster, strength = at
        state = state * jnp.exp(faster if rates is None else faster * rates)[..., None]
        if beta is not None:
            new = (new - jnp.einsum("bhwv,bhw->bhv", state, key)) * strength
        state = state + key[..., None] * new[..., None, :]
        return state, jnp.einsum("bhwv,bhw->bhv", state, query)

    first = jnp.zeros((*value.shape[:2], key.shape[3], value.shape[3]), jnp.float32)
    _, seen = lax.scan(go, first, tuple(given))
    return jnp.moveaxis(seen, 0, 2)


def _plain_attention(query: Array, key: Array, value: Array, mask: Any, _: float, *rest: Any) -> Array:
    return attention(query, key, value, mask, None, *rest)


CONTRACTING: Mapping[str, Function] = {
    "aten.linear": _linear,
    "aten.matmul": jnp.matmul,
    "aten.mm": jnp.matmul,
    "aten.bmm": jnp.matmul,
    "aten.addmm": _added,
    "aten.baddbmm": _added,
    "aten.embedding": _embedding,
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _rms_norm,
    "aten.group_norm": _group_norm,
    "aten.batch_norm": lambda *args: batch_norm(*args)[0],
    "aten.scaled_dot_product_attention": _plain_attention,
    "fusion.expert_linear": _expert_linear,
    "fusion.recurrence": _recurrence,
}
