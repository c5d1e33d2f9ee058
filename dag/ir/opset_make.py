"""Ops that make a tensor from numbers and sizes."""

from __future__ import annotations

from math import ceil, isfinite

from fusion.dag.ir.dims import Dim, Poly
from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_shapes import MAX_ELEMENTS, divide, dtype_or, promote, volume
from fusion.dag.ir.opset_spec import MAX_RANK, Call, Infer, OpSpec, Types, op


def arange(call: Call) -> Types:
    """ceil((end - start) / step) numbers; int64 unless a bound is a float."""
    start, end, step = call.values.get("start", 0), call["end"], call.values.get("step", 1)
    bounds = (start, end, step)
    if any(isinstance(b, bool) for b in bounds) or isinstance(step, Poly) or step == 0:
        raise call.fail("needs numbers, and a step that is not zero")
    dtype = dtype_or(call["dtype"], "float32" if any(isinstance(b, float) for b in bounds) else "int64")
    if any(isinstance(b, float) for b in bounds):
        if any(isinstance(b, Poly) for b in bounds) or not all(map(isfinite, (*bounds, end - start))):
            raise call.fail("needs finite numbers, and bounds that are no further apart")
        if (end - start) / step > MAX_ELEMENTS:
            raise call.fail("the size is too large")
        count: Dim = arange_count(start, end, step)
    else:
        span = end - start
        count = arange_count(start, end, step) if isinstance(span, int) else divide(call, span, step)
    if isinstance(count, int) and count < 0:
        raise call.fail(f"the bounds {start}, {end} and step {step} disagree")
    return (TensorType((count,), dtype),)


def arange_count(start: float, end: float, step: float) -> int:
    """The length of an arange; below 0 if the bounds and the step disagree. For floats the quotient is rounded first, as in PyTorch:
    from 0 to 0.9 by 0.3 there are three."""
    if all(isinstance(bound, int) for bound in (start, end, step)):
        return int(-((end - start) // -step))
    return ceil(max(-1.0, (end - start) / step))


def _sized(call: Call, size: tuple[Dim, ...], dtype: str) -> Types:
    if len(size) > MAX_RANK or any(isinstance(d, int) and d < 0 for d in size):
        raise call.fail("a negative dimension or too many")
    volume(call, size)
    return (TensorType(size, dtype),)


def filled(call: Call) -> Types:
    """full, zeros, ones: float32, or for full the dtype of the number, unless one is given."""
    value = call.values.get("fill_value", 0.0)
    return _sized(call, call["size"], dtype_or(call["dtype"], promote((value,))))


def filled_like(call: Call) -> Types:
    """The dtype and the size of self, unless they are given."""
    t = call["self"]
    size = call["size"] if "size" in call.values else t.shape
    return _sized(call, size, dtype_or(call["dtype"], t.dtype))


def scalar(call: Call) -> Types:
    return (TensorType((), dtype_or(call["dtype"], "float32")),)


def linspace(call: Call) -> Types:
    return _sized(call, (call["steps"],), dtype_or(call["dtype"], "float32"))


def _make(name: str, parameters: str, infer: Infer) -> OpSpec:
    return op(name, parameters + ", dtype: dtype? = None", infer, "make", differentiable=False)


SPECS: list[OpSpec] = [
    _make("aten.arange", "end: number", arange),
    _make("aten.arange.start", "start: number, end: number", arange),
    _make("aten.arange.start_step", "start: number, end: number, step: number = 1", arange),
    _make("aten.linspace", "start: number, end: number, steps: int", linspace),
    _make("aten.full", "size: dims, fill_value: number", filled),
    _make("aten.zeros", "size: dims", filled),
    _make("aten.ones", "size: dims", filled),
    _make("aten.full_like", "self: tensor, fill_value: number", filled_like),
    _make("aten.zeros_like", "self: tensor", filled_like),
    _make("aten.ones_like", "self: tensor", filled_like),
    _make("aten.new_full", "self: tensor, size: dims, fill_value: number", filled_like),
    _make("aten.new_zeros", "self: tensor, size: dims", filled_like),
    _make("aten.new_ones", "self: tensor, size: dims", filled_like),
    _make("aten.scalar_tensor", "s: number", scalar),
]
