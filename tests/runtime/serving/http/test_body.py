"""JSON from outside is bounded before anything looks at it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.http.body import MAX_BRACKETS, MAX_DEPTH, parse
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
        b"[" * 100_000,
        b"[" * 500 + b"]" * 500,
        b'{"a":' * 100_000,
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b"[" + b"[]," * MAX_BRACKETS + b"[]]",
        *(b'"' + bracket * (MAX_BRACKETS + 1) + b'"' for bracket in (rb"\u005b", rb"\u007B")),
    ],
    ids=range(19),
)
def test_json_that_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="JSON") as found:
        parse(body)
    assert found.value.status == 400


def test_as_deep_as_may_be() -> None:
    parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
