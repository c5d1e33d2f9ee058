"""One session's draft: what the draft model has read of the text, and what it guessed behind it. Pure, and without torch.

The text here is what is known, then what is expected to follow: guesses under way, whoever made them, and what was drafted behind
them. A token that is not the expected one cuts the rest off, and what the model has read of it is read anew: its cache is cut
back by the position that comes again.
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

STEP_POSITIONS = 32  # that the model reads in one run; a token that comes meanwhile waits for them
LEAST_REPEATED = 8  # tokens of a match from which on what repeats is guessed and nothing drafted


# (logits of the vocabulary, a position) -> the token that is guessed there
Guess = Callable[[Any, int], int]


def likeliest(logits: Any, position: int) -> int:
    return int(logits.argmax())


class Repeats(Protocol):
    """Guesses what repeats earlier text."""

    def push(self, token: int) -> None: ...

    def propose(self, ahead: Sequence[int], most: int) -> list[int]: ...


@dataclass(frozen=True)
class DraftStep:
    """What the draft model reads next: tokens at `start` and behind. `version`: of the text, as long as nothing in it proves
    wrong."""

    session: str
    capacity: int  # positions that the session may have
    start: int
    ids: tuple[int, ...]
    last: bool  # the token that follows them is a guess
    version: int = 0
    guess: Guess = likeliest

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class ModelDrafter:
    """`text`: the prompt. `repeats`: who is asked first. `capacity`: positions that the model can read, at most. `guess`: which token
    what it says stands for."""

    def __init__(
        self, session: str, text: Sequence[int], repeats: Repeats, capacity: int, guess: Guess = likeliest
    ) -> None:
        self._session = session
        self._text = list(text)
        self._repeats = repeats
        self._capacity = capacity
        self._guess = guess
        self._expected: list[int] = []  # behind the text
        self._drafted_from = 0  # the position from which on that was drafted
        self._held = 0  # positions that the model has read
        self._version = 0
        self._repeating = False  # what was proposed last was a repeat
        self._stopped = len(text) >= capacity
        self._worth = FIRST_DRAFTED  # how far it is worth drafting, when last asked
        self.acceptance = Acceptance()
        self.trips = Trips()

    def push(self, token: int) -> None:
        """The text has one token more."""
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
        """At most so many guesses behind those that are under way, `ahead`."""
        found = self._repeats.propose(ahead, most)
        self._repeating = bool(found)
        if found:
            self._expect([*ahead, *found])
            return found
        return self._expected[len(ahead) : len(ahead) + most]

    @property
    def least(self) -> int:
        """How many guesses may be under way whatever became of the last ones: that a share of them is wrong is reckoned with."""
        hopeful = not (self._stopped or self._repeating) and self.acceptance.share >= HOPEFUL
        return min(self._worth, MOST_HOPED) if hopeful else 0

    def next_step(self, most: int, room: int, step_seconds: float | None) -> DraftStep | None:
        """What to run so that `most` guesses, those under way among them, may be there: at most `room` positions. None where it is
        not worth a run of so many seconds, or nothing is to be guessed. Whoever asks runs it."""
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
        """The model says what follows the step. Dropped where the text has turned out otherwise meanwhile."""
        end = len(self._text) + len(self._expected)  # what repeats may have been guessed behind the step
        if step.last and step.end == end and step.version == self._version and not self._stopped:
            if not self._expected:
                self._drafted_from = len(self._text)
            self._expected.append(token)

    def stop(self) -> None:
        """The model reads this text no more."""
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
        """What stood at that position and behind it is something else."""
        self._held = min(self._held, position)
        self._version += 1
