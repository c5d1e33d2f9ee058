"""Questions that torch asks about a source length that the model's code pads to whole blocks: `-length % 64`, `length // 64`.

Such block counts are no polynomials of the length, and torch would add what the code asks of them as a guard on the length. While a model is
exported, a comparison of block counts is answered here if the answer is the same for all sample lengths (`_samples`). Where the answers
differ, it is answered as torch answers for unknown sizes: one that is not always 0 or 1 is neither, and two that are not always equal are
unequal. So code that pads a source where needed pads it always, at times by nothing. Other questions are left to torch, which refuses the
model for them.

The same holds for parts of the batch, `n // 2`, with one difference: a question of the model's own code is answered only if the answer holds
for every batch size.
"""

from __future__ import annotations

import ast
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from math import prod
from os.path import dirname
from pathlib import Path
from typing import Any

import numpy as np
import sympy
import torch
from sympy.core.relational import Relational
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from fusion.runtime.capture.exporting.model_code import is_asked_by_model, is_model_code, line_of_caller
from fusion.runtime.job.errors import CaptureError

_SMALL = frozenset({sympy.Integer(0), sympy.Integer(1)})
_OTHER = 1009  # stands for every size other than the source length
# Block counts to try: an answer that depends on the count changes between two of these, or nowhere.
_BLOCK_COUNTS = (0, 1, 2, 3, 4, 30, 10**4, 10**9)


class SourceLength:
    """The symbol of the free source length, known from when the model runs, and the answers to questions about its block counts."""

    _exact_for_model = False  # whether the model's own code gets only answers that hold for every size

    def __init__(self) -> None:
        self.symbol: sympy.Symbol | None = None
        self._answers: dict[tuple[Any, bool], bool | None] = {}

    def set_from(self, length: Any) -> None:
        if isinstance(length, torch.SymInt):
            self.symbol = length.node.expr

    @contextmanager
    def answering_guards(self) -> Iterator[None]:
        """While open, torch's `ShapeEnv.evaluate_expr` first looks for an answer here."""
        original = ShapeEnv.evaluate_expr

        def evaluate(env: ShapeEnv, orig_expr: Any, *args: Any, **named: Any) -> Any:
            from_model = self._exact_for_model and is_asked_by_model()
            if (orig_expr, from_model) not in self._answers:
                self._answers[orig_expr, from_model] = self._answer(orig_expr, from_model)
            answer = self._answers[orig_expr, from_model]
            return original(env, orig_expr, *args, **named) if answer is None else sympy.sympify(answer)

        ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            ShapeEnv.evaluate_expr = original  # type: ignore[method-assign]

    def _answer(self, condition: Any, exact: bool) -> bool | None:
        """The answer to a condition, None to leave it to torch. `exact`: only an answer that holds for all sizes."""
        if isinstance(condition, (sympy.And, sympy.Or)):
            operands = [self._answer(part, exact) for part in condition.args]
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
        if differences != {0} and not exact:
            margin = 1 if {condition.lhs, condition.rhs} & _SMALL else 0
            differences = {
                difference
                for difference in differences
                if abs(difference) > margin
                and not (self._exact_for_model and _is_below_two(condition, difference))
            }
        answers = {bool(condition.func(difference, 0)) for difference in differences}
        return answers.pop() if len(answers) == 1 else None


def _is_below_two(condition: Any, difference: int) -> bool:
    """Whether this difference of the sides of a comparison with 2 means that the other side is less than 2."""
    return (condition.rhs == 2 and difference < 0) or (condition.lhs == 2 and difference > 0)


