"""Complex numbers in real arithmetic: a complex value is a pair of real values of one shape.

The op-set has no complex dtype. Models use complex numbers for rotary positions (`polar`, a product, `view_as_real`), which takes four real
products, between Fourier transforms, and in state-space models (`exp`, quotients, `1j * x`).

While an operator is converted, a part may be a Python number; with 0 or 1 no operator is emitted for it. The parts of the result are
values again (`fusion.runtime.capture.lowering.lower`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusion.dag.ir.graph import DType, Ref
from fusion.dag.ir.opset import OPSET
from fusion.runtime.capture.lowering.sizes import dtype_name
from fusion.runtime.job.errors import CaptureError

Part = Ref | float
Emit = Callable[..., Ref]  # (op, *args) -> its result
_Conversion = Callable[[Mapping[str, Any], Emit], "Complex | Ref"]
REMEDY = "make it of real numbers, torch.view_as_real(...), and torch.view_as_complex(...) of it in the forward"  # of a parameter or buffer
# Operators whose result shares memory between real and complex numbers.
VIEWS = ("aten.view_as_complex", "aten.view_as_real", "aten.real", "aten.imag")
_MOVEMENTS = ("view", "move")  # families of ops that compute nothing


@dataclass(frozen=True)
class Complex:
    real: Any  # Ref, or Part within this module
    imaginary: Any


def is_complex(node: fx.Node) -> bool:
    """Whether the node computes or reads complex numbers."""
    return any(
        isinstance(value := n.meta.get("val"), torch.Tensor) and value.is_complex()
        for n in (node, *node.all_input_nodes)
    )


def has_real_form(node: fx.Node, name: str) -> bool:
    """Whether to convert the call of a node with complex numbers here, or to refuse it, rather than to decompose it with torch."""
    if not is_complex(node):
        return False
    can_decompose = getattr(node.target, "_can_decompose", None)
    return name in _CONVERSIONS or _is_movement(name) or can_decompose is None or not can_decompose()


def in_real_arithmetic(name: str, values: Mapping[str, Any], emit: Emit) -> Complex | Ref:
    """The operator's result for these arguments, by name. CaptureError for an operator that is not known here."""
    if name in _CONVERSIONS:
        return _CONVERSIONS[name](values, emit)
    if _is_movement(name):
        first, *rest = (values[p.name] for p in OPSET[name].parameters)
        if isinstance(first, Complex) and not any(isinstance(arg, (Complex, Ref)) for arg in rest):
            return Complex(emit(name, first.real, *rest), emit(name, first.imaginary, *rest))
    raise CaptureError(f"the op-set has no complex numbers, which the model gives to {name}")


def _is_movement(name: str) -> bool:
    return name in OPSET and OPSET[name].family in _MOVEMENTS


def _polar(values: Mapping[str, Any], emit: Emit) -> Complex:
    length, angle = values["abs"], values["angle"]
    return Complex(
        emit("aten.mul.Tensor", length, emit("aten.cos", angle)),
        emit("aten.mul.Tensor", length, emit("aten.sin", angle)),
    )


def _from_pairs(values: Mapping[str, Any], emit: Emit) -> Complex:
    pairs = values["self"]
    return Complex(emit("aten.select.int", pairs, -1, 0), emit("aten.select.int", pairs, -1, 1))


def _to_pairs(values: Mapping[str, Any], emit: Emit) -> Ref:
    pair = values["self"]
    return emit("aten.stack", (pair.real, pair.imaginary), -1)


def _as_complex(value: Any) -> Complex:
    return value if isinstance(value, Complex) else Complex(value, 0.0)


def _multiply(emit: Emit, name: str, a: Part, b: Part) -> Part:
    if not isinstance(a, Ref) and not isinstance(b, Ref):
        return a * b
    if not isinstance(a, Ref) or not isinstance(b, Ref):
        number, value = (b, a) if isinstance(a, Ref) else (a, b)
        if number in (0, 1):
            return value if number == 1 else 0.0
        return emit(name, value, number)  # the number is the last argument
    return emit(name, a, b)


