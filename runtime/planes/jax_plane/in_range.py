"""Indices that stay within their tables, in JAX, which takes one below zero for one from the end, the last row for one beyond, and
leaves out what would be written there.

Indices are data, perhaps a stranger's, and a label may be one that the model does not have. What is made with one that torch refuses
is not a number (of whole numbers the least), as on CUDA (`fusion.runtime.planes.kernels.in_range`): an answer or a step of training
fails for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from fusion.dag.ir.opset_index import INDEXED, IndexKind

Args = tuple[Any, ...]


def in_range(op: str, args: Args, made: Array) -> Array:
    """What `op` has made of these arguments, as far as their indices are within their tables."""
    if op not in INDEXED or made.dtype == jnp.bool_:
        return made
    strayed = _STRAYED[INDEXED[op]]
    nothing = jnp.nan if jnp.issubdtype(made.dtype, jnp.floating) else jnp.iinfo(made.dtype).min
    return jnp.where(strayed(args), jnp.asarray(nothing, made.dtype), made)


def _beyond(index: Array, size: int, least: int = 0) -> Array:
    index = index.astype(jnp.int64)
    return (index < least) | (index >= size)


def _rows_of(args: Args) -> Array:
    """weight, indices, ...: each row is by itself."""
    return _beyond(args[1], args[0].shape[0])[..., None]


def _along(args: Args) -> Array:
    """self, dim, index, ..."""
    return jnp.any(_beyond(args[2], args[0].shape[args[1]] if args[0].ndim else 1))


def _listed(args: Args) -> Array:
    """self, indices, ...: for each dimension one, which may count from the end, or none; or for several a mask."""
    found = jnp.zeros((), jnp.bool_)
    for index, size in zip(args[1], args[0].shape, strict=False):
        if index is not None and index.dtype != jnp.bool_:
            found = found | jnp.any(_beyond(index, size, -size))
    return found


def _classes(args: Args) -> Array:
    """self, num_classes."""
    return jnp.any(_beyond(args[0], args[1]))


def _targets(args: Args) -> Array:
    """self, target, weight, reduction, ignore_index, ...: classes, or a probability for each."""
    scores, target, ignored = args[0], args[1], args[4]
    if jnp.issubdtype(target.dtype, jnp.floating):
        return jnp.zeros((), jnp.bool_)
    strayed = _beyond(target, scores.shape[min(1, scores.ndim - 1)])
    return jnp.any(strayed & (target.astype(jnp.int64) != ignored))


def _probabilities(args: Args) -> Array:
    """self, target, ...: not a number is none."""
    return ~jnp.all(jnp.stack([jnp.all((given >= 0) & (given <= 1)) for given in args[:2]]))


_STRAYED: Mapping[IndexKind, Callable[[Args], Array]] = {
    "rows": _rows_of,
    "along": _along,
    "listed": _listed,
    "classes": _classes,
    "targets": _targets,
    "probabilities": _probabilities,
}
