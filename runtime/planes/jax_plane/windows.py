"""Operators whose windows slide over the last one to three dimensions: convolutions and pools, in JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Node
from fusion.runtime.planes.jax_plane.contracting import wide
from fusion.runtime.planes.jax_plane.moving import shrinking_first

Function = Callable[..., Any]
MOST_PLACES = 256  # of a window with holes, along all of its dimensions; models have 3 along each
_MAX_POOLS = {"aten.max_pool1d": 1, "aten.max_pool2d": 2, "aten.max_pool3d": 3}
_NAMES = "DHW"


def _spread(values: Sequence[Any], n: int) -> tuple[Any, ...]:
    return tuple(values) * n if len(values) == 1 else tuple(values)


def _batched(n: int, run: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """For an input (channels, n dimensions) as well, without a batch."""
    return lambda x: run(x) if x.ndim == n + 2 else run(x[None])[0]


def _layout(n: int) -> tuple[str, str, str]:
    space = _NAMES[-n:]
    return f"NC{space}", f"OI{space}", f"NC{space}"


def _with_bias(x: Array, bias: Array | None, n: int) -> Array:
    return x if bias is None else x + bias.reshape(-1, *[1] * n)


def _convolution(n: int) -> Function:
    def convolution(
        x: Array,
        weight: Array,
        bias: Array | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Array:
        def run(x: Array) -> Array:
            return lax.conv_general_dilated(
                x,
                weight,
                window_strides=_spread(stride, n),
                padding=[(p, p) for p in _spread(padding, n)],
                rhs_dilation=_spread(dilation, n),
                dimension_numbers=_layout(n),
                feature_group_count=groups,
            )

        return _with_bias(_batched(n, run)(x), bias, n)

    return convolution


def _transposed(n: int) -> Function:
    def convolution(
        x: Array,
        weight: Array,  # (in, out of a group, window)
        bias: Array | None,
        stride: Sequence[int],
        padding: Sequence[int],
        more: Sequence[int],
        groups: int,
        dilation: Sequence[int],
    ) -> Array:
        """The gradient of a convolution by its input: the input spread out, and the window turned round."""
        inside, out, *window = weight.shape
        turned = jnp.flip(weight.reshape(groups, inside // groups, out, *window), range(3, n + 3))
        turned = jnp.swapaxes(turned, 1, 2).reshape(groups * out, inside // groups, *window)
        dilated = _spread(dilation, n)
        around = [
            (g * (k - 1) - p, g * (k - 1) - p + m)
            for k, p, g, m in zip(window, _spread(padding, n), dilated, _spread(more, n), strict=True)
        ]

        def run(x: Array) -> Array:
            return lax.conv_general_dilated(
                x,
                turned,
                window_strides=(1,) * n,
                padding=around,
                lhs_dilation=_spread(stride, n),
                rhs_dilation=dilated,
                dimension_numbers=_layout(n),
                feature_group_count=groups,
            )

        return _with_bias(_batched(n, run)(x), bias, n)

    return convolution


def _more(length: int, window: int, stride: int, pad: int, dilation: int, ceil: bool) -> tuple[int, int]:
    """How many windows there are, and how far the last one reaches beyond the padded input (PyTorch's formula for pools)."""
    span = length + 2 * pad - dilation * (window - 1) - 1
    count = (-(-span // stride) if ceil else span // stride) + 1
    if ceil and (count - 1) * stride >= length + pad:
        count -= 1
    return count, max(0, (count - 1) * stride - span)


def _max_pool(n: int) -> Function:
    def pool(
        x: Array,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil: bool,
    ) -> Array:
        window = _spread(kernel, n)
        steps, pads, apart = _spread(stride or window, n), _spread(padding, n), _spread(dilation, n)
        sizes = [_more(*each, ceil) for each in zip(x.shape[-n:], window, steps, pads, apart, strict=True)]
        around = [(p, p + more) for p, (_, more) in zip(pads, sizes, strict=True)]
        lead = x.ndim - n
        if set(apart) == {1}:
            return lax.reduce_window(
                x,
                -jnp.inf,
                lax.max,
                (1,) * lead + window,
                (1,) * lead + steps,
                [(0, 0)] * lead + around,
            )
        # JAX has no gradient of windows with holes: along one dimension after the other each place of the window is a slice, and
        # the first of the largest counts.
        for at in reversed(range(n)):
            count, _ = sizes[at]
            before, after = around[at]
            padded = lax.pad(
                x,
                jnp.asarray(-jnp.inf, x.dtype),
                [(before, after, 0) if axis == lead + at else (0, 0, 0) for axis in range(x.ndim)],
            )
            for place in range(window[at]):
                start = place * apart[at]
                end = start + (count - 1) * steps[at] + 1
                seen = lax.slice_in_dim(padded, start, end, steps[at], lead + at)
                x = seen if not place else jnp.where((seen > x) | jnp.isnan(seen), seen, x)
        return x

    return pool


def require_few_places(node: Node) -> None:
    """GraphError for a window that JAX would take too long to compile."""
    n = _MAX_POOLS.get(node.op)
    if n is not None:
        kernel, dilation = node.args[1], node.args[4]
        assert isinstance(kernel, tuple) and isinstance(dilation, tuple)
        places = sum(k for k in _spread(kernel, n) if isinstance(k, int))
        if set(dilation) != {1} and places > MOST_PLACES:
            raise GraphError(
                f"the JAX plane does not run a window of {places} places with holes: {MOST_PLACES} at most"
            )


def _average_pool(n: int) -> Function:
    def pool(
        x: Array,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil: bool,
        count_pads: bool,
        divisor: int | None = None,
    ) -> Array:
        window, x = _spread(kernel, n), wide(x)  # half precision counts to 256, or to 2048
        steps, pads = _spread(stride or window, n), _spread(padding, n)
        space = x.shape[-n:]
        sizes = [_more(*each, 1, ceil) for each in zip(space, window, steps, pads, strict=True)]
        around = [(p, p + more) for p, (_, more) in zip(pads, sizes, strict=True)]
        lead = x.ndim - n

        def sums(values: Array, around: Sequence[tuple[int, int]]) -> Array:
            return lax.reduce_window(
                values,
                0.0,
                lax.add,
                (1,) * lead + window,
                (1,) * lead + steps,
                [(0, 0)] * lead + list(around),
            )

        total = sums(x, around)
        if divisor is not None:
            return total / divisor
        ones = jnp.ones((*[1] * lead, *space), x.dtype)
        if count_pads:
            ones = jnp.pad(ones, [(0, 0)] * lead + [(p, p) for p in pads], constant_values=1)
            around = [(0, more) for _, more in sizes]
        return total / sums(ones, around)

    return pool


def _adaptive(n: int) -> Function:
    def pool(x: Array, size: Sequence[int]) -> Array:
        wanted = _spread(size, n)
        for at in shrinking_first(x.shape[-n:], wanted):
            axis = x.ndim - n + at
            had, windows = x.shape[axis], np.arange(wanted[at])
            starts, ends = windows * had // wanted[at], -(-(windows + 1) * had // wanted[at])
            # A place more than the shortest window at most, which does not count there.
            places = starts[:, None] + np.arange((ends - starts).max(initial=0))
            inside = (places < ends[:, None]).reshape(*places.shape, *[1] * (n - 1 - at))
            seen = jnp.take(x, np.minimum(places, had - 1), axis=axis)
            counts = jnp.asarray(ends - starts, x.dtype).reshape(-1, *[1] * (n - 1 - at))
            x = jnp.sum(jnp.where(inside, seen, 0), axis + 1) / counts
        return x

    return pool


WINDOWS: Mapping[str, Function] = {
    "aten.conv1d": _convolution(1),
    "aten.conv2d": _convolution(2),
    "aten.conv3d": _convolution(3),
    "aten.conv_transpose1d": _transposed(1),
    "aten.conv_transpose2d.input": _transposed(2),
    "aten.conv_transpose3d.input": _transposed(3),
    "aten.max_pool1d": _max_pool(1),
    "aten.max_pool2d": _max_pool(2),
    "aten.max_pool3d": _max_pool(3),
    "aten.avg_pool1d": _average_pool(1),
    "aten.avg_pool2d": _average_pool(2),
    "aten.avg_pool3d": _average_pool(3),
    "aten.adaptive_avg_pool1d": _adaptive(1),
    "aten.adaptive_avg_pool2d": _adaptive(2),
    "aten.adaptive_avg_pool3d": _adaptive(3),
}
