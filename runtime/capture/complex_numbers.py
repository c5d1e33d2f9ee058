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


def in_real_numbers(name: str, values: Mapping[str, Any], emit: Emit) -> Complex | Ref:
    """What the operator gives for these arguments, by name. CaptureError for one that is not known here."""
    known = _KNOWN.get(name)
    if known is not None:
        return known(values, emit)
    if name in OPSET and OPSET[name].family in _MOVES:
        first, *rest = (values[p.name] for p in OPSET[name].parameters)
        if isinstance(first, Complex) and not any(isinstance(arg, (Complex, Ref)) for arg in rest):
            return Complex(emit(name, first.real, *rest), emit(name, first.imaginary, *rest))
    raise CaptureError(f"the op-set has no complex numbers, which the model gives to {name}")


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


def _product(values: Mapping[str, Any], emit: Emit) -> Complex:
    def times(a: Arg, b: Arg) -> Ref:
        return emit("aten.mul.Tensor", *((a, b) if isinstance(a, Ref) else (b, a)))

    a, b = values["self"], values["other"]
    if not isinstance(a, Complex):
        a, b = b, a
    if not isinstance(b, Complex):
        return Complex(times(a.real, b), times(a.imaginary, b))
    return Complex(
        emit("aten.sub.Tensor", times(a.real, b.real), times(a.imaginary, b.imaginary), 1),
        emit("aten.add.Tensor", times(a.real, b.imaginary), times(a.imaginary, b.real), 1),
    )


_KNOWN: Mapping[str, Callable[[Mapping[str, Any], Emit], Complex | Ref]] = {
    "aten.polar": _polar,
    "aten.complex": lambda values, _: Complex(values["real"], values["imag"]),
    "aten.view_as_complex": _of_pairs,
    "aten.view_as_real": _pairs,
    "aten.mul.Tensor": _product,
    "aten.mul.Scalar": _product,
}
