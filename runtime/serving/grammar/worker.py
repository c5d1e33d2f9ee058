"""A process that computes token masks by JSON schemas for one model. Run as a module, imported by nothing.

    python -m fusion.runtime.serving.grammar.worker PARENT MEMORY_BYTES GRAMMAR_BYTES

A schema comes from a stranger, and a few lines can take years of work or all memory (`multipleOf`, patterns that repeat, `allOf` of
itself): llguidance has limits, which do not bound everything. So each schema is compiled and tracked in a process of its own, with
limits on CPU time and memory that the kernel enforces. It is forked from this one, which has loaded the model's tokenizer already.

Standard input is a socket. It receives {kind, vocabulary, end_tokens} and the tokenizer's bytes, and sends {} or {error}. Then each
byte carries a socket for one schema, which receives the schema's text and sends {} or {error}. There each byte carries a socket for
one completion, with masks where the byte is MASKS. That receives lists of tokens, 4 bytes of count and 4 bytes for each; for each list
it sends the state of the completion (GOES_ON, ACCEPTS, COMPLETE, DENIED, FAILED) and, unless it has ended, the mask: a bit for each
token, and one after them for the end of the completion.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.text import ByteText, TokenizerText

MASKS, STATES = b"m", b"s"
GOES_ON, ACCEPTS, COMPLETE, DENIED, FAILED = b"g", b"a", b"c", b"x", b"e"
LOAD_SECONDS = 60.0  # of CPU time, for the tokenizer; so are the following
COMPILE_SECONDS = 2.0  # for a schema and its first mask
STEP_SECONDS = 0.25  # for one token and the mask after it
FIRST_SECONDS, SECONDS_PER_TOKEN = 1.0, 0.005  # for all tokens of a schema's completions together
MAX_SESSIONS = 1024
LINE_CHARACTERS = 200
_PR_SET_PDEATHSIG = 1
# Between the parts of a JSON text, as in llama.cpp: with unlimited whitespace a completion might never end.
_OPTIONS = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}


def main(parent: int, memory_bytes: int, grammar_bytes: int) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a schema's process may begin no thread
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no zombies are left
    _end_with(parent)
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_FSIZE", 0)
    _limit("RLIMIT_AS", memory_bytes)
    control = socket.socket(fileno=0)
    head = _receive_text(control)
    if head is None:
        return 0
    about = json.loads(head)
    data = _receive(control, about["length"])
    try:
        _time(LOAD_SECONDS)
        tokenizer = _tokenizer(about, data or b"")
    except (JobError, ValueError, MemoryError) as error:
        _answer(control, error=_line(error))
        return 0
    _time(0.0)
    _answer(control)
    del data, head
    gc.collect()
    gc.freeze()  # so that the memory stays shared
    while True:
        byte, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not byte:
            return 0
        if not _forked():
            for fd in fds:
                os.close(fd)
            continue
        control.close()
        _end_with(os.getppid())
        _limit("RLIMIT_AS", min(memory_bytes, _address_space() + grammar_bytes))
        _limit("RLIMIT_NPROC", 0)
        return _Grammar(socket.socket(fileno=fds[0]), tokenizer, about["vocabulary"]).serve()


def _forked() -> bool:
    """Whether this is the new process. If fork fails the caller closes its socket, which reports that."""
    try:
        return os.fork() == 0
    except OSError:
        return False


def _tokenizer(about: dict[str, Any], data: bytes) -> LLTokenizer:
    vocabulary, ends = about["vocabulary"], set(about["end_tokens"])
    text: ByteText | TokenizerText = ByteText() if about["kind"] == "bytes" else TokenizerText(data)
    if not text.literal:
        raise JobError("its tokenizer does not say which text each token stands for")
    special = text.special | ends
    tokens = [b"" if token in special else text.spell(token) for token in range(vocabulary)]
    # The end of a completion is an extra token after all others: which real tokens end one depends on the model.
    tokens_with_end = _Tokens([*tokens, b"<end>"], text)
    tokens_with_end.greedy = LLTokenizer(tokens_with_end, n_vocab=vocabulary + 1, slices=[])  # type: ignore[arg-type]
    return LLTokenizer(tokens_with_end, n_vocab=vocabulary + 1)  # type: ignore[arg-type]


class _Tokens:
    """The interface of a tokenizer for llguidance. Text that the schema fully determines is tokenized by the model's own tokenizer if
    that reproduces the text, else greedily into the longest tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    greedy: LLTokenizer | None = None

    def __init__(self, tokens: list[bytes], text: ByteText | TokenizerText) -> None:
        self.tokens = tokens
        self._text = text
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        with contextlib.suppress(Exception):  # a stranger's tokenizer may raise anything
            ids = self._text.encode(str(data, "utf-8"), plain=False)
            pieces = [self.tokens[token] for token in ids]
            if all(pieces) and b"".join(pieces) == data:
                return ids
        return [] if self.greedy is None else self.greedy.greedy_tokenize(str(data, "utf-8", "replace"))


