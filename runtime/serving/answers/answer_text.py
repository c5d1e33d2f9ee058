"""Incremental detokenization of one completion, up to the first stop string. Runs in the tokenizers' threads."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.text import NoText, Text
from fusion.runtime.serving.requests.stop import StopTexts


class PromptText:
    """The text of an echoed prompt."""

    def __init__(self, text: Text) -> None:
        self._stream = text.stream(())
        self.length = 0  # so far, in characters

    def read(self, tokens: Sequence[int], *, last: bool) -> tuple[str, tuple[int, ...]]:
        """The text that these tokens add, and the offset of each. `last`: there are no more, so an incomplete character is dropped."""
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
    """A pure function of the tokens, so that another gateway that resumes a completion gets the same text."""

    def __init__(self, text: Text, prompt: Sequence[int], stops: Sequence[str], least: int = 0) -> None:
        """`least`: min_tokens, in whose text no stop string ends. JobError for `stops` and a model without a tokenizer."""
        if stops and isinstance(text, NoText):
            raise JobError("stop: this model has no tokenizer, so its answers have no text")
        self._pieces: list[str] = []
        self._stream = text.stream(prompt)
        self._stops = StopTexts(stops)
        self._least, self._tokens = least, 0
        self._length = 0  # in characters, ignoring stop strings

    @property
    def whole(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def begins(self) -> int:
        """Offset of the last token in the text, in characters, ignoring stop strings."""
        return self._stream.begins

    @property
    def ends(self) -> int:
        """Length of that text so far, without an incomplete character."""
        return self._length

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        self._tokens += 1
        piece = self._stream.push(token)
        self._length += len(piece)
        return self._add(self._stops.push(piece, counts=self._counts))

    def read(self, tokens: Sequence[int]) -> None:
        """Push the tokens that the client has already."""
        for token in tokens:
            self.push(token)

    def finish(self) -> None:
        """At the end of the tokens: what was held back is text, except for an incomplete character."""
        self._add(self._stops.push(self._stream.finish(), counts=self._counts))
        self._add(self._stops.finish())

    @property
    def _counts(self) -> bool:
        return self._tokens > self._least

    def _add(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece
