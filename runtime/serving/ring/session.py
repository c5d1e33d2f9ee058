"""One generation as the stages see it: its opening, and the chunk to run next.

No I/O here: that is in `fusion.runtime.serving.answers.gateway` (the whole generation) and `fusion.runtime.serving.ring.stage` (one stage's
part).
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
from fusion.runtime.serving.ring.guesses import LEAST_ALONE, MAX_GUESSES, Drafter, SpeculationWindow
from fusion.runtime.serving.ring.prefix import checked_chain, positions_of
from fusion.swarm.errors import FrameError
from fusion.swarm.transport import PeerId

SessionId = NewType("SessionId", str)


# Reasons that a stage may report for a failed session; what they mean: `fusion.runtime.serving.answers.failover`.
FailedReason = Literal["vanished", "moved", "full", "broken", "grammar", "refused"]


@dataclass(frozen=True)
class Hop:
    """The peer that runs a stage, and the term of its claim."""

    peer: PeerId
    term: int


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The settings of a session, which the gateway sends to every stage once."""

    session: SessionId
    route: tuple[Hop, ...]  # one per stage
    prompt_length: int
    max_tokens: int
    sampling: Sampling
    logits: bool = False
    top_logprobs: int | None = None  # how many beside that of the sampled token; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens
    ends: Ends = MODELS_OWN  # which tokens end the completion, and from which index on
    # How many tokens at the end of the prompt belong to the completion: earlier sessions generated them.
    answered: int = 0
    user: int = 0  # the gateway's number for a tenant; turns are shared fairly between users
    prefix: bytes = b""  # the chain of its first blocks, which a stage may have cached
    schema_bytes: int = 0  # of the schema, which is sent to the last stage; 0: none
    source: int = 0  # ids or frames of the encoder's input, which is sent with the prompt

    @property
    def reads_prompt(self) -> bool:
        """Whether the last stage needs the tokens so far."""
        return self.sampling.penalises or self.schema_bytes > 0 or self.prompt_logprobs is not None

    @property
    def newer(self) -> tuple[str, ...]:
        """Names of the settings that a last stage of an older release would ignore. One that supports them announces that when it opens
        the session."""
        schema = ("schema",) if self.schema_bytes else ()
        counts = {"top_logprobs": self.top_logprobs, "prompt_logprobs": self.prompt_logprobs}
        logprobs = (name for name, count in counts.items() if count is not None)
        return (*self.sampling.newer, *logprobs, *self.ends.to_header(), *schema)

    def logprobs_of(self, header: Mapping[str, Any], vocabulary: int) -> Logprobs | None:
        """The log-probabilities in a token's header, where they were requested. JobError where they are missing or not valid."""
        if self.top_logprobs is None:
            return None
        logprobs = Logprobs.from_header(header, self.top_logprobs)
        if any(token >= vocabulary for token, _ in logprobs.top):
            raise JobError("top_logprobs: tokens that the model does not have")
        return logprobs

    def prompt_logprobs_of(self, position: int, payload: memoryview, vocabulary: int) -> list[Logprobs]:
        """Log-probabilities of the prompt's tokens from `position` on. JobError where they were not requested, or are not valid."""
        if self.prompt_logprobs is None:
            raise JobError("prompt_logprobs: nobody asked for them")
        logprobs = unpacked(payload, min(self.prompt_logprobs, vocabulary), vocabulary)
        if not 0 < position <= self.prompt_length - len(logprobs):
            raise JobError("prompt_logprobs: of tokens that the prompt does not have")
        return logprobs

    @property
    def first(self) -> int:
        """The position of the completion's first token, which an earlier session may have generated."""
        return self.prompt_length - self.answered

    @property
    def capacity(self) -> int:
        """Positions of the KV cache, one more than needed: the last token is never fed back."""
        return self.prompt_length + self.max_tokens

    def finish(self, token: int, position: int, end_tokens: Sequence[int]) -> Finish:
        """Whether the completion ends with `token` at `position` of the sequence, and why."""
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
        """JobError for settings that are not valid for a model of these dimensions."""
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
    """JobError in one line where the length of a session's source is not valid."""
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
    """Positions [start, start + length) of one session, run at once; `sample`: sample the next token after them. Positions below 0 are
    the source's, and run all at once.

    With `guesses`, the ids of its last positions, a token is sampled after each position up to the first rejected guess. `number`: of
    the session's chunks, from 1, where positions may be run again; else 0."""

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
        """Increases from each chunk of a session to the next."""
        return self.number or self.end

    def check_in(self, opening: Opening) -> None:
        """FrameError where the positions are outside of the session."""
        if self.end > opening.capacity or (self.start < 0 and self.length != opening.source):
            raise FrameError(f"positions {self.start} to {self.end} are not in the session")

    @classmethod
    def from_header(cls, header: Mapping[str, Any], most: int, vocabulary: int, source: int = 0) -> Chunk:
        """A chunk of another stage. `most`: positions of the model; `source`: longest source. FrameError, JobError where it is not
        valid."""
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
    """A field of at most MAX_GUESSES token ids. FrameError where it is not valid."""
    tokens = header.get(name, [])
    if not isinstance(tokens, list) or len(tokens) > MAX_GUESSES:
        raise FrameError(f"{name}: at most {MAX_GUESSES} tokens")
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise FrameError(f"{name}: tokens of the vocabulary")
    return tuple(tokens)


