"""The rules by which an answer ends: they come back from a header as they were, or are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.ends import Ends
from fusion.runtime.serving.requests.request import GenerateRequest

all_ends = st.builds(
    Ends,
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 9),
    stop_token_ids=st.lists(st.integers(0, 999), max_size=3).map(tuple),
)


@given(all_ends)
def test_they_come_back_from_their_header_and_from_a_request(ends: Ends) -> None:
    assert Ends.from_header(ends.to_header()) == ends
    assert set(ends.to_header()) == {name for name, value in vars(ends).items() if value}
    request = GenerateRequest(prompt="x", max_tokens=9, ends=ends)
    header, payload = request.to_frame()
    assert GenerateRequest.from_frame(header, memoryview(payload)) == request
    # A gateway of the release before knows no such prompt, and refuses it.
    assert header["prompt"] == ("text" if ends == Ends() else "text+ends")
    assert request.newer == (ends != Ends())


@given(all_ends, st.integers(0, 9), st.integers(0, 12))
def test_what_ends_is_one_of_the_tokens_that_end_and_late_enough(ends: Ends, token: int, index: int) -> None:
    ending = token in ends.tokens((1, 2))
    assert ends.end_with(token, index, (1, 2)) == (ending and index >= ends.min_tokens)
    assert ending == (token in ends.stop_token_ids or (token in (1, 2) and not ends.ignore_eos))


def test_a_schema_comes_with_them() -> None:
    request = GenerateRequest(prompt="x", ends=Ends(stop_token_ids=(3,)), schema='{"type":"null"}')
    header, payload = request.to_frame()
    assert header["prompt"] == "text+ends+schema"
    assert GenerateRequest.from_frame(header, memoryview(payload)) == request


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2**63}, "min_tokens"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"min_tokens": True}, "min_tokens"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ],
)
def test_what_is_out_of_range_is_named(header: dict[str, Any], field: str) -> None:
    with pytest.raises(JobError, match=f"^{field}: "):
        Ends.from_header(header)
