"""How one answer stands with its grammar: a connection to the process that follows it (`fusion.runtime.serving.grammar.worker`)."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fusion.runtime.job.errors import JobError, JobFailed

MASKS, STATES = b"m", b"s"  # as in the worker, with what follows
GOES_ON, ACCEPTS, COMPLETE, DENIED, FAILED = b"g", b"a", b"c", b"x", b"e"
WAIT_SECONDS = 10.0  # for a step, which takes far less of a processor: on a busy machine
TOO_MUCH = "response_format: the schema takes too much time or memory"


class GrammarSession:
    """The tokens of one answer: which it may have, and whether it is complete. `release` is called once, as it is closed, and `used`
    with each token, in the thread that says it.

    `push` and `mask` wait and are for one thread; `push_soon` is for the loop."""

    def __init__(
        self,
        connection: socket.socket,
        vocabulary: int,
        release: Callable[[], None],
        used: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._mask_bytes = (vocabulary + 32) // 32 * 4
        self._release = release
        self._used = used
        self._closed = False
        self._state = GOES_ON
        self._using = threading.Lock()  # a thread waits for it

    @property
    def accepts(self) -> bool:
        """Whether the answer may end here."""
        return self._state in (ACCEPTS, COMPLETE)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self._state == COMPLETE

    def close(self) -> None:
        """From any thread. Idempotent."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
            with self._using:
                self._connection.close()
            self._release()

    def push(self, token: int) -> None:
        """The answer has one more, which its mask allows. JobFailed where it cannot be followed any further."""
        try:
            with self._using:
                self._connection.settimeout(WAIT_SECONDS)
                self._connection.sendall(_tokens((token,)))
                state = self._connection.recv(1)
        except OSError:
            raise GrammarTooCostly(TOO_MUCH) from None
        if not self._moved(state):
            raise JobFailed(f"response_format: token {token} was not allowed")

    def mask(self) -> bytearray:
        """A bit for each token, lowest first, and one after them for the end of the answer; once after each push.
        JobFailed where there is none."""
        found = bytearray(self._mask_bytes)
        view = memoryview(found)
        try:
            with self._using:
                self._connection.settimeout(WAIT_SECONDS)
                while view:
                    count = self._connection.recv_into(view)
                    if not count:
                        raise GrammarTooCostly(TOO_MUCH)
                    view = view[count:]
        except OSError:
            raise GrammarTooCostly(TOO_MUCH) from None
        return found

    async def push_soon(self, tokens: Sequence[int]) -> bool:
        """Whether the answer may have these next: it has them then, or as many of them as it may. JobFailed as `push`."""
        loop = asyncio.get_running_loop()
        try:
            self._connection.setblocking(False)
            async with asyncio.timeout(WAIT_SECONDS):
                await loop.sock_sendall(self._connection, _tokens(tokens))
                state = await loop.sock_recv(self._connection, 1)
        except (OSError, TimeoutError):
            raise GrammarTooCostly(TOO_MUCH) from None
        return self._moved(state)

    def _moved(self, state: bytes) -> bool:
        if state == DENIED:
            return False
        if state not in (GOES_ON, ACCEPTS, COMPLETE):
            raise GrammarTooCostly(TOO_MUCH)
        self._state = state
        self._used()
        return True


class GrammarTooCostly(JobFailed):
    """Its process has ended: what the schema asks for takes too much time or memory, as a rule."""


class GrammarsBusy(JobFailed):
    """So many answers to unlike schemas are under way that this one has to wait."""


class GrammarRefused(JobError):
    """The schema, or any with this model, is not possible; says why."""


def _tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