class BatchSize(SourceLength):
    """The same for the number of samples, which a model's code divides: `n // 2`, `int(n / 2)`."""

    _exact_for_model = True

    def set_from(self, length: Any) -> None:
        super().set_from(length)
        if isinstance(length, torch.SymInt):
            _batch_sizes[length.node.expr] = length

    @contextmanager
    def answering_model(self, module: nn.Module) -> Iterator[None]:
        """While open, guards are answered here, and integers that the module's code computes from the batch size by fractions stay free."""
        with self.answering_guards(), ExitStack() as undo:
            for name, patch in _NUMBER_PATCHES.items():
                original = getattr(torch.SymFloat, name)
                undo.callback(setattr, torch.SymFloat, name, original)
                setattr(torch.SymFloat, name, patch(original))
            undo.callback(_unrecorded.clear)
            undo.callback(_batch_sizes.clear)
            for namespace in _namespaces(module):
                namespace["int"] = _Int
                undo.callback(namespace.pop, "int")
            yield


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
    """Sizes before, at and after block boundaries: of the first blocks, and of some far beyond any text."""
    samples = {
        count * length + offset
        for length in lengths
        for count in _BLOCK_COUNTS
        for offset in (-1, 0, 1, 2, length // 2)
    }
    return sorted(n for n in samples if n >= 2)


_ALL_BATCHES = np.arange(1, (1 << 16) + 1)  # the batch sizes for which a result is checked
_MAX_DENOMINATOR = 128  # of a fraction of the batch
_batch_sizes: dict[Any, Any] = {}  # torch's size of the batch of the running export, by its symbol
_unrecorded = set[Any]()  # sums and products of several steps, whose rounding torch does not record


def _rounding(function: Callable[[Any], Any]) -> Callable[[Any], Callable[[torch.SymFloat], Any]]:
    """A patch of SymFloat's method for floor, ceil or trunc; `function`: the same for arrays."""

    def patch(original: Callable[[torch.SymFloat], Any]) -> Callable[[torch.SymFloat], Any]:
        def run(self: torch.SymFloat) -> Any:
            size = _integer_size(self, function)
            return original(self) if size is None else size

        return run

    return patch


def _noting_joins(
    original: Callable[[torch.SymFloat, Any], Any],
) -> Callable[[torch.SymFloat, Any], Any]:
    """Notes sums and products of sums and products: torch joins their operands, which rounds differently."""

    def run(self: torch.SymFloat, other: Any) -> Any:
        result = original(self, other)
        if isinstance(result, torch.SymFloat) and self.node.expr.atoms(sympy.Float):
            _unrecorded.add(result.node.expr)
        return result

    return run


def _integer_size(number: torch.SymFloat, function: Callable[[Any], Any]) -> Any:
    """The size (times * batch + more) // divisor that is `function(number)` for every batch size; None if there is none."""
    expression = number.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if (
        len(symbols) != 1
        or symbols[0] not in _batch_sizes
        or any(expression.has(each) for each in _unrecorded)
    ):
        return None
    try:
        values = function(_values(expression, _ALL_BATCHES)).astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    slope = Fraction(float(values[-1] - values[0]) / (len(_ALL_BATCHES) - 1))
    times, divisor = slope.limit_denominator(_MAX_DENOMINATOR).as_integer_ratio()
    more = int((values * divisor - times * _ALL_BATCHES).max())
    if times <= 0 or not np.array_equal((times * _ALL_BATCHES + more) // divisor, values):
        return None
    return (times * _batch_sizes[symbols[0]] + more) // divisor


def batch_choice(first: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """The smaller or the larger of two sizes, as `first` compares them, if the model's code asks for it; None if torch asks. CaptureError if
    it is one of them for some batch sizes and the other for others."""
    if (isinstance(a, int) and isinstance(b, int)) or not is_asked_by_model(past_capture=True):
        return None
    expressions = [
        each.node.expr if isinstance(each, torch.SymInt) else sympy.Integer(each) for each in (a, b)
    ]
    if not {symbol for each in expressions for symbol in each.free_symbols} <= _batch_sizes.keys():
        return None
    try:
        values = [_values(each, _ALL_BATCHES) + 0 * _ALL_BATCHES for each in expressions]
    except TypeError:
        return None
    if first(*values).all():
        return a
    if first(*reversed(values)).all():
        return b
    raise CaptureError(
        f"the model takes the larger or the smaller of sizes, one for some numbers of samples and the other for others{line_of_caller()}: "
        "a graph is the same for all"
    )


def _values(expression: Any, sizes: Any) -> Any:
    """The expression as Python computes it for each of these sizes. TypeError for an expression of other parts than these."""
    if expression.is_Symbol:
        return sizes
    if expression.is_Integer:
        return int(expression)
    if expression.is_Float:
        return float(expression)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer:
        return _values(expression.base, sizes) ** int(expression.exp)
    first, *others = (_values(arg, sizes) for arg in expression.args)
    if isinstance(expression, sympy_functions.ToFloat):
        return first * 1.0
    if isinstance(expression, (sympy_functions.IntTrueDiv, sympy_functions.FloatTrueDiv)):
        return first / others[0]
    if isinstance(expression, FloorDiv):
        return first // others[0]
    if isinstance(expression, (Mod, PythonMod)):
        return first % others[0]
    if isinstance(expression, (sympy.Add, sympy.Mul)) and (
        len(others) == 1 or not expression.atoms(sympy.Float)
    ):
        return functools.reduce(
            operator.add if isinstance(expression, sympy.Add) else operator.mul, others, first
        )
    raise TypeError(expression)


class _IntType(type):
    """The type of what replaces `int` in a model's code: calling it keeps a size free."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.SymInt):
            return args[0]
        size = _integer_size(args[0], np.trunc) if args and isinstance(args[0], torch.SymFloat) else None
        return int(*args, **named) if size is None else size

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class _Int(int, metaclass=_IntType):
    pass


def _namespaces(module: nn.Module) -> list[dict[str, Any]]:
    """The global names of each file that has code of the module, or lies beside one, and only calls `int`."""
    own = {
        each.__module__
        for part in module.modules()
        for each in (type(part), *vars(part).values())
        if hasattr(each, "__module__")
    }
    # Of thousands of modules: paths as texts, each a fiftieth of a Path's time.
    files = {name: getattr(each, "__file__", None) or "" for name, each in list(sys.modules.items())}
    folders = {dirname(files[name]) for name in own & files.keys() if is_model_code(files[name])}
    namespaces = [
        vars(sys.modules[name]) for name, file in files.items() if name in own or dirname(file) in folders
    ]
    return [names for names in namespaces if "int" not in names and _only_calls_int(names.get("__file__"))]


@functools.cache
def _only_calls_int(file: str | None) -> bool:
    """Whether the code of a file calls `int`, and uses it for nothing else but annotations and isinstance."""
    if file is None or not file.endswith(".py") or not is_model_code(file):
        return False
    nodes = list(ast.walk(ast.parse(Path(file).read_bytes())))
    calls = [each for each in nodes if isinstance(each, ast.Call)]
    called = {id(each.func) for each in calls}
    harmless = {
        id(name)
        for each in nodes
        for part in (getattr(each, "annotation", None), getattr(each, "returns", None))
        if part is not None
        for name in ast.walk(part)
    }
    harmless |= {
        id(name)
        for each in calls
        if isinstance(each.func, ast.Name) and each.func.id == "isinstance"
        for name in ast.walk(each)
    }
    used = [each for each in nodes if isinstance(each, ast.Name) and each.id == "int"]
    return any(id(each) in called for each in used) and all(id(each) in called | harmless for each in used)


_NUMBER_PATCHES: Mapping[str, Callable[[Any], Any]] = {
    "__trunc__": _rounding(np.trunc),
    "__floor__": _rounding(np.floor),
    "__ceil__": _rounding(np.ceil),
    **dict.fromkeys(("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"), _noting_joins),
}
