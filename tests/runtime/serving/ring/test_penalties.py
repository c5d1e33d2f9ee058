"""Each setting against `transformers`, or against the formula that is published for it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.every_setting import EVERY_SETTING
from support.examples import examples
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.serving.requests.header_fields import pack_tokens
from fusion.runtime.serving.requests.sampling_params import MAX_BIASES, Sampling
from fusion.runtime.serving.ring.penalties import TokenCounts, adjusted, prompt_of
from fusion.runtime.serving.ring.sampling import logprobs, sample
from fusion.runtime.serving.ring.session import Hop, Opening, SessionId
from fusion.swarm.transport import PeerId

VOCABULARY = 12
rows = st.lists(st.floats(-30, 30, width=32), min_size=VOCABULARY, max_size=VOCABULARY).map(torch.tensor)
tokens_of = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
signed = st.floats(-2, 2)


@settings(max_examples=examples(100))
@given(row=rows, prompt=tokens_of, answer=tokens_of, penalty=st.floats(0.1, 3))
def test_repetition_is_that_of_transformers(
    row: torch.Tensor, prompt: list[int], answer: list[int], penalty: float
) -> None:
    tokens = [0, *prompt, *answer]
    found = adjusted(row, Sampling(repetition_penalty=penalty), len(tokens), TokenCounts(tokens, len(answer)))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), row.double()[None])[0]
    torch.testing.assert_close(found, row.double() if penalty == 1.0 else expected, rtol=0, atol=0)


@settings(max_examples=examples(100))
@given(row=rows, prompt=tokens_of, answer=tokens_of, frequency=signed, presence=signed, repetition=signed)
def test_frequency_and_presence_count_the_answer_alone_and_come_after_repetition(
    row: torch.Tensor,
    prompt: list[int],
    answer: list[int],
    frequency: float,
    presence: float,
    repetition: float,
) -> None:
    given_ = Sampling(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=math.exp(repetition),
        logit_bias=((3, 1.5), (7, -100.0)),
    )
    tokens = [0, *prompt, *answer]
    found = adjusted(row, given_, len(tokens), TokenCounts(tokens, len(answer)))
    times = Counter(answer)
    for token in range(VOCABULARY):
        # OpenAI's formula, after CTRL's, after the bias.
        value = float(row[token]) + {3: 1.5, 7: -100.0}.get(token, 0.0)
        if token in tokens:
            value = value / given_.repetition_penalty if value > 0 else value * given_.repetition_penalty
        value -= frequency * times[token] + presence * (times[token] > 0)
        assert math.isclose(float(found[token]), value, rel_tol=1e-9, abs_tol=1e-9)
    assert sample(row, given_, len(tokens), TokenCounts(tokens, len(answer))) == int(found.argmax())


@settings(max_examples=examples(100))
@given(row=rows, min_p=st.floats(0.001, 1), temperature=st.floats(0.2, 5), seed=st.integers(0, 999))
def test_min_p_draws_from_what_transformers_leaves(
    row: torch.Tensor, min_p: float, temperature: float, seed: int
) -> None:
    scaled = row.double() / temperature
    # A hair to either side: at the border itself the two may round differently.
    left = [
        {int(i) for i in MinPLogitsWarper(p)(torch.zeros(1, 1), scaled[None])[0].isfinite().nonzero()}
        for p in (min(1.0, min_p * (1 + 1e-9)), min_p * (1 - 1e-9))
    ]
    drawn = {sample(row, Sampling(temperature=temperature, min_p=min_p, seed=seed), i) for i in range(60)}
    assert drawn <= left[1]
    if len(left[0]) > 1 and min_p > 0.5:
        assert drawn == left[1] or left[0] != left[1]


def test_min_p_top_k_and_top_p_apply_in_that_order() -> None:
    row = torch.tensor([math.log(p) for p in (0.4, 0.3, 0.15, 0.1, 0.05)])

    def drawn(**fields: Any) -> set[int]:
        return {sample(row, Sampling(temperature=1.0, seed=1, **fields), i) for i in range(400)}

    assert drawn(min_p=0.3) == {0, 1, 2}
    assert drawn(min_p=0.3, top_k=2) == {0, 1}
    # Of 0.4 and 0.3 alone the first has 0.57: enough for top_p only once min_p has left the others out.
    assert drawn(min_p=0.5, top_p=0.55) == {0} and drawn(top_p=0.55) == {0, 1}


def test_a_bias_bans_and_forces_with_any_temperature() -> None:
    row = torch.tensor([0.0, 3.0, 1.0, 2.5, -4.0])
    assert sample(row, Sampling(logit_bias=((1, -100.0),)), 3) == 3
    forced = Sampling(temperature=2.0, seed=1, logit_bias=((4, 100.0),))
    assert {sample(row, forced, position) for position in range(200)} == {4}


def test_settings_left_alone_give_the_tokens_that_they_always_gave() -> None:
    """Another value here would change answers that people have kept."""
    row = (torch.arange(1, 1001) * 7919 % 997).float() / 120
    pinned = {
        Sampling(): [34, 35, 36, 37, 38, 39],
        Sampling(temperature=0.8, seed=3): [473, 964, 281, 290, 703, 74],
        Sampling(temperature=1.2, top_k=50, top_p=0.9, seed=4): [944, 298, 19, 370, 738, 57],
        Sampling(temperature=0.5, top_p=0.7, seed=5): [979, 595, 421, 177, 21, 687],
    }
    for given_, expected in pinned.items():
        assert [sample(row.roll(position), given_, position) for position in range(6)] == expected


def test_what_is_counted_does_not_depend_on_when_it_was_said() -> None:
    whole = TokenCounts([5, 1, 5, 2, 2, 5], 3)
    step = TokenCounts([5, 1, 5], 0)
    for token in (2, 2, 5):
        step.counted()
        step.push(token)
    assert len(whole) == len(step) == 6
    one, other = (dict(zip(*(t.tolist() for t in c.counted()), strict=True)) for c in (whole, step))
    assert one == other == {5: 1, 1: 0, 2: 2}


@pytest.mark.parametrize("counts", [None, TokenCounts([1, 2], 0)])
def test_penalties_never_guess_the_tokens_before(counts: TokenCounts | None) -> None:
    with pytest.raises(JobFailed, match="position 3"):
        sample(torch.zeros(4), Sampling(presence_penalty=1.0), 3, counts)


# --- what a stage takes


def opening(**fields: Any) -> Opening:
    given_: dict[str, Any] = {"sampling": Sampling(repetition_penalty=1.3), "answered": 1}
    return Opening(
        session=SessionId("s"),
        route=(Hop(PeerId("a"), 1),),
        prompt_length=3,
        max_tokens=4,
        **{**given_, **fields},
    )


def test_the_prompt_comes_with_an_opening_that_needs_it() -> None:
    payload = memoryview(pack_tokens([1, 2, 1]))
    assert prompt_of(opening(), payload, VOCABULARY) == [1, 2, 1]
    assert prompt_of(opening(sampling=Sampling(), schema_bytes=3), payload, VOCABULARY) == [1, 2, 1]
    assert prompt_of(opening(sampling=Sampling()), memoryview(b""), VOCABULARY) == []


@pytest.mark.parametrize("prompt", [[], [1, 2], [1, 2, 3, 4], [1, 2, VOCABULARY], [1, 2, -1]])
def test_a_prompt_that_is_not_the_one_announced_is_refused(prompt: list[int]) -> None:
    with pytest.raises(JobError, match=r"^open: "):
        prompt_of(opening(), memoryview(pack_tokens(prompt)), VOCABULARY)


def test_a_bias_for_a_token_that_there_is_not_is_refused() -> None:
    with pytest.raises(JobError, match=r"^logit_bias: .* not 12"):
        prompt_of(opening(sampling=Sampling(logit_bias=((12, 1.0),))), memoryview(b""), VOCABULARY)


def test_an_opening_with_every_setting_comes_back_and_names_what_is_new() -> None:
    sent = opening(sampling=EVERY_SETTING, top_logprobs=0, schema_bytes=7)
    assert Opening.from_header(sent.to_header(), stages=1, max_sequence=9) == sent
    assert set(sent.newer) == {
        *(
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "top_logprobs",
            "schema",
        )
    }
    plain = opening(sampling=Sampling(temperature=1.0, top_k=3, top_p=0.5, seed=3), answered=0)
    assert plain.newer == () and set(plain.to_header()) == {
        *("session", "route", "prompt_length", "max_tokens", "sampling", "logits")
    }
    assert set(plain.to_header()["sampling"]) == {"temperature", "top_k", "top_p", "seed"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("answered", 3), ("answered", -1), ("top_logprobs", 21), ("schema", -1), ("schema", 1 << 17)],
)
def test_an_opening_out_of_range_is_refused(field: str, value: int) -> None:
    with pytest.raises(JobError, match=f"^{field}: "):
        Opening.from_header({**opening().to_header(), field: value}, stages=1, max_sequence=9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.01),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((i, 1.0) for i in range(MAX_BIASES + 1))),
    ],
)
def test_settings_out_of_range_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(JobError, match=f"^{field}: "):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    "value",
    [7, [3], [[1]], [[1, "a"]], [["1", 1.0]], [[True, 1.0]], [[1, True]], {"1": 2}, [[1, 1.0]] * 2000],
)
def test_a_bias_off_the_wire_is_checked_for_its_form(value: object) -> None:
    with pytest.raises(JobError, match=r"^logit_bias: "):
        Sampling.from_header({"logit_bias": value})
    assert Sampling.from_header(EVERY_SETTING.to_header()) == EVERY_SETTING


# --- log-probabilities


@settings(max_examples=examples(60))
@given(row=rows, token=st.integers(0, VOCABULARY - 1), count=st.integers(0, 20))
def test_logprobs_are_those_of_the_softmax_best_first_and_lower_ids_of_equals(
    row: torch.Tensor, token: int, count: int
) -> None:
    found = logprobs(row, token, count)
    expected = row.double().log_softmax(0)
    assert found.chosen == float(expected[token])
    order = sorted(range(VOCABULARY), key=lambda i: (-float(expected[i]), i))
    assert found.top == tuple((i, float(expected[i])) for i in order[:count])


def test_logprobs_have_a_floor_and_no_nonsense() -> None:
    assert logprobs(torch.tensor([0.0, -math.inf]), 1, 2).top == ((0, 0.0), (1, -9999.0))
    with pytest.raises(JobFailed, match="NaN"):
        logprobs(torch.tensor([0.0, math.nan]), 0, 0)
