"""What the backward pass of a microbatch needs of its forward pass, without what is held anyway.

`jax.vjp` names the weights among its residuals, and a compiled function copies whatever it returns: each microbatch under way
would hold a copy of its stage's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array


@dataclass(frozen=True)
class Layout:
    """Where each residual is found: in what the forward pass was given, or in what it returned."""

    tree: Any  # of JAX: what these are the leaves of
    held: tuple[int, ...]  # those that it was given, by their places
    places: tuple[int, ...]  # of each residual among these, and then among what was returned


def partition(back: Any, given: Sequence[Array]) -> tuple[list[Array], Layout]:
    """What has to be returned for `back`, a function that `jax.vjp` made, within the trace of what was `given`."""
    leaves, tree = jax.tree.flatten(back)
    number = {id(value): place for place, value in enumerate(given)}
    held = tuple(sorted({number[id(leaf)] for leaf in leaves if id(leaf) in number}))
    known = [given[place] for place in held]
    places = {id(value): place for place, value in enumerate(known)}
    for leaf in leaves:
        if id(leaf) not in places:
            places[id(leaf)] = len(known)
            known.append(leaf)
    return known[len(held) :], Layout(tree, held, tuple(places[id(leaf)] for leaf in leaves))


def combine(layout: Layout, held: Sequence[Array], returned: Sequence[Array]) -> Any:
    """The function again, of those of the given values that `layout` holds, and of what was returned."""
    known = (*held, *returned)
    return jax.tree.unflatten(layout.tree, [known[place] for place in layout.places])
