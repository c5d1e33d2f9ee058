"""One generation as the stages see it: what they are told once, and which positions run next.

No I/O here: the shells are `fusion.runtime.serving.answers.gateway` (the whole generation) and `fusion.runtime.serving.ring.stage` (one stage's
part of it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import SourceConfig
from fusion.runtime.serving.requests.ends import MODELS_OWN, Ends
from fusion.runtime.serving.requests.header_fields import whole
from fusion.runtime.serving.requests.json_schema import MAX_SCHEMA_BYTES
from fusion.runtime.serving.requests.prompt_logprobs import unpacked
from fusion.runtime.serving.requests.request import Finish, Logprobs, check_top_logprobs
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.guesses import LEAST_ALONE, MAX_GUESSES, Allowance, Drafter
from fusion.runtime.serving.ring.prefix import checked_chain, positions_of
from fusion.swarm.errors import FrameError
from fusion.swarm.transport import PeerId

SessionId = NewType("SessionId", str)


# What a stage may report of a session that has failed; the gateway's words for it: `fusion.runtime.serving.answers.failover`.
FailedReason = Literal["vanished", "moved", "full", "broken", "grammar", "refused"]


@dataclass(frozen=True)
class Hop:
    """Who runs a stage, and under which term of its claim."""

    peer: PeerId
    term: int


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What the gateway tells every stage of a session once, so that no later frame has to say it again."""

    session: SessionId
    route: tuple[Hop, ...]  # one per stage
    prompt_length: int
    max_tokens: int
    sampling: Sampling
    logits: bool = False
    top_logprobs: int | None = None  # of how many tokens beside the one chosen; None: not of that either
    prompt_logprobs: int | None = None  # the same of the prompt's own tokens
    ends: Ends = MODELS_OWN  # which tokens end the answer, and from when on
    # How many tokens at the end of the prompt belong to the answer: those that sessions before this one gave.
    answered: int = 0
    user: int = 0  # whose of the gateway's clients it is, by a number of the gateway's own; turns are shared between users
    prefix: bytes = b""  # the chain of its first blocks, of which a stage may have keys and values already
    schema_bytes: int = 0  # of the schema that the answer follows, which goes to the last stage; 0: none
    source: int = 0  # ids or frames that an encoder-decoder reads first, which come with the prompt

    @property
    def reads_prompt(self) -> bool:
        """Whether the last stage has to know the tokens so far."""
        return self.sampling.penalises or self.schema_bytes > 0 or self.prompt_logprobs is not None

    @property
    def newer(self) -> tuple[str, ...]:
        """The settings that a last stage of the release before does not know and would pass over, by name. One that knows
        them says so as it opens the session."""
        schema = ("schema",) if self.schema_bytes else ()
        asked = {"top_logprobs": self.top_logprobs, "prompt_logprobs": self.prompt_logprobs}
        logprobs = (name for name, count in asked.items() if count is not None)
        return (*self.sampling.newer, *logprobs, *self.ends.to_header(), *schema)

    def logprobs_of(self, header: Mapping[str, Any], vocabulary: int) -> Logprobs | None:
        """Of a token, where they were asked for. JobError where they are not there, or of tokens that there are not."""
        if self.top_logprobs is None:
            return None
        found = Logprobs.from_header(header, self.top_logprobs)
        if any(token >= vocabulary for token, _ in found.top):
            raise JobError("top_logprobs: tokens that the model does not have")
        return found

    def prompt_logprobs_of(self, position: int, payload: memoryview, vocabulary: int) -> list[Logprobs]:
        """Of the prompt's tokens from `position` on. JobError where they were not asked for, or are of other tokens."""
        if self.prompt_logprobs is None:
            raise JobError("prompt_logprobs: nobody asked for them")
        found = unpacked(payload, min(self.prompt_logprobs, vocabulary), vocabulary)
        if not 0 < position <= self.prompt_length - len(found):
            raise JobError("prompt_logprobs: of tokens that the prompt does not have")
        return found

    @property
    def first(self) -> int:
        """The position of the answer's first token, which sessions before this one may have given."""
        return self.prompt_length - self.answered

    @property
    def capacity(self) -> int:
        """Positions that the KV cache needs room for; the last token is never fed back, one spare is harmless."""
        return self.prompt_length + self.max_tokens

    def finish(self, token: int, position: int, end_tokens: Sequence[int]) -> Finish:
        """Whether the answer ends with `token` at `position` of the sequence, and why."""
        if self.ends.end_with(token, position - self.first, end_tokens):
            return "stop"
        return "length" if position + 1 >= self.capacity else ""

    def to_header(self) -> dict[str, Any]:
        header = {
            "session": self.session,
            "route": [[hop.peer, hop.term] for hop in self.route],
            "prompt_length": self.prompt_length,
            "max_tokens": self.max_tokens,
            "sampling": self.sampling.to_header(),
            "logits": self.logits,
            **self.ends.to_header(),
        }
        if self.top_logprobs is not None:
            header["top_logprobs"] = self.top_logprobs
        if self.prompt_logprobs is not None:
            header["prompt_logprobs"] = self.prompt_logprobs
        if self.answered:
            header["answered"] = self.answered
        if self.user:
            header["user"] = self.user
        if self.prefix:
            header["prefix"] = self.prefix
        if self.schema_bytes:
            header["schema"] = self.schema_bytes
        if self.source:
            header["source"] = self.source
        return header

    @classmethod
    def from_header(
        cls,
        header: Mapping[str, Any],
        *,
        stages: int,
        max_sequence: int,
        source: SourceConfig | None = None,
    ) -> Opening:
        """JobError for anything that is not a session this model can run."""
        session, route, sampling = header.get("session"), header.get("route"), header.get("sampling")
        if not isinstance(session, str) or not 1 <= len(session) <= 64:
            raise JobError("session: a name of 1 to 64 characters")
        if not isinstance(route, list) or len(route) != stages:
            raise JobError(f"route: one [peer, term] for each of {stages} stages")
        if not isinstance(sampling, dict):
            raise JobError("sampling: a table")
        opening = cls(
            session=SessionId(session),
            route=tuple(_hop(entry) for entry in route),
            prompt_length=whole(header, "prompt_length", 0),
            max_tokens=whole(header, "max_tokens", 0),
            sampling=Sampling.from_header(sampling),
            logits=header.get("logits") is True,
            top_logprobs=_count(header, "top_logprobs"),
            prompt_logprobs=_count(header, "prompt_logprobs"),
            ends=Ends.from_header(header),
            answered=whole(header, "answered", 0),
            user=whole(header, "user", 0),
            prefix=checked_chain(header),
            schema_bytes=whole(header, "schema", 0),
            source=whole(header, "source", 0),
        )
        check_source(opening.source, source)
        if source is not None and opening.prefix:
            raise JobError("prefix: an encoder-decoder has none")
        if min(opening.prompt_length, opening.max_tokens) < 1 or opening.capacity > max_sequence:
            raise JobError(f"max_tokens: prompt and answer take 2 to {max_sequence} positions")
        check_top_logprobs(opening.top_logprobs)
        check_top_logprobs(opening.prompt_logprobs, "prompt_logprobs")
        if opening.prompt_logprobs is not None and (opening.prefix or opening.answered or source is not None):
            raise JobError(
                "prompt_logprobs: every token of the prompt is run, and none is of the answer or a source"
            )
        if not 0 <= opening.schema_bytes <= MAX_SCHEMA_BYTES:
            raise JobError(f"schema: at most {MAX_SCHEMA_BYTES} bytes")
        if not 0 <= opening.answered < opening.prompt_length:
            raise JobError("answered: fewer tokens than the prompt has")
        if positions_of(opening.prefix) > opening.prompt_length:
            raise JobError("prefix: no more blocks than the prompt has")
        return opening


