"""Speculative decoding over the ring (arXiv 2211.17192; over a pipeline: arXiv 2407.11798): the first stage guesses tokens, so that
several trips are under way at once. Pure, and without torch.

The first stage feeds guesses after the last known token; the last stage samples a token after each of them as usual, and drops
everything after a wrong guess. So guesses change only the time of a completion, never its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_GUESSES = 15  # in one chunk: with the token before them it still counts as decoding
LEAST_ALONE = 4  # guesses, of a chunk without a known token
LEAST_MATCH = 3  # tokens of a match, at least
LONGEST_MATCH = 64
LONGEST_TEXT = 16_384  # last tokens of a prompt that are searched
CANDIDATES = 8  # earlier matches that are compared, newest first
FIRST_GUESSES = 4  # in flight before any acceptance is known
MOST_GUESSES = 64
LONGEST_PAUSE = 64  # tokens, at most, without guesses after rejections


class Drafter(Protocol):
    """Guesses the next tokens of a text."""

    @property
    def least(self) -> int:
        """How many guesses may be in flight, whatever the acceptance of the last ones."""

    def push(self, token: int) -> None:
        """Append a token to the text."""

    def propose(self, ahead: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow the text and the guesses in flight, `ahead`; empty where it has none."""


class RepeatDrafter:
    """Prompt lookup decoding: guesses that the text goes on as it did after the longest earlier match of its end. Finds quotes and
    edited copies, and guesses nothing for most novel text."""

    least = 0

    def __init__(self, text: Sequence[int] = (), *, least: int = LEAST_MATCH) -> None:
        """`least`: tokens of a match; LEAST_MATCH or more."""
        self._least = least
        self._text: list[int] = []
        # LEAST_MATCH tokens -> where they ended, newest last
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._distance = 0  # from a proposed token back to its source; 0: no match
        for token in text[-LONGEST_TEXT:]:
            self.push(token)

    def push(self, token: int) -> None:
        follows = self._distance and self._text[-self._distance] == token
        self._text.append(token)
        if not follows:
            self._distance = 0
        self._remember()

    def _remember(self) -> None:
        """Index the end of the text, without its last token."""
        if len(self._text) > LEAST_MATCH:
            key = tuple(self._text[-LEAST_MATCH - 1 : -1])
            ends = self._ends.setdefault(key, [])
            ends.append(len(self._text) - 1)
            del ends[:-CANDIDATES]

    def propose(self, ahead: Sequence[int], most: int) -> list[int]:
        if not self._distance and not ahead:
            self._distance = self._match()
        if not self._distance:
            return []
        length_so_far = len(self._text)
        length = self._length(length_so_far - self._distance)
        found = list(ahead)
        while len(found) < min(len(ahead) + most, max(LEAST_MATCH, length)):
            place = length_so_far + len(found) - self._distance
            found.append(self._text[place] if place < length_so_far else found[place - length_so_far])
        return found[len(ahead) :]

    def _match(self) -> int:
        """The distance to what followed the longest match, the newest of equally long ones; 0 where there is none."""
        ends = self._ends.get(tuple(self._text[-LEAST_MATCH:]), ())
        best = max(reversed(ends), key=self._length, default=0)
        return len(self._text) - best if best and self._length(best) >= self._least else 0

    def _length(self, end: int) -> int:
        """How many tokens before `end` match the end of the text, up to LONGEST_MATCH."""
        text, length, length_so_far = self._text, 0, len(self._text)
        while length < min(LONGEST_MATCH, end) and text[end - 1 - length] == text[length_so_far - 1 - length]:
            length += 1
        return length


class SampledTokens:
    """The sampled tokens at the last stage, against which guesses are verified. `first`: the position of the first."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._tokens: list[int] = []

    @property
    def next(self) -> int:
        """The position of the next token to sample."""
        return self._first + len(self._tokens)

    def push(self, token: int) -> None:
        self._tokens.append(token)

    def holds(self, position: int, token: int) -> bool:
        """Whether the token that was sampled for the position is this one."""
        return self._first <= position < self.next and self._tokens[position - self._first] == token


class SpeculationWindow:
    """How many guesses may be in flight: one more for each accepted one, half after a rejection (as TCP's window), none for a while
    after several rejections."""

    def __init__(self) -> None:
        self._most = FIRST_GUESSES
        self._pause_length = 0  # tokens without guesses after the next rejection
        self._paused = 0  # of these, left now

    def right(self) -> None:
        self._most = min(MOST_GUESSES, self._most + 1)
        self._pause_length = 0

    def wrong(self) -> None:
        self._most = max(1, self._most // 2)
        self._paused = self._pause_length if self._most == 1 else 0
        self._pause_length = min(LONGEST_PAUSE, 2 * self._pause_length + 1)

    def token(self) -> None:
        """A token arrived without a guess for it."""
        self._paused = max(0, self._paused - 1)

    @property
    def most(self) -> int:
        return 0 if self._paused else self._most
