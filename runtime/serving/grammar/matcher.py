"""The grammar state of one completion: a connection to the process that tracks it (`fusion.runtime.serving.grammar.worker`)."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fusion.runtime.job.errors import JobError, JobFailed

MASKS, STATES = b"m", b"s"  # these two lines as in the worker
GOES_ON, ACCEPTS, COMPLETE, DENIED, FAILED = b"g", b"a", b"c", b"x", b"e"
WAIT_SECONDS = 10.0  # for a step on a busy machine; its CPU time is far less
TOO_MUCH = "response_format: the schema takes too much time or memory"


class GrammarSession:
    """Tracks the tokens of one completion: which may come next, and whether it is complete. `release` is called once, when it is closed,
    and `used` with each token, in the calling thread.

    `push` and `mask` block and are for one thread; `push_soon` is for the event loop."""

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
        self._using = threading.Lock()  # held while a thread uses the connection

    @property
    def accepts(self) -> bool:
        """Whether the completion may end here."""
        return self._state in (ACCEPTS, COMPLETE)

    @property
    def complete(self) -> bool:
        """Whether no further token is allowed."""
        return self._state == COMPLETE

    def close(self) -> None:
        """Close the matcher; may be called from any thread. Idempotent."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
            with self._using:
                self._connection.close()
            self._release()

    def push(self, token: int) -> None:
        """Add a token that the mask allows. JobFailed where the process has failed."""
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
        """The mask: a bit for each token, lowest first, and one after them for the end of the completion. To be called once after each
        push. JobFailed where the process has failed."""
        bits = bytearray(self._mask_bytes)
        view = memoryview(bits)
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
        return bits

    async def push_soon(self, tokens: Sequence[int]) -> bool:
        """Add tokens, as many as are allowed; returns whether all are. JobFailed as `push`."""
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
    """The process has ended: most often because the schema takes too much time or memory."""


class GrammarsBusy(JobFailed):
    """Too many different schemas are in use."""


class GrammarRefused(JobError):
    """The schema, or any schema with this model, is not possible; says why."""


def _tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