class Feed:
    """The chunks that the first stage feeds to the ring: the prompt, then each token as it returns, with guesses behind it.

    `recompute`: the model has no KV cache, so every chunk is the whole sequence so far. `answered`: how many tokens at the prompt's end
    belong to the completion; they get chunks of their own, as each was decoded singly before. `start`: every stage has cached the
    positions before it; less than the prompt's length. `drafter`: guesses tokens; None: no speculation. `capacity`: positions of the
    session.
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
        self._fed = start  # positions, including guesses
        self._recompute = recompute
        self._prompt_length = len(prompt)
        self._first = len(prompt) - answered  # position of the completion
        self._drafter = drafter
        self._capacity = capacity
        self._ahead: list[int] = []  # guesses in flight, behind the known tokens
        self._window = SpeculationWindow()
        self._number = 0

    def push(self, position: int, token: int) -> None:
        """Add the token sampled for `position`. JobError where that is not the next position."""
        if position != len(self._tokens) or self._fed < position:
            raise JobError(f"token for position {position}, but {len(self._tokens)} positions are known")
        self._tokens.append(token)
        if self._drafter is None:
            return
        self._drafter.push(token)
        if not self._ahead:
            self._window.token()
        elif self._ahead[0] == token:
            self._window.right()
            del self._ahead[0]
        else:
            self._window.wrong()
            self._ahead.clear()
            self._fed = position

    @property
    def prompt_positions(self) -> int:
        """Positions of the prompt to run, without cached ones."""
        return self._prompt_length - self._start

    @property
    def fed(self) -> int:
        """Positions fed to the ring."""
        return self._fed

    @property
    def prompt_fed(self) -> int:
        """Of `prompt_positions`, how many have been fed."""
        return self._fed - self._start

    @property
    def answering(self) -> bool:
        """Whether the next position belongs to the completion."""
        return self._fed >= self._first

    def next(self, most: int, guesses: int = 0) -> tuple[Chunk, Sequence[int]] | None:
        """The next chunk, of at most `most` positions of the prompt, and its token ids; None where everything known has been fed.
        `guesses`: most that may be in flight."""
        known = len(self._tokens)
        if self._fed < known - 1 or self._fed < self._prompt_length or self._recompute:
            return self._next_known(known, most)
        ids = self._tokens[self._fed :]
        guessed = self._guess(guesses)
        least = LEAST_ALONE if self._ahead else min(LEAST_ALONE, max(1, self.allowed(guesses)))
        if not ids and len(guessed) < least:
            return None  # more can be guessed when tokens return
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
        """New guesses; `most`: including those in flight."""
        most = min(MAX_GUESSES, self.allowed(most) - len(self._ahead))
        return self._drafter.propose(self._ahead, most) if self._drafter is not None and most > 0 else []

    def allowed(self, most: int) -> int:
        """How many guesses may be in flight, up to `most`: none before the prompt has been fed, and none for the last token of the
        completion, which is never fed."""
        if self._drafter is None or self._recompute or self._fed < self._prompt_length:
            return 0
        worth = max(self._window.most, self._drafter.least)
        return max(0, min(most, worth, self._capacity - 1 - len(self._tokens)))

    def _next_number(self) -> int:
        if self._drafter is None:
            return 0
        self._number += 1
        return self._number