def _count(header: Mapping[str, Any], name: str) -> int | None:
    return None if header.get(name) is None else whole(header, name, 0)


def check_source(length: int, source: SourceConfig | None) -> None:
    """JobError in one line where a session cannot have so much of a source."""
    if source is None:
        if length:
            raise JobError("source: this model reads none")
    elif source.channels and length != source.length:
        raise JobError(f"source: {source.length} frames of features, not {length}")
    elif not 1 <= length <= source.length:
        raise JobError(f"source: 1 to {source.length} tokens, not {length}")


def _hop(entry: object) -> Hop:
    match entry:
        case [str() as peer, int() as term] if len(peer) <= 128:
            return Hop(PeerId(peer), term)
    raise JobError("route: each entry is [peer, term]")


@dataclass(frozen=True)
class Chunk:
    """Positions [start, start + length) of one session, run in one go; `sample`: choose the next token after it. Those before 0
    are the source's, and run all at once.

    With `guesses`, the ids of its last positions, a token is chosen after each of its positions up to the first wrong guess.
    `number`: of the session's chunks, from 1, where positions may come again; else 0."""

    start: int
    length: int
    sample: bool
    guesses: tuple[int, ...] = ()
    number: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def order(self) -> int:
        """Rises from each chunk of a session to the next."""
        return self.number or self.end

    def check_in(self, opening: Opening) -> None:
        """FrameError where the session has no such positions."""
        if self.end > opening.capacity or (self.start < 0 and self.length != opening.source):
            raise FrameError(f"positions {self.start} to {self.end} are not in the session")

    @classmethod
    def from_header(cls, header: Mapping[str, Any], most: int, vocabulary: int, source: int = 0) -> Chunk:
        """Of another stage, for a model of so many positions, and so much of a source. FrameError, JobError where it is none."""
        start, length = whole(header, "start", -1), whole(header, "length", 0)
        if start < 0 and 1 <= length <= source and start + length == 0:
            return cls(start, length, sample=False)
        if start < 0 or length < 1 or start + length > most:
            raise FrameError(f"positions {start} to {start + length} are not those of the model")
        guesses = guessed_tokens(header, "guesses", vocabulary)
        if guesses and not 0 <= length - len(guesses) <= 1:
            raise FrameError("guesses: behind one token or none")
        return cls(start, length, header.get("sample") is True, guesses, whole(header, "number", 0))

    def to_header(self) -> dict[str, Any]:
        header: dict[str, Any] = {"start": self.start, "length": self.length, "sample": self.sample}
        if self.number:
            header |= {"number": self.number, "guesses": list(self.guesses)}
        return header


