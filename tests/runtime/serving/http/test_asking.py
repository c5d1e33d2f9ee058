"""What a gateway is asked, of what a client says."""

from __future__ import annotations

from random import Random

import pytest

from fusion.runtime.serving.http import asking
from fusion.runtime.serving.http.schema import CompletionRequest


@pytest.mark.parametrize(
    ("said", "guesses"), [({}, True), ({"guesses": None}, True), ({"guesses": False}, False)]
)
def test_guesses_are_left_out_where_a_client_says_so(said: dict[str, bool | None], guesses: bool) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "n": 2, **said})
    found = asking.requests(body, "job", [(1, 2), (3,)], [4, 4], None, Random(1))
    assert [request.guesses for request in found] == [guesses] * 4
