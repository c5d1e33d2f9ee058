"""Checks indices in JAX, which takes one below zero from the end, clamps one beyond its table, and drops writes there.

Indices are untrusted data, and a label may be of no class of the model. Results for indices that torch refuses are NaN (of integers the
minimum), as on CUDA (`fusion.runtime.planes.kernels.in_range`), for which a generation or a training step fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from fusion.dag.ir.opset_index import INDEXED, IndexKind

Args = tuple[Any, ...]


def in_range(op: str, args: Args, output: Array) -> Array:
    """The result of `op`, invalid where an index is out of range."""
    if op not in INDEXED or output.dtype == jnp.bool_:
        return output
    check = _CHECKS[INDEXED[op]]
    invalid = jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else jnp.iinfo(output.dtype).min
    return jnp.where(check(args), jnp.asarray(invalid, output.dtype), output)


def _out_of_range(index: Array, size: int, low: int = 0) -> Array:
    index = index.astype(jnp.int64)
    return (index < low) | (index >= size)


def _rows_of(args: Args) -> Array:
    """weight, indices, ...: each row has one index."""
    return _out_of_range(args[1], args[0].shape[0])[..., None]


def _along(args: Args) -> Array:
    """self, dim, index, ..."""
    return jnp.any(_out_of_range(args[2], args[0].shape[args[1]] if args[0].ndim else 1))


def _listed(args: Args) -> Array:
    """self, indices, ...: for each dimension an index, which may be negative, or None; or a mask over several dimensions."""
    out_of_range = jnp.zeros((), jnp.bool_)
    for index, size in zip(args[1], args[0].shape, strict=False):
        if index is not None and index.dtype != jnp.bool_:
            out_of_range = out_of_range | jnp.any(_out_of_range(index, size, -size))
    return out_of_range


def _classes(args: Args) -> Array:
    """self, num_classes."""
    return jnp.any(_out_of_range(args[0], args[1]))


def _targets(args: Args) -> Array:
    """self, target, weight, reduction, ignore_index, ...: classes, or a probability for each."""
    scores, target, ignored = args[0], args[1], args[4]
    if jnp.issubdtype(target.dtype, jnp.floating):
        return jnp.zeros((), jnp.bool_)
    out_of_range = _out_of_range(target, scores.shape[min(1, scores.ndim - 1)])
    return jnp.any(out_of_range & (target.astype(jnp.int64) != ignored))


def _probabilities(args: Args) -> Array:
    """self, target, ...: NaN is out of range."""
    return ~jnp.all(jnp.stack([jnp.all((values >= 0) & (values <= 1)) for values in args[:2]]))


_CHECKS: Mapping[IndexKind, Callable[[Args], Array]] = {
    "rows": _rows_of,
    "along": _along,
    "listed": _listed,
    "classes": _classes,
    "targets": _targets,
    "probabilities": _probabilities,
}
