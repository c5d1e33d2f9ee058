"""Any peer is a gateway for any model: from a prompt to a stream of tokens, through the ring of stages.

The gateway opens a session on every stage at once, sends the prompt to the first, and then only receives: tokens come from the last
stage. The end of its link to a stage tells the gateway that the stage has failed, and the stage that the gateway has. Failover is
in `fusion.runtime.serving.answers.generation`; this module has requests and clients.

    /fusion/generate/1   generate {model, prompt: "text" | "ids", max_tokens, temperature, top_k, top_p, seed,
                         logits, answered, guesses} + the prompt; the answer is `token` {index, id, text} (+ logits) for each
                         token, then `done` {text, finish, prompt_tokens, cached_tokens, route, seconds}, or one `error` {message};
                         of a job that is not open to all also {closed: its job, ask: peers that take part}, and
                         `generate` may have {grants}
    /fusion/generate/2   the same, and {min_p, repetition_penalty, frequency_penalty, presence_penalty, logit_bias,
                         top_logprobs, stop} and the prompts "chat" and "features" (of {features} bytes, then ids), which /1 does
                         not have; `token` has {logprob, top_logprobs}. "text+schema" and so on: a schema of {schema} bytes
                         comes before the prompt. "text+ends" and so on: with {ignore_eos, min_tokens, stop_token_ids}
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count

from cachetools import LRUCache

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed, NoRoute
from fusion.runtime.serving.answers.answer_text import AnswerText, PromptText
from fusion.runtime.serving.answers.catalog import Catalog
from fusion.runtime.serving.answers.clients import Arrivals, answer_until_disconnect, send, send_error
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.answers.gateway_session import GatewaySessions
from fusion.runtime.serving.answers.generation import Generation, PromptLogprobs
from fusion.runtime.serving.answers.owner_reports import OwnerReports
from fusion.runtime.serving.answers.task import OpenGrammar, Task, check_answerable, task_of
from fusion.runtime.serving.answers.text_threads import ModelTexts
from fusion.runtime.serving.requests.request import (
    PROMPT_PIECE_TOKENS,
    Answer,
    GenerateRequest,
    Logprobs,
    Piece,
    PromptPiece,
)
from fusion.swarm.errors import FrameError, NotAdmitted
from fusion.swarm.transport import Frame, PeerId, Stream
from fusion.swarm.turns import Turn, Turns

# Completions of one tenant at once while others have some: memory alone would not share this peer's CPU fairly.
ANSWERS_BESIDE = 16
ANSWER_BYTES = 256 << 10  # of memory of a completion here, beside its prompt
LARGE_PROMPTS = 16  # over UNASKED_BYTES, received at once
KNOWN_USERS = 4096  # tenants that have a number; least recently used ones lose theirs
IDLE_SECONDS = 30.0  # without a token, before a completion may be preempted for any other
BUSY = "this peer answers as many requests as it can, and others have fewer: ask again later, or ask another peer"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    max_sessions: int = 256
    failover: FailoverConfig = field(default_factory=FailoverConfig)

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise ValueError("max_sessions must be above 0")


class Gateway:
    """Generates completions; `attend` does so for a client at the other end of a stream."""

    def __init__(self, context: Context, grammar: OpenGrammar, config: GatewayConfig | None = None) -> None:
        self._context = context
        self._open_grammar = grammar
        self._config = config or GatewayConfig()
        self._sessions = GatewaySessions(
            context.transport,
            self._config.failover.reach_seconds,
            context.clock.monotonic,
            context.access.chain,
        )
        self._catalog = Catalog(context, self._sessions.sessions_per_holder)
        self.texts = ModelTexts()
        clock = context.clock.monotonic
        self._answers = Turns(clock, self._config.max_sessions * ANSWER_BYTES, IDLE_SECONDS)
        self._arriving = Arrivals(clock, LARGE_PROMPTS)
        self._reports = OwnerReports(context.takeover, self._catalog.routes.newer)
        # Stages get a number for each tenant, not its identity
        self._tenant_numbers: LRUCache[PeerId, int] = LRUCache(KNOWN_USERS)
        self._numbers = count(1)

    async def aclose(self) -> None:
        await self._reports.aclose()
        await self._sessions.aclose()
        await self._catalog.aclose()
        self.texts.close()

    async def generate(
        self, request: GenerateRequest, client: PeerId | None = None, tenant: PeerId | None = None
    ) -> AsyncGenerator[PromptPiece | Piece | Answer, None]:
        """Pieces, first those of the prompt if it is echoed, then one Answer. `client`: who sent the request; None: this peer. `tenant`:
        whose share and prefix cache it uses; by default the client's. Raises JobError (the request), NotAdmitted, NoRoute, JobFailed
        (a stage), SwarmError.

        Close the iterator (`contextlib.aclosing`) to stop: that frees the session on every stage.
        """
        began = self._context.clock.monotonic()
        client_id = client or self._context.peer_id
        tenant = tenant or client_id
        model = await self._catalog.find(request.model)
        await self._catalog.check_client(model, client_id, request.grants)
        check_answerable(model, request)
        ids = list(request.prompt_ids or ())
        if request.prompt is not None:
            given, plain = request.prompt, not request.chat
            ids = await self.texts.of_prompt(model, tenant, model.text.encode, given, plain=plain)
        task = task_of(model, request, ids, tenant, self._context.random.randrange)
        task = replace(task, user=self._tenant_number(tenant))
        stops, least = request.stop, request.ends.min_tokens
        text = await self.texts.of_answer(model, tenant, AnswerText, model.text, task.prompt, stops, least)
        tokens, grammar = list(request.answered), None
        if request.schema:
            answered = [token for token in tokens if token not in model.serve.end_tokens]
            grammar = await self._open_grammar(model.job, model.manifest, request.schema, answered, tenant)
        with nullcontext() if grammar is None else closing(grammar):
            generation = Generation(
                self._context,
                replace(task, grammar=grammar),
                self._sessions,
                self._catalog.routes,
                self._reports.suspect,
                self._config.failover,
            )
            prompt = _Prompt(task, PromptText(model.text)) if request.echo else None
            async with aclosing(self._pieces(task, generation, text, prompt)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        tokens.append(piece.id)
                    yield piece
        yield Answer(
            text=text.whole,
            tokens=tuple(tokens),
            finish="stop" if text.stopped else generation.finish,
            prompt_tokens=max(len(ids), len(task.prompt)),
            cached_tokens=generation.cached_tokens,
            route=_peers(generation),
            seconds=self._context.clock.monotonic() - began,
        )

    async def _pieces(
        self, task: Task, generation: Generation, text: AnswerText, prompt: _Prompt | None
    ) -> AsyncGenerator[PromptPiece | Piece, None]:
        """Pieces of the `prompt`, if it is echoed, then of the tokens that the client does not have yet. The piece in which a stop string
        ends comes once the session is closed on every stage."""
        model, answered = task.model, task.answered
        if prompt is not None:
            for unscored in prompt.unscored():
                yield await self._prompt_piece(prompt, unscored, generation)
        if answered:  # may be as long as a prompt; an end token is not text
            answered_text = answered[:-1] if task.ends_with(answered[-1], len(answered) - 1) else answered
            await self.texts.of_prompt(model, task.tenant, text.read, answered_text)
        last: Piece | None = None
        async with aclosing(generation.tokens()) as chosen:
            index = len(answered) - 1
            while (token := None if text.stopped else await anext(chosen, None)) is not None:
                if isinstance(token, PromptLogprobs):
                    assert prompt is not None, "nobody else asks for it"
                    yield await self._prompt_piece(prompt, token.logprobs, generation)
                    continue
                index += 1
                ended = generation.finish == "stop" and task.ends_with(token.id, index)
                shown = ""
                if not ended:
                    shown = await self.texts.of_answer(model, task.tenant, text.push, token.id)
                begins = text.ends if ended else text.begins
                begins += 0 if prompt is None else prompt.text.length
                last = token.piece(index, shown, begins, _peers(generation))
                if not text.stopped:
                    yield last
        if not text.stopped:
            await self.texts.of_answer(model, task.tenant, text.finish)
        elif last is not None:
            yield last

    async def _prompt_piece(
        self, prompt: _Prompt, logprobs: Sequence[Logprobs | None], generation: Generation
    ) -> PromptPiece:
        """The piece of the next tokens of the prompt: as many as there are `logprobs`, or PROMPT_PIECE_TOKENS without any."""
        task = prompt.task
        ids = prompt.next(len(logprobs) or PROMPT_PIECE_TOKENS)
        last = prompt.at == len(task.prompt)
        read = prompt.text.read
        shown, begins = await self.texts.of_answer(task.model, task.tenant, read, ids, last=last)
        return PromptPiece(
            ids=ids, text=shown, begins=begins, logprobs=tuple(logprobs), route=_peers(generation)
        )

    def _tenant_number(self, tenant: PeerId) -> int:
        number = self._tenant_numbers.get(tenant)
        if number is None:
            number = self._tenant_numbers[tenant] = next(self._numbers)
        return number

    @property
    def catalog(self) -> Catalog:
        """The served models and their routes."""
        return self._catalog

    # --- clients

    def admit(self, tenant: PeerId, prompt_bytes: int) -> Turn | None:
        """Admit a completion of the tenant. The result is done when it is preempted; None: not admitted, as the gateway is full, or the
        tenant has ANSWERS_BESIDE while others have some. Each that is admitted needs a `release`."""
        if self._answers.count(tenant) >= ANSWERS_BESIDE and not self._answers.alone(tenant):
            return None
        return self._answers.turn(tenant, ANSWER_BYTES + prompt_bytes)

    def can_admit(self, prompt_bytes: int) -> bool:
        """Whether a completion of this size could be admitted by an idle gateway."""
        return self._answers.fits(ANSWER_BYTES + prompt_bytes)

    def touch(self, turn: Turn) -> None:
        """The completion makes progress."""
        self._answers.use(turn)

    def release(self, turn: Turn, *, completed: bool) -> None:
        """The completion has ended; `completed`: to its end."""
        self._answers.release(turn, completed=completed)

    async def attend(self, client: Stream) -> None:
        """Handle one request of a client. The generation ends if the client vanishes or sends anything more, or if it is preempted for
        a client with fewer requests."""
        frame = await self._arriving.first(client)
        if frame is None:
            client.abort()  # it then tries another peer
            return
        if frame.kind != "generate":
            raise FrameError(f"clients send generate, not {frame.kind!r:.40}")
        turn = self.admit(client.remote, len(frame.payload))
        if turn is None:
            await send_error(client, BUSY)
            return
        await answer_until_disconnect(
            client,
            turn,
            self._answer(client, frame, turn),
            lambda completed: self.release(turn, completed=completed),
        )
        if turn.done():
            await send_error(client, BUSY)

    async def _answer(self, client: Stream, frame: Frame, turn: Turn) -> bool:
        """Whether the completion was sent to its end."""
        try:
            request = GenerateRequest.from_frame(frame.header, frame.payload)
            async with aclosing(self.generate(request, client.remote)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        self.touch(turn)
                        await send(client, "token", piece.to_header(), [piece.logits])
                    elif isinstance(piece, Answer):
                        await send(client, "done", _done(piece))
        except NotAdmitted as error:
            await send_error(client, str(error), closed=error.job, ask=list(error.ask))
            return False
        except (JobError, JobFailed, NoRoute) as error:
            await send_error(client, str(error))
            return False
        return True


@dataclass
class _Prompt:
    """An echoed prompt, and how much of it has been returned."""

    task: Task
    text: PromptText
    at: int = 0

    def next(self, count: int) -> tuple[int, ...]:
        """Its next tokens."""
        ids = tuple(self.task.prompt[self.at : self.at + count])
        self.at += len(ids)
        return ids

    def unscored(self) -> Iterator[Sequence[None]]:
        """Pieces that need no stage: the first token, or all of them where no log-probabilities are requested."""
        if self.task.prompt_logprobs is not None:
            yield (None,)
        else:
            yield from ((),) * -(-len(self.task.prompt) // PROMPT_PIECE_TOKENS)


def _peers(generation: Generation) -> tuple[PeerId, ...]:
    return tuple(hop.peer for hop in generation.route)


def _done(answer: Answer) -> dict[str, object]:
    """Header of the `done` frame. The client has the tokens already; the whole text is repeated as its last piece may be held back."""
    return {
        "text": answer.text,
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        **({"cached_tokens": answer.cached_tokens} if answer.cached_tokens else {}),
        "route": list(answer.route),
        "seconds": answer.seconds,
    }
