"""One generation as the stages see it: what they are told once, and which positions run next.

No I/O here: the shells are `fusion.runtime.serving.answers.gateway` (the whole generation) and `fusion.runtime.serving.ring.stage` (one stage's
part of it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.request import Finish, Sampling, check_top_logprobs, whole
from fusion.swarm.transport import PeerId

SessionId = NewType("SessionId", str)


# What a stage may report of a session that has failed; the gateway's words for it: `fusion.runtime.serving.answers.failover`.
FailedReason = Literal["vanished", "moved", "full", "broken", "refused"]


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
    # How many tokens at the end of the prompt belong to the answer: those that sessions before this one gave.
    answered: int = 0

    @property
    def newer(self) -> tuple[str, ...]:
        """The settings that a last stage of the release before does not know and would pass over, by name. One that knows
        them says so as it opens the session."""
        return (*self.sampling.newer, *(() if self.top_logprobs is None else ("top_logprobs",)))

    @property
    def capacity(self) -> int:
        """Positions that the KV cache needs room for; the last token is never fed back, one spare is harmless."""
        return self.prompt_length + self.max_tokens

    def finish(self, token: int, position: int, end_tokens: Sequence[int]) -> Finish:
        """Whether the answer ends with `token` at `position` of the sequence, and why."""
        if token in end_tokens:
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
        }
        if self.top_logprobs is not None:
            header["top_logprobs"] = self.top_logprobs
        if self.sampling.penalises:
            header["answered"] = self.answered
        return header

    @classmethod
    def from_header(cls, header: Mapping[str, Any], *, stages: int, max_sequence: int) -> Opening:
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
            top_logprobs=None if header.get("top_logprobs") is None else whole(header, "top_logprobs", 0),
            answered=whole(header, "answered", 0),
        )
        if min(opening.prompt_length, opening.max_tokens) < 1 or opening.capacity > max_sequence:
            raise JobError(f"max_tokens: prompt and answer take 2 to {max_sequence} positions")
        check_top_logprobs(opening.top_logprobs)
        if not 0 <= opening.answered < opening.prompt_length:
            raise JobError("answered: fewer tokens than the prompt has")
        return opening


def _hop(entry: object) -> Hop:
    match entry:
        case [str() as peer, int() as term] if len(peer) <= 128:
            return Hop(PeerId(peer), term)
    raise JobError("route: each entry is [peer, term]")


@dataclass(frozen=True)
class Chunk:
    """Positions [start, start + length) of one session, run in one go; `sample`: choose the next token after it."""

    start: int
    length: int
    sample: bool

    @property
    def end(self) -> int:
        return self.start + self.length


class Feed:
    """What the first stage feeds the ring: the prompt in chunks, then each token as it comes back.

    `recompute`: the model has no KV cache, so every chunk is the whole sequence so far.
    """

    def __init__(self, prompt: Sequence[int], *, prefill_chunk: int, recompute: bool) -> None:
        self._tokens = list(prompt)
        self._fed = 0
        self._prefill_chunk = prefill_chunk
        self._recompute = recompute

    def push(self, position: int, token: int) -> None:
        """The token chosen for `position`, which must be the next one. JobError otherwise."""
        if position != len(self._tokens) or self._fed != position:
            raise JobError(f"token for position {position}, but {len(self._tokens)} positions are known")
        self._tokens.append(token)

    def next(self) -> tuple[Chunk, Sequence[int]] | None:
        """The chunk to run now and its token ids; None where the ring has all there is."""
        known = len(self._tokens)
        if self._fed == known:
            return None
        start = 0 if self._recompute else self._fed
        end = known if self._recompute else min(known, start + self._prefill_chunk)
        self._fed = end
        return Chunk(start, end - start, sample=end == known), self._tokens[start:end]
