"""The text of one answer, of its tokens: as much as may be shown so far, and no more than before the first stop text.
Runs where tokenizers do."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.text import NoText, Text
from fusion.runtime.serving.requests.stop import StopTexts


class PromptText:
    """The text of a prompt's own tokens, from its beginning."""

    def __init__(self, text: Text) -> None:
        self._stream = text.stream(())
        self.length = 0  # so far, in characters

    def read(self, tokens: Sequence[int], *, last: bool) -> tuple[str, tuple[int, ...]]:
        """What these add to the text, and where that of each begins. `last`: there are no more, and the beginning of a
        character is no text."""
        pieces, begins = list[str](), list[int]()
        for token in tokens:
            pieces.append(self._stream.push(token))
            begins.append(self._stream.begins)
        if last:
            pieces.append(self._stream.finish())
        added = "".join(pieces)
        self.length += len(added)
        return added, tuple(begins)


class AnswerText:
    """A pure function of the tokens: whoever goes on with an answer, of which it is told the tokens, goes on with its
    text."""

    def __init__(self, text: Text, prompt: Sequence[int], stops: Sequence[str], least: int = 0) -> None:
        """None of `stops` ends in the text of the first `least` tokens. JobError where there are `stops` and no text that could
        have them."""
        if stops and isinstance(text, NoText):
            raise JobError("stop: this model has no tokenizer, so its answers have no text")
        self._pieces: list[str] = []
        self._stream = text.stream(prompt)
        self._stops = StopTexts(stops)
        self._least, self._tokens = least, 0
        self._length = 0  # in characters, without an end at a stop text

    @property
    def whole(self) -> str:
        """So far."""
        return "".join(self._pieces)

    @property
    def begins(self) -> int:
        """Where the token that was pushed last begins, in characters of the text that there would be without a stop text."""
        return self._stream.begins

    @property
    def ends(self) -> int:
        """Where that text ends so far, without an unfinished character."""
        return self._length

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, token: int) -> str:
        """What this token adds to the text, as far as that is certain."""
        self._tokens += 1
        piece = self._stream.push(token)
        self._length += len(piece)
        return self._add(self._stops.push(piece, counts=self._counts))

    def read(self, tokens: Sequence[int]) -> None:
        """The tokens that the user has already, and their text."""
        for token in tokens:
            self.push(token)

    def finish(self) -> None:
        """There are no more tokens: what was held back is text, unless it is the beginning of a character."""
        self._add(self._stops.push(self._stream.finish(), counts=self._counts))
        self._add(self._stops.finish())

    @property
    def _counts(self) -> bool:
        return self._tokens > self._least

    def _add(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece
