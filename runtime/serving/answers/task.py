"""One completion to generate, and the model's inputs: a prompt, and a source for an encoder-decoder. Pure."""

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

# Opens a completion that is constrained by a schema and has these tokens already: (job, manifest, schema, tokens, tenant).
OpenGrammar = Callable[[JobId, Manifest, str, Sequence[int], PeerId], Awaitable[GrammarSession]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One completion to generate."""

    model: ServedModel
    prompt: Sequence[int]
    answered: Sequence[int]  # tokens that the client has already, from another gateway
    max_tokens: int  # including `answered`
    sampling: Sampling
    logits: bool
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same of the prompt's own tokens
    ends: Ends = MODELS_OWN  # which tokens end it, and from which index on
    tenant: PeerId  # whose prefix cache it shares
    user: int = 0  # the tenant's number, for fair scheduling at the stages
    guesses: bool = True
    schema: bytes = b""  # that constrains the completion, UTF-8; b"": any text
    grammar: GrammarSession | None = None  # its state under the schema
    source: bytes = b""  # input of an encoder, of `source_length` ids or frames
    source_length: int = 0

    @property
    def scored(self) -> int:
        """How many of the prompt's tokens need log-probabilities: all but the first."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - 1

    def ends_with(self, token: int, index: int) -> bool:
        """Whether `token`, number `index` of the completion, ends it and is not part of the text."""
        return self.ends.end_with(token, index, self.model.serve.end_tokens)


@dataclass(frozen=True)
class Reading:
    """Inputs of the model. `prompt`: tokens of the decoder; `source`: input of the encoder, `length` ids or frames."""

    prompt: Sequence[int]
    source: bytes = b""
    length: int = 0


def check_answerable(model: ServedModel, request: GenerateRequest) -> None:
    """JobError, in one line, for a model that does not generate, or a prompt's text that is too long for any tokenization to fit."""
    if model.serve.outputs:
        raise JobError(
            f"model: {model.manifest.name} generates nothing; ask it with: fusion-peer run {model.manifest.name}"
        )
    check_size(request, model.serve.longest_prompt)


def task_of(
    model: ServedModel,
    request: GenerateRequest,
    ids: Sequence[int],
    tenant: PeerId,
    draw: Callable[[int], int],
) -> Task:
    """The task of a request, without grammar and user. `ids`: the prompt's tokens; `draw` returns a number below its argument, for a seed.
    JobError, in one line, for what the model cannot serve."""
    serve = model.serve
    inputs = reading(serve, ids, request.features)
    prompt = list(inputs.prompt)
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
        tenant=tenant,
        guesses=request.guesses,
        schema=request.schema.encode(),
        source=inputs.source,
        source_length=inputs.length,
    )


def tokens_wanted(request: GenerateRequest, serve: ServeConfig, prompt: Sequence[int]) -> int:
    """max_tokens of the completion, including those that the client has already. JobError, in one line, for a request that the model
    cannot serve."""
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
    """JobError, in one line, where the prompt cannot be echoed."""
    if serve.source is not None:
        raise JobError("echo: this model's encoder reads the prompt, and no token of it follows another")
    if request.top_logprobs is not None and serve.cache != "kv":
        raise JobError("echo: no logprobs beside it of this model, which is served without a KV cache")


def reading(serve: ServeConfig, ids: Sequence[int], features: bytes) -> Reading:
    """The model's inputs. `ids`: the prompt's tokens. JobError, in one line, where the model cannot take them."""
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
