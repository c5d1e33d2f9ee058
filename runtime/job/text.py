"""Prompts to token ids, and token ids to text that can be shown while it is still being made.

Two things make streaming text harder than decoding it: a character may be spread over several tokens, and some
tokenizers give a piece other text after a neighbour than alone (a leading space that is dropped at the start). So a
stream decodes a short window of tokens with and without the newest ones and emits the difference, once it is whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from fusion.runtime.job.errors import JobError

MAX_TOKENIZER_BYTES = 64 << 20
REPLACEMENT = "\ufffd"  # what an unfinished or impossible byte sequence decodes to
CONTEXT_TOKENS = 6  # tokens of the prompt that give the first piece its neighbours
# A character has at most four bytes: text that is still broken after this many tokens will never be whole.
PATIENCE_TOKENS = 8


class TextStream(Protocol):
    """The text of one answer, token by token."""

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; often one piece, "" while a character is unfinished."""

    def finish(self) -> str:
        """What is left; a character that never became whole is dropped."""


class Text(Protocol):
    """How a model reads and writes text."""

    def encode(self, prompt: str, *, plain: bool = True) -> list[int]:
        """`plain` False: a text that has its special tokens already, as a chat template writes it."""

    def stream(self, prompt: Sequence[int]) -> TextStream: ...


class ByteText:
    """Token ids below 256 are the bytes of UTF-8 text; others have no text."""

    def encode(self, prompt: str, *, plain: bool = True) -> list[int]:
        return list(prompt.encode())

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return _ByteStream()


class NoText:
    """A model without a tokenizer: ids in, ids out."""

    def encode(self, prompt: str, *, plain: bool = True) -> list[int]:
        raise JobError("prompt: this model has no tokenizer; give token ids instead (--prompt-ids 1,2,3)")

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return _NoStream()


class TokenizerText:
    """A Hugging Face `tokenizers` JSON file. JobError for bytes that are not one."""

    def __init__(self, data: bytes) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception for every kind of bad file
            raise JobError(f"the model's tokenizer cannot be read: {str(error)[:200]}") from None

    def encode(self, prompt: str, *, plain: bool = True) -> list[int]:
        return list(self._tokenizer.encode(prompt, add_special_tokens=plain).ids)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return _WindowStream(self._decode, prompt)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes((token,))) if 0 <= token < 256 else ""

    def finish(self) -> str:
        return ""


class _NoStream:
    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _Decode(Protocol):
    def __call__(self, ids: Sequence[int], /) -> str: ...


class _WindowStream:
    def __init__(self, decode: _Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        # The window: tokens whose text has been shown, then tokens held back. It always starts where a character
        # does: a byte-fallback decoder reads a run of byte tokens as a whole or not at all.
        self._ids: list[int] = []
        self._before = ""  # text of the shown part
        for length in range(CONTEXT_TOKENS, CONTEXT_TOKENS + 4):
            self._ids = list(prompt[-length:])
            self._before = decode(self._ids)
            if not self._before.startswith(REPLACEMENT):
                break
        self._shown = len(self._ids)

    def push(self, token: int) -> str:
        self._ids.append(token)
        whole = self._decode(self._ids)
        patient = len(self._ids) - self._shown < PATIENCE_TOKENS
        if whole.endswith(REPLACEMENT) and patient:
            return ""
        piece = whole[len(self._before) :]
        if piece:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
            self._before = self._decode(self._ids)
        elif not patient:  # tokens without text must not make the window grow for ever
            del self._ids[self._shown :]
        return piece

    def finish(self) -> str:
        piece = self._decode(self._ids)[len(self._before) :].rstrip(REPLACEMENT)
        del self._ids[self._shown :]
        return piece
