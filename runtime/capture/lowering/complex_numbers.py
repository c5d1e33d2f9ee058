"""Complex numbers in real arithmetic: a value of them is a pair of real values, of one shape.

The op-set has no complex dtype. Models use such numbers to rotate by position (`polar`, a product, `view_as_real`), which is
four real products; what else they may do with one is to move its elements about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusion.dag.ir.graph import Arg, Ref
from fusion.dag.ir.opset import OPSET
from fusion.runtime.job.errors import CaptureError

Emit = Callable[..., Ref]  # (op, *args) -> its result
_Known = Callable[[Mapping[str, Any], Emit], "Complex | Ref"]
_MOVES = ("view", "move")  # families of ops that compute nothing


@dataclass(frozen=True)
class Complex:
    real: Ref
    imaginary: Ref


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


def _product(name: str) -> _Known:
    """Of numbers, or of matrices, by that operator."""

    def product(values: Mapping[str, Any], emit: Emit) -> Complex:
        def times(a: Arg, b: Arg) -> Ref:
            return emit(name, *((a, b) if isinstance(a, Ref) else (b, a)))  # a number comes last

        a, b = (values[p.name] for p in OPSET[name].parameters)
        if not isinstance(b, Complex):
            return Complex(times(a.real, b), times(a.imaginary, b))
        if not isinstance(a, Complex):
            return Complex(times(a, b.real), times(a, b.imaginary))
        return Complex(
            emit("aten.sub.Tensor", times(a.real, b.real), times(a.imaginary, b.imaginary), 1),
            emit("aten.add.Tensor", times(a.real, b.imaginary), times(a.imaginary, b.real), 1),
        )

    return product


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
    a, b = values["self"], values["other"]
    if isinstance(b, Complex):
        raise CaptureError("the op-set has no complex numbers, by which the model divides")
    return Complex(emit("aten.div.Tensor", a.real, b), emit("aten.div.Tensor", a.imaginary, b))


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


_KNOWN: Mapping[str, _Known] = {
    "aten.polar": _polar,
    "aten.complex": lambda values, _: Complex(values["real"], values["imag"]),
    "aten.view_as_complex": _of_pairs,
    "aten.view_as_real": _pairs,
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar"), _product("aten.mul.Tensor")),
    **{name: _product(name) for name in ("aten.matmul", "aten.mm", "aten.bmm")},
    **{name: _by_parts(name) for name in (
        "aten.add.Tensor", "aten.sub.Tensor", "aten.neg", "aten.sum", "aten.sum.dim_IntList", "aten.mean", "aten.mean.dim",
        "aten.cat", "aten.stack",
    )},
    "aten.where.self": _by_parts("aten.where.self", "condition"),
    "aten.div.Tensor": _quotient,
    "aten.abs": _length,
    "aten.angle": lambda values, emit: emit("aten.atan2", values["self"].imaginary, values["self"].real),
    "aten.real": lambda values, _: values["self"].real,
    "aten.imag": lambda values, _: values["self"].imaginary,
    **dict.fromkeys(("aten._conj", "aten.conj", "aten.conj_physical"), _conjugate),
    **dict.fromkeys(("aten.resolve_conj", "aten.resolve_neg"), lambda values, _: values["self"]),
}  # fmt: skip
