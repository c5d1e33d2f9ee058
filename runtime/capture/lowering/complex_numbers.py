"""Complex numbers in real arithmetic: a value of them is a pair of real values, of one shape.

The op-set has no complex dtype. Models use such numbers to rotate by position (`polar`, a product, `view_as_real`), which is
four real products, between Fourier transforms, and in state-space models (`exp`, quotients, `1j * x`).

While an operator is said in real ones, a part may be a number of Python's, which takes part in no operator where it is 0 or 1; what comes
of it has values again (`fusion.runtime.capture.lowering.lower`).
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
_Known = Callable[[Mapping[str, Any], Emit], "Complex | Ref"]
REMEDY = "make it of real numbers, torch.view_as_real(...), and torch.view_as_complex(...) of it in the forward"  # of a parameter or buffer
# Real numbers in the memory of complex ones.
VIEWS = ("aten.view_as_complex", "aten.view_as_real", "aten.real", "aten.imag")
_MOVES = ("view", "move")  # families of ops that compute nothing


@dataclass(frozen=True)
class Complex:
    real: Any  # Ref, or Part within this module
    imaginary: Any


def is_complex(node: fx.Node) -> bool:
    """Whether the node makes complex numbers, or reads them."""
    return any(
        isinstance(value := n.meta.get("val"), torch.Tensor) and value.is_complex()
        for n in (node, *node.all_input_nodes)
    )


def is_said_in_real_numbers(node: fx.Node, name: str) -> bool:
    """Whether it is what a node with complex numbers calls that has a place here, or is refused, rather than what torch takes it
    apart to."""
    if not is_complex(node):
        return False
    apart = getattr(node.target, "_can_decompose", None)
    return name in _KNOWN or _moves(name) or apart is None or not apart()


def in_real_numbers(name: str, values: Mapping[str, Any], emit: Emit) -> Complex | Ref:
    """What the operator gives for these arguments, by name. CaptureError for one that is not known here."""
    if name in _KNOWN:
        return _KNOWN[name](values, emit)
    if _moves(name):
        first, *rest = (values[p.name] for p in OPSET[name].parameters)
        if isinstance(first, Complex) and not any(isinstance(arg, (Complex, Ref)) for arg in rest):
            return Complex(emit(name, first.real, *rest), emit(name, first.imaginary, *rest))
    raise CaptureError(f"the op-set has no complex numbers, which the model gives to {name}")


def _moves(name: str) -> bool:
    return name in OPSET and OPSET[name].family in _MOVES


def _polar(values: Mapping[str, Any], emit: Emit) -> Complex:
    length, angle = values["abs"], values["angle"]
    return Complex(
        emit("aten.mul.Tensor", length, emit("aten.cos", angle)),
        emit("aten.mul.Tensor", length, emit("aten.sin", angle)),
    )


def _of_pairs(values: Mapping[str, Any], emit: Emit) -> Complex:
    pairs = values["self"]
    return Complex(emit("aten.select.int", pairs, -1, 0), emit("aten.select.int", pairs, -1, 1))


def _pairs(values: Mapping[str, Any], emit: Emit) -> Ref:
    own = values["self"]
    return emit("aten.stack", (own.real, own.imaginary), -1)


def _as_pair(value: Any) -> Complex:
    return value if isinstance(value, Complex) else Complex(value, 0.0)


def _times(emit: Emit, name: str, a: Part, b: Part) -> Part:
    if not isinstance(a, Ref) and not isinstance(b, Ref):
        return a * b
    if not isinstance(a, Ref) or not isinstance(b, Ref):
        number, value = (b, a) if isinstance(a, Ref) else (a, b)
        if number in (0, 1):
            return value if number == 1 else 0.0
        return emit(name, value, number)  # a number comes last
    return emit(name, a, b)


def _plus(emit: Emit, a: Part, b: Part, sign: float = 1) -> Part:
    """a + sign * b."""
    if not isinstance(b, Ref):
        if not isinstance(a, Ref):
            return a + sign * b
        return emit("aten.add.Tensor", a, sign * b, 1) if b else a
    if not isinstance(a, Ref):
        value = b if sign == 1 else _times(emit, "aten.mul.Tensor", b, sign)
        return _plus(emit, value, a)
    return emit("aten.add.Tensor", a, b, sign)


def _product(name: str) -> _Known:
    """Of numbers, or of matrices, by that operator."""

    def product(values: Mapping[str, Any], emit: Emit) -> Complex:
        a, b = (_as_pair(values[p.name]) for p in OPSET[name].parameters)

        def times(x: Part, y: Part) -> Part:
            return _times(emit, name, x, y)

        return Complex(
            _plus(emit, times(a.real, b.real), times(a.imaginary, b.imaginary), -1),
            _plus(emit, times(a.real, b.imaginary), times(a.imaginary, b.real)),
        )

    return product


def _sum(sign: float, *, reverse: bool = False) -> _Known:
    """self + alpha * other, either of which may be real; the difference for a `sign` of -1."""

    def total(values: Mapping[str, Any], emit: Emit) -> Complex:
        a, b = _as_pair(values["self"]), _as_pair(values["other"])
        first, second = (b, a) if reverse else (a, b)
        by = sign * values["alpha"]
        return Complex(
            _plus(emit, first.real, second.real, by), _plus(emit, first.imaginary, second.imaginary, by)
        )

    return total


def _by_parts(name: str, *plain: str) -> _Known:
    """What is done to each part by itself. `plain`: arguments that are no complex numbers."""

    def part(arg: Any, which: str) -> Any:
        if isinstance(arg, tuple):
            return tuple(part(each, which) for each in arg)
        return getattr(arg, which) if isinstance(arg, Complex) else arg

    def both(values: Mapping[str, Any], emit: Emit) -> Complex:
        given = {p.name: values[p.name] for p in OPSET[name].parameters}
        for arg in (given[other] for other in given if other not in plain):
            if any(isinstance(each, Ref) for each in (arg if isinstance(arg, tuple) else (arg,))):
                raise CaptureError(
                    f"the op-set has no complex numbers, to which the model gives real ones in {name}"
                )
        real, imaginary = ([part(arg, which) for arg in given.values()] for which in ("real", "imaginary"))
        return Complex(emit(name, *real), emit(name, *imaginary))

    return both


def _quotient(values: Mapping[str, Any], emit: Emit) -> Complex:
    a, b = _as_pair(values["self"]), _as_pair(values["other"])

    def over(x: Part, y: Part) -> Part:
        if isinstance(x, Ref):
            return emit("aten.div.Tensor", x, y)
        return _times(emit, "aten.mul.Tensor", emit("aten.reciprocal", y), x) if x else 0.0

    if b.imaginary == 0.0:
        return Complex(over(a.real, b.real), over(a.imaginary, b.real))
    if not isinstance(b.real, Ref):
        inverse = 1 / complex(b.real, b.imaginary)
        return _multiplied({"self": a, "other": Complex(inverse.real, inverse.imag)}, emit)  # type: ignore[return-value]
    # By the larger part first, whose square may have no place among the numbers.
    size = emit("aten.detach", emit("aten.maximum", emit("aten.abs", b.real), emit("aten.abs", b.imaginary)))
    real, imaginary = (emit("aten.div.Tensor", part, size) for part in (b.real, b.imaginary))
    square = emit("aten.add.Tensor", emit("aten.mul.Tensor", real, real), emit("aten.mul.Tensor", imaginary, imaginary), 1)  # fmt: skip
    made: Any = _multiplied({"self": a, "other": Complex(real, emit("aten.neg", imaginary))}, emit)
    by = emit("aten.mul.Tensor", square, size)
    return Complex(over(made.real, by), over(made.imaginary, by))


def _reciprocal(values: Mapping[str, Any], emit: Emit) -> Complex:
    return _quotient({"self": 1.0, "other": values["self"]}, emit)


def _exponential(values: Mapping[str, Any], emit: Emit) -> Complex:
    own = values["self"]
    return _polar({"abs": emit("aten.exp", own.real), "angle": own.imaginary}, emit)


def _filled(values: Mapping[str, Any], _: Emit) -> Complex:
    return _as_pair(values.get("fill_value", values.get("value", 0.0)))


def _masked(values: Mapping[str, Any], emit: Emit) -> Complex:
    own, mask, value = values["self"], values["mask"], _as_pair(values["value"])
    parts = ((own.real, value.real), (own.imaginary, value.imaginary))
    return Complex(*(emit("aten.masked_fill.Scalar", part, mask, number) for part, number in parts))


def _cast(values: Mapping[str, Any], emit: Emit) -> Complex | Ref:
    """To real numbers, as torch has it, the imaginary part is lost."""
    own, dtype = _as_pair(values["self"]), values["dtype"]
    if not isinstance(dtype, torch.dtype):
        return emit("aten.to.dtype", own.real, dtype)
    part = DType(dtype_name(dtype.to_real()))
    real, imaginary = (
        emit("aten.to.dtype", each, part) if isinstance(each, Ref) else each
        for each in (own.real, own.imaginary)
    )
    return Complex(real, imaginary)


def _length(values: Mapping[str, Any], emit: Emit) -> Ref:
    """With a gradient of 0 where it is 0, as torch has it."""
    own = values["self"]
    square = emit(
        "aten.add.Tensor",
        emit("aten.mul.Tensor", own.real, own.real),
        emit("aten.mul.Tensor", own.imaginary, own.imaginary),
        1,
    )
    some = emit("aten.gt.Scalar", square, 0)
    root = emit("aten.sqrt", emit("aten.where.ScalarOther", some, square, 1.0))
    return emit("aten.where.ScalarOther", some, root, 0.0)


def _conjugate(values: Mapping[str, Any], emit: Emit) -> Complex:
    own = values["self"]
    return Complex(own.real, emit("aten.neg", own.imaginary))


_multiplied = _product("aten.mul.Tensor")
_KNOWN: Mapping[str, _Known] = {
    "aten.polar": _polar,
    "aten.complex": lambda values, _: Complex(values["real"], values["imag"]),
    "aten.view_as_complex": _of_pairs,
    "aten.view_as_real": _pairs,
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar"), _multiplied),
    **{name: _product(name) for name in ("aten.matmul", "aten.mm", "aten.bmm")},
    **{name: _by_parts(name) for name in (
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
    "aten.where.self": _by_parts("aten.where.self", "condition"),
    "aten.div.Tensor": _quotient,
    "aten.abs": _length,
    "aten.angle": lambda values, emit: emit("aten.atan2", values["self"].imaginary, values["self"].real),
    "aten.real": lambda values, _: values["self"].real,
    "aten.imag": lambda values, _: values["self"].imaginary,
    **dict.fromkeys(("aten._conj", "aten.conj", "aten.conj_physical"), _conjugate),
    **dict.fromkeys(("aten.resolve_conj", "aten.resolve_neg"), lambda values, _: values["self"]),
}  # fmt: skip
