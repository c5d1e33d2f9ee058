"""From a request body to requests for the gateway: one for each completion."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.generation_fields import Settings
from fusion.runtime.serving.requests.ends import Ends
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.runtime.serving.requests.sampling_params import MAX_SEED, Sampling

TEMPERATURE = 1.0  # OpenAI's default
LEAST_TOP_P = 1e-9  # in place of 0: it leaves only the most probable token
MAX_LOGPROBS = 1 << 21  # of a response that is not streamed: 150 MiB


def generate_requests(
    body: Settings,
    model: str,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: Sequence[int],
    top_logprobs: int | None,
    random: Random,
) -> list[GenerateRequest]:
    """`body.answers` requests for each prompt. Completion i of a prompt is sampled with `seed` + i, so that each can be reproduced
    by itself. `model`: job id; `max_tokens`: of each prompt. JobError and ApiError name a setting that is out of range."""
    tokens = sum(max_tokens) + (sum(map(len, prompts)) if body.echoes else 0)
    logprobs = 0 if top_logprobs is None or body.stream else (1 + top_logprobs) * body.answers * tokens
    if logprobs > MAX_LOGPROBS:
        message = (
            f"top_logprobs: {logprobs} log-probabilities, of at most {MAX_LOGPROBS} that are told at once"
        )
        raise ApiError(400, f"{message}: ask for a stream, or for fewer tokens", param="top_logprobs")
    first = random.randrange(MAX_SEED) if body.seed is None else body.seed
    schema = body.json_schema
    ends = Ends(
        ignore_eos=body.ignore_eos is True,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )
    samplings = [_sampling(body, (first + i) & MAX_SEED) for i in range(body.answers)]
    return [
        GenerateRequest(
            model=model,
            prompt_ids=prompt,
            max_tokens=limit,
            sampling=sampling,
            top_logprobs=top_logprobs,
            stop=body.stop or (),
            ends=ends,
            schema=schema,
            guesses=body.guesses is not False,
            echo=body.echoes,
        )
        for prompt, limit in zip(prompts, max_tokens, strict=True)
        for sampling in samplings
    ]


def _sampling(body: Settings, seed: int) -> Sampling:
    return Sampling(
        temperature=TEMPERATURE if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else max(LEAST_TOP_P, body.top_p),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=tuple((_token(name), bias) for name, bias in (body.logit_bias or {}).items()),
        seed=seed,
    )


def _token(name: str) -> int:
    if not name.isascii() or not name.isdigit() or len(name) > 18:
        raise ApiError(400, f"logit_bias: {name[:40]!r} is no token id", param="logit_bias")
    return int(name)