def _add(emit: Emit, a: Part, b: Part, sign: float = 1) -> Part:
    """a + sign * b."""
    if not isinstance(b, Ref):
        if not isinstance(a, Ref):
            return a + sign * b
        return emit("aten.add.Tensor", a, sign * b, 1) if b else a
    if not isinstance(a, Ref):
        value = b if sign == 1 else _multiply(emit, "aten.mul.Tensor", b, sign)
        return _add(emit, value, a)
    return emit("aten.add.Tensor", a, b, sign)


def _product(name: str) -> _Conversion:
    """A product of numbers or of matrices, by the operator `name`."""

    def product(values: Mapping[str, Any], emit: Emit) -> Complex:
        a, b = (_as_complex(values[p.name]) for p in OPSET[name].parameters)

        def multiply(x: Part, y: Part) -> Part:
            return _multiply(emit, name, x, y)

        return Complex(
            _add(emit, multiply(a.real, b.real), multiply(a.imaginary, b.imaginary), -1),
            _add(emit, multiply(a.real, b.imaginary), multiply(a.imaginary, b.real)),
        )

    return product


def _sum(sign: float, *, reverse: bool = False) -> _Conversion:
    """self + alpha * other, either of which may be real; for a `sign` of -1, the difference."""

    def total(values: Mapping[str, Any], emit: Emit) -> Complex:
        a, b = _as_complex(values["self"]), _as_complex(values["other"])
        first, second = (b, a) if reverse else (a, b)
        factor = sign * values["alpha"]
        return Complex(
            _add(emit, first.real, second.real, factor), _add(emit, first.imaginary, second.imaginary, factor)
        )

    return total


def _part_by_part(name: str, *plain: str) -> _Conversion:
    """An operator on the real and the imaginary parts by themselves. `plain`: arguments that are real."""

    def part(arg: Any, which: str) -> Any:
        if isinstance(arg, tuple):
            return tuple(part(each, which) for each in arg)
        return getattr(arg, which) if isinstance(arg, Complex) else arg

    def both(values: Mapping[str, Any], emit: Emit) -> Complex:
        arguments = {p.name: values[p.name] for p in OPSET[name].parameters}
        for arg in (arguments[other] for other in arguments if other not in plain):
            if any(isinstance(each, Ref) for each in (arg if isinstance(arg, tuple) else (arg,))):
                raise CaptureError(
                    f"the op-set has no complex numbers, to which the model gives real ones in {name}"
                )
        real, imaginary = (
            [part(arg, which) for arg in arguments.values()] for which in ("real", "imaginary")
        )
        return Complex(emit(name, *real), emit(name, *imaginary))

    return both


def _quotient(values: Mapping[str, Any], emit: Emit) -> Complex:
    a, b = _as_complex(values["self"]), _as_complex(values["other"])

    def divide(x: Part, y: Part) -> Part:
        if isinstance(x, Ref):
            return emit("aten.div.Tensor", x, y)
        return _multiply(emit, "aten.mul.Tensor", emit("aten.reciprocal", y), x) if x else 0.0

    if b.imaginary == 0.0:
        return Complex(divide(a.real, b.real), divide(a.imaginary, b.real))
    if not isinstance(b.real, Ref):
        inverse = 1 / complex(b.real, b.imaginary)
        return _multiplied({"self": a, "other": Complex(inverse.real, inverse.imag)}, emit)  # type: ignore[return-value]
    # Scaled by the larger part first, so that the squares stay in range.
    size = emit("aten.detach", emit("aten.maximum", emit("aten.abs", b.real), emit("aten.abs", b.imaginary)))
    real, imaginary = (emit("aten.div.Tensor", part, size) for part in (b.real, b.imaginary))
    square = emit("aten.add.Tensor", emit("aten.mul.Tensor", real, real), emit("aten.mul.Tensor", imaginary, imaginary), 1)  # fmt: skip
    numerator: Any = _multiplied({"self": a, "other": Complex(real, emit("aten.neg", imaginary))}, emit)
    denominator = emit("aten.mul.Tensor", square, size)
    return Complex(divide(numerator.real, denominator), divide(numerator.imaginary, denominator))


