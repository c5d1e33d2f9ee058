"""The draft of one session: what the draft model has read of the text, and what it guessed behind it. Pure, and without torch.

The text is the known tokens, then the expected ones: guesses in flight, of either drafter, and tokens drafted behind them. A token that
differs from the expected one discards the rest, and the draft model reads the text again from there: its cache is truncated at the
position that is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fusion.runtime.serving.drafts.draft_length import (
    FIRST_DRAFTED,
    HOPEFUL,
    MOST_HOPED,
    Acceptance,
    Trips,
    worth_drafting,
)

STEP_POSITIONS = 32  # of one run, for which a token that arrives meanwhile has to wait
LEAST_REPEATED = 8  # tokens of a match from which on prompt lookup is used instead of the draft model


# (logits of the vocabulary, a position) -> the guessed token
Guess = Callable[[Any, int], int]


def likeliest(logits: Any, position: int) -> int:
    return int(logits.argmax())


class Repeats(Protocol):
    """Guesses repetitions of earlier text."""

    def push(self, token: int) -> None: ...

    def propose(self, ahead: Sequence[int], most: int) -> list[int]: ...


@dataclass(frozen=True)
class DraftStep:
    """The next tokens for the draft model to read, from `start` on. `version`: of the text, which changes with each rejection."""

    session: str
    capacity: int  # positions that the session may have
    start: int
    ids: tuple[int, ...]
    last: bool  # the model is to guess the token after them
    version: int = 0
    guess: Guess = likeliest

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class ModelDrafter:
    """`text`: the prompt. `repeats`: a drafter that is tried first. `capacity`: positions of the draft model's context. `guess`: from
    logits to a token."""

    def __init__(
        self, session: str, text: Sequence[int], repeats: Repeats, capacity: int, guess: Guess = likeliest
    ) -> None:
        self._session = session
        self._text = list(text)
        self._repeats = repeats
        self._capacity = capacity
        self._guess = guess
        self._expected: list[int] = []  # tokens expected after the text
        self._drafted_from = 0  # the position from which on they were drafted
        self._held = 0  # positions that the model has read
        self._version = 0
        self._repeating = False  # the last proposal was a repetition
        self._stopped = len(text) >= capacity
        self._worth = FIRST_DRAFTED  # last result of `worth_drafting`
        self.acceptance = Acceptance()
        self.trips = Trips()

    def push(self, token: int) -> None:
        """Append a token to the text."""
        self._repeats.push(token)
        position = len(self._text)
        self._text.append(token)
        if self._expected:
            right = self._expected[0] == token
            if position >= self._drafted_from:
                self.acceptance.add(right)
            if right:
                del self._expected[0]
                return
        self._expected.clear()
        self._changed(position)

    def propose(self, ahead: Sequence[int], most: int) -> list[int]:
        """At most `most` guesses behind those in flight, `ahead`."""
        found = self._repeats.propose(ahead, most)
        self._repeating = bool(found)
        if found:
            self._expect([*ahead, *found])
            return found
        return self._expected[len(ahead) : len(ahead) + most]

    @property
    def least(self) -> int:
        """How many guesses may be in flight whatever the last results: with a draft model some rejections are expected."""
        hopeful = not (self._stopped or self._repeating) and self.acceptance.share >= HOPEFUL
        return min(self._worth, MOST_HOPED) if hopeful else 0

    def next_step(self, most: int, room: int, step_seconds: float | None) -> DraftStep | None:
        """The next step, of at most `room` positions, towards `most` guesses including those in flight. None where drafting is not worth a
        run of `step_seconds`, or there is nothing to guess. The caller has to run it."""
        self._worth = worth_drafting(self.acceptance.share, self.trips.seconds.value, step_seconds)
        most = min(most, self._worth)
        end = len(self._text) + len(self._expected)
        if self._stopped or self._repeating or len(self._expected) >= most or end > self._capacity:
            return None
        start = min(self._held, end - 1)
        ids = (self._text + self._expected)[start : start + room]
        self._held = start + len(ids)
        last = self._held == end
        return DraftStep(self._session, self._capacity, start, tuple(ids), last, self._version, self._guess)

    def drafted(self, step: DraftStep, token: int) -> None:
        """Add the guess after a step. Dropped where the text has changed meanwhile."""
        end = len(self._text) + len(self._expected)  # repetitions may have been guessed behind the step
        if step.last and step.end == end and step.version == self._version and not self._stopped:
            if not self._expected:
                self._drafted_from = len(self._text)
            self._expected.append(token)

    def stop(self) -> None:
        """Stop drafting for this session."""
        self._stopped = True

    def _expect(self, tokens: Sequence[int]) -> None:
        same = 0
        while same < min(len(tokens), len(self._expected)) and tokens[same] == self._expected[same]:
            same += 1
        if same < len(tokens):
            if same < len(self._expected):
                del self._expected[same:]
                self._changed(len(self._text) + same)
            self._expected += tokens[same:]
            self._drafted_from = len(self._text) + len(self._expected)

    def _changed(self, position: int) -> None:
        """The text has changed from that position on."""
        self._held = min(self._held, position)
        self._version += 1
