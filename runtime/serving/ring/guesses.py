"""Tokens that the first stage guesses, so that several trips around the ring are under way at once (speculative decoding,
arXiv 2211.17192; over a pipeline: arXiv 2407.11798). Pure, and without torch.

The first stage feeds guesses behind the last token that it knows, the last stage chooses a token after each of them as ever
and drops what follows a wrong one. So the tokens of an answer are the same with any guesses; only time depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_GUESSES = 15  # in one chunk: with the token before them the stages still take it for decoding
LEAST_ALONE = 4  # in a chunk that has nothing else
LEAST_MATCH = 3  # tokens that have to be the same as earlier ones before what followed those is guessed
LONGEST_MATCH = 64
LONGEST_TEXT = 16_384  # tokens of a prompt, its last ones, that are looked through
CANDIDATES = 8  # earlier places that are compared, the newest first
FIRST_GUESSES = 4  # that may be under way before anything is known of their fate
MOST_GUESSES = 64
LONGEST_SILENCE = 64  # tokens after which a text that could not be guessed is tried again


class Drafter(Protocol):
    """Guesses how a text goes on."""

    @property
    def least(self) -> int:
        """How many guesses may be under way, whatever became of the last ones."""

    def push(self, token: int) -> None:
        """The text has one token more."""

    def propose(self, ahead: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow the text and what was proposed before, `ahead`; none where it cannot tell."""


class RepeatDrafter:
    """The text goes on as it did after the longest match of its end with an earlier part (prompt lookup decoding): what is
    quoted, reformatted or renamed is guessed, and novel text hardly ever."""

    least = 0

    def __init__(self, text: Sequence[int] = (), *, least: int = LEAST_MATCH) -> None:
        """`least`: tokens of a match; LEAST_MATCH or more."""
        self._least = least
        self._text: list[int] = []
        # LEAST_MATCH tokens -> where they ended, newest last
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._distance = 0  # back to the token that is proposed; 0: none is
        for token in text[-LONGEST_TEXT:]:
            self.push(token)

    def push(self, token: int) -> None:
        follows = self._distance and self._text[-self._distance] == token
        self._text.append(token)
        if not follows:
            self._distance = 0
        self._remember()

    def _remember(self) -> None:
        """The end of the text is found from the next token on."""
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
        whole = len(self._text)
        length = self._length(whole - self._distance)
        found = list(ahead)
        while len(found) < min(len(ahead) + most, max(LEAST_MATCH, length)):
            at = whole + len(found) - self._distance
            found.append(self._text[at] if at < whole else found[at - whole])
        return found[len(ahead) :]

    def _match(self) -> int:
        """The distance to what followed the longest match, of equally long ones the newest; 0 where there is none."""
        ends = self._ends.get(tuple(self._text[-LEAST_MATCH:]), ())
        best = max(reversed(ends), key=self._length, default=0)
        return len(self._text) - best if best and self._length(best) >= self._least else 0

    def _length(self, end: int) -> int:
        """How many tokens before `end` are those at the end of the text, counted up to LONGEST_MATCH."""
        text, length, whole = self._text, 0, len(self._text)
        while length < min(LONGEST_MATCH, end) and text[end - 1 - length] == text[whole - 1 - length]:
            length += 1
        return length


class Verdicts:
    """At the last stage: the tokens that were chosen, against which guesses are held. `first`: the position of the first."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._tokens: list[int] = []

    @property
    def next(self) -> int:
        """The position of the token to choose next."""
        return self._first + len(self._tokens)

    def push(self, token: int) -> None:
        self._tokens.append(token)

    def holds(self, position: int, token: int) -> bool:
        """Whether the token at a position of the answer is this one."""
        return self._first <= position < self.next and self._tokens[position - self._first] == token


class Allowance:
    """How many guesses may be under way: more for each that was right, as TCP's window grows, half after a wrong one, none
    for a while after several."""

    def __init__(self) -> None:
        self._most = FIRST_GUESSES
        self._silence = 0  # tokens for which nothing is guessed after the next wrong one
        self._rest = 0  # of these, that are left

    def right(self) -> None:
        self._most = min(MOST_GUESSES, self._most + 1)
        self._silence = 0

    def wrong(self) -> None:
        self._most = max(1, self._most // 2)
        self._rest = self._silence if self._most == 1 else 0
        self._silence = min(LONGEST_SILENCE, 2 * self._silence + 1)

    def token(self) -> None:
        """A token came that nobody had guessed."""
        self._rest = max(0, self._rest - 1)

    @property
    def most(self) -> int:
        return 0 if self._rest else self._most
