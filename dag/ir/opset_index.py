"""Ops that copy values to other places: joins, look-ups by index, shifts, pads, repeats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_shapes import (
    add_up,
    axes,
    axis,
    broadcast,
    divide,
    is_float,
    promote,
    splice,
    volume,
)
from fusion.dag.ir.opset_spec import (
    MAX_RANK,
    Call,
    Infer,
    Mixed,
    Mixes,
    OpSpec,
    Types,
    elements,
    no_mixing,
    op,
)
from fusion.dag.ir.opset_views import along, like, select, slice_

_INDICES = ("int32", "int64")  # torch takes uint8 for a mask, and refuses other dtypes


def repeat(call: Call) -> Types:
    t, repeats = call["self"], call["repeats"]
    lead = len(repeats) - len(t.shape)
    if lead < 0 or len(repeats) > MAX_RANK or any(isinstance(r, int) and r < 0 for r in repeats):
        raise call.fail(f"cannot repeat {t} {len(repeats)} times")
    return like(t, tuple(r * d for r, d in zip(repeats, (1,) * lead + t.shape, strict=True)))


def repeat_interleave(call: Call) -> Types:
    t, times, dim = call["self"], call["repeats"], call["dim"]
    if isinstance(times, int) and times < 0:
        raise call.fail("repeats is negative")
    if dim is None:
        return like(t, (volume(call, t.shape) * times,))
    at = axis(call, dim, len(t.shape))
    return like(t, splice(t.shape, at, t.shape[at] * times) if t.shape else (times,))


def cat(call: Call) -> Types:
    tensors = call["tensors"]
    first = tensors[0]
    at = axis(call, call["dim"], len(first.shape))
    if not first.shape:
        raise call.fail("cannot join tensors without dimensions")
    for t in tensors:
        if len(t.shape) != len(first.shape) or splice(t.shape, at) != splice(first.shape, at):
            raise call.fail(f"{first} and {t} differ outside dimension {at}")
    total = add_up(call, (t.shape[at] for t in tensors))
    return (TensorType(splice(first.shape, at, total), promote(tensors)),)


def stack(call: Call) -> Types:
    tensors = call["tensors"]
    first = tensors[0]
    at = axis(call, call["dim"], len(first.shape) + 1)
    if any(t.shape != first.shape for t in tensors) or len(first.shape) >= MAX_RANK:
        raise call.fail("tensors of different shapes")
    return (TensorType((*first.shape[:at], len(tensors), *first.shape[at:]), promote(tensors)),)


def index(call: Call) -> Types:
    """Advanced indexing: the index tensors broadcast together and replace the dimensions that they index."""
    t, indices = call["self"], call["indices"]
    used = [i for i, entry in enumerate(indices) if entry is not None]
    if not used or len(indices) > len(t.shape):
        raise call.fail(f"{len(indices)} indices of {t}")
    if any(indices[i].dtype not in _INDICES for i in used):
        raise call.fail(
            "indices must be integers, of 32 or 64 bits (the size of a boolean look-up depends on data)"
        )
    looked_up = broadcast(call, *(indices[i].shape for i in used))
    rest = [d for i, d in enumerate(t.shape) if i not in used]
    together = used == list(range(used[0], used[-1] + 1))
    at = used[0] if together else 0
    if len(rest) + len(looked_up) > MAX_RANK:
        raise call.fail(f"rank is over {MAX_RANK}")
    return like(t, (*rest[:at], *looked_up, *rest[at:]))


def index_select(call: Call) -> Types:
    t, i = call["self"], call["index"]
    at = axis(call, call["dim"], len(t.shape))
    if not t.shape or len(i.shape) != 1 or i.dtype not in _INDICES:
        raise call.fail("needs a row of integers and a dimension")
    return like(t, splice(t.shape, at, i.shape[0]))


def gather(call: Call) -> Types:
    t, i = call["self"], call["index"]
    axis(call, call["dim"], len(t.shape))
    if len(i.shape) != len(t.shape) or i.dtype != "int64":
        raise call.fail(f"index {i} does not fit {t}")
    return like(t, i.shape)


def scatter(call: Call) -> Types:
    t, i = call["self"], call["index"]
    axis(call, call["dim"], len(t.shape))
    src = call.values.get("src")
    if (
        len(i.shape) != len(t.shape)
        or i.dtype != "int64"
        or (src and (len(src.shape), src.dtype) != (len(i.shape), t.dtype))
    ):
        raise call.fail(f"index {i} does not fit {t}")
    return (t,)


def index_add(call: Call) -> Types:
    t, i, source = call["self"], call["index"], call["source"]
    at = axis(call, call["dim"], len(t.shape))
    if not t.shape or len(i.shape) != 1 or i.dtype not in _INDICES or source.dtype != t.dtype:
        raise call.fail("needs a row of integers, of 32 or 64 bits, and a source of the same dtype")
    if source.shape != splice(t.shape, at, i.shape[0]):
        raise call.fail(f"source {source} does not fit {t}")
    return (t,)


def index_put(call: Call) -> Types:
    """self with `values`, broadcast to the shape of the look-up, written at the indices. Instead of integers one boolean mask over
    the first dimensions of self may choose where a single value is written."""
    t, indices, values = call["self"], call["indices"], call["values"]
    if values.dtype != t.dtype:
        raise call.fail(f"values {values} are not of the dtype of {t}")
    masks = [entry for entry in indices if entry is not None and entry.dtype == "bool"]
    if masks:
        (mask, *more), at = masks, indices.index(masks[0])
        if (
            more
            or at
            or any(e is not None for e in indices[1:])
            or values.shape not in ((), (1,))
            or call["accumulate"]
        ):
            raise call.fail("a mask goes with one value, and with no other index")
        same_lead = mask.shape == t.shape[: len(mask.shape)]
        if not same_lead or not mask.shape:
            raise call.fail(f"mask {mask} does not fit {t}")
        return (t,)
    looked_up = index(call)[0].shape
    if broadcast(call, values.shape, looked_up) != looked_up:
        raise call.fail(f"values {values} do not fit {TensorType(looked_up, t.dtype)}")
    return (t,)


def written_part(call: Call) -> Types:
    """self with one position or slice of `dim` replaced by `src`, which has its shape."""
    t, src = call["self"], call["src"]
    (part,) = select(call) if call.op == "aten.select_scatter" else slice_(call)
    if src != part:
        raise call.fail(f"{src} does not fit {part}")
    return (t,)


def flip(call: Call) -> Types:
    t = call["self"]
    _flipped(call)
    return (t,)


def _flipped(call: Call) -> tuple[int, ...]:
    rank = len(call["self"].shape)
    return axes(call, call["dims"], rank) if call["dims"] else ()


def roll(call: Call) -> Types:
    axes(call, call["dims"], len(call["self"].shape))
    if (call["dims"] and len(call["shifts"]) != len(call["dims"])) or (
        not call["dims"] and len(call["shifts"]) != 1
    ):
        raise call.fail("needs one shift for each dimension")
    return (call["self"],)


def triangle(call: Call) -> Types:
    if len(call["self"].shape) < 2:
        raise call.fail("needs a matrix")
    return (call["self"],)


def diff(call: Call) -> Types:
    t, n = call["self"], call["n"]
    at = axis(call, call["dim"], len(t.shape))
    if not t.shape or n < 0:
        raise call.fail("needs a dimension, and n of at least 0")
    length = t.shape[at]
    for extra in (call["prepend"], call["append"]):
        if extra is not None:
            if len(extra.shape) != len(t.shape) or splice(extra.shape, at) != splice(t.shape, at):
                raise call.fail(f"{extra} does not continue {t}")
            length = length + extra.shape[at]
    length = length - n
    if isinstance(length, int):
        length = max(0, length)
    return (TensorType(splice(t.shape, at, length), promote([t, *call.tensors()])),)


def constant_pad(call: Call) -> Types:
    t, pad = call["self"], call["pad"]
    if len(pad) % 2 or len(pad) // 2 > len(t.shape):
        raise call.fail(f"{len(pad)} pads for rank {len(t.shape)}")
    shape = list(t.shape)
    for i in range(len(pad) // 2):
        shape[-1 - i] = shape[-1 - i] + pad[2 * i] + pad[2 * i + 1]
        if isinstance(shape[-1 - i], int) and shape[-1 - i] < 0:
            raise call.fail("a pad takes away more than there is")
    return like(t, tuple(shape))


def one_hot(call: Call) -> Types:
    t, classes = call["self"], call["num_classes"]
    if t.dtype != "int64" or classes <= 0 or len(t.shape) >= MAX_RANK:
        raise call.fail("needs int64 and a number of classes above zero")
    return (TensorType((*t.shape, classes), "int64"),)


def pixel_shuffle(call: Call) -> Types:
    t, r = call["self"], call["upscale_factor"]
    if len(t.shape) < 3 or r <= 0:
        raise call.fail("needs (..., channels, height, width) and a factor above zero")
    *lead, c, h, w = t.shape
    return like(t, (*lead, divide(call, c, r * r), h * r, w * r))


def upsample(call: Call) -> Types:
    t, size = call["self"], call["output_size"]
    if len(t.shape) != 4 or len(size) != 2 or not is_float(t.dtype):
        raise call.fail("needs (batch, channels, height, width) and two sizes")
    return like(t, (*t.shape[:2], *size))


def _cat_mixes(call: Call) -> Mixed:
    return {"tensors": {axis(call, call["dim"], len(call["tensors"][0].shape))}}


def _repeat_mixes(call: Call) -> Mixed:
    lead = len(call["repeats"]) - len(call["self"].shape)
    return {"self": {i for i in range(len(call["self"].shape)) if call["repeats"][i + lead] != 1}}


def _interleave_mixes(call: Call) -> Mixed:
    rank = len(call["self"].shape)
    return {"self": set(axes(call, None if call["dim"] is None else call["dim"], rank))}


def _index_mixes(call: Call) -> Mixed:
    return {"self": {i for i, entry in enumerate(call["indices"]) if entry is not None}}


def _gather_mixes(call: Call) -> Mixed:
    """The index is read element by element; self is mixed along `dim`, and along dimensions where the index is shorter."""
    own, index = call["self"].shape, call["index"].shape
    at = axis(call, call["dim"], len(own))
    return {"self": {at} | {i for i, (a, b) in enumerate(zip(own, index, strict=True)) if a != b}}


def _everything_along(call: Call) -> Mixed:
    """scatter and index_add mix all their tensors along `dim`, and along dimensions where the index is shorter than self."""
    at = axis(call, call["dim"], len(call["self"].shape))
    mixed = {
        name: {at}
        for name in ("self", "index", "src", "source")
        if isinstance(call.values.get(name), TensorType)
    }
    for i, (a, b) in enumerate(zip(call["self"].shape, call["index"].shape, strict=False)):
        if a != b and len(call["index"].shape) == len(call["self"].shape):
            for dims in mixed.values():
                dims.add(i)
    if "source" in mixed:
        mixed["index"] = {0}
    return mixed


def _index_put_mixes(call: Call) -> Mixed:
    """The indexed dimensions of self, and all dimensions of indices and values, are mixed."""
    written = {i for i, entry in enumerate(call["indices"]) if entry is not None}
    ranks = [len(entry.shape) for entry in call["indices"] if entry is not None]
    if any(entry is not None and entry.dtype == "bool" for entry in call["indices"]):
        return {"values": set(range(len(call["values"].shape)))}
    return {
        "self": written,
        "indices": set(range(max(ranks))),
        "values": set(range(len(call["values"].shape))),
    }


def _everything_written(call: Call) -> Mixed:
    at = axis(call, call["dim"], len(call["self"].shape))
    return {"self": {at}, "src": {at} if len(call["src"].shape) == len(call["self"].shape) else set()}


def _roll_mixes(call: Call) -> Mixed:
    return {"self": set(axes(call, call["dims"], len(call["self"].shape)))}


def _triangle_mixes(call: Call) -> Mixed:
    rank = len(call["self"].shape)
    return {"self": {rank - 2, rank - 1}}


def _pad_mixes(call: Call) -> Mixed:
    rank, pad = len(call["self"].shape), call["pad"]
    return {"self": {rank - 1 - i // 2 for i in range(len(pad)) if pad[i] != 0}}


def _shuffle_mixes(call: Call) -> Mixed:
    rank = len(call["self"].shape)
    return {"self": {rank - 3, rank - 2, rank - 1}}


def _diff_flops(call: Call, _: Types) -> int:
    """One subtraction for each element, n times, at most until none is left."""
    own = call["self"]
    length = int(own.shape[axis(call, call["dim"], len(own.shape))])
    return min(int(call["n"]), length) * sum(elements(t) for t in call.tensors())


def _m(name: str, parameters: str, infer: Infer, mixes: Mixes, saves: str = "") -> OpSpec:
    return op(name, parameters, infer, "move", mixes=mixes, saves=tuple(saves.split()))


SPECS: list[OpSpec] = [
    _m("aten.repeat", "self: tensor, repeats: dims", repeat, _repeat_mixes),
    _m("aten.repeat_interleave.self_int", "self: tensor, repeats: dim, dim: int? = None", repeat_interleave, _interleave_mixes),
    _m("aten.cat", "tensors: tensors, dim: int = 0", cat, _cat_mixes),
    _m("aten.stack", "tensors: tensors, dim: int = 0", stack, no_mixing),
    _m("aten.index.Tensor", "self: tensor, indices: maybe_tensors", index, _index_mixes, "indices"),
    _m("aten.index_select", "self: tensor, dim: int, index: tensor", index_select, along("dim"), "index"),
    _m("aten.gather", "self: tensor, dim: int, index: tensor", gather, _gather_mixes, "self index"),
    _m("aten.scatter.src", "self: tensor, dim: int, index: tensor, src: tensor", scatter, _everything_along, "index"),
    _m("aten.scatter.value", "self: tensor, dim: int, index: tensor, value: number", scatter, _everything_along, "index"),
    _m("aten.index_add", "self: tensor, dim: int, index: tensor, source: tensor, alpha: number = 1", index_add, _everything_along, "index"),
    op("aten.scatter_add", "self: tensor, dim: int, index: tensor, src: tensor", scatter, "move", mixes=_everything_along, saves=("index",),
       flops=lambda c, _: elements(c["index"]), since=2),
    op("aten.index_put", "self: tensor, indices: maybe_tensors, values: tensor, accumulate: bool = False", index_put, "move", mixes=_index_put_mixes, saves=("indices",), since=2),
    op("aten.select_scatter", "self: tensor, src: tensor, dim: int, index: dim", written_part, "move", mixes=_everything_written, since=2),
    op("aten.slice_scatter", "self: tensor, src: tensor, dim: int = 0, start: dim? = None, end: dim? = None, step: dim = 1", written_part, "move", mixes=_everything_written, since=2),
    _m("aten.flip", "self: tensor, dims: ints", flip, lambda c: {"self": set(_flipped(c))}),
    _m("aten.roll", "self: tensor, shifts: dims, dims: ints = ()", roll, _roll_mixes),
    _m("aten.tril", "self: tensor, diagonal: dim = 0", triangle, _triangle_mixes),
    _m("aten.triu", "self: tensor, diagonal: dim = 0", triangle, _triangle_mixes),
    op("aten.diff", "self: tensor, n: int = 1, dim: int = -1, prepend: tensor? = None, append: tensor? = None", diff, "move",
       mixes=along("dim", "prepend", "append"), flops=_diff_flops),
    _m("aten.constant_pad_nd", "self: tensor, pad: dims, value: number = 0", constant_pad, _pad_mixes),
    op("aten.one_hot", "self: tensor, num_classes: int = -1", one_hot, "move", differentiable=False),
    _m("aten.pixel_shuffle", "self: tensor, upscale_factor: int", pixel_shuffle, _shuffle_mixes),
    _m("aten.upsample_nearest2d", "self: tensor, output_size: dims, scales_h: float? = None, scales_w: float? = None", upsample, lambda c: {"self": {2, 3}}),
    op("aten.upsample_bilinear2d", "self: tensor, output_size: dims, align_corners: bool, scales_h: float? = None, scales_w: float? = None", upsample, "move",
       mixes=lambda c: {"self": {2, 3}}, flops=lambda _, results: 11 * elements(results[0]), since=2),  # four weights, four products, three sums
]  # fmt: skip

IndexKind = Literal["rows", "stored rows", "along", "listed", "classes", "targets", "probabilities"]
# Operators with an argument that must be within a table or a range, which untrusted data may violate, and the kind of it.
# Each plane makes the result of a violation NaN, or fails.
INDEXED: Mapping[str, IndexKind] = {
    "aten.embedding": "rows",
    "fusion.embedding_int8": "stored rows",
    "fusion.embedding_int4": "stored rows",
    "aten.index_select": "along",
    "aten.gather": "along",
    "aten.scatter.src": "along",
    "aten.scatter.value": "along",
    "aten.scatter_add": "along",
    "aten.index_add": "along",
    "aten.index.Tensor": "listed",
    "aten.index_put": "listed",
    "aten.one_hot": "classes",
    "aten.cross_entropy_loss": "targets",
    "aten.nll_loss": "targets",
    "aten.nll_loss_nd": "targets",
    "aten.binary_cross_entropy": "probabilities",
}
