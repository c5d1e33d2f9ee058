"""torch's sizes, shapes and dtypes in a graph's form: a free size is a polynomial of the inputs' sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
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

_COUNTED = (SOURCE, "batch")  # sizes whose blocks a graph may count
_DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}


class Sizes:
    """Converts sizes. `symbols`: the graph's name for each of torch's size symbols."""

    def __init__(self, symbols: Mapping[str, str]) -> None:
        self._symbols = dict(symbols)

    @property
    def counted(self) -> tuple[str, ...]:
        """The names of the block counts that occur in sizes so far."""
        return tuple(sorted(name for name in set(self._symbols.values()) if blocks(name)))

    def dim(self, value: Any) -> Dim:
        """The size as a Dim. CaptureError if it is no polynomial of the inputs' sizes, or depends on data."""
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression.has(Max, Min):
            expression = _resolved_extremes(expression, value.node.shape_env.var_to_range)
        expression = sympy.expand(self._without_quotients(expression))
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

    def _without_quotients(self, expression: Any) -> Any:
        """The same number with block counts in place of quotients and remainders of a free size."""
        if not expression.has(FloorDiv, Mod, PythonMod):
            return expression
        args = [self._without_quotients(arg) for arg in expression.args]
        if not isinstance(expression, (FloorDiv, Mod, PythonMod)):
            return expression.func(*args)
        quotient = self._quotient(sympy.expand(args[0]), args[1])
        if quotient is None:
            return expression.func(*args)
        return quotient if isinstance(expression, FloorDiv) else args[0] - args[1] * quotient

    def _quotient(self, dividend: Any, divisor: Any) -> Any:
        """The quotient of a sum whose terms are multiples of the divisor, a number, and at most one free size or block count; else None."""
        if not divisor.is_Integer:
            ratio = sympy.cancel(dividend / divisor)
            return ratio if ratio.is_polynomial() else None
        exact, rest, offset = sympy.Integer(0), [], 0
        for term, coefficient in dividend.as_coefficients_dict().items():
            if not coefficient.is_Integer:
                return None
            exact += coefficient // divisor * term
            if term == 1:
                offset = int(coefficient % divisor)
            elif coefficient % divisor:
                rest.append((term, coefficient % divisor))
        if not rest:
            return exact
        (term, coefficient), *more = rest
        name = self._symbols.get(str(term), "")
        block = blocks(name)
        if more or (block is None and name not in _COUNTED):
            return None
        times, divisor = int(coefficient), int(divisor)
        if block is not None:
            if times != 1:
                return None
            before = block.more + block.length * (offset + 1)
            return exact + self._block_count(replace(block, more=before, length=block.length * divisor)) - 1
        if 1 < times == divisor - 1:
            return exact + term - self._block_count(Blocks(name, -offset, divisor))
        shared = gcd(times, divisor)
        rounded = Blocks(name, offset // shared + 1, divisor // shared, times // shared)
        return exact + self._block_count(rounded) - 1

    def _block_count(self, block: Blocks) -> Any:
        """The count as a symbol and a number; the symbol's `more` is less than its length."""
        whole, rest = divmod(block.more, block.length)
        name = replace(block, more=rest).name
        self._symbols[name] = name
        return sympy.Symbol(name, integer=True, positive=True) + whole

    def type_of(self, value: Any) -> TensorType:
        """The type of an exported operator's result."""
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"an operator gives a {type(value).__name__} where a tensor is needed")
        return TensorType(tuple(self.dim(d) for d in value.shape), dtype_name(value.dtype))


def _resolved_extremes(expression: sympy.Expr, ranges: Mapping[sympy.Symbol, Any]) -> sympy.Expr:
    """The expression without maxima and minima whose result is the same argument for all sizes of at least 1 in these ranges."""
    known = {
        s: ValueRanges(max(1, ranges[s].lower), ranges[s].upper)
        for s in expression.free_symbols
        if s in ranges
    }

    def dominating(kind: Any, sign: int, parts: tuple[sympy.Expr, ...]) -> sympy.Expr:
        for candidate in parts:
            if all(bound_sympy(sign * (candidate - other), known).lower >= 0 for other in parts):
                return candidate
        return kind(*parts)

    expression = expression.replace(Max, lambda *parts: dominating(Max, 1, parts))
    return expression.replace(Min, lambda *parts: dominating(Min, -1, parts))


def dtype_name(dtype: torch.dtype) -> str:
    """CaptureError for one that no value of a graph has."""
    if dtype not in _DTYPES:
        raise CaptureError(f"the op-set has no dtype {dtype}")
    return _DTYPES[dtype]
