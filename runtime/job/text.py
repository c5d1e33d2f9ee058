"""Prompts to token ids, and token ids to text that can be shown while it is still generated.

Two things make streaming text harder than decoding it: a character may be spread over several tokens, and some
tokenizers give a piece other text after a neighbour than alone (a leading space that is dropped at the start). So a
stream decodes a short window of tokens with and without the newest ones and emits the difference, once it is whole.
"""

from __future__ import annotations

import base64
import codecs
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.model_files import check_fetched
from fusion.swarm.printable import one_line

# A text alone is read by one thread; with the first the library would begin one for each core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_TOKENIZER_BYTES = 64 << 20
# What the steps of a tokenizer may make of a text, and of one token: a few lines of a file can make one a million times as
# long, and a process that the library finds no memory in ends.
MAX_GROWN_BYTES, MAX_TOKEN_BYTES = 32 << 20, 8 << 10
MAX_BESIDE = 1 << 16  # tokens that are put around each text
# Characters of a word that WordPiece looks up, which takes time with their square or more; 100 is usual.
MAX_WORD_CHARACTERS = 256
# Reading a file blocks the whole process, and could take seconds and gigabytes: the library keeps the words of some models in a tree
# with a node for each byte, and all added tokens in an automaton.
MAX_TREE_BYTES, MAX_ADDED_BYTES = 4 << 20, 2 << 20
MAX_STEPS, MAX_PATTERN_BYTES = 1024, 64 << 10
_NODE_BYTES = 420  # of memory for each byte of the words in a tree
_FILE_TIMES = 21  # bytes of memory for each byte of the file, at most, beside the tree
REPLACEMENT = "\ufffd"  # what an unfinished or impossible byte sequence decodes to
CONTEXT_TOKENS = 6  # tokens of the prompt that give the first piece its neighbours
# A character has at most four bytes: text that is still broken after this many tokens that brought none will never be whole.
PATIENCE_TOKENS = 8


class TextStream(Protocol):
    """The text of one answer, token by token."""

    @property
    def begins(self) -> int:
        """Where the text of the token that was pushed last begins, in characters, counting those that are not certain yet. For a
        token inside a character: where the character begins."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" while a character is unfinished."""

    def finish(self) -> str:
        """The rest of the text; an unfinished character is dropped."""


class Text(Protocol):
    """A model's tokenizer."""

    def encode(self, prompt: str, *, plain: bool = True) -> list[int]:
        """`plain` False: no special tokens are added, as a chat template has written them into the text."""

    def stream(self, prompt: Sequence[int]) -> TextStream: ...

    def spell(self, token: int) -> bytes:
        """The bytes of the token by itself, which may be a part of a character; b"" for one without text."""

    @property
    def memory_bytes(self) -> int:
        """The most memory that it takes."""

    @property
    def literal(self) -> bool:
        """Whether the text of an answer is the concatenation of what `spell` gives for its tokens."""

    @property
    def special(self) -> frozenset[int]:
        """The tokens that do not stand for text, as those for the end of a text."""


class ByteText:
    """Token ids below 256 are the bytes of UTF-8 text; others have no text."""

    literal, special, memory_bytes = True, frozenset[int](), 0

    def encode(self, prompt: str, *, plain: bool = True) -> list[int]:
        return list(prompt.encode())

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return _ByteStream()

    def spell(self, token: int) -> bytes:
        return bytes((token,)) if 0 <= token < 256 else b""


class NoText:
    """A model without a tokenizer: ids in, ids out."""

    literal, special, memory_bytes = False, frozenset[int](), 0

    def encode(self, prompt: str, *, plain: bool = True) -> list[int]:
        raise JobError("prompt: this model has no tokenizer; give token ids instead (--prompt-ids 1,2,3)")

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return _NoStream()

    def spell(self, token: int) -> bytes:
        return b""


