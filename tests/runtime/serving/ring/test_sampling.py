from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.sampling import guess, sample, uniform

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.5, -4.0])


def draws(sampling: Sampling, count: int = 400) -> list[int]:
    return [sample(LOGITS, sampling, position) for position in range(count)]


def test_temperature_zero_takes_the_most_probable_whatever_else_is_set() -> None:
    assert set(draws(Sampling(top_k=3, top_p=0.1, seed=4), 20)) == {1}


def test_a_draw_depends_on_seed_and_position_and_on_nothing_else() -> None:
    one = draws(Sampling(temperature=1.0, seed=7))
    assert one == draws(Sampling(temperature=1.0, seed=7))
    assert one != draws(Sampling(temperature=1.0, seed=8))
    assert len(set(one)) > 2


def test_frequencies_follow_the_softmax() -> None:
    count = 20_000
    found = torch.bincount(torch.tensor(draws(Sampling(temperature=2.0, seed=1), count)), minlength=5) / count
    expected = (LOGITS.double() / 2.0).softmax(0)
    assert float((found - expected).abs().max()) < 5 * 0.5 / math.sqrt(count)


@pytest.mark.parametrize(("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (99, {0, 1, 2, 3, 4})])
def test_top_k_keeps_the_k_most_probable(top_k: int, kept: set[int]) -> None:
    assert set(draws(Sampling(temperature=5.0, top_k=top_k, seed=3), 400)) == kept


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    # probabilities at temperature 1, sorted: 1 -> .54, 3 -> .33, 2 -> .07, 0 -> .03
    assert set(draws(Sampling(temperature=1.0, top_p=0.5, seed=3))) == {1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.6, seed=3))) == {1, 3}
    assert set(draws(Sampling(temperature=1.0, top_p=0.9, seed=3))) == {1, 2, 3}


def test_top_k_and_top_p_together_renormalise_within_the_k() -> None:
    # of the two that top_k keeps, token 1 has 0.62 of the probability: enough for top_p alone
    assert set(draws(Sampling(temperature=1.0, top_k=2, top_p=0.6, seed=3))) == {1}


@settings(max_examples=examples(60))
@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 10**6),
)
def test_every_draw_is_a_token_with_probability(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> None:
    row = torch.tensor(logits)
    token = sample(row, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed), position)
    assert 0 <= token < len(logits)
    if top_k:
        assert int((row > row[token]).sum()) < top_k


@settings(max_examples=examples(60))
@given(
    spread=st.floats(0, 12),
    count=st.integers(1, 3000),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.001, 1.0, exclude_max=True),
    decimals=st.integers(0, 3),
)
def test_what_may_be_drawn_is_what_a_whole_sort_gives(
    spread: float, count: int, top_k: int, top_p: float, decimals: int
) -> None:
    made = torch.Generator().manual_seed(count)
    row = (spread * torch.randn(count, generator=made)).round(decimals=decimals)  # some are equal
    order = row.sort(descending=True, stable=True).indices[: top_k or count]
    probabilities = row.double()[order].softmax(0)
    allowed = order[(probabilities.cumsum(0) - probabilities) < top_p * (1 - 1e-12)]
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=count)
    drawn = {sample(row, sampling, position) for position in range(60)}
    assert drawn <= {*order[: len(allowed) + 1].tolist()}
    if len(allowed) < 4 and probabilities[: len(allowed)].min() > 0.1 * probabilities[: len(allowed)].sum():
        assert {*allowed.tolist()} <= drawn


def test_uniform_is_fixed_for_ever() -> None:
    values = [uniform(5, i) for i in range(2000)]
    assert min(values) >= 0.0 and max(values) < 1.0
    assert abs(sum(values) / len(values) - 0.5) < 0.03
    # Another value here would change every seeded answer that anybody has kept.
    assert uniform(1, 2) == 0.6434025071674214


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_numbers_are_an_error(temperature: float) -> None:
    with pytest.raises(JobFailed, match="NaN"):
        sample(torch.tensor([0.0, float("nan"), 1.0]), Sampling(temperature=temperature), 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_name_the_field(field: str, value: float) -> None:
    with pytest.raises(JobError, match=f"^{field}: "):
        Sampling(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("temperature", "hot"), ("top_k", 1.5), ("seed", True)])
def test_settings_off_the_wire_are_checked_for_their_type(field: str, value: object) -> None:
    with pytest.raises(JobError, match=f"^{field}: "):
        Sampling.from_header({field: value})
    assert Sampling.from_header(Sampling(temperature=0.5, seed=9).to_header()) == Sampling(
        temperature=0.5, seed=9
    )


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_p=0.8, top_k=40, seed=4)]
)
def test_a_guess_of_a_draw_is_right_more_often_than_the_likeliest_token(sampling: Sampling) -> None:
    made = torch.Generator().manual_seed(0)
    guessed = likeliest = 0
    for position in range(400):
        logits = 1.5 * torch.randn(20, generator=made)
        smaller = logits + 0.3 * torch.randn(20, generator=made)
        token = sample(logits, sampling, position)
        guessed += guess(sampling, smaller, position) == token
        likeliest += int(smaller.argmax()) == token
    assert guessed > 1.05 * likeliest, (guessed, likeliest)


def test_a_guess_without_temperature_is_the_likeliest_token_whatever_is_penalised() -> None:
    assert guess(Sampling(repetition_penalty=2.0, seed=1), LOGITS, 5) == 1
    assert guess(Sampling(temperature=1e-6, frequency_penalty=1.0, seed=1), LOGITS, 5) == 1
