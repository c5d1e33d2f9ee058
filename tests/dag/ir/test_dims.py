"""Dimensions: the laws of polynomials, and that every way to the same polynomial gives the same normal form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.dag.ir.dims import (
    Blocks,
    Dim,
    Poly,
    bind,
    bind_upper_bound,
    blocks,
    named_symbols,
    poly,
    size,
    symbol,
    symbols_of,
)
from fusion.dag.ir.errors import GraphError

SIZES = {"batch": 3, "sequence": 7}
DIMS = st.builds(
    lambda terms: poly(terms),
    st.lists(
        st.tuples(st.lists(st.sampled_from(["batch", "sequence"]), max_size=2), st.integers(-9, 9)),
        max_size=4,
    ),
)


@given(DIMS, DIMS, DIMS)
@settings(max_examples=examples(150), deadline=None)
def test_arithmetic_is_that_of_the_values(a: Dim, b: Dim, c: Dim) -> None:
    for made, value in (
        (a + b, bind(a, SIZES) + bind(b, SIZES)),
        (a - b, bind(a, SIZES) - bind(b, SIZES)),
        (a * b, bind(a, SIZES) * bind(b, SIZES)),
        (a * (b + c), bind(a, SIZES) * (bind(b, SIZES) + bind(c, SIZES))),
    ):
        assert bind(made, SIZES) == value
    assert a + b == b + a and a * b == b * a and a * (b + c) == a * b + a * c and (a - a) == 0


@given(DIMS)
@settings(max_examples=examples(100), deadline=None)
def test_normal_form(a: Dim) -> None:
    if isinstance(a, Poly):
        assert symbols_of(a) and list(a.terms) == sorted(a.terms) and all(c for _, c in a.terms)
        assert poly(reversed(a.terms)) == a
    else:
        assert type(a) is int and not symbols_of(a)


@given(DIMS, st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=examples(150), deadline=None)
def test_the_most_is_above_the_values_at_all_smaller_sizes(a: Dim, batch: int, sequence: int) -> None:
    most = bind_upper_bound(a, {"batch": batch, "sequence": sequence})
    assert all(
        most >= bind(a, {"batch": b, "sequence": s})
        for b in range(1, batch + 1)
        for s in range(1, sequence + 1)
    )
    assert bind_upper_bound(12 - 3 * symbol("batch"), {"batch": batch}) == 9


def test_size_and_words() -> None:
    b, s = symbol("batch"), symbol("sequence")
    assert size((b, s, 4)) == 4 * b * s == poly([(["sequence", "batch"], 4)])
    assert size(()) == 1
    assert str(2 * b + 3) in ("3 + 2*batch", "2*batch + 3")
    assert 5 - b == -1 * b + 5


def test_blocks_follow_from_the_size_that_they_hold() -> None:
    whole, begun = Blocks("source", 0, 16).name, Blocks("source", 1, 16).name
    part = Blocks("source", 2, 10, 7).name
    for length, held, with_one_more in ((1, 1, 1), (15, 1, 1), (16, 1, 2), (17, 2, 2), (32, 2, 3)):
        assert bind(symbol(whole) * 16 - symbol("source"), {"source": length}) == 16 * held - length
        assert bind(symbol(begun), {"source": length, begun: 5}) == with_one_more
        assert bind(symbol(part), {"source": length}) == -(-(7 * length + 2) // 10)
    assert symbols_of(symbol(part)) == {"source"} and blocks(part) == Blocks("source", 2, 10, 7)
    assert symbols_of(symbol(whole) + symbol("batch")) == {"source", "batch"}
    assert named_symbols(symbol(whole) + 1) == {whole}
    with pytest.raises(GraphError, match="source"):
        bind(symbol(whole), {"batch": 1})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(GraphError, match="batch"):
        bind(symbol("batch"), {"sequence": 1})


def test_a_product_of_dimensions_that_have_many_terms_each_is_refused_at_once() -> None:
    """Each is one that a graph may have; together they have millions of terms."""
    symbols = [symbol(name) for name in "abcdef"]
    long = [sum((a * b for b in symbols[i:]), start=1) for i, a in enumerate(symbols)]
    assert isinstance(size(long[:2]), Poly)
    with pytest.raises(GraphError, match="too intricate"):
        size(long * 2)
