"""Ops that combine elements along dimensions: sums, extremes, scans, softmax, sorting, and the losses."""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_shapes import (
    axes,
    axis,
    broadcast,
    dtype_or,
    floating,
    is_float,
    promote,
    reduced,
    splice,
)
from fusion.dag.ir.opset_spec import Call, Flops, Infer, Mixed, Mixes, OpSpec, Types, elements, op


def _over(call: Call) -> tuple[int, ...]:
    return axes(call, call.values.get("dim"), len(call["self"].shape))


def _reduce(call: Call, dtype: str) -> Types:
    return (TensorType(reduced(call["self"].shape, _over(call), bool(call.values.get("keepdim"))), dtype),)


def total(call: Call) -> Types:
    """sum and prod: integers and booleans add up in int64."""
    dtype = call["self"].dtype
    return _reduce(call, dtype_or(call["dtype"], dtype if is_float(dtype) else "int64"))


def average(call: Call) -> Types:
    """mean, var, std, norms: of floating values, or of any if a floating dtype is given."""
    dtype = dtype_or(call.values.get("dtype"), call["self"].dtype)
    if not is_float(dtype):
        raise call.fail(f"needs a floating dtype, not {dtype}")
    return _reduce(call, dtype)


def log_sum_exp(call: Call) -> Types:
    return _reduce(call, floating(call["self"].dtype))


def extreme(call: Call) -> Types:
    return _reduce(call, call["self"].dtype)


def extreme_along(call: Call) -> Types:
    (values,) = _reduce(call, call["self"].dtype)
    return values, TensorType(values.shape, "int64")


def truth(call: Call) -> Types:
    return _reduce(call, "uint8" if call["self"].dtype == "uint8" else "bool")


def position(call: Call) -> Types:
    return _reduce(call, "int64")


def scan(call: Call) -> Types:
    """cumsum and cumprod."""
    t = call["self"]
    axis(call, call["dim"], len(t.shape))
    return (TensorType(t.shape, dtype_or(call["dtype"], t.dtype if is_float(t.dtype) else "int64")),)


def softmax(call: Call) -> Types:
    t = call["self"]
    axis(call, call["dim"], len(t.shape))
    dtype = dtype_or(call["dtype"], t.dtype)
    if not is_float(dtype):
        raise call.fail(f"needs a floating dtype, not {dtype}")
    return (TensorType(t.shape, dtype),)


def top(call: Call) -> Types:
    t, k = call["self"], call["k"]
    at = axis(call, call["dim"], len(t.shape))
    size = t.shape[at] if t.shape else 1
    if isinstance(k, int) and (k < 0 or (isinstance(size, int) and k > size)):
        raise call.fail(f"k = {k} of a dimension of {size}")
    shape = splice(t.shape, at, k) if t.shape else ()
    return TensorType(shape, t.dtype), TensorType(shape, "int64")


def ordering(call: Call) -> Types:
    t = call["self"]
    axis(call, call["dim"], len(t.shape))
    positions = TensorType(t.shape, "int64")
    return (positions,) if call.op == "aten.argsort" else (t, positions)


def _reduction(call: Call, shape: tuple[object, ...], dtype: str) -> Types:
    if call["reduction"] not in (0, 1, 2):
        raise call.fail(f"reduction {call['reduction']} is not 0 (none), 1 (mean) or 2 (sum)")
    return (TensorType(shape if call["reduction"] == 0 else (), dtype),)  # type: ignore[arg-type]


def class_loss(call: Call) -> Types:
    """Scores (classes), (N, classes) or (N, classes, ...) against class numbers without that dimension, or, for
    cross entropy, probabilities with it."""
    t, target, weight = call["self"], call["target"], call["weight"]
    if not is_float(t.dtype) or not t.shape:
        raise call.fail(f"needs floating scores with a class dimension, not {t}")
    at = 1 if len(t.shape) > 1 else 0
    rows = splice(t.shape, at)
    probabilities = (
        call.op == "aten.cross_entropy_loss" and target.shape == t.shape and is_float(target.dtype)
    )
    if not probabilities and not (target.shape == rows and target.dtype in ("int64", "uint8")):
        raise call.fail(f"target {target} does not fit scores {t}")
    if weight is not None and (weight.shape != (t.shape[at],) or weight.dtype != t.dtype):
        raise call.fail(f"weight {weight} does not fit scores {t}")
    return _reduction(call, rows, t.dtype)


