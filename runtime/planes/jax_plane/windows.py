"""Convolutions and pools over the last one to three dimensions, in JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Node
from fusion.runtime.planes.jax_plane.contracting import at_least_float32
from fusion.runtime.planes.jax_plane.moving import shrinking_first

Function = Callable[..., Any]
MAX_DILATED_ELEMENTS = 256  # of a dilated window, summed over its dimensions; models have 3 in each
_MAX_POOLS = {"aten.max_pool1d": 1, "aten.max_pool2d": 2, "aten.max_pool3d": 3}
_NAMES = "DHW"


def _per_dimension(values: Sequence[Any], n: int) -> tuple[Any, ...]:
    return tuple(values) * n if len(values) == 1 else tuple(values)


def _batched(n: int, run: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Also accept an input (channels, n dimensions) without a batch."""
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
                window_strides=_per_dimension(stride, n),
                padding=[(p, p) for p in _per_dimension(padding, n)],
                rhs_dilation=_per_dimension(dilation, n),
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
        output_padding: Sequence[int],
        groups: int,
        dilation: Sequence[int],
    ) -> Array:
        """The gradient of a convolution by its input: the input dilated, the window flipped."""
        in_channels, out_channels, *window = weight.shape
        flipped = jnp.flip(
            weight.reshape(groups, in_channels // groups, out_channels, *window), range(3, n + 3)
        )
        flipped = jnp.swapaxes(flipped, 1, 2).reshape(groups * out_channels, in_channels // groups, *window)
        dilations = _per_dimension(dilation, n)
        paddings = [
            (g * (k - 1) - p, g * (k - 1) - p + m)
            for k, p, g, m in zip(
                window, _per_dimension(padding, n), dilations, _per_dimension(output_padding, n), strict=True
            )
        ]

        def run(x: Array) -> Array:
            return lax.conv_general_dilated(
                x,
                flipped,
                window_strides=(1,) * n,
                padding=paddings,
                lhs_dilation=_per_dimension(stride, n),
                rhs_dilation=dilations,
                dimension_numbers=_layout(n),
                feature_group_count=groups,
            )

        return _with_bias(_batched(n, run)(x), bias, n)

    return convolution


def _pool_size(length: int, window: int, stride: int, pad: int, dilation: int, ceil: bool) -> tuple[int, int]:
    """The number of windows, and how far the last one exceeds the padded input (PyTorch's formula for pools)."""
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
        window = _per_dimension(kernel, n)
        steps, pads, dilations = (
            _per_dimension(stride or window, n),
            _per_dimension(padding, n),
            _per_dimension(dilation, n),
        )
        sizes = [
            _pool_size(*each, ceil) for each in zip(x.shape[-n:], window, steps, pads, dilations, strict=True)
        ]
        paddings = [(p, p + more) for p, (_, more) in zip(pads, sizes, strict=True)]
        leading = x.ndim - n
        if set(dilations) == {1}:
            return lax.reduce_window(
                x,
                -jnp.inf,
                lax.max,
                (1,) * leading + window,
                (1,) * leading + steps,
                [(0, 0)] * leading + paddings,
            )
        # JAX has no gradient of dilated windows. One dimension after another, each element of the window is a slice; of equal maxima the
        # first one gets the gradient.
        for dim in reversed(range(n)):
            count, _ = sizes[dim]
            before, after = paddings[dim]
            padded = lax.pad(
                x,
                jnp.asarray(-jnp.inf, x.dtype),
                [(before, after, 0) if axis == leading + dim else (0, 0, 0) for axis in range(x.ndim)],
            )
            for element in range(window[dim]):
                start = element * dilations[dim]
                end = start + (count - 1) * steps[dim] + 1
                values = lax.slice_in_dim(padded, start, end, steps[dim], leading + dim)
                x = values if not element else jnp.where((values > x) | jnp.isnan(values), values, x)
        return x

    return pool


def require_small_dilated_windows(node: Node) -> None:
    """GraphError for a dilated window that JAX would take too long to compile."""
    n = _MAX_POOLS.get(node.op)
    if n is not None:
        kernel, dilation = node.args[1], node.args[4]
        assert isinstance(kernel, tuple) and isinstance(dilation, tuple)
        elements = sum(k for k in _per_dimension(kernel, n) if isinstance(k, int))
        if set(dilation) != {1} and elements > MAX_DILATED_ELEMENTS:
            raise GraphError(
                f"the JAX plane does not run a window of {elements} places with holes: {MAX_DILATED_ELEMENTS} at most"
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
        window, x = (
            _per_dimension(kernel, n),
            at_least_float32(x),
        )  # half precision represents integers up to 256 or 2048
        steps, pads = _per_dimension(stride or window, n), _per_dimension(padding, n)
        space = x.shape[-n:]
        sizes = [_pool_size(*each, 1, ceil) for each in zip(space, window, steps, pads, strict=True)]
        paddings = [(p, p + more) for p, (_, more) in zip(pads, sizes, strict=True)]
        leading = x.ndim - n

        def sums(values: Array, paddings: Sequence[tuple[int, int]]) -> Array:
            return lax.reduce_window(
                values,
                0.0,
                lax.add,
                (1,) * leading + window,
                (1,) * leading + steps,
                [(0, 0)] * leading + list(paddings),
            )

        total = sums(x, paddings)
        if divisor is not None:
            return total / divisor
        ones = jnp.ones((*[1] * leading, *space), x.dtype)
        if count_pads:
            ones = jnp.pad(ones, [(0, 0)] * leading + [(p, p) for p in pads], constant_values=1)
            paddings = [(0, more) for _, more in sizes]
        return total / sums(ones, paddings)

    return pool


def _adaptive(n: int) -> Function:
    def pool(x: Array, size: Sequence[int]) -> Array:
        sizes = _per_dimension(size, n)
        for dim in shrinking_first(x.shape[-n:], sizes):
            axis = x.ndim - n + dim
            length, windows = x.shape[axis], np.arange(sizes[dim])
            starts, ends = windows * length // sizes[dim], -(-(windows + 1) * length // sizes[dim])
            # Windows differ by one element at most, which is masked in the shorter ones.
            positions = starts[:, None] + np.arange((ends - starts).max(initial=0))
            inside = (positions < ends[:, None]).reshape(*positions.shape, *[1] * (n - 1 - dim))
            values = jnp.take(x, np.minimum(positions, length - 1), axis=axis)
            counts = jnp.asarray(ends - starts, x.dtype).reshape(-1, *[1] * (n - 1 - dim))
            x = jnp.sum(jnp.where(inside, values, 0), axis + 1) / counts
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
