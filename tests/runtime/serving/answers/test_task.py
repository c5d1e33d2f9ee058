"""What is to be answered: pure."""

from __future__ import annotations

import pytest

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.serving.answers.task import tokens_wanted
from fusion.runtime.serving.requests.request import DEFAULT_MAX_TOKENS, GenerateRequest
from fusion.runtime.serving.requests.sampling_params import Sampling

SERVE = ServeConfig(cache="kv", max_sequence=100, vocabulary=50)


def test_how_many_tokens_an_answer_has_at_most() -> None:
    assert tokens_wanted(GenerateRequest(prompt="a"), SERVE, [1] * 10) == DEFAULT_MAX_TOKENS
    assert tokens_wanted(GenerateRequest(prompt="a"), SERVE, [1] * 90) == 10
    assert tokens_wanted(GenerateRequest(prompt="a", max_tokens=90), SERVE, [1] * 10) == 90
    chat = GenerateRequest(prompt="a", chat=True, max_tokens=1000)
    assert tokens_wanted(chat, SERVE, [1] * 10) == 90


@pytest.mark.parametrize(
    ("request_", "prompt", "says"),
    [
        (GenerateRequest(prompt="a", max_tokens=91), [1] * 10, "max_tokens: .* at most 90"),
        (GenerateRequest(prompt="a"), [1] * 100, "prompt: the model takes 100 positions"),
        (GenerateRequest(prompt="a"), [], "prompt: at least one token"),
        (GenerateRequest(prompt="a"), [50], "prompt_ids: this model's tokens are 0 to 49"),
        (GenerateRequest(prompt="a", answered=(50,)), [1], "answered: this model's tokens are 0 to 49"),
        (GenerateRequest(prompt="a", answered=(1, 1), max_tokens=1), [1], "answered: 2 tokens"),
        (GenerateRequest(prompt="a", sampling=Sampling(logit_bias=((50, 1.0),))), [1], "logit_bias: "),
    ],
)
def test_what_cannot_be_answered_so_is_one_line(
    request_: GenerateRequest, prompt: list[int], says: str
) -> None:
    with pytest.raises(JobError, match=f"^{says}"):
        tokens_wanted(request_, SERVE, prompt)
