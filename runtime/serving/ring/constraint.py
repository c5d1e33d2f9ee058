"""Which tokens an answer may have next, where it follows a schema. As with the counts of penalties, each token moves it on."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.manifest import ServeConfig, SourceConfig
from fusion.runtime.serving.grammar.matcher import GrammarsBusy, GrammarSession, GrammarTooCostly
from fusion.runtime.serving.requests.request import split_schema
from fusion.runtime.serving.ring.penalties import TokenCounts, prompt_of
from fusion.runtime.serving.ring.sampling import PromptScores
from fusion.runtime.serving.ring.session import FailedReason, Opening
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import error_line
from fusion.swarm.transport import PeerId

# An answer to a schema that has these tokens already, for a gateway: `fusion.runtime.serving.grammar.grammars` opens it.
Constrain = Callable[[str, Sequence[int], PeerId], Awaitable[GrammarSession]]


async def unconstrained(schema: str, answered: Sequence[int], gateway: PeerId) -> GrammarSession:
    raise JobError("response_format: not possible here")


class NotConstrained(Exception):
    """The answer cannot be held to its schema here; says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error_line(error))
        self.reason = reason_of(error)


def reason_of(error: Exception) -> FailedReason:
    """What a stage tells of a session that ended by this error."""
    match error:
        case GrammarsBusy() | MemoryError():
            return "full"
        case GrammarTooCostly():
            return "grammar"
        case JobError():
            return "refused"
    return "broken"


@dataclass(frozen=True)
class OpeningPayload:
    """What the last stage is told of a session beside its header, where the settings need it."""

    counts: TokenCounts | None = None
    schema: str = ""
    answered: Sequence[int] = ()
    scores: PromptScores | None = None

    @classmethod
    def of(cls, opening: Opening, payload: memoryview, vocabulary: int) -> OpeningPayload:
        """JobError where it is not what was announced, or not of this model."""
        opening.ends.check_vocabulary(vocabulary)
        schema = ""
        if opening.schema_bytes:
            schema, payload = split_schema(payload, opening.schema_bytes)
        tokens = prompt_of(opening, payload, vocabulary)
        counts = TokenCounts(tokens, opening.answered) if opening.sampling.penalises else None
        asked = opening.prompt_logprobs
        scores = None if asked is None else PromptScores(array("q", tokens), asked, vocabulary)
        return cls(counts, schema, tokens[opening.prompt_length - opening.answered :], scores)


async def constraint_of(
    constrain: Constrain, said: OpeningPayload, serve: ServeConfig, gateway: PeerId
) -> TokenConstraint | None:
    """For the session of a gateway that has said so. Raises NotConstrained."""
    if not said.schema:
        return None
    try:
        session = await constrain(said.schema, said.answered, gateway)
    except (SwarmError, JobError, JobFailed, OSError) as error:
        raise NotConstrained(error) from None
    return TokenConstraint(session, serve.vocabulary, serve.end_tokens)


class SuppressedTokens:
    """Tokens that a model is not to say, as its files have it."""

    def __init__(self, source: SourceConfig, vocabulary: int) -> None:
        self._later = torch.ones(vocabulary, dtype=torch.bool)
        self._later[list(source.suppress_tokens)] = False
        self._first = self._later.clone()
        self._first[list(source.begin_suppress_tokens)] = False

    def of(self, allowed: torch.Tensor | None, *, first: bool) -> torch.Tensor:
        """Of the tokens that are `allowed` (vocabulary,), those that may be said; `first`: as the first of an answer."""
        mine = self._first if first else self._later
        return mine if allowed is None else mine & allowed


def suppressed_by(serve: ServeConfig) -> SuppressedTokens | None:
    """None where every token may be said."""
    source = serve.source
    if source is None or not (source.suppress_tokens or source.begin_suppress_tokens):
        return None
    return SuppressedTokens(source, serve.vocabulary)


class WithheldEnds:
    """The tokens that end an answer, which is not to have any of them among its first."""

    def __init__(self, opening: Opening, serve: ServeConfig) -> None:
        self._until = opening.first + opening.ends.min_tokens
        self._others = torch.ones(serve.vocabulary, dtype=torch.bool)
        self._others[list(opening.ends.tokens(serve.end_tokens))] = False

    def of(self, allowed: torch.Tensor | None, position: int) -> torch.Tensor | None:
        """Of the tokens that are `allowed` (vocabulary,), those that may be said at `position`; None: all."""
        if position >= self._until:
            return allowed
        return self._others if allowed is None else self._others & allowed


def withheld_by(opening: Opening, serve: ServeConfig) -> WithheldEnds | None:
    """None where an answer may end at once."""
    return WithheldEnds(opening, serve) if opening.ends.min_tokens else None


class TokenConstraint:
    """Used by the worker's thread. Tokens in `end_tokens` end an answer wherever it may end."""

    def __init__(self, session: GrammarSession, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._session = session
        self._vocabulary = vocabulary
        self._ends = [token for token in end_tokens if token < vocabulary]
        self._allowed: torch.Tensor | None = None

    def allowed(self) -> torch.Tensor:
        """(vocabulary,), bool, on the CPU. JobFailed where there is no such token, or it takes too long to know."""
        if self._allowed is None:
            # NumPy, because torch would wake all of its threads for this.
            allowed = np.zeros(self._vocabulary, np.bool_)
            if not self._session.complete:
                bits = np.unpackbits(np.frombuffer(self._session.mask(), np.uint8), bitorder="little")
                allowed = bits[: self._vocabulary].view(np.bool_)
            if self._session.accepts:
                allowed[self._ends] = True
            if not allowed.any():
                raise JobFailed("response_format: none of the model's tokens may follow")
            self._allowed = torch.from_numpy(allowed)
        return self._allowed

    def push(self, token: int) -> bool:
        """The answer has one more, of those allowed. Whether nothing may follow."""
        if token in self._ends:
            return True
        self._allowed = None
        self._session.push(token)
        return self._session.complete

    def close(self) -> None:
        """Idempotent."""
        self._session.close()