_KEEPS_DTYPE = {"aten.huber_loss": "self", "aten.binary_cross_entropy_with_logits": "target"}


def pair_loss(call: Call) -> Types:
    """A loss for each element of self and target, of their promoted dtype, or of the argument in `_KEEPS_DTYPE`."""
    tensors = call.tensors()
    kept = _KEEPS_DTYPE.get(call.op)
    dtype = call[kept].dtype if kept else promote(tensors[:2])
    if not is_float(dtype):
        raise call.fail("needs floating values")
    if call.op.startswith("aten.binary") and call["self"].shape != call["target"].shape:
        raise call.fail(f"target {call['target']} does not fit {call['self']}")
    return _reduction(call, broadcast(call, *(t.shape for t in tensors)), dtype)


def _reduce_mixes(call: Call) -> Mixed:
    return {"self": set(_over(call))}


def _class_mixes(call: Call) -> Mixed:
    rank = len(call["self"].shape)
    at = 1 if rank > 1 else 0
    everything = call["reduction"] != 0
    mixed = {
        "self": set(range(rank)) if everything else {at},
        "target": set(range(len(call["target"].shape))) if everything else set(),
    }
    return mixed | ({"weight": {0}} if call["weight"] is not None else {})


def _pair_mixes(call: Call) -> Mixed:
    if call["reduction"] == 0:
        return {}
    return {n: set(range(len(t.shape))) for n, t in call.values.items() if isinstance(t, TensorType)}


def _per_input(count: int) -> Flops:
    return lambda call, _: count * elements(call["self"])


def _r(
    name: str, parameters: str, infer: Infer, saves: str = "", smooth: bool = True, flops: Flops | None = None
) -> OpSpec:
    return op(
        name, parameters, infer, "reduction",
        mixes=_reduce_mixes, flops=flops or _per_input(1), saves=tuple(saves.split()), differentiable=smooth,
    )  # fmt: skip


def _loss(name: str, parameters: str, infer: Infer, mixes: Mixes, saves: str, flops: int) -> OpSpec:
    return op(
        name, parameters, infer, "reduction",
        loss=True, mixes=mixes, flops=_per_input(flops), saves=tuple(saves.split()),
    )  # fmt: skip


_DIM = "self: tensor, dim: int, keepdim: bool = False"
_DIMS = "self: tensor, dim: ints?, keepdim: bool = False"
_ALL = "self: tensor"
_PAIR = "self: tensor, target: tensor"
_CLASS = "self: tensor, target: tensor, weight: tensor? = None, reduction: int = 1, ignore_index: int = -100"

SPECS: list[OpSpec] = [
    _r("aten.sum", "self: tensor, dtype: dtype? = None", total),
    _r("aten.sum.dim_IntList", _DIMS + ", dtype: dtype? = None", total),
    _r("aten.mean", "self: tensor, dtype: dtype? = None", average),
    _r("aten.mean.dim", _DIMS + ", dtype: dtype? = None", average),
    _r("aten.prod", "self: tensor, dtype: dtype? = None", total, "self result"),
    _r("aten.prod.dim_int", _DIM + ", dtype: dtype? = None", total, "self result"),
    _r("aten.var.correction", "self: tensor, dim: ints? = None, correction: number? = None, keepdim: bool = False", average, "self", flops=_per_input(4)),
    _r("aten.std.correction", "self: tensor, dim: ints? = None, correction: number? = None, keepdim: bool = False", average, "self result", flops=_per_input(4)),
    _r("aten.var.dim", "self: tensor, dim: ints?, unbiased: bool = True, keepdim: bool = False", average, "self", flops=_per_input(4)),
    _r("aten.std.dim", "self: tensor, dim: ints?, unbiased: bool = True, keepdim: bool = False", average, "self result", flops=_per_input(4)),
    _r("aten.linalg_vector_norm", "self: tensor, ord: number = 2, dim: ints? = None, keepdim: bool = False, dtype: dtype? = None", average, "self result", flops=_per_input(2)),
    _r("aten.logsumexp", "self: tensor, dim: ints, keepdim: bool = False", log_sum_exp, "self result", flops=_per_input(3)),
    _r("aten.amax", "self: tensor, dim: ints = (), keepdim: bool = False", extreme, "self result"),
    _r("aten.amin", "self: tensor, dim: ints = (), keepdim: bool = False", extreme, "self result"),
    _r("aten.max", _ALL, extreme, "self result"),
    _r("aten.min", _ALL, extreme, "self result"),
    _r("aten.max.dim", _DIM, extreme_along, "positions"),
    _r("aten.min.dim", _DIM, extreme_along, "positions"),
    _r("aten.any", _ALL, truth, smooth=False),
    _r("aten.all", _ALL, truth, smooth=False),
    _r("aten.any.dim", _DIM, truth, smooth=False),
    _r("aten.all.dim", _DIM, truth, smooth=False),
    _r("aten.argmax", "self: tensor, dim: int? = None, keepdim: bool = False", position, smooth=False),
    _r("aten.argmin", "self: tensor, dim: int? = None, keepdim: bool = False", position, smooth=False),
    _r("aten.cumsum", "self: tensor, dim: int, dtype: dtype? = None", scan),
    _r("aten.cumprod", "self: tensor, dim: int, dtype: dtype? = None", scan, "self result"),
    _r("aten.softmax.int", "self: tensor, dim: int, dtype: dtype? = None", softmax, "result", flops=_per_input(5)),
    _r("aten.log_softmax.int", "self: tensor, dim: int, dtype: dtype? = None", softmax, "result", flops=_per_input(5)),
    _r("aten.topk", "self: tensor, k: dim, dim: int = -1, largest: bool = True, sorted: bool = True", top, "positions"),
    _r("aten.sort", "self: tensor, dim: int = -1, descending: bool = False", ordering, "positions"),
    _r("aten.argsort", "self: tensor, dim: int = -1, descending: bool = False", ordering, smooth=False),
    _loss("aten.cross_entropy_loss", _CLASS + ", label_smoothing: float = 0.0", class_loss, _class_mixes, "copy target", 6),
    _loss("aten.nll_loss_nd", _CLASS, class_loss, _class_mixes, "self target", 1),
    _loss("aten.nll_loss", _CLASS, class_loss, _class_mixes, "self target", 1),
    _loss("aten.mse_loss", _PAIR + ", reduction: int = 1", pair_loss, _pair_mixes, "self target", 3),
    _loss("aten.l1_loss", _PAIR + ", reduction: int = 1", pair_loss, _pair_mixes, "copy", 3),
    _loss("aten.smooth_l1_loss", _PAIR + ", reduction: int = 1, beta: float = 1.0", pair_loss, _pair_mixes, "self target", 4),
    _loss("aten.huber_loss", _PAIR + ", reduction: int = 1, delta: float = 1.0", pair_loss, _pair_mixes, "self target", 4),
    replace(_loss("aten.kl_div", _PAIR + ", reduction: int = 1, log_target: bool = False", pair_loss, _pair_mixes, "self target", 4), bilinear=True),
    _loss("aten.binary_cross_entropy", _PAIR + ", weight: tensor? = None, reduction: int = 1", pair_loss, _pair_mixes, "self target", 6),
    _loss("aten.binary_cross_entropy_with_logits", _PAIR + ", weight: tensor? = None, pos_weight: tensor? = None, reduction: int = 1", pair_loss, _pair_mixes, "self target", 6),
]  # fmt: skip
