"""What a gateway is asked, of what a client says."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random

import pytest

from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.generate_requests import LEAST_TOP_P, generate_requests
from fusion.runtime.serving.http.schema import CompletionRequest


@pytest.mark.parametrize(
    ("given", "guesses"), [({}, True), ({"guesses": None}, True), ({"guesses": False}, False)]
)
def test_guesses_are_left_out_where_a_client_says_so(given: dict[str, bool | None], guesses: bool) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "n": 2, **given})
    found = generate_requests(body, "job", [(1, 2), (3,)], [4, 4], None, Random(1))
    assert [request.guesses for request in found] == [guesses] * 4


@pytest.mark.parametrize(("given", "kept"), [(None, 1.0), (1, 1.0), (0.5, 0.5), (0, LEAST_TOP_P)])
def test_of_no_probability_the_most_probable_token_is_left(given: float | None, kept: float) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "top_p": given})
    [asked] = generate_requests(body, "job", [(1, 2)], [4], None, Random(1))
    assert asked.sampling.top_p == kept


@pytest.mark.parametrize(
    ("tokens", "stream", "taken"), [(1000, False, True), (7000, False, False), (7000, True, True)]
)
def test_log_probabilities_that_are_told_at_once_are_bounded(tokens: int, stream: bool, taken: bool) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "n": 16, "stream": stream})
    with nullcontext() if taken else pytest.raises(ApiError, match="2352000 log-probabilities"):
        assert len(generate_requests(body, "job", [(1,)], [tokens], 20, Random(1))) == 16
