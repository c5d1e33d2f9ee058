"""Views: a tensor in another shape, or a part of it. No value is computed, and most copy none."""

from __future__ import annotations

from fusion.dag.ir.dims import Dim, Poly
from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_shapes import (
    Shape,
    axes,
    axis,
    checked_count,
    divide,
    lower_bound,
    resolve_shape,
    same,
    splice,
    volume,
)  # fmt: skip
from fusion.dag.ir.opset_spec import MAX_RANK, Call, Infer, Mixed, Mixes, OpSpec, Types, no_mixing, op

_FAR = 2**62  # an `end` from here on means "to the end" (exports write 2**63 - 1)


def like(t: TensorType, shape: Shape) -> Types:
    return (TensorType(shape, t.dtype),)


def view(call: Call) -> Types:
    t = call["self"]
    wanted = call.values["size"] if "size" in call.values else call.values["shape"]
    return like(t, resolve_shape(call, wanted, volume(call, t.shape)))


def flatten(call: Call) -> Types:
    t = call["self"]
    rank = len(t.shape)
    start, end = axis(call, call["start_dim"], rank), axis(call, call["end_dim"], rank)
    if start > end:
        raise call.fail("start_dim is after end_dim")
    return like(t, (*t.shape[:start], volume(call, t.shape[start : end + 1]), *t.shape[end + 1 :]))


def unflatten(call: Call) -> Types:
    t = call["self"]
    at = axis(call, call["dim"], len(t.shape))
    if not t.shape or len(t.shape) - 1 + len(call["sizes"]) > MAX_RANK:
        raise call.fail("rank out of range")
    return like(t, splice(t.shape, at, *resolve_shape(call, call["sizes"], t.shape[at])))


def transpose(call: Call) -> Types:
    t = call["self"]
    a, b = (axis(call, call[d], len(t.shape)) for d in ("dim0", "dim1"))
    shape = list(t.shape)
    if shape:
        shape[a], shape[b] = shape[b], shape[a]
    return like(t, tuple(shape))


def reverse_dims(call: Call) -> Types:
    t = call["self"]
    if call.op == "aten.t" and len(t.shape) > 2:
        raise call.fail(f"rank {len(t.shape)} is over 2")
    return like(t, t.shape[::-1])


def permute(call: Call) -> Types:
    t = call["self"]
    order = [axis(call, d, len(t.shape)) for d in call["dims"]]
    if sorted(order) != list(range(len(t.shape))):
        raise call.fail(f"{call['dims']} is not a permutation of the dimensions of {t}")
    return like(t, tuple(t.shape[d] for d in order))


def squeeze(call: Call) -> Types:
    t = call["self"]
    dims = axes(call, call.values.get("dim"), len(t.shape)) if call.values.get("dim", ...) != () else ()
    return like(t, tuple(d for i, d in enumerate(t.shape) if i not in dims or d != 1))


def unsqueeze(call: Call) -> Types:
    t = call["self"]
    at = axis(call, call["dim"], len(t.shape) + 1)
    if len(t.shape) >= MAX_RANK:
        raise call.fail(f"rank is over {MAX_RANK}")
    return like(t, (*t.shape[:at], 1, *t.shape[at:]))


def expand(call: Call) -> Types:
    t = call["self"]
    wanted = call["other"].shape if "other" in call.values else call["size"]
    lead = len(wanted) - len(t.shape)
    if lead < 0 or len(wanted) > MAX_RANK:
        raise call.fail(f"cannot expand {t} to rank {len(wanted)}")
    shape: list[Dim] = []
    for i, dim in enumerate(wanted):
        old = t.shape[i - lead] if i >= lead else None
        if dim == -1 and old is not None:
            dim = old
        if (isinstance(dim, int) and dim < 0) or old not in (None, 1, dim):
            raise call.fail(f"cannot expand {t} to {TensorType(wanted, t.dtype)}")
        shape.append(dim)
    return like(t, tuple(shape))


