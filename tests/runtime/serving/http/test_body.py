"""JSON from outside is bounded before anything looks at it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.http.body import MAX_BRACKETS, MAX_DEPTH, MAX_TEXTS, MAX_VALUES, parse
from fusion.runtime.serving.http.errors import ApiError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abé"), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_json_is_what_it_is(value: Any) -> None:
    assert parse(json.dumps(value).encode()) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"{",
            b"nonsense",
            b"\xff\xfe",
            b'{"a": NaN}',
            b"[Infinity]",
            b"[-Infinity]",
            b'"\xed\xa0\x80"',
        ),
        *(b'"\\ud800"', b'{"\\udfff": 1}', b'[["\\ud800"]]', b"9" * 5000),
        # No pairs, however they are put together.
        *(b'{"\\ud83d": 1, "\\ude00": 2}', b'{"a": ["\\ud83d", "\\ude00"]}'),
        b"[" * 100_000,
        b"[" * 500 + b"]" * 500,
        b'{"a":' * 100_000,
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b"[" + b"[]," * MAX_BRACKETS + b"[]]",
        *(b'"' + bracket * (MAX_BRACKETS + 1) + b'"' for bracket in (rb"\u005b", rb"\u007B")),
    ],
    ids=range(21),
)
def test_json_that_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="JSON") as found:
        parse(body)
    assert found.value.status == 400


def test_as_deep_as_may_be() -> None:
    parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", "values"),
        (b"[" + b"1e9 ,\n" * (MAX_VALUES + 1) + b"1]", "values"),
        (b"[" + b'"",' * (MAX_TEXTS + 1) + b'""]', "texts and names"),
        (b"{" + b'"\\\\":1,' * (MAX_TEXTS + 1) + b'"b":1}', "texts and names"),
    ],
    ids=range(4),
)
def test_more_values_than_any_request_has_are_not_read(
    body: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine megabytes of numbers held the loop for seconds."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ApiError, match=f"JSON: at most .* {said}"):
        parse(body)


@pytest.mark.parametrize(
    "value",
    [
        "," * (MAX_VALUES + 9),
        '"' * (2 * MAX_TEXTS + 9),
        '\\",' * (MAX_VALUES + 9),
        ["\\", "," * (MAX_VALUES + 9), "\\\\", [1, 2]],
        [list(range(MAX_VALUES // 2)), list(range(MAX_VALUES // 2 - 9)), ["a"]],
    ],
    ids=range(5),
)
def test_texts_may_have_as_many_commas_and_quotes_as_they_like(value: Any) -> None:
    assert parse(json.dumps(value).encode()) == value
