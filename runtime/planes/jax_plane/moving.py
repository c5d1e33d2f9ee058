"""Views, moves, and tensors made from sizes, in JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fusion.dag.ir.opset_make import arange_count

Function = Callable[..., Any]
Index = tuple[Any, ...]


def _flatten(x: Array, start: int, end: int) -> Array:
    rank = max(1, x.ndim)
    start, end = start % rank, end % rank
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def _unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    at = dim % x.ndim
    return x.reshape(*x.shape[:at], *_resolved_sizes(sizes, x.shape[at]), *x.shape[at + 1 :])


def _resolved_sizes(sizes: Sequence[int], total: int) -> list[int]:
    """The sizes, with a -1 replaced."""
    known = int(np.prod([size for size in sizes if size != -1], dtype=np.int64))
    return [total // known if size == -1 else size for size in sizes]


def _transpose(x: Array, a: int, b: int) -> Array:
    return jnp.swapaxes(x, a, b) if x.ndim else x


def _squeeze(x: Array, dims: int | Sequence[int] | None = None) -> Array:
    if dims is None:
        return x.reshape([size for size in x.shape if size != 1])
    chosen = {dim % max(1, x.ndim) for dim in ((dims,) if isinstance(dims, int) else dims)}
    return x.reshape([size for at, size in enumerate(x.shape) if at not in chosen or size != 1])


def _expand(x: Array, size: Sequence[int]) -> Array:
    lead = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[at - lead] if n == -1 else n for at, n in enumerate(size)])


def _slice_index(x: Array, dim: int, start: int | None, end: int | None, step: int) -> Index:
    return (*[slice(None)] * (dim % x.ndim), slice(start, end, step))


def _slice(x: Array, dim: int, start: int | None, end: int | None, step: int) -> Array:
    return x[_slice_index(x, dim, start, end, step)]


def _narrow(x: Array, dim: int, start: int, length: int) -> Array:
    start = start + x.shape[dim] if start < 0 else start
    return lax.slice_in_dim(x, start, start + length, axis=dim % x.ndim)


def _select(x: Array, dim: int, index: int) -> Array:
    return x[_select_index(x, dim, index)]


def _select_index(x: Array, dim: int, index: int) -> Index:
    """An index of one element of a dimension. IndexError out of range, which JAX would clamp."""
    if not -x.shape[dim] <= index < x.shape[dim]:
        raise IndexError(f"index {index} of a dimension of {x.shape[dim]}")
    return (*[slice(None)] * (dim % x.ndim), index)


def _split(x: Array, sizes: Sequence[int], dim: int) -> list[Array]:
    ends = np.cumsum(sizes)
    return [
        lax.slice_in_dim(x, int(end - size), int(end), axis=dim % x.ndim)
        for end, size in zip(ends, sizes, strict=True)
    ]


def _split_every(x: Array, step: int, dim: int) -> list[Array]:
    total = x.shape[dim]
    return _split(x, [min(step, total - at) for at in range(0, max(1, total), max(1, step))], dim)


def _chunk(x: Array, chunks: int, dim: int) -> list[Array]:
    return _split_every(x, max(1, -(-x.shape[dim] // chunks)), dim)


def _unbind(x: Array, dim: int) -> list[Array]:
    return [_select(x, dim, at) for at in range(x.shape[dim])]


def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


def _repeat_interleave(x: Array, times: int, dim: int | None) -> Array:
    return jnp.repeat(x, times, axis=dim) if x.ndim else jnp.repeat(x, times)


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[tuple(slice(None) if each is None else each for each in indices)]


def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool) -> Array:
    if indices[0] is not None and indices[0].dtype == jnp.bool_:
        mask = indices[0]
        return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), values.reshape(()), x)
    place = x.at[tuple(slice(None) if each is None else each for each in indices)]
    return place.add(values) if accumulate else place.set(values)


def _gather(x: Array, dim: int, index: Array) -> Array:
    if not x.ndim:
        return x
    at = dim % x.ndim
    # In other dimensions the index may be shorter.
    x = x[tuple(slice(None) if i == at else slice(0, n) for i, n in enumerate(index.shape))]
    return jnp.take_along_axis(x, index, axis=at)


def _scatter(x: Array, dim: int, index: Array, source: Any) -> Array:
    if not x.ndim:
        return jnp.broadcast_to(source, x.shape)
    at = dim % x.ndim
    where = list(jnp.indices(index.shape, sparse=True))
    where[at] = index
    if isinstance(source, Array):
        source = source[tuple(slice(0, n) for n in index.shape)]
    return x.at[tuple(where)].set(source)


def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    if not x.ndim:
        return x + source.reshape(())
    where = list(jnp.indices(index.shape, sparse=True))
    where[dim % x.ndim] = index
    return x.at[tuple(where)].add(source[tuple(slice(0, n) for n in index.shape)])


def _index_add(x: Array, dim: int, index: Array, source: Array, alpha: Any) -> Array:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].add(source if alpha == 1 else source * alpha)


def _select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    return x.at[_select_index(x, dim, index)].set(source)


def _slice_scatter(x: Array, source: Array, dim: int, start: int | None, end: int | None, step: int) -> Array:
    return x.at[_slice_index(x, dim, start, end, step)].set(source)


def _flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, tuple(dims)) if len(dims) else x


def _roll(x: Array, shifts: Sequence[int], dims: Sequence[int]) -> Array:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if len(dims) else jnp.roll(x, shifts[0])


def _diff(x: Array, n: int, dim: int, prepend: Array | None, append: Array | None) -> Array:
    x = jnp.concatenate([each for each in (prepend, x, append) if each is not None], dim)
    length = max(0, x.shape[dim] - n)

    def difference(x: Array, _: None) -> tuple[Array, None]:
        next_values = jnp.roll(x, -1, dim)  # the wrapped element is cut off below
        return jnp.logical_xor(next_values, x) if x.dtype == jnp.bool_ else next_values - x, None

    if length:
        x, _ = lax.scan(difference, x, length=n)
    return lax.slice_in_dim(x, 0, length, axis=dim % x.ndim)


def _pad(x: Array, pad: Sequence[int], value: Any) -> Array:
    paddings = [(0, 0, 0)] * x.ndim
    for pair in range(len(pad) // 2):
        paddings[-1 - pair] = (pad[2 * pair], pad[2 * pair + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), paddings)


def _pixel_shuffle(x: Array, factor: int) -> Array:
    *leading, channels, height, width = x.shape
    out_channels = channels // factor**2
    x = x.reshape(*leading, out_channels, factor, factor, height, width)
    rank = len(leading)
    order = (*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2)
    return x.transpose(order).reshape(*leading, out_channels, height * factor, width * factor)


def shrinking_first(sizes: Sequence[int], new_sizes: Sequence[int]) -> list[int]:
    """An order in which to resize dimensions so that no intermediate tensor is larger than both ends."""
    return sorted(range(len(sizes)), key=lambda dim: new_sizes[dim] / max(1, sizes[dim]))


def _upsample_nearest(x: Array, size: Sequence[int], *scales: float | None) -> Array:
    for dim in shrinking_first(x.shape[2:], size):
        new_size, scale, old_size = size[dim], scales[dim], x.shape[dim + 2]
        step = np.float32(1 / scale if scale is not None and scale > 0 else old_size / new_size)
        sources = np.floor(np.arange(new_size, dtype=np.float32) * step).astype(np.int64)
        x = jnp.take(x, np.minimum(sources, old_size - 1), axis=dim + 2)
    return x


def _upsample_bilinear(x: Array, size: Sequence[int], corners: bool, *scales: float | None) -> Array:
    """One dimension after another, each value from two neighbours."""
    for dim in shrinking_first(x.shape[2:], size):
        new_size, scale, old_size = size[dim], scales[dim], x.shape[dim + 2]
        positions = np.arange(new_size)
        if corners:
            sources = positions * ((old_size - 1) / (new_size - 1) if new_size > 1 else 0.0)
        else:
            step = 1 / scale if scale is not None and scale > 0 else old_size / new_size
            sources = np.maximum(0.0, (positions + 0.5) * step - 0.5)
        first = np.minimum(sources.astype(np.int64), old_size - 1)
        weight = jnp.asarray((sources - first).reshape(-1, *[1] * (1 - dim)), x.dtype)
        values, next_values = (
            jnp.take(x, each, axis=dim + 2) for each in (first, np.minimum(first + 1, old_size - 1))
        )
        x = values * (1 - weight) + next_values * weight
    return x


def _arange(start: Any, end: Any, step: Any, _: Any) -> Array:
    """The number of elements comes from the op-set. Computed from an iota: a constant would be stored in the program."""
    return start + step * jnp.arange(arange_count(start, end, step))


def _filled(size: Sequence[int], value: Any) -> Array:
    return jnp.full(tuple(size), value)


MOVING: Mapping[str, Function] = {
    "aten.view": lambda x, size: x.reshape(_resolved_sizes(size, x.size)),
    "aten._unsafe_view": lambda x, size: x.reshape(_resolved_sizes(size, x.size)),
    "aten.reshape": lambda x, size: x.reshape(_resolved_sizes(size, x.size)),
    "aten.flatten.using_ints": _flatten,
    "aten.unflatten.int": _unflatten,
    "aten.transpose.int": _transpose,
    "aten.permute": lambda x, dims: x.transpose([dim % x.ndim for dim in dims]) if x.ndim else x,
    "aten.t": lambda x: x.T,
    "aten.numpy_T": lambda x: x.T,
    "aten.squeeze": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.unsqueeze": lambda x, dim: jnp.expand_dims(x, dim),
    "aten.expand": _expand,
    "aten.expand_as": lambda x, other: jnp.broadcast_to(x, other.shape),
    **{f"aten.{name}": lambda x: x for name in ("alias", "contiguous", "clone", "detach")},
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.narrow": _narrow,
    "aten.split.Tensor": _split_every,
    "aten.split.sizes": _split,
    "aten.split_with_sizes": _split,
    "aten.chunk": _chunk,
    "aten.unbind.int": _unbind,
    "aten.repeat": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.cat": lambda tensors, dim: jnp.concatenate(tensors, dim),
    "aten.stack": lambda tensors, dim: jnp.stack(tensors, dim),
    "aten.index.Tensor": _index,
    "aten.index_select": lambda x, dim, index: jnp.take(x, index, axis=dim),
    "aten.gather": _gather,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter,
    "aten.scatter_add": _scatter_add,
    "aten.index_add": _index_add,
    "aten.index_put": _index_put,
    "aten.select_scatter": _select_scatter,
    "aten.slice_scatter": _slice_scatter,
    "aten.flip": _flip,
    "aten.roll": _roll,
    "aten.tril": jnp.tril,
    "aten.triu": jnp.triu,
    "aten.diff": _diff,
    "aten.constant_pad_nd": _pad,
    "aten.one_hot": lambda x, classes: x[..., None] == jnp.arange(classes),
    "aten.pixel_shuffle": _pixel_shuffle,
    "aten.upsample_nearest2d": _upsample_nearest,
    "aten.upsample_bilinear2d": _upsample_bilinear,
    "aten.arange": lambda end, dtype: _arange(0, end, 1, dtype),
    "aten.arange.start": lambda start, end, dtype: _arange(start, end, 1, dtype),
    "aten.arange.start_step": _arange,
    "aten.linspace": lambda start, end, steps, _: jnp.linspace(float(start), float(end), steps),
    "aten.full": lambda size, value, _: _filled(size, value),
    "aten.zeros": lambda size, _: _filled(size, 0),
    "aten.ones": lambda size, _: _filled(size, 1),
    "aten.full_like": lambda x, value, _: _filled(x.shape, value),
    "aten.zeros_like": lambda x, _: _filled(x.shape, 0),
    "aten.ones_like": lambda x, _: _filled(x.shape, 1),
    "aten.new_full": lambda _, size, value, __: _filled(size, value),
    "aten.new_zeros": lambda _, size, __: _filled(size, 0),
    "aten.new_ones": lambda _, size, __: _filled(size, 1),
    "aten.scalar_tensor": lambda value, _: jnp.asarray(value),
}
