"""Questions that torch asks about a source length that the model's code pads to whole blocks: `-length % 64`, `length // 64`.

Such block counts are no polynomials of the length, and torch would add what the code asks of them as a guard on the length. While a model is
exported, a comparison of block counts is answered here if the answer is the same for all sample lengths (`_samples`). Where the answers
differ, it is answered as torch answers for unknown sizes: one that is not always 0 or 1 is neither, and two that are not always equal are
unequal. So code that pads a source where needed pads it always, at times by nothing. Other questions are left to torch, which refuses the
model for them.
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
_OTHER = 1009  # stands for every size other than the source length
# Block counts to try: an answer that depends on the count changes between two of these, or nowhere.
_BLOCK_COUNTS = (0, 1, 2, 3, 4, 30, 10**4, 10**9)


class SourceLength:
    """The symbol of the free source length, known from when the model runs, and the answers to questions about its block counts."""

    def __init__(self) -> None:
        self.symbol: sympy.Symbol | None = None
        self._answers: dict[Any, bool | None] = {}

    def set_from(self, length: Any) -> None:
        if isinstance(length, torch.SymInt):
            self.symbol = length.node.expr

    @contextmanager
    def answering_guards(self) -> Iterator[None]:
        """While open, torch's `ShapeEnv.evaluate_expr` first looks for an answer here."""
        original = ShapeEnv.evaluate_expr

        def evaluate(env: ShapeEnv, orig_expr: Any, *args: Any, **named: Any) -> Any:
            if orig_expr not in self._answers:
                self._answers[orig_expr] = self._answer(orig_expr)
            answer = self._answers[orig_expr]
            return original(env, orig_expr, *args, **named) if answer is None else sympy.sympify(answer)

        ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            ShapeEnv.evaluate_expr = original  # type: ignore[method-assign]

    def _answer(self, condition: Any) -> bool | None:
        if isinstance(condition, (sympy.And, sympy.Or)):
            operands = [self._answer(part) for part in condition.args]
            return None if None in operands else bool(condition.func(*operands))
        parts = condition.atoms(FloorDiv, Mod, PythonMod) if isinstance(condition, Relational) else ()
        if all(self.symbol not in part.free_symbols for part in parts):
            return None
        lengths = {int(part.args[1]) for part in parts if part.args[1].is_Integer}
        known = dict.fromkeys(condition.free_symbols, _OTHER)
        differences = set()
        for length in _samples(lengths):
            known[self.symbol] = length
            with suppress(ZeroDivisionError):  # a length for which the question does not arise
                differences.add(_value(condition.lhs, known) - _value(condition.rhs, known))
        if differences != {0}:
            margin = 1 if {condition.lhs, condition.rhs} & _SMALL else 0
            differences = {difference for difference in differences if abs(difference) > margin}
        answers = {bool(condition.func(difference, 0)) for difference in differences}
        return answers.pop() if len(answers) == 1 else None


def _value(expression: Any, known: Mapping[Any, int]) -> int:
    """The expression where its symbols have these sizes."""
    if expression.is_Symbol:
        return known[expression]
    if expression.is_Integer:
        return int(expression)
    parts = [_value(arg, known) for arg in expression.args]
    if isinstance(expression, sympy.Add):
        return sum(parts)
    if isinstance(expression, sympy.Mul):
        return prod(parts)
    if isinstance(expression, FloorDiv):
        return parts[0] // parts[1]
    if isinstance(expression, (Mod, PythonMod)):
        return parts[0] % parts[1]
    return int(expression.func(*parts))


def _samples(lengths: set[int]) -> list[int]:
    """Source lengths before, at and after block boundaries: of the first blocks, and of some far beyond any text."""
    samples = {
        count * length + offset
        for length in lengths
        for count in _BLOCK_COUNTS
        for offset in (-1, 0, 1, 2, length // 2)
    }
    return sorted(n for n in samples if n >= 2)
