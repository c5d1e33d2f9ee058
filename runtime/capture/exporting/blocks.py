"""A source that a model's code pads to whole blocks: `-length % 64`, `length // 64`, of a length that is free.

Such numbers are no polynomials of the length, and torch takes what the code asks of them for a condition on the length. While a model
is exported, a question about them is answered where the answer is the same for all lengths that are tried (`_samples`); where it is not, as torch answers for sizes
that it does not know: one that is not always 0 or 1 is neither, and two that are not always equal are unlike. So code that pads a
source where it has to pads it always, at times by nothing. Other questions are left to torch, which refuses the model for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

_SMALL = frozenset({sympy.Integer(0), sympy.Integer(1)})
_OTHER = 1009  # stands for a size that is not that of the source
# Blocks. What is asked of a number of them is answered otherwise somewhere between these, or nowhere.
_TIMES = (0, 1, 2, 3, 4, 30, 10**4, 10**9)


class SourceLength:
    """The length that blocks are counted of, from when the model is run."""

    def __init__(self) -> None:
        self.symbol: sympy.Symbol | None = None
        self._answers: dict[Any, bool | None] = {}

    def is_of(self, length: Any) -> None:
        if isinstance(length, torch.SymInt):
            self.symbol = length.node.expr

    @contextmanager
    def answered(self) -> Iterator[None]:
        """While open, torch asks here first what follows from numbers of blocks."""
        plain = ShapeEnv.evaluate_expr

        def evaluate(env: ShapeEnv, orig_expr: Any, *args: Any, **named: Any) -> Any:
            if orig_expr not in self._answers:
                self._answers[orig_expr] = self._answer(orig_expr)
            answer = self._answers[orig_expr]
            return plain(env, orig_expr, *args, **named) if answer is None else sympy.sympify(answer)

        ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            ShapeEnv.evaluate_expr = plain  # type: ignore[method-assign]

    def _answer(self, asked: Any) -> bool | None:
        if isinstance(asked, (sympy.And, sympy.Or)):
            each = [self._answer(part) for part in asked.args]
            return None if None in each else bool(asked.func(*each))
        parts = asked.atoms(FloorDiv, Mod, PythonMod) if isinstance(asked, Relational) else ()
        if all(self.symbol not in part.free_symbols for part in parts):
            return None
        lengths = {int(part.args[1]) for part in parts if part.args[1].is_Integer}
        known = dict.fromkeys(asked.free_symbols, _OTHER)
        gaps = set()
        for length in _samples(lengths):
            known[self.symbol] = length
            with suppress(ZeroDivisionError):  # no length for which it is asked
                gaps.add(_value(asked.lhs, known) - _value(asked.rhs, known))
        if gaps != {0}:
            near = 1 if {asked.lhs, asked.rhs} & _SMALL else 0
            gaps = {gap for gap in gaps if abs(gap) > near}
        answers = {bool(asked.func(gap, 0)) for gap in gaps}
        return answers.pop() if len(answers) == 1 else None


def _value(of: Any, known: Mapping[Any, int]) -> int:
    """Of an expression where the symbols have these sizes."""
    if of.is_Symbol:
        return known[of]
    if of.is_Integer:
        return int(of)
    parts = [_value(each, known) for each in of.args]
    if isinstance(of, sympy.Add):
        return sum(parts)
    if isinstance(of, sympy.Mul):
        return prod(parts)
    if isinstance(of, FloorDiv):
        return parts[0] // parts[1]
    if isinstance(of, (Mod, PythonMod)):
        return parts[0] % parts[1]
    return int(of.func(*parts))


def _samples(lengths: set[int]) -> list[int]:
    """Lengths of a source before, at and behind the ends of blocks: of the first, and of some that lie beyond any text's."""
    found = {times * each + more for each in lengths for times in _TIMES for more in (-1, 0, 1, 2, each // 2)}
    return sorted(n for n in found if n >= 2)