def _reciprocal(values: Mapping[str, Any], emit: Emit) -> Complex:
    return _quotient({"self": 1.0, "other": values["self"]}, emit)


def _exponential(values: Mapping[str, Any], emit: Emit) -> Complex:
    value = values["self"]
    return _polar({"abs": emit("aten.exp", value.real), "angle": value.imaginary}, emit)


def _filled(values: Mapping[str, Any], _: Emit) -> Complex:
    return _as_complex(values.get("fill_value", values.get("value", 0.0)))


def _masked(values: Mapping[str, Any], emit: Emit) -> Complex:
    base, mask, value = values["self"], values["mask"], _as_complex(values["value"])
    parts = ((base.real, value.real), (base.imaginary, value.imaginary))
    return Complex(*(emit("aten.masked_fill.Scalar", part, mask, number) for part, number in parts))


def _cast(values: Mapping[str, Any], emit: Emit) -> Complex | Ref:
    """A cast to a real dtype drops the imaginary part, as in torch."""
    value, dtype = _as_complex(values["self"]), values["dtype"]
    if not isinstance(dtype, torch.dtype):
        return emit("aten.to.dtype", value.real, dtype)
    part = DType(dtype_name(dtype.to_real()))
    real, imaginary = (
        emit("aten.to.dtype", each, part) if isinstance(each, Ref) else each
        for each in (value.real, value.imaginary)
    )
    return Complex(real, imaginary)


def _magnitude(values: Mapping[str, Any], emit: Emit) -> Ref:
    """The magnitude, with a gradient of 0 at 0 as in torch."""
    value = values["self"]
    square = emit(
        "aten.add.Tensor",
        emit("aten.mul.Tensor", value.real, value.real),
        emit("aten.mul.Tensor", value.imaginary, value.imaginary),
        1,
    )
    nonzero = emit("aten.gt.Scalar", square, 0)
    root = emit("aten.sqrt", emit("aten.where.ScalarOther", nonzero, square, 1.0))
    return emit("aten.where.ScalarOther", nonzero, root, 0.0)


def _conjugate(values: Mapping[str, Any], emit: Emit) -> Complex:
    value = values["self"]
    return Complex(value.real, emit("aten.neg", value.imaginary))


_multiplied = _product("aten.mul.Tensor")
_CONVERSIONS: Mapping[str, _Conversion] = {
    "aten.polar": _polar,
    "aten.complex": lambda values, _: Complex(values["real"], values["imag"]),
    "aten.view_as_complex": _from_pairs,
    "aten.view_as_real": _to_pairs,
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar"), _multiplied),
    **{name: _product(name) for name in ("aten.matmul", "aten.mm", "aten.bmm")},
    **{name: _part_by_part(name) for name in (
        "aten.neg", "aten.sum", "aten.sum.dim_IntList", "aten.mean", "aten.mean.dim",
        "aten.cat", "aten.stack", "aten.copy", "aten.slice_scatter", "aten.select_scatter", "aten.cumsum",
    )},
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar"), _sum(1)),
    **dict.fromkeys(("aten.sub.Tensor", "aten.sub.Scalar"), _sum(-1)),
    **dict.fromkeys(("aten.rsub.Tensor", "aten.rsub.Scalar"), _sum(-1, reverse=True)),
    **dict.fromkeys(("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.full", "aten.fill.Tensor", "aten.fill.Scalar"), _filled),
    "aten.masked_fill.Scalar": _masked,
    "aten.to.dtype": _cast,
    "aten.exp": _exponential,
    "aten.reciprocal": _reciprocal,
    "aten.where.self": _part_by_part("aten.where.self", "condition"),
    "aten.div.Tensor": _quotient,
    "aten.abs": _magnitude,
    "aten.angle": lambda values, emit: emit("aten.atan2", values["self"].imaginary, values["self"].real),
    "aten.real": lambda values, _: values["self"].real,
    "aten.imag": lambda values, _: values["self"].imaginary,
    **dict.fromkeys(("aten._conj", "aten.conj", "aten.conj_physical"), _conjugate),
    **dict.fromkeys(("aten.resolve_conj", "aten.resolve_neg"), lambda values, _: values["self"]),
}  # fmt: skip
