"""What is to be answered, and what the model is given to read of it: a prompt, and for an encoder-decoder a source beside
that. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.grammar.matcher import GrammarSession
from fusion.runtime.serving.requests.ends import MODELS_OWN, Ends
from fusion.runtime.serving.requests.header_fields import pack_tokens
from fusion.runtime.serving.requests.request import GenerateRequest, check_answered, check_prompt, check_size
from fusion.runtime.serving.requests.sampling_params import Sampling, check_biases
from fusion.runtime.serving.ring.session import check_source
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

# How an answer that has these tokens already stands with a schema: of a job, for a client.
OpenGrammar = Callable[[JobId, Manifest, str, Sequence[int], PeerId], Awaitable[GrammarSession]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be answered."""

    model: ServedModel
    prompt: Sequence[int]
    answered: Sequence[int]  # tokens that the user has already, from another gateway
    max_tokens: int  # those included
    sampling: Sampling
    logits: bool
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same of the prompt's own tokens
    ends: Ends = MODELS_OWN  # which tokens end it, and from when on
    holder: PeerId  # whose it is: stages may have the beginning of it from another one of the same holder
    user: int = 0  # who asks, as stages are told
    guesses: bool = True
    schema: bytes = b""  # UTF-8: of the JSON that the answer is to be; b"": any text
    grammar: GrammarSession | None = None  # how the answer stands with it
    source: bytes = b""  # what an encoder-decoder reads first, of so many ids or frames
    source_length: int = 0

    @property
    def scored(self) -> int:
        """How many of the prompt's tokens the stages have to tell of: nothing comes before the first one."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - 1

    def ends_with(self, token: int, index: int) -> bool:
        """Whether `token`, number `index` of the answer, ends it and is no text."""
        return self.ends.end_with(token, index, self.model.serve.end_tokens)


@dataclass(frozen=True)
class Reading:
    """`prompt`: the tokens that the answer follows; `source`: what travels with them, of `length` ids or frames."""

    prompt: Sequence[int]
    source: bytes = b""
    length: int = 0


def check_answerable(model: ServedModel, request: GenerateRequest) -> None:
    """JobError, in one line, for a model that generates nothing, or a prompt that is too long for it whatever tokens are made of it."""
    if model.serve.outputs:
        raise JobError(
            f"model: {model.manifest.name} generates nothing; ask it with: fusion-peer run {model.manifest.name}"
        )
    check_size(request, model.serve.longest_prompt)


def task_of(
    model: ServedModel,
    request: GenerateRequest,
    ids: Sequence[int],
    holder: PeerId,
    draw: Callable[[int], int],
) -> Task:
    """What is to be answered, without the grammar and the user. `ids`: of the request's text, or that it gave; `draw` gives a
    number below another, for a seed. JobError, in one line, for what the model cannot answer."""
    serve = model.serve
    read = reading(serve, ids, request.features)
    prompt = list(read.prompt)
    return Task(
        model=model,
        prompt=prompt,
        answered=request.answered,
        max_tokens=tokens_wanted(request, serve, prompt),
        sampling=request.drawn(draw).sampling,
        logits=request.logits,
        top_logprobs=request.top_logprobs,
        prompt_logprobs=request.top_logprobs if request.echo else None,
        ends=request.ends,
        holder=holder,
        guesses=request.guesses,
        schema=request.schema.encode(),
        source=read.source,
        source_length=read.length,
    )


def tokens_wanted(request: GenerateRequest, serve: ServeConfig, prompt: Sequence[int]) -> int:
    """How many tokens the answer that follows `prompt` has at most, those included that the user has. JobError, in one line, for
    what the model cannot answer so."""
    wanted = request.most_tokens
    if request.echo:
        _check_echo(request, serve)
    if request.chat or request.max_tokens is None:
        wanted = min(wanted, max(1, serve.max_sequence - len(prompt)))
    check_prompt(prompt, wanted, serve.vocabulary, serve.max_sequence)
    check_answered(request.answered, wanted, serve.vocabulary)
    check_biases(request.sampling, serve.vocabulary)
    request.ends.check_vocabulary(serve.vocabulary)
    return wanted


def _check_echo(request: GenerateRequest, serve: ServeConfig) -> None:
    """JobError, in one line, where the prompt's own tokens cannot be told of."""
    if serve.source is not None:
        raise JobError("echo: this model's encoder reads the prompt, and no token of it follows another")
    if request.top_logprobs is not None and serve.cache != "kv":
        raise JobError("echo: no logprobs beside it of this model, which is served without a KV cache")


def reading(serve: ServeConfig, ids: Sequence[int], features: bytes) -> Reading:
    """`ids`: of the request's text, or that it gave. JobError, in one line, where the model cannot read that."""
    config = serve.source
    if config is None:
        if features:
            raise JobError("features: this model takes none; give a prompt")
        return Reading(ids)
    if not config.channels:
        if features:
            raise JobError("features: this model reads text; give a prompt")
        check_source(len(ids), config)
        if any(not 0 <= token < serve.vocabulary for token in ids):
            raise JobError(f"prompt_ids: this model's tokens are 0 to {serve.vocabulary - 1}")
        return Reading(config.start, pack_tokens(ids), len(ids))
    if len(features) != config.length * config.unit_bytes:
        raise JobError(
            f"features: this model takes {config.channels} channels of {config.length} frames in float32, "
            f"{config.length * config.unit_bytes} bytes, not {len(features)}"
        )
    return Reading(ids or config.start, features, config.length)
