"""Sizes, shapes and dtypes of torch's, in ours: a size that is left free is a polynomial of those of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from fusion.dag.ir.dims import Dim, poly
from fusion.dag.ir.graph import DTYPE_BYTES, TensorType
from fusion.runtime.job.errors import CaptureError

_DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}


class Sizes:
    """`symbols`: our name of each of torch's size symbols."""

    def __init__(self, symbols: Mapping[str, str]) -> None:
        self._symbols = symbols

    def dim(self, value: Any) -> Dim:
        """CaptureError where it is no polynomial, or follows from what is in a tensor."""
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression.has(Max, Min):
            expression = _settled(expression, value.node.shape_env.var_to_range)
        expression = sympy.expand(expression)
        if free_unbacked_symbols(expression):
            raise CaptureError(
                "the size of a value follows from what is in a tensor: use torch.where or a mask"
            )
        if expression.is_Integer:
            return int(expression)
        try:
            terms = sympy.Poly(expression, *sorted(expression.free_symbols, key=str))
            return poly(
                (
                    [
                        self._symbols[str(s)]
                        for s, power in zip(terms.gens, monomial, strict=True)
                        for _ in range(power)
                    ],
                    int(coefficient),
                )
                for monomial, coefficient in terms.terms()
            )
        except (sympy.PolynomialError, KeyError, TypeError, ValueError):
            raise CaptureError(
                f"a size of the model, {expression}, is not a polynomial of batch and sequence"
            ) from None

    def type_of(self, value: Any) -> TensorType:
        """Of what an exported operator makes."""
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"an operator gives a {type(value).__name__} where a tensor is needed")
        return TensorType(tuple(self.dim(d) for d in value.shape), dtype_name(value.dtype))


def _settled(expression: sympy.Expr, ranges: Mapping[sympy.Symbol, Any]) -> sympy.Expr:
    """Without the maxima and minima that are the same one of theirs for all sizes in these ranges, of at least 1."""
    known = {
        s: ValueRanges(max(1, ranges[s].lower), ranges[s].upper)
        for s in expression.free_symbols
        if s in ranges
    }

    def first_of(kind: Any, sign: int, parts: tuple[sympy.Expr, ...]) -> sympy.Expr:
        for one in parts:
            if all(bound_sympy(sign * (one - other), known).lower >= 0 for other in parts):
                return one
        return kind(*parts)

    expression = expression.replace(Max, lambda *parts: first_of(Max, 1, parts))
    return expression.replace(Min, lambda *parts: first_of(Min, -1, parts))


def dtype_name(dtype: torch.dtype) -> str:
    """CaptureError for one that no value of a graph has."""
    if dtype not in _DTYPES:
        raise CaptureError(f"the op-set has no dtype {dtype}")
    return _DTYPES[dtype]
