"""From what a client says to what a gateway is asked: one request for each answer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.schema import Settings
from fusion.runtime.serving.requests.request import MAX_SEED, GenerateRequest, Sampling

TEMPERATURE = 1.0  # where none is given, as with OpenAI


def requests(
    body: Settings,
    model: str,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: Sequence[int],
    top_logprobs: int | None,
    random: Random,
) -> list[GenerateRequest]:
    """For each prompt as many answers as were asked for. Answer i to a prompt is drawn with `seed` + i, so that each of them
    can be had again by itself. JobError names a setting that is out of range."""
    first = random.randrange(MAX_SEED) if body.seed is None else body.seed
    samplings = [_sampling(body, (first + i) & MAX_SEED) for i in range(body.answers)]
    for name in (
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "stop",
    ):
        if getattr(body, name):
            raise ApiError(400, f"{name}: not known here yet", param=name)
    if top_logprobs is not None:
        raise ApiError(400, "logprobs: not known here yet", param="logprobs")
    return [
        GenerateRequest(model=model, prompt_ids=prompt, max_tokens=most, sampling=sampling)
        for prompt, most in zip(prompts, max_tokens, strict=True)
        for sampling in samplings
    ]


def _sampling(body: Settings, seed: int) -> Sampling:
    return Sampling(
        temperature=TEMPERATURE if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=seed,
    )
