"""Reductions, scans, orders and losses in JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fusion.runtime.planes.jax_plane.contracting import at_least_float32
from fusion.runtime.planes.jax_plane.pointwise import absolute

Function = Callable[..., Any]
Dims = int | Sequence[int] | None


def _axes(x: Array, dims: Dims) -> tuple[int, ...]:
    """Axes as numbers from 0; None or () are all. A scalar counts as one dimension."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return tuple(range(x.ndim))
    numbers = (dims,) if isinstance(dims, int) else dims
    return tuple(dim % max(1, x.ndim) for dim in numbers) if x.ndim else ()


def _accumulated(x: Array, dtype: Any) -> Array:
    """The input in the dtype of the sum: integers and booleans in int64."""
    if dtype is not None:
        return x.astype(dtype)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.int64)


def _sum(x: Array, dims: Dims, keepdim: bool, dtype: Any) -> Array:
    return jnp.sum(_accumulated(x, dtype), _axes(x, dims), keepdims=keepdim)


def _mean(x: Array, dims: Dims, keepdim: bool, dtype: Any) -> Array:
    return jnp.mean(x if dtype is None else x.astype(dtype), _axes(x, dims), keepdims=keepdim)


def _var(x: Array, dims: Dims, correction: Any, keepdim: bool) -> Array:
    x, axes = at_least_float32(x), _axes(x, dims)
    count = prod(x.shape[axis] for axis in axes)
    centred = x - jnp.mean(x, axes, keepdims=True)
    subtracted = 1 if correction is None else correction
    # 0 / 0 with too few elements
    return jnp.sum(centred * centred, axes, keepdims=keepdim) / np.float64(
        max(0.0, count - subtracted)
    ).astype(x.dtype)


def _deviation(variance: Array) -> Array:
    """The square root, with gradient zero at zero."""
    zero = variance == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, variance)))


def _vector_norm(x: Array, order: Any, dims: Dims, keepdim: bool, dtype: Any) -> Array:
    x = at_least_float32(x if dtype is None else x.astype(dtype))
    axes = _axes(x, dims)
    magnitudes = absolute(x)
    if order == float("inf"):
        return jnp.max(magnitudes, axes, keepdims=keepdim)
    if order == -float("inf"):
        return jnp.min(magnitudes, axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum(magnitudes != 0, axes, keepdims=keepdim)
    if order == 1:
        return jnp.sum(magnitudes, axes, keepdims=keepdim)
    total = jnp.sum(magnitudes * magnitudes if order == 2 else magnitudes**order, axes, keepdims=keepdim)
    # The norm of zeros has gradient zero.
    nonzero = jnp.where(total == 0, 1, total)
    return jnp.where(total == 0, 0, jnp.sqrt(nonzero) if order == 2 else nonzero ** (1 / order))


def _extreme_along(find: Function) -> Function:
    def extreme(x: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), jnp.int64)
        indices = find(x, dim, keepdims=True)
        values = jnp.take_along_axis(x, indices, dim)
        return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))

    return extreme


def _position(find: Function) -> Function:
    def position(x: Array, dim: int | None, keepdim: bool) -> Array:
        if not x.ndim:
            return jnp.zeros((), jnp.int64)
        return find(x, dim, keepdims=keepdim)

    return position


def _on_booleans(function: Function) -> Function:
    return lambda x, dim=None, keepdim=False: function(x.astype(jnp.bool_), _axes(x, dim), keepdims=keepdim)