def _parts(call: Call, sizes: list[Dim], at: int) -> Types:
    t = call["self"]
    return tuple(TensorType(splice(t.shape, at, s), t.dtype) for s in sizes)


def _fixed_size(call: Call, at: int) -> int:
    t = call["self"]
    if not t.shape or not isinstance(t.shape[at], int):
        raise call.fail(f"dimension {at} of {t} has no plain size")
    return int(t.shape[at])


def _equal_parts(call: Call, total: int, step: int, at: int) -> Types:
    count = checked_count(call, -(-total // step) or 1)
    return _parts(call, [min(step, total - i * step) for i in range(count)], at)


def split(call: Call) -> Types:
    at = axis(call, call["dim"], len(call["self"].shape))
    step = call["split_size"]
    if call["self"].shape and step == call["self"].shape[at]:
        return (call["self"],)
    if not isinstance(step, int) or step <= 0:
        raise call.fail(f"split_size {step} is not above zero")
    return _equal_parts(call, _fixed_size(call, at), step, at)


def split_sizes(call: Call) -> Types:
    t = call["self"]
    sizes = list(call["split_size"] if "split_size" in call.values else call["split_sizes"])
    at = axis(call, call["dim"], len(t.shape))
    checked_count(call, len(sizes))
    total: Dim = 0
    for s in sizes:
        if isinstance(s, int) and s < 0:
            raise call.fail("a size is negative")
        total = total + s
    same(call, total, t.shape[at] if t.shape else 0, "sum of the sizes")
    return _parts(call, sizes, at)


def chunk(call: Call) -> Types:
    t, chunks = call["self"], call["chunks"]
    at = axis(call, call["dim"], len(t.shape))
    checked_count(call, chunks)
    if t.shape and isinstance(t.shape[at], Poly):
        return _parts(call, [divide(call, t.shape[at], chunks)] * chunks, at)
    total = _fixed_size(call, at)
    return _equal_parts(call, total, max(1, -(-total // chunks)), at)


def unbind(call: Call) -> Types:
    at = axis(call, call["dim"], len(call["self"].shape))
    t = call["self"]
    return tuple(
        TensorType(splice(t.shape, at), t.dtype) for _ in range(checked_count(call, _fixed_size(call, at)))
    )


def _bound(call: Call, at: Dim | None, length: Dim, default: Dim) -> Dim:
    """A slice bound counted from the front and clamped to [0, length]; GraphError for a polynomial of which that is undecidable."""
    if at is None or (isinstance(at, int) and at >= _FAR):
        return default if at is None else length
    if isinstance(at, int) and at < 0:
        at = length + at
        if isinstance(at, int):
            at = max(at, 0)
        return at
    if isinstance(at, Poly) and (lower_bound(-at) or 0) > 0:  # negative for all sizes: counts from the end
        at = length + at
        if isinstance(at, int):
            return max(at, 0)
        low = lower_bound(at)
        if low is None or low < 0:
            raise call.fail(f"cannot tell whether {at} is below 0")
        return at
    if isinstance(at, int) and isinstance(length, int):
        return min(at, length)
    low = lower_bound(length - at)
    if isinstance(length, Poly) and low is not None and low < 0 and at != length:
        raise call.fail(f"cannot tell whether {at} is within {length}")
    return at


def slice_(call: Call) -> Types:
    t, step = call["self"], call["step"]
    at = axis(call, call["dim"], len(t.shape))
    if not t.shape or not isinstance(step, int) or step <= 0:
        raise call.fail("needs a dimension and a step above zero")
    length = t.shape[at]
    start, end = _bound(call, call["start"], length, 0), _bound(call, call["end"], length, length)
    span = end - start
    if isinstance(span, int):
        return like(t, splice(t.shape, at, max(0, -(-span // step))))
    return like(t, splice(t.shape, at, divide(call, span, step)))


def select(call: Call) -> Types:
    t, index = call["self"], call["index"]
    at = axis(call, call["dim"], len(t.shape))
    size = t.shape[at] if t.shape else 0
    if isinstance(index, int) and isinstance(size, int) and not -size <= index < size:
        raise call.fail(f"index {index} of a dimension of {size}")
    return like(t, splice(t.shape, at))


def narrow(call: Call) -> Types:
    t, start, length = call["self"], call["start"], call["length"]
    at = axis(call, call["dim"], len(t.shape))
    size = t.shape[at] if t.shape else 0
    if all(isinstance(v, int) for v in (start, length, size)):
        if not (
            length >= 0 and -size <= start <= size and (start + size if start < 0 else start) + length <= size
        ):
            raise call.fail(f"[{start}, {start} + {length}) of a dimension of {size}")
    elif isinstance(length, int) and length < 0:
        raise call.fail("length is negative")
    return like(t, splice(t.shape, at, length))


def along(parameter: str, *also: str) -> Mixes:
    """`self` and the tensors of `also` are mixed along the dimension that `parameter` names."""

    def mixes(call: Call) -> Mixed:
        at = axis(call, call[parameter], len(call["self"].shape))
        return {name: {at} for name in ("self", *also) if call[name] is not None}

    return mixes


def _slice_mixes(call: Call) -> Mixed:
    at = axis(call, call["dim"], len(call["self"].shape))
    whole = slice_(call)[0].shape == call["self"].shape and call["step"] == 1
    return {} if whole else {"self": {at}}


def _split_mixes(call: Call) -> Mixed:
    at = axis(call, call["dim"], len(call["self"].shape))
    return {"self": {at}}


def _v(name: str, parameters: str, infer: Infer, mixes: Mixes = no_mixing) -> OpSpec:
    return op(name, parameters, infer, "view", mixes=mixes)


SPECS: list[OpSpec] = [
    _v("aten.view", "self: tensor, size: dims", view),
    _v("aten._unsafe_view", "self: tensor, size: dims", view),
    _v("aten.reshape", "self: tensor, shape: dims", view),
    _v("aten.flatten.using_ints", "self: tensor, start_dim: int = 0, end_dim: int = -1", flatten),
    _v("aten.unflatten.int", "self: tensor, dim: int, sizes: dims", unflatten),
    _v("aten.transpose.int", "self: tensor, dim0: int, dim1: int", transpose),
    _v("aten.permute", "self: tensor, dims: ints", permute),
    _v("aten.t", "self: tensor", reverse_dims),
    _v("aten.numpy_T", "self: tensor", reverse_dims),
    _v("aten.squeeze", "self: tensor", squeeze),
    _v("aten.squeeze.dim", "self: tensor, dim: int", squeeze),
    _v("aten.squeeze.dims", "self: tensor, dim: ints", squeeze),
    _v("aten.unsqueeze", "self: tensor, dim: int", unsqueeze),
    _v("aten.expand", "self: tensor, size: dims", expand),
    _v("aten.expand_as", "self: tensor, other: tensor", expand),
    *[_v(f"aten.{n}", "self: tensor", lambda c: (c["self"],)) for n in ("alias", "contiguous", "clone")],
    op("aten.detach", "self: tensor", lambda c: (c["self"],), "view", mixes=no_mixing, differentiable=False),
    _v("aten.slice.Tensor", "self: tensor, dim: int = 0, start: dim? = None, end: dim? = None, step: dim = 1", slice_, _slice_mixes),
    _v("aten.select.int", "self: tensor, dim: int, index: dim", select, along("dim")),
    _v("aten.narrow", "self: tensor, dim: int, start: dim, length: dim", narrow, along("dim")),
    _v("aten.split.Tensor", "self: tensor, split_size: dim, dim: int = 0", split, _split_mixes),
    _v("aten.split.sizes", "self: tensor, split_size: dims, dim: int = 0", split_sizes, _split_mixes),
    _v("aten.split_with_sizes", "self: tensor, split_sizes: dims, dim: int = 0", split_sizes, _split_mixes),
    _v("aten.chunk", "self: tensor, chunks: int, dim: int = 0", chunk, _split_mixes),
    _v("aten.unbind.int", "self: tensor, dim: int = 0", unbind, _split_mixes),
]  # fmt: skip
