"""Sizes, shapes and dtypes of torch's, in ours: a size that is left free is a polynomial of those of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from fusion.dag.cutting.source import SOURCE
from fusion.dag.ir.dims import Blocks, Dim, blocks, poly
from fusion.dag.ir.graph import DTYPE_BYTES, TensorType
from fusion.runtime.job.errors import CaptureError

_DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}


class Sizes:
    """`symbols`: our name of each of torch's size symbols."""

    def __init__(self, symbols: Mapping[str, str]) -> None:
        self._symbols = dict(symbols)
        self._source = next((own for own, name in symbols.items() if name == SOURCE), None)

    @property
    def counted(self) -> tuple[str, ...]:
        """Our names of the numbers of blocks that sizes are made of, so far."""
        return tuple(sorted(name for name in set(self._symbols.values()) if blocks(name)))

    def dim(self, value: Any) -> Dim:
        """CaptureError where it is no polynomial, or follows from what is in a tensor."""
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression.has(Max, Min):
            expression = _settled(expression, value.node.shape_env.var_to_range)
        expression = sympy.expand(self._whole(expression))
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

    def _whole(self, expression: Any) -> Any:
        """The same number with numbers of blocks in the place of quotients and remainders of the source's length."""
        if not expression.has(FloorDiv, Mod, PythonMod):
            return expression
        args = [self._whole(each) for each in expression.args]
        if not isinstance(expression, (FloorDiv, Mod, PythonMod)):
            return expression.func(*args)
        quotient = self._quotient(sympy.expand(args[0]), args[1])
        if quotient is None:
            return expression.func(*args)
        return quotient if isinstance(expression, FloorDiv) else args[0] - args[1] * quotient

    def _quotient(self, dividend: Any, divisor: Any) -> Any:
        """Of a multiple of the divisor and, beside a number, at most one length of the source or number of its blocks; else None."""
        if not divisor.is_Integer:
            ratio = sympy.cancel(dividend / divisor)
            return ratio if ratio.is_polynomial() else None
        exact, rest, number = sympy.Integer(0), [], 0
        for term, coefficient in dividend.as_coefficients_dict().items():
            if not coefficient.is_Integer:
                return None
            exact += coefficient // divisor * term
            if term == 1:
                number = int(coefficient % divisor)
            elif coefficient % divisor:
                rest.append((term, coefficient % divisor))
        if not rest:
            return exact
        (term, coefficient), *more = rest
        counted = blocks(self._symbols.get(str(term), ""))
        if more or (counted is None and str(term) != self._source):
            return None
        if coefficient == 1:  # of blocks: how many of longer ones
            length = counted.length if counted else 1
            before = (counted.more + length - 1 if counted else 0) + length * number + 1
            return exact + self._blocks(before, length * int(divisor)) - 1
        if coefficient == divisor - 1 and counted is None:
            return exact + term - self._blocks(-number, int(divisor))
        return None

    def _blocks(self, more: int, length: int) -> Any:
        """How many of this length hold the source and `more`."""
        whole, rest = divmod(more, length)
        made = sympy.Symbol(f"{self._source}_{rest}_{length}", integer=True, positive=True)
        self._symbols[str(made)] = Blocks(SOURCE, rest, length).name
        return made + whole

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
