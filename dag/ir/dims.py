"""Dimensions of a shape: whole numbers, or polynomials over named symbols such as `batch` and `sequence`.

A polynomial in normal form is enough for every shape that capture meets, makes equality of two shapes decidable,
and can be evaluated without running any code that came with a graph. The number of blocks that hold a size is a symbol as well,
whose value follows from that size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fusion.dag.ir.errors import GraphError

Monomial = tuple[str, ...]  # sorted symbol names; () is the constant term
# Terms of a product before they are collected: the dimensions in a hostile graph could multiply to a hundred million.
MAX_PRODUCTS = 1 << 10

_BLOCKS = re.compile(r"([a-z][a-z0-9_]*?)(?:_times_([1-9][0-9]{0,8}))?_([0-9]{1,9})_over_([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Poly:
    """A polynomial with integer coefficients in normal form: monomials sorted, no zero coefficient, never constant."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        return _normal([*self.terms, *_terms(other)])

    __radd__ = __add__

    def __mul__(self, other: Dim) -> Dim:
        """GraphError for more than MAX_PRODUCTS terms."""
        if isinstance(other, Poly) and len(self.terms) * len(other.terms) > MAX_PRODUCTS:
            raise GraphError("a size that is too intricate")
        return _normal((tuple(sorted(a + b)), x * y) for a, x in self.terms for b, y in _terms(other))

    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + (other * -1)

    def __rsub__(self, other: int) -> Dim:
        return other + self * -1

    def __str__(self) -> str:
        parts = ["*".join([*([] if c == 1 and m else [str(c)]), *m]) for m, c in self.terms]
        return " + ".join(parts)


Dim = int | Poly


def _terms(dim: Dim) -> tuple[tuple[Monomial, int], ...]:
    return dim.terms if isinstance(dim, Poly) else (((), dim),)


def _normal(terms: Iterable[tuple[Monomial, int]]) -> Dim:
    total: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
    kept = tuple(sorted((m, c) for m, c in total.items() if c))
    if not kept:
        return 0
    if len(kept) == 1 and kept[0][0] == ():
        return kept[0][1]
    return Poly(kept)


def poly(terms: Iterable[tuple[Iterable[str], int]]) -> Dim:
    """The normal form of a sum of `coefficient * product(symbols)`; collapses to int when it is constant."""
    return _normal((tuple(sorted(m)), c) for m, c in terms)


def symbol(name: str) -> Poly:
    return Poly((((name,), 1),))


@dataclass(frozen=True)
class Blocks:
    """A symbol that is ceil((times * of + more) / length): the blocks of `length` that hold `times` times the size `of` and `more` elements."""

    of: str
    more: int
    length: int
    times: int = 1

    @property
    def name(self) -> str:
        times = "" if self.times == 1 else f"_times_{self.times}"
        return f"{self.of}{times}_{self.more}_over_{self.length}"

    def count(self, size: int) -> int:
        """The number of blocks if the size `of` is `size`."""
        return -(-(self.times * size + self.more) // self.length)


@lru_cache(1024)
def blocks(name: str) -> Blocks | None:
    """The blocks that a symbol of this name counts; None for a plain size."""
    match = _BLOCKS.fullmatch(name)
    return None if match is None else Blocks(match[1], int(match[3]), int(match[4]), int(match[2] or 1))


def symbols_of(dim: Dim) -> frozenset[str]:
    """The plain sizes that `dim` depends on."""
    return frozenset(_base_symbol(s) for monomial, _ in _terms(dim) for s in monomial)


def named_symbols(dim: Dim) -> frozenset[str]:
    """The symbols in `dim`, numbers of blocks included."""
    return frozenset(s for monomial, _ in _terms(dim) for s in monomial)


def _base_symbol(name: str) -> str:
    counted = blocks(name)
    return name if counted is None else counted.of


def bind(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The value of `dim` with each symbol bound to its size. GraphError names a symbol without a size."""
    if isinstance(dim, int):
        return dim
    try:
        return sum(c * prod(_size(s, sizes) for s in monomial) for monomial, c in dim.terms)
    except KeyError as missing:
        raise GraphError(f"no size given for the symbol {missing}") from None


def _size(name: str, sizes: Mapping[str, int]) -> int:
    counted = blocks(name)
    return sizes[name] if counted is None else counted.count(sizes[counted.of])


def bind_upper_bound(dim: Dim, sizes: Mapping[str, int]) -> int:
    """An upper bound of `dim` for each symbol between 1 and its size: negative terms are taken at 1. GraphError as `bind`."""
    if isinstance(dim, int):
        return dim
    negative = sum(c for _, c in dim.terms if c < 0)
    return negative + bind(poly((m, c) for m, c in dim.terms if c > 0), sizes)


def size(shape: Iterable[Dim]) -> Dim:
    """Number of elements of a shape."""
    total: Dim = 1
    for dim in shape:
        total = total * dim
    return total