def check_tokenizer(path: Path) -> None:
    """JobError for a tokenizer.json that no peer could load."""
    check_fetched(path)
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise JobError(f"{path} has {size} bytes; the limit is {MAX_TOKENIZER_BYTES}")
    try:
        TokenizerText(path.read_bytes())
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def of_any_length(tokenizer: Tokenizer) -> Tokenizer:
    """The same, for texts of any length: without the truncation and padding that a file may set, which transformers ignores by
    default."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _failing_as(kind: type[JobError] | type[JobFailed], what: str) -> Iterator[None]:
    """Raises `kind`, in one line, for errors of the library: Exception, or a BaseException where its Rust code panics, as a file
    may cause."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {one_line(str(error), 200)}") from None


class TokenizerText:
    """A Hugging Face `tokenizers` JSON file. JobError for bytes that are not one, and for a text that it cannot encode; JobFailed
    for tokens that it cannot decode."""

    def __init__(self, data: bytes) -> None:
        with _failing_as(JobError, "the model's tokenizer cannot be read"):
            file = json.loads(str(data, "utf-8"))
            self.memory_bytes = _FILE_TIMES * len(data) + _NODE_BYTES * _checked_tree(file)
            self._grows = _checked_growth(file)
            del file
            self._tokenizer = of_any_length(Tokenizer.from_buffer(data))
        self._steps = _decoder_steps(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        # These are what they look like
        self._added = {token: entry.content for token, entry in added.items()}
        self._skipped = {token for token, entry in added.items() if entry.special}
        self.literal = bool(self._steps & _SPELLED) and self._steps <= _SPELLED | _NEIGHBOURLY
        self.special = frozenset(self._added)

    def encode(self, prompt: str, *, plain: bool = True) -> list[int]:
        size = _size(prompt)
        if size * self._grows > MAX_GROWN_BYTES:
            raise JobError(
                f"prompt: {size} bytes of text, which the model's tokenizer may make {self._grows:.0f} times as long"
            )
        with _failing_as(JobError, "prompt: the model's tokenizer cannot read it"):
            # As a batch, for which alone the library lets other threads of Python run meanwhile.
            [read] = self._tokenizer.encode_batch_fast([prompt], add_special_tokens=plain)
            return list(read.ids)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return _WindowStream(self._decode, self._shown, prompt)

    def spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if piece is None:
            return b""
        if "ByteLevel" in self._steps and all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        if "ByteFallback" in self._steps and (byte := _FALLBACK.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if "Metaspace" in self._steps or "Replace" in self._steps:
            return str(piece).replace("\u2581", " ").encode()
        return self._decode([token]).encode()

    def _shown(self, token: int) -> bytes:
        return b"" if token in self._skipped else self.spell(token)

    def _decode(self, ids: Sequence[int]) -> str:
        with _failing_as(JobFailed, "the model's tokenizer cannot write its tokens"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))


# How many times as many bytes each kind of step makes of a text, at most.
_GROWTH = {
    **dict.fromkeys(("Sequence", "Replace", "Prepend", "Precompiled", "Strip", "StripAccents", "Nmt", "Fuse"), 1),
    **dict.fromkeys(("ByteFallback", "Split", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation"), 1),
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts", "FixedLength"), 1),
    **dict.fromkeys(("Lowercase", "ByteLevel"), 2),
    **dict.fromkeys(("NFC", "NFD"), 3),
    **dict.fromkeys(("NFKC", "NFKD", "BertNormalizer"), 12),
}  # fmt: skip
_OTHER_GROWTH = 4  # a Metaspace's, and more than that of decoders


def _checked_tree(file: Any) -> int:
    """The bytes of the words in a tree. ValueError for a file that takes too long to read, or too much memory."""
    file = file if isinstance(file, dict) else {}
    added = sum(
        _size(entry.get("content")) for entry in file.get("added_tokens") or [] if isinstance(entry, dict)
    )
    if added > MAX_ADDED_BYTES:
        raise ValueError(f"added tokens of {added} bytes; at most {MAX_ADDED_BYTES}")
    steps = [file.get(kind) for kind in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    for number, step in enumerate(steps):  # which grows
        if number == MAX_STEPS:
            raise ValueError(f"more than {MAX_STEPS} steps")
        if isinstance(step, dict):
            pattern = step.get("pattern")
            if _size(pattern.get("Regex") if isinstance(pattern, dict) else pattern) > MAX_PATTERN_BYTES:
                raise ValueError(f"a pattern of more than {MAX_PATTERN_BYTES} bytes")
            for several in ("normalizers", "pretokenizers", "processors", "decoders"):
                steps += (step.get(several) or [])[:MAX_STEPS]
    model = file.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    tree = (
        sum(_size(word[0]) for word in words if isinstance(word, list) and word)
        if isinstance(words, list)
        else 0
    )
    if tree > MAX_TREE_BYTES:
        raise ValueError(f"words of {tree} bytes; at most {MAX_TREE_BYTES} for a model of this kind")
    return tree


def _checked_growth(file: Any) -> float:
    """The factor by which the tokenizer lengthens a text, at most. ValueError for a file with tokens or words that are too long."""
    file = file if isinstance(file, dict) else {}
    written, decoded = _growth(file.get("normalizer")), _growth(file.get("decoder"))
    added = [entry.get("content") for entry in file.get("added_tokens") or [] if isinstance(entry, dict)]
    model = file.get("model")
    word = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(word, int) and word > MAX_WORD_CHARACTERS:
        raise ValueError(f"words of {word} characters; at most {MAX_WORD_CHARACTERS}")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    words = [each[0] if isinstance(each, list) and each else each for each in vocabulary or []]
    longest = max((_size(word) for word in (*words, *added)), default=0)
    if sum(map(_size, added)) * written > MAX_GROWN_BYTES or longest * decoded > MAX_TOKEN_BYTES:
        raise ValueError("its steps make tokens too long")
    copies, beside = _copies(file.get("post_processor"))
    if beside > MAX_BESIDE:
        raise ValueError(f"it puts {beside:.0f} tokens beside each text; at most {MAX_BESIDE}")
    return written * _growth(file.get("pre_tokenizer")) * copies


def _growth(step: Any) -> float:
    """Of a step, or several: by its fields, as a file need not name its kind."""
    if not isinstance(step, dict):
        return 1.0
    times = float(_GROWTH.get(str(step.get("type")), _OTHER_GROWTH))
    for several in ("normalizers", "pretokenizers", "decoders"):
        times *= prod(map(_growth, step.get(several) or []))
    if (pattern := step.get("pattern")) is not None:
        replaced = _size(pattern.get("String") if isinstance(pattern, dict) else pattern)
        new = _size(step.get("content"))
        times *= max(1.0, new / replaced) if replaced else 1.0 + new  # what a regex finds may be nothing
    times *= 2.0 if step.get("add_prefix_space") else 1.0  # a blank for each piece
    times *= 1.0 + _size(step.get("prepend"))
    if isinstance(charsmap := step.get("precompiled_charsmap"), str):
        data = base64.b64decode(charsmap)  # the size of a table, the table, and texts that end in a zero
        texts = data[4 + int.from_bytes(data[:4], "little") :]
        times *= max(1, max(map(len, texts.split(b"\0"))))
    return times


def _copies(step: Any) -> tuple[float, float]:
    """How often the tokens of a text come, and how many others are put beside them."""
    if not isinstance(step, dict):
        return 1.0, 0.0
    single, special = step.get("single") or [], step.get("special_tokens")
    ids = [len(each.get("ids") or []) for each in special.values()] if isinstance(special, dict) else []
    texts = sum("Sequence" in each for each in single)
    times, added = float(max(1, texts)), float((len(single) - texts) * max(ids, default=1))
    for again, more in map(_copies, step.get("processors") or []):
        times, added = times * again, added * again + more
    return times, added


def _size(text: Any) -> int:
    """In bytes; 0 for anything but a text."""
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._places = _Places()
        self.begins = 0

    def push(self, token: int) -> str:
        spelled = bytes((token,)) if 0 <= token < 256 else b""
        self.begins = self._places.push(spelled)
        return self._decoder.decode(spelled)

    def finish(self) -> str:
        return ""


class _NoStream:
    begins = 0

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def _decoder_steps(tokenizer: Tokenizer) -> frozenset[str]:
    """The kinds of decoder that it has, one or in sequence."""
    if tokenizer.decoder is None:
        return frozenset()
    state = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(str(step["type"]) for step in state.get("decoders", [state]))


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as (GPT-2): those that can be seen stand for themselves, the others
    for characters above 255, in order."""
    seen = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\u00a1"), ord("\u00ac") + 1),
        *range(ord("\u00ae"), 256),
    ]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
# Decoders whose pieces are the bytes of the text, and others that leave such pieces as they are, but for the first.
_SPELLED = frozenset({"ByteLevel", "ByteFallback", "Metaspace"})
_NEIGHBOURLY = frozenset({"Replace", "Fuse", "Strip"})
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


class _Decode(Protocol):
    def __call__(self, ids: Sequence[int], /) -> str: ...


class _Spell(Protocol):
    def __call__(self, token: int, /) -> bytes: ...


class _Places:
    """Where each token begins, in characters, of the bytes that it spells."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0  # without an unfinished character

    def push(self, spelled: bytes) -> int:
        """Of the next token."""
        begins = self._length
        if spelled and self._decoder.getstate()[0] and not 0x80 <= spelled[0] < 0xC0:
            begins += 1  # behind a character that never becomes whole
        self._length += len(self._decoder.decode(spelled))
        return begins

    def put(self, length: int) -> None:
        """So many characters there are, and none is unfinished: what is no text may be written as more or fewer of them."""
        self._decoder.reset()
        self._length = length


class _WindowStream:
    def __init__(self, decode: _Decode, spell: _Spell, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._spell = spell
        # The window: tokens whose text has been shown, but for an unfinished character at their end, then tokens held back.
        # With a byte-fallback decoder, which reads a run of byte tokens as a whole or not at all, it always starts where a
        # character does; with others it may start inside one, whose rest then reads the same in each text.
        self._ids: list[int] = []
        self._before = ""  # text of the shown part
        self._quiet = 0  # tokens since there was some, or since we gave up
        self._length = 0  # of what is certain
        self.begins = 0
        self._places = _Places()
        for length in range(CONTEXT_TOKENS, CONTEXT_TOKENS + 4):
            self._ids = list(prompt[-length:])
            self._before = decode(self._ids)
            if not self._before.startswith(REPLACEMENT):
                break
        self._shown = len(self._ids)

    def push(self, token: int) -> str:
        self._ids.append(token)
        self._quiet += 1
        whole = self._decode(self._ids)
        self.begins = self._places.push(self._spell(token))
        patient = self._quiet < PATIENCE_TOKENS
        # Of what never becomes whole the last may yet be the beginning of what does.
        certain = whole.rstrip(REPLACEMENT) if patient else whole.removesuffix(REPLACEMENT)
        piece = certain[len(self._before) :]
        if piece:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
            self._before = self._decode(self._ids)
            if unfinished := len(whole) - len(certain):
                self._before = self._before[:-unfinished]
            self._quiet = 0
            self._length += len(piece)
            if not unfinished:
                self._places.put(self._length)
        elif not patient:  # tokens without text must not make the window grow for ever
            del self._ids[self._shown :]
            self._quiet = 0
        return piece

    def finish(self) -> str:
        piece = self._decode(self._ids)[len(self._before) :].rstrip(REPLACEMENT)
        del self._ids[self._shown :]
        return piece
