"""Token masks at the last stage: which tokens may come next, by schema, suppressed tokens and min_tokens."""

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

# Opens a constrained completion: (schema, tokens so far, gateway), by `fusion.runtime.serving.grammar.grammars`.
Constrain = Callable[[str, Sequence[int], PeerId], Awaitable[GrammarSession]]


async def unconstrained(schema: str, answered: Sequence[int], gateway: PeerId) -> GrammarSession:
    raise JobError("response_format: not possible here")


class NotConstrained(Exception):
    """The schema cannot be enforced here; says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error_line(error))
        self.reason: FailedReason = "refused" if isinstance(error, JobError) else reason_of(error)


def reason_of(error: Exception) -> FailedReason:
    """The reason that a stage reports for a session that failed with this error."""
    match error:
        case GrammarsBusy() | MemoryError():
            return "full"
        case GrammarTooCostly():
            return "grammar"
    return "broken"


@dataclass(frozen=True)
class OpeningPayload:
    """Payload of an `open` frame to the last stage, where the session's settings need one."""

    counts: TokenCounts | None = None
    schema: str = ""
    answered: Sequence[int] = ()
    scores: PromptScores | None = None

    @classmethod
    def of(cls, opening: Opening, payload: memoryview, vocabulary: int) -> OpeningPayload:
        """JobError where it does not match the opening, or the vocabulary."""
        opening.ends.check_vocabulary(vocabulary)
        schema = ""
        if opening.schema_bytes:
            schema, payload = split_schema(payload, opening.schema_bytes)
        tokens = prompt_of(opening, payload, vocabulary)
        counts = TokenCounts(tokens, opening.answered) if opening.sampling.penalises else None
        prompt_logprobs = opening.prompt_logprobs
        scores = (
            None if prompt_logprobs is None else PromptScores(array("q", tokens), prompt_logprobs, vocabulary)
        )
        return cls(counts, schema, tokens[opening.prompt_length - opening.answered :], scores)


async def constraint_of(
    constrain: Constrain, payload: OpeningPayload, serve: ServeConfig, gateway: PeerId
) -> TokenConstraint | None:
    """The constraint of a session; None where it has no schema. Raises NotConstrained."""
    if not payload.schema:
        return None
    try:
        session = await constrain(payload.schema, payload.answered, gateway)
    except (SwarmError, JobError, JobFailed, OSError) as error:
        raise NotConstrained(error) from None
    return TokenConstraint(session, serve.vocabulary, serve.end_tokens)


class SuppressedTokens:
    """Tokens that a model's generation config suppresses."""

    def __init__(self, source: SourceConfig, vocabulary: int) -> None:
        self._later = torch.ones(vocabulary, dtype=torch.bool)
        self._later[list(source.suppress_tokens)] = False
        self._first = self._later.clone()
        self._first[list(source.begin_suppress_tokens)] = False

    def of(self, allowed: torch.Tensor | None, *, first: bool) -> torch.Tensor:
        """`allowed` (vocabulary,), bool, without suppressed tokens; `first`: for the first token of a completion."""
        mask = self._first if first else self._later
        return mask if allowed is None else mask & allowed


def suppressed_by(serve: ServeConfig) -> SuppressedTokens | None:
    """None where no token is suppressed."""
    source = serve.source
    if source is None or not (source.suppress_tokens or source.begin_suppress_tokens):
        return None
    return SuppressedTokens(source, serve.vocabulary)


class WithheldEnds:
    """Masks the tokens that end a completion, for its first `min_tokens`."""

    def __init__(self, opening: Opening, serve: ServeConfig) -> None:
        self._until = opening.first + opening.ends.min_tokens
        self._others = torch.ones(serve.vocabulary, dtype=torch.bool)
        self._others[list(opening.ends.tokens(serve.end_tokens))] = False

    def of(self, allowed: torch.Tensor | None, position: int) -> torch.Tensor | None:
        """`allowed` (vocabulary,), bool, without end tokens where `position` is too early for them; None: all."""
        if position >= self._until:
            return allowed
        return self._others if allowed is None else self._others & allowed


def withheld_by(opening: Opening, serve: ServeConfig) -> WithheldEnds | None:
    """None where a completion may end at once."""
    return WithheldEnds(opening, serve) if opening.ends.min_tokens else None


class TokenConstraint:
    """The schema's mask, for the worker's thread. Tokens in `end_tokens` are allowed where the schema allows the end."""

    def __init__(self, session: GrammarSession, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._session = session
        self._vocabulary = vocabulary
        self._ends = [token for token in end_tokens if token < vocabulary]
        self._allowed: torch.Tensor | None = None

    def allowed(self) -> torch.Tensor:
        """(vocabulary,), bool, on the CPU. JobFailed where no token is allowed, or the grammar fails."""
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
        """Add an allowed token. Whether the completion is complete."""
        if token in self._ends:
            return True
        self._allowed = None
        self._session.push(token)
        return self._session.complete

    def close(self) -> None:
        """Idempotent."""
        self._session.close()
