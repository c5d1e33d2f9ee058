"""What travels between clients, gateways and stages: it comes back as it was, or is refused in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.every_setting import EVERY_SETTING

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.protocol import MAX_SOURCE_BYTES
from fusion.runtime.serving.requests.request import DEFAULT_MAX_TOKENS, GenerateRequest, Logprobs, Piece
from fusion.runtime.serving.requests.sampling_params import Sampling

values = st.floats(-9999, 0)


def test_a_request_with_every_setting_comes_back_from_its_frame() -> None:
    sent = GenerateRequest(
        prompt="x", max_tokens=7, sampling=EVERY_SETTING, top_logprobs=0, stop=("a", "né"), chat=True
    )
    header, payload = sent.to_frame()
    assert GenerateRequest.from_frame(header, memoryview(payload)) == sent and sent.newer


def test_how_many_tokens_are_asked_for_is_left_to_the_gateway_where_nobody_says() -> None:
    header, payload = GenerateRequest(prompt="x").to_frame()
    assert "max_tokens" not in header
    assert GenerateRequest.from_frame(header, memoryview(payload)).most_tokens == DEFAULT_MAX_TOKENS


@pytest.mark.parametrize(
    "newer",
    [
        {"stop": ("a",)},
        {"top_logprobs": 0},
        {"chat": True},
        {"sampling": Sampling(min_p=0.1)},
        {"sampling": Sampling(logit_bias=((1, 0.0),))},
    ],
)
def test_what_the_release_before_does_not_know_is_told_apart(newer: dict[str, Any]) -> None:
    sampling = Sampling(temperature=1.0, top_k=3, top_p=0.5, seed=3)
    plain = GenerateRequest(prompt="x", max_tokens=9, sampling=sampling)
    assert not plain.newer and GenerateRequest(prompt="x", **newer).newer
    assert set(plain.to_frame()[0]) == {
        *("model", "max_tokens", "temperature", "top_k", "top_p", "seed", "prompt")
    }


@pytest.mark.parametrize("ids", [None, (3, 4)])
def test_features_come_before_what_the_answer_follows(ids: tuple[int, ...] | None) -> None:
    asked = GenerateRequest(features=b"abcdefgh", prompt_ids=ids)
    header, payload = asked.to_frame()
    assert asked.newer and GenerateRequest.from_frame(header, memoryview(payload)).features == b"abcdefgh"
    assert GenerateRequest.from_frame(header, memoryview(payload)).prompt_ids == ids
    for size in (0, -1, 1, len(payload) + 4, 1 << 62, "8"):
        with pytest.raises(JobError):
            GenerateRequest.from_frame({**header, "features": size}, memoryview(payload))


def test_features_are_whole_numbers_of_a_size_that_is_taken() -> None:
    for wrong in ({"features": b"abc"}, {"features": b"abcd", "prompt": "text"}):
        with pytest.raises(JobError, match="features"):
            GenerateRequest(**wrong)
    with pytest.raises(JobError, match="at most"):
        GenerateRequest(features=bytes(MAX_SOURCE_BYTES + 4))


def test_a_chat_is_a_text() -> None:
    with pytest.raises(JobError, match="a chat is a text"):
        GenerateRequest(prompt_ids=(1,), chat=True)
    header, payload = GenerateRequest(prompt="né", chat=True).to_frame()
    assert header["prompt"] == "chat" and payload == "né".encode()


@given(chosen=values, top=st.lists(st.tuples(st.integers(0, 2**40), values), max_size=20).map(tuple))
def test_logprobs_come_back_from_the_header_of_a_piece(
    chosen: float, top: tuple[tuple[int, float], ...]
) -> None:
    header = Piece(index=0, id=3, text="a", logprob=chosen, top_logprobs=top).to_header()
    assert Logprobs.from_header(header, 20) == Logprobs(chosen, top)
    assert Piece(index=0, id=3, text="a").to_header() == {"index": 0, "id": 3, "text": "a"}


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"logprob": 0.5},
        {"logprob": "0"},
        {"logprob": math.nan},
        {"logprob": -math.inf},
        {"logprob": -1.0, "top_logprobs": 3},
        {"logprob": -1.0, "top_logprobs": [[1, -1.0]] * 3},
        {"logprob": -1.0, "top_logprobs": [[1]]},
        {"logprob": -1.0, "top_logprobs": [[-1, -1.0]]},
        {"logprob": -1.0, "top_logprobs": [[1.0, -1.0]]},
        {"logprob": -1.0, "top_logprobs": [[1, None]]},
    ],
)
def test_logprobs_that_are_none_are_refused(header: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="logprob"):
        Logprobs.from_header(header, 2)