def guessed_tokens(header: Mapping[str, Any], name: str, vocabulary: int) -> tuple[int, ...]:
    """A field of token ids, at most as many as are guessed in one chunk. FrameError where it is something else."""
    found = header.get(name, [])
    if not isinstance(found, list) or len(found) > MAX_GUESSES:
        raise FrameError(f"{name}: at most {MAX_GUESSES} tokens")
    if not all(type(token) is int and 0 <= token < vocabulary for token in found):
        raise FrameError(f"{name}: tokens of the vocabulary")
    return tuple(found)


class Feed:
    """What the first stage feeds the ring: the prompt in chunks, then each token as it comes back, and guesses behind it.

    `recompute`: the model has no KV cache, so every chunk is the whole sequence so far. `answered`: how many tokens at the prompt's
    end are of the answer; they come in chunks of their own, as each ran by itself before. `start`: the positions before it every
    stage holds already; less than the prompt has. `drafter`: what guesses, of the whole text; None: nobody does. `capacity`:
    positions that the session has room for.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        recompute: bool,
        answered: int = 0,
        start: int = 0,
        drafter: Drafter | None = None,
        capacity: int = 0,
    ) -> None:
        self._tokens = list(prompt)
        self._start = start
        self._fed = start  # positions, those of guesses included
        self._recompute = recompute
        self._prompt_length = len(prompt)
        self._first = len(prompt) - answered  # position of the answer
        self._drafter = drafter
        self._capacity = capacity
        self._ahead: list[int] = []  # guesses for the positions behind those that are known
        self._allowance = Allowance()
        self._number = 0

    def push(self, position: int, token: int) -> None:
        """The token chosen for `position`, which must be the next one. JobError otherwise."""
        if position != len(self._tokens) or self._fed < position:
            raise JobError(f"token for position {position}, but {len(self._tokens)} positions are known")
        self._tokens.append(token)
        if self._drafter is None:
            return
        self._drafter.push(token)
        if not self._ahead:
            self._allowance.token()
        elif self._ahead[0] == token:
            self._allowance.right()
            del self._ahead[0]
        else:
            self._allowance.wrong()
            self._ahead.clear()
            self._fed = position

    @property
    def prompt_positions(self) -> int:
        """Of the prompt, that the ring has to run."""
        return self._prompt_length - self._start

    @property
    def fed(self) -> int:
        """Positions that the ring has been given."""
        return self._fed

    @property
    def prompt_fed(self) -> int:
        """Of `prompt_positions`, that the ring has been given."""
        return self._fed - self._start

    @property
    def answering(self) -> bool:
        """Whether what comes next is of the answer, new or read again."""
        return self._fed >= self._first

    def next(self, most: int, guesses: int = 0) -> tuple[Chunk, Sequence[int]] | None:
        """The chunk to run now, of at most so many positions of the prompt, and its token ids; None where the ring has all there
        is. `guesses`: that may be under way at most."""
        known = len(self._tokens)
        if self._fed < known - 1 or self._fed < self._prompt_length or self._recompute:
            return self._next_known(known, most)
        ids = self._tokens[self._fed :]
        guessed = self._guess(guesses)
        least = LEAST_ALONE if self._ahead else min(LEAST_ALONE, max(1, self.allowed(guesses)))
        if not ids and len(guessed) < least:
            return None  # there will be more when tokens come back
        self._ahead += guessed
        ids += guessed
        chunk = Chunk(self._fed, len(ids), sample=True, guesses=tuple(guessed), number=self._next_number())
        self._fed = chunk.end
        return chunk, ids

    def _next_known(self, known: int, most: int) -> tuple[Chunk, Sequence[int]] | None:
        if self._fed == known:
            return None
        start = 0 if self._recompute else self._fed
        until = self._first if start < self._first else known
        end = known if self._recompute else min(until, start + most)
        self._fed = end
        return Chunk(start, end - start, sample=end == known, number=self._next_number()), self._tokens[
            start:end
        ]

    def _guess(self, most: int) -> list[int]:
        """Behind those that are under way, `most` with them. The last token of the answer is never fed."""
        most = min(MAX_GUESSES, self.allowed(most) - len(self._ahead))
        return self._drafter.propose(self._ahead, most) if self._drafter is not None and most > 0 else []

    def allowed(self, most: int) -> int:
        """How many guesses may be under way, of at most so many: none before the ring has the prompt, and the last token of the
        answer is never fed."""
        if self._drafter is None or self._recompute or self._fed < self._prompt_length:
            return 0
        worth = max(self._allowance.most, self._drafter.least)
        return max(0, min(most, worth, self._capacity - 1 - len(self._tokens)))

    def _next_number(self) -> int:
        if self._drafter is None:
            return 0
        self._number += 1
        return self._number
