"""Operators whose windows slide over the last one to three dimensions: convolutions and pools, in JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Function = Callable[..., Any]
_NAMES = "DHW"


def _spread(values: Sequence[int], n: int) -> tuple[int, ...]:
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
        # JAX has no gradient of windows with holes: each place of the window is a slice, and the first of the largest counts.
        padded = lax.pad(
            x, jnp.asarray(-jnp.inf, x.dtype), [(0, 0, 0)] * lead + [(*each, 0) for each in around]
        )
        places = []
        for offset in np.ndindex(*window):
            starts = [o * g for o, g in zip(offset, apart, strict=True)]
            ends = [
                s + (count - 1) * step + 1 for s, (count, _), step in zip(starts, sizes, steps, strict=True)
            ]
            places.append(
                lax.slice(padded, (*[0] * lead, *starts), (*x.shape[:lead], *ends), (*[1] * lead, *steps))
            )
        stacked = jnp.stack(places)
        return jnp.take_along_axis(stacked, jnp.argmax(stacked, 0, keepdims=True), 0)[0]

    return pool


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
        window = _spread(kernel, n)
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
        for axis, wanted in zip(range(x.ndim - n, x.ndim), _spread(size, n), strict=True):
            had = x.shape[axis]
            shares = np.zeros((wanted, had))
            for at in range(wanted):
                start, end = at * had // wanted, -(-(at + 1) * had // wanted)
                shares[at, start:end] = 1 / (end - start)
            x = jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ jnp.asarray(shares.T, x.dtype), -1, axis)
        return x

    return pool


WINDOWS: Mapping[str, Function] = {
    "aten.conv1d": _convolution(1),
    "aten.conv2d": _convolution(2),
    "aten.conv3d": _convolution(3),
    "aten.conv_transpose1d": _transposed(1),
    "aten.conv_transpose2d.input": _transposed(2),
    "aten.max_pool1d": _max_pool(1),
    "aten.max_pool2d": _max_pool(2),
    "aten.avg_pool1d": _average_pool(1),
    "aten.avg_pool2d": _average_pool(2),
    "aten.adaptive_avg_pool1d": _adaptive(1),
    "aten.adaptive_avg_pool2d": _adaptive(2),
}