class _Grammar:
    """One schema and its completions."""

    def __init__(self, control: socket.socket, tokenizer: LLTokenizer, vocabulary: int) -> None:
        self._control = control
        self._tokenizer = tokenizer
        self._only_the_end = bytearray((vocabulary + 32) // 32 * 4)
        self._only_the_end[vocabulary // 8] = 1 << vocabulary % 8
        self._sessions: dict[socket.socket, tuple[LLMatcher, bool]] = {}
        self._spent, self._tokens = 0.0, 0

    def serve(self) -> int:
        schema = _receive_text(self._control)
        if schema is None:
            return 0
        _time(COMPILE_SECONDS)
        try:
            matcher = self._compiled(schema)
        except (ValueError, MemoryError) as error:
            _answer(self._control, error=_line(error))
            return 0
        _time(0.0)
        _answer(self._control)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self._control:
                        assert isinstance(key.fileobj, socket.socket)
                        if not self._step(key.fileobj):
                            selector.unregister(key.fileobj)
                            del self._sessions[key.fileobj]
                            key.fileobj.close()
                        continue
                    byte, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not byte:
                        return 0
                    for fd in fds:
                        session = socket.socket(fileno=fd)
                        if len(self._sessions) >= MAX_SESSIONS:
                            session.close()
                            continue
                        self._sessions[session] = matcher.deep_copy(), byte == MASKS
                        selector.register(session, selectors.EVENT_READ)

    def _compiled(self, schema: str) -> LLMatcher:
        """ValueError says what is wrong with it."""
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)  # type: ignore[arg-type]
        limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            raise ValueError("no answer could follow it")
        return matcher

    def _step(self, session: socket.socket) -> bool:
        """Handle the next tokens of a completion. False where it has ended."""
        head = _receive(session, 4)
        count = struct.unpack("<I", head)[0] if head else 0
        data = _receive(session, 4 * count) if head else None
        if data is None:
            return False
        self._tokens += count
        left = FIRST_SECONDS + SECONDS_PER_TOKEN * self._tokens - self._spent
        if left <= 0:
            sys.exit(1)
        began = time.process_time()
        _time(min(left, STEP_SECONDS + SECONDS_PER_TOKEN * count))
        matcher, masks = self._sessions[session]
        state, mask = self._consume(matcher, list(struct.unpack(f"<{count}I", data)))
        try:
            session.sendall(state)
            if masks and state in (GOES_ON, ACCEPTS):  # while the token is on its way around the ring
                mask = mask or matcher.compute_bitmask()
                if matcher.is_error():
                    return False
                session.sendall(mask)
        except OSError:
            return False
        _time(0.0)
        self._spent += time.process_time() - began
        return True

    def _consume(self, matcher: LLMatcher, tokens: list[int]) -> tuple[bytes, bytes | None]:
        """The state after these tokens, and the mask if it was computed for that."""
        if any(token >= self._tokenizer.vocab_size - 1 for token in tokens):
            return DENIED, None
        if tokens and matcher.try_consume_tokens(tokens) < len(tokens):
            return FAILED if matcher.is_error() else DENIED, None
        if matcher.is_error():
            return FAILED, None
        if matcher.is_stopped():
            return COMPLETE, None
        if not matcher.is_accepting():
            return GOES_ON, None
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return FAILED, None
        return (COMPLETE, None) if mask == self._only_the_end else (ACCEPTS, mask)


def _time(seconds: float) -> None:
    """Limit the process to so much CPU time from now; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit(name: str, value: int) -> None:
    with contextlib.suppress(ValueError, OSError, AttributeError):  # macOS knows some of them by name only
        resource.setrlimit(getattr(resource, name), (value, value))


def _address_space() -> int:
    """Bytes of address space in use; 2**62 where that is unknown."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 1 << 62


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit(0)


def _line(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return " ".join(str(error).split())[:LINE_CHARACTERS] or type(error).__name__


def _answer(control: socket.socket, **fields: str) -> None:
    data = json.dumps(fields).encode()
    control.sendall(struct.pack("<I", len(data)) + data)


def _receive_text(control: socket.socket) -> str | None:
    head = _receive(control, 4)
    data = None if head is None else _receive(control, struct.unpack("<I", head)[0])
    return None if data is None else str(data, "utf-8")


def _receive(source: socket.socket, count: int) -> bytes | None:
    """`count` bytes; None where the stream ends before."""
    data = bytearray()
    while len(data) < count:
        try:
            part = source.recv(min(count - len(data), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
