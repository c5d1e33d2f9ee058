"""Any peer answers for any model: from a prompt to a stream of tokens, by way of the ring of stages.

The gateway opens a session on every stage at once, hands the prompt to the first, and then only listens: tokens
come from the last stage. Its link to each stage is also how it learns that one has vanished, and how the stages
learn that it has. What then happens is in `fusion.runtime.serving.answers.generation`: here are the requests and the clients.

    /fusion/generate/1   generate {model, prompt: "text" | "ids", max_tokens, temperature, top_k, top_p, seed,
                         logits, answered, guesses} + the prompt; the answer is `token` {index, id, text} (+ logits) for each
                         token, then `done` {text, finish, prompt_tokens, cached_tokens, route, seconds}, or one `error` {message};
                         of a model that is not for everybody also {closed: its job, ask: peers that take part}, and
                         `generate` may show {grants}
    /fusion/generate/2   the same, and {min_p, repetition_penalty, frequency_penalty, presence_penalty, logit_bias,
                         top_logprobs, stop} and the prompts "chat" and "features" (of {features} bytes, then ids), of which /1 says
                         nothing; `token` has {logprob, top_logprobs}. "text+schema" and so on: a schema of {schema} bytes
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
from fusion.runtime.serving.answers.clients import Arrivals, answer_while_there, send, send_error
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

# Of one client at once, while others have some: what each costs this peer is not shared out otherwise.
ANSWERS_BESIDE = 16
ANSWER_BYTES = 256 << 10  # that an answer takes here beside its prompt
LARGE_PROMPTS = 16  # over UNASKED_BYTES, on their way here at once
KNOWN_USERS = 4096  # that are told apart; those that asked last
IDLE_SECONDS = 30.0  # without a token, before an answer gives way to any other
BUSY = "this peer answers as many requests as it can, and others have fewer: ask again later, or ask another peer"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    max_sessions: int = 256
    failover: FailoverConfig = field(default_factory=FailoverConfig)

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise ValueError("max_sessions must be above 0")


class Gateway:
    """Runs generations; `attend` does so for a client on the other side of a stream."""

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
        self._catalog = Catalog(context, self._sessions.through)
        self.texts = ModelTexts()
        clock = context.clock.monotonic
        self._answers = Turns(clock, self._config.max_sessions * ANSWER_BYTES, IDLE_SECONDS)
        self._arriving = Arrivals(clock, LARGE_PROMPTS)
        self._reports = OwnerReports(context.takeover, self._catalog.routes.newer)
        # Stages are told that one is the same, and not who
        self._users: LRUCache[PeerId, int] = LRUCache(KNOWN_USERS)
        self._numbers = count(1)

    async def aclose(self) -> None:
        await self._reports.aclose()
        await self._sessions.aclose()
        await self._catalog.aclose()
        self.texts.close()

    async def generate(
        self, request: GenerateRequest, client: PeerId | None = None, holder: PeerId | None = None
    ) -> AsyncGenerator[PromptPiece | Piece | Answer, None]:
        """Pieces, first those of the prompt where it is told too, then one Answer. `client`: who asks, if not we ourselves; `holder`: whose share of the stages it takes, and
        with whose others it may begin alike, if not the client's. Raises JobError (the request), NotAdmitted, NoRoute, JobFailed (a stage), SwarmError.

        Close the iterator (`contextlib.aclosing`) to stop: that frees the session on every stage.
        """
        began = self._context.clock.monotonic()
        asker = client or self._context.peer_id
        holder = holder or asker
        model = await self._catalog.find(request.model)
        await self._catalog.check_asker(model, asker, request.grants)
        check_answerable(model, request)
        ids = list(request.prompt_ids or ())
        if request.prompt is not None:
            given, plain = request.prompt, not request.chat
            ids = await self.texts.of_prompt(model, holder, model.text.encode, given, plain=plain)
        task = task_of(model, request, ids, holder, self._context.random.randrange)
        task = replace(task, user=self._user(holder))
        stops, least = request.stop, request.ends.min_tokens
        text = await self.texts.of_answer(model, holder, AnswerText, model.text, task.prompt, stops, least)
        tokens, grammar = list(request.answered), None
        if request.schema:
            answered = [token for token in tokens if token not in model.serve.end_tokens]
            grammar = await self._open_grammar(model.job, model.manifest, request.schema, answered, holder)
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
        """Of the `prompt`, where it is told, and of the tokens that the user does not have yet; that which a stop text ends in
        once every stage is free."""
        model, had = task.model, task.answered
        if prompt is not None:
            for unscored in prompt.unscored():
                yield await self._told(prompt, unscored, generation)
        if had:  # as many as a prompt may have; an end token is not text
            had_text = had[:-1] if task.ends_with(had[-1], len(had) - 1) else had
            await self.texts.of_prompt(model, task.holder, text.read, had_text)
        last: Piece | None = None
        async with aclosing(generation.tokens()) as chosen:
            index = len(had) - 1
            while (token := None if text.stopped else await anext(chosen, None)) is not None:
                if isinstance(token, PromptLogprobs):
                    assert prompt is not None, "nobody else asks for it"
                    yield await self._told(prompt, token.logprobs, generation)
                    continue
                index += 1
                ended = generation.finish == "stop" and task.ends_with(token.id, index)
                shown = ""
                if not ended:
                    shown = await self.texts.of_answer(model, task.holder, text.push, token.id)
                begins = text.ends if ended else text.begins
                begins += 0 if prompt is None else prompt.text.length
                last = token.piece(index, shown, begins, _peers(generation))
                if not text.stopped:
                    yield last
        if not text.stopped:
            await self.texts.of_answer(model, task.holder, text.finish)
        elif last is not None:
            yield last

    async def _told(
        self, prompt: _Prompt, logprobs: Sequence[Logprobs | None], generation: Generation
    ) -> PromptPiece:
        """Of the next tokens of the prompt, as many as there are `logprobs`, or without any as many as are told at once."""
        task = prompt.task
        ids = prompt.next(len(logprobs) or PROMPT_PIECE_TOKENS)
        last = prompt.at == len(task.prompt)
        read = prompt.text.read
        shown, begins = await self.texts.of_answer(task.model, task.holder, read, ids, last=last)
        return PromptPiece(
            ids=ids, text=shown, begins=begins, logprobs=tuple(logprobs), route=_peers(generation)
        )

    def _user(self, holder: PeerId) -> int:
        number = self._users.get(holder)
        if number is None:
            number = self._users[holder] = next(self._numbers)
        return number

    @property
    def catalog(self) -> Catalog:
        """The models that there are."""
        return self._catalog

    # --- clients

    def place(self, holder: PeerId, prompt_bytes: int) -> Turn | None:
        """Among the answers that we give at once, for whoever `holder` is; done when it has to be given up. None where
        there is none, or `holder` has ANSWERS_BESIDE while others have some. Every one that is taken ends in `leave`."""
        if self._answers.count(holder) >= ANSWERS_BESIDE and not self._answers.alone(holder):
            return None
        return self._answers.turn(holder, ANSWER_BYTES + prompt_bytes)

    def has_place_for(self, prompt_bytes: int) -> bool:
        """Whether there ever is a place for such an answer."""
        return self._answers.fits(ANSWER_BYTES + prompt_bytes)

    def use(self, place: Turn) -> None:
        """The answer goes on."""
        self._answers.use(place)

    def leave(self, place: Turn, *, completed: bool) -> None:
        """The answer has ended; `completed`: as it should."""
        self._answers.release(place, completed=completed)

    async def attend(self, client: Stream) -> None:
        """Answer one request of a client. It vanishing, or saying anything more, ends the generation; so does another
        client that has fewer, where there is not room for both."""
        frame = await self._arriving.first(client)
        if frame is None:
            client.abort()  # which sends it to another peer
            return
        if frame.kind != "generate":
            raise FrameError(f"clients send generate, not {frame.kind!r:.40}")
        place = self.place(client.remote, len(frame.payload))
        if place is None:
            await send_error(client, BUSY)
            return
        await answer_while_there(
            client,
            place,
            self._answer(client, frame, place),
            lambda completed: self.leave(place, completed=completed),
        )
        if place.done():
            await send_error(client, BUSY)

    async def _answer(self, client: Stream, frame: Frame, place: Turn) -> bool:
        """Whether it was given to its end."""
        try:
            request = GenerateRequest.from_frame(frame.header, frame.payload)
            async with aclosing(self.generate(request, client.remote)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        self.use(place)
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
    """A prompt that is told of, and how far it is."""

    task: Task
    text: PromptText
    at: int = 0

    def next(self, count: int) -> tuple[int, ...]:
        """Of its tokens."""
        found = tuple(self.task.prompt[self.at : self.at + count])
        self.at += len(found)
        return found

    def unscored(self) -> Iterator[Sequence[None]]:
        """What can be told before any stage runs: the first token, or all of them where there are no log-probabilities."""
        if self.task.prompt_logprobs is not None:
            yield (None,)
        else:
            yield from ((),) * -(-len(self.task.prompt) // PROMPT_PIECE_TOKENS)


def _peers(generation: Generation) -> tuple[PeerId, ...]:
    return tuple(hop.peer for hop in generation.route)


def _done(answer: Answer) -> dict[str, object]:
    """The client has the tokens already; the text is repeated because the last piece of it may be held back."""
    return {
        "text": answer.text,
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        **({"cached_tokens": answer.cached_tokens} if answer.cached_tokens else {}),
        "route": list(answer.route),
        "seconds": answer.seconds,
    }