def _cumulative(function: Function) -> Function:
    def scan(x: Array, dim: int, dtype: Any) -> Array:
        x = _accumulated(x, dtype)
        x = at_least_float32(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return function(x, dim) if x.ndim else x

    return scan


def _softmax(function: Function) -> Function:
    def softmax(x: Array, dim: int, dtype: Any) -> Array:
        x = at_least_float32(x if dtype is None else x.astype(dtype))
        return function(x[None], 0)[0] if not x.ndim else function(x, dim)

    return softmax


def _order(x: Array, dim: int, descending: bool) -> Array:
    return jnp.argsort(x, dim, stable=True, descending=descending) if x.ndim else jnp.zeros((), jnp.int64)


def _sort(x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    indices = _order(x, dim, descending)
    return (jnp.take_along_axis(x, indices, dim) if x.ndim else x), indices


def _topk(x: Array, k: int, dim: int, largest: bool, _: bool) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    indices = jax.lax.slice_in_dim(_order(x, dim, largest), 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, indices, dim), indices


def _reduced(losses: Array, reduction: int) -> Array:
    """0 none, 1 mean, 2 sum."""
    return (lambda x: x, jnp.mean, jnp.sum)[reduction](losses)


def _nll(x: Array, target: Array, weight: Array | None, reduction: int, ignored: int) -> Array:
    """Negative log-likelihoods of (classes), (N, classes) or (N, classes, ...)."""
    axis = 1 if x.ndim > 1 else 0
    target = target.astype(jnp.int64)
    counted = target != ignored
    safe = jnp.where(counted, target, 0)
    weights = jnp.ones((), x.dtype) if weight is None else weight[safe]
    weights = jnp.where(counted, weights, 0)
    picked = jnp.take_along_axis(x, jnp.expand_dims(safe, axis), axis).squeeze(axis)
    losses = jnp.where(counted, -picked * weights, 0)
    if reduction == 1:
        return jnp.sum(losses) / jnp.sum(weights)
    return _reduced(losses, reduction)


def _cross_entropy(
    x: Array, target: Array, weight: Array | None, reduction: int, ignored: int, smoothing: float
) -> Array:
    axis = 1 if x.ndim > 1 else 0
    logs = jax.nn.log_softmax(x, axis)
    classes = x.shape[axis]
    along = None if weight is None else weight.reshape([-1 if at == axis else 1 for at in range(x.ndim)])
    if target.shape == x.shape and jnp.issubdtype(target.dtype, jnp.floating):
        if smoothing:
            target = target * (1 - smoothing) + smoothing / classes
        losses = -jnp.sum(logs * target if along is None else logs * target * along, axis)
        return jnp.sum(losses) / max(1, losses.size) if reduction == 1 else _reduced(losses, reduction)
    picked = _nll(logs, target, weight, reduction, ignored)
    if not smoothing:
        return picked
    counted = target.astype(jnp.int64) != ignored
    flat = -jnp.sum(logs if along is None else logs * along, axis)
    flat = jnp.where(counted, flat, 0)
    if reduction == 1:
        weights = 1.0 if weight is None else weight[jnp.where(counted, target, 0)]
        smooth = jnp.sum(flat) / jnp.sum(jnp.where(counted, weights, 0))
    else:
        smooth = _reduced(flat, reduction)
    return (1 - smoothing) * picked + smoothing / classes * smooth


def _smooth_l1(x: Array, target: Array, reduction: int, beta: float) -> Array:
    error = absolute(x - target)
    if beta == 0:
        return _reduced(error, reduction)
    return _reduced(jnp.where(error < beta, 0.5 * error * error / beta, error - 0.5 * beta), reduction)


def _huber(x: Array, target: Array, reduction: int, delta: float) -> Array:
    error = absolute(x - target)
    return _reduced(jnp.where(error <= delta, 0.5 * error * error, delta * (error - 0.5 * delta)), reduction)


def _kl(x: Array, target: Array, reduction: int, log_target: bool) -> Array:
    if log_target:
        return _reduced(jnp.exp(target) * (target - x), reduction)
    safe_target = jnp.where(target == 0, 1, target)  # below 0 the logarithm is NaN
    return _reduced(jnp.where(target == 0, 0, target * (jnp.log(safe_target) - x)), reduction)


def _binary(x: Array, target: Array, weight: Array | None, reduction: int) -> Array:
    """Binary cross-entropy with PyTorch's gradient, which is finite at probabilities 0 and 1."""
    known = lax.stop_gradient(x)
    slope = lax.stop_gradient((x - target) / jnp.maximum((1 - x) * x, 1e-12))
    losses = -(
        target * jnp.maximum(jnp.log(known), -100) + (1 - target) * jnp.maximum(jnp.log1p(-known), -100)
    )
    losses = losses + slope * (x - known)
    return _reduced(losses if weight is None else losses * weight, reduction)


def _binary_logits(
    x: Array, target: Array, weight: Array | None, positive: Array | None, reduction: int
) -> Array:
    positive_weight = 1 if positive is None else 1 + (positive - 1) * target
    losses = (1 - target) * x - positive_weight * jax.nn.log_sigmoid(x)
    return _reduced(losses if weight is None else losses * weight, reduction)


REDUCING: Mapping[str, Function] = {
    "aten.sum": lambda x, dtype: _sum(x, None, False, dtype),
    "aten.sum.dim_IntList": _sum,
    "aten.mean": lambda x, dtype: _mean(x, None, False, dtype),
    "aten.mean.dim": _mean,
    "aten.prod": lambda x, dtype: jnp.prod(_accumulated(x, dtype)),
    "aten.prod.dim_int": lambda x, dim, keepdim, dtype: jnp.prod(
        _accumulated(x, dtype), _axes(x, dim), keepdims=keepdim
    ),
    "aten.var.correction": _var,
    "aten.std.correction": lambda *args: _deviation(_var(*args)),
    "aten.var.dim": lambda x, dims, unbiased, keepdim: _var(x, dims, int(unbiased), keepdim),
    "aten.std.dim": lambda x, dims, unbiased, keepdim: _deviation(_var(x, dims, int(unbiased), keepdim)),
    "aten.linalg_vector_norm": _vector_norm,
    "aten.logsumexp": lambda x, dims, keepdim: jax.nn.logsumexp(
        x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32),
        _axes(x, dims),
        keepdims=keepdim,
    ),
    "aten.amax": lambda x, dims, keepdim: jnp.max(x, _axes(x, dims), keepdims=keepdim),
    "aten.amin": lambda x, dims, keepdim: jnp.min(x, _axes(x, dims), keepdims=keepdim),
    "aten.max": jnp.max,
    "aten.min": jnp.min,
    "aten.max.dim": _extreme_along(jnp.argmax),
    "aten.min.dim": _extreme_along(jnp.argmin),
    "aten.any": _on_booleans(jnp.any),
    "aten.all": _on_booleans(jnp.all),
    "aten.any.dim": _on_booleans(jnp.any),
    "aten.all.dim": _on_booleans(jnp.all),
    "aten.argmax": _position(jnp.argmax),
    "aten.argmin": _position(jnp.argmin),
    "aten.cumsum": _cumulative(jnp.cumsum),
    "aten.cumprod": _cumulative(jnp.cumprod),
    "aten.softmax.int": _softmax(jax.nn.softmax),
    "aten.log_softmax.int": _softmax(jax.nn.log_softmax),
    "aten.topk": _topk,
    "aten.sort": _sort,
    "aten.argsort": _order,
    "aten.cross_entropy_loss": _cross_entropy,
    "aten.nll_loss_nd": _nll,
    "aten.nll_loss": _nll,
    "aten.mse_loss": lambda x, target, reduction: _reduced((x - target) ** 2, reduction),
    "aten.l1_loss": lambda x, target, reduction: _reduced(absolute(x - target), reduction),
    "aten.smooth_l1_loss": _smooth_l1,
    "aten.huber_loss": _huber,
    "aten.kl_div": _kl,
    "aten.binary_cross_entropy": _binary,
    "aten.binary_cross_entropy_with_logits": _binary_logits,
}
