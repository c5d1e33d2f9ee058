"""The residuals of a microbatch, without values that are held anyway.

`jax.vjp` has the weights among its residuals, and a compiled function copies what it returns: each microbatch in flight would hold a
copy of its stage's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array


@dataclass(frozen=True)
class Layout:
    """Where each residual is: among the arguments of the forward pass, or among its results."""

    tree: Any  # of JAX, whose leaves are the residuals
    held: tuple[int, ...]  # indices of arguments that are residuals
    indices: tuple[int, ...]  # of each residual, among these and then the returned values


def partition(vjp: Any, arguments: Sequence[Array]) -> tuple[list[Array], Layout]:
    """The values to return for `vjp`, a function made by `jax.vjp`, within the trace of the `arguments`; and the layout."""
    leaves, tree = jax.tree.flatten(vjp)
    argument_index = {id(value): index for index, value in enumerate(arguments)}
    held = tuple(sorted({argument_index[id(leaf)] for leaf in leaves if id(leaf) in argument_index}))
    values = [arguments[index] for index in held]
    indices = {id(value): index for index, value in enumerate(values)}
    for leaf in leaves:
        if id(leaf) not in indices:
            indices[id(leaf)] = len(values)
            values.append(leaf)
    return values[len(held) :], Layout(tree, held, tuple(indices[id(leaf)] for leaf in leaves))


def combine(layout: Layout, held: Sequence[Array], returned: Sequence[Array]) -> Any:
    """The function, from the arguments that `layout` holds and the returned values."""
    values = (*held, *returned)
    return jax.tree.unflatten(layout.tree, [values[index] for index in layout.indices])
