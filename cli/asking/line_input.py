"""Lines that the user writes: edited and recalled on a terminal, one message a line from a pipe or a file."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PROMPT = "> "
MAX_CHARACTERS = 16 << 20  # of a line that is not typed: 4 million tokens
NOTICED_SECONDS = 0.05  # within which Python has raised KeyboardInterrupt, if it is going to


class LineInput:
    """`read` in the main thread: Ctrl-C interrupts it there."""

    def __init__(self, *, interactive: bool = True) -> None:
        """`interactive`: whether it may be, where there is a terminal."""
        self.interactive = interactive and sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            with suppress(ImportError):  # not every Python has it; `input` then edits nothing
                import readline  # noqa: F401 - `input` goes through it from now on

    def read(self) -> str | None:
        """The next line without its end; None where there is none. Raises KeyboardInterrupt, UnicodeError; ValueError for one that is
        longer than any."""
        line = self._typed() if self.interactive else self._piped()
        if line is not None:
            line.encode()  # in some locales Python reads what is no UTF-8 as halves of surrogate pairs
        return line

    def _typed(self) -> str | None:
        try:
            with _interruptible():
                return input(PROMPT)
        except EOFError:
            return None

    def _piped(self) -> str | None:
        line = sys.stdin.readline(MAX_CHARACTERS + 2)
        text = line.rstrip("\r\n")
        if len(text) > MAX_CHARACTERS:  # of /dev/zero, say, which has no ends of lines
            raise ValueError(f"a line of more than {MAX_CHARACTERS} characters is no message")
        return text if line else None


@contextmanager
def _interruptible() -> Iterator[None]:
    """`input` waits for a key and for a signal that comes while it waits. One that came just before, or to another thread, it
    would notice with the next key only: that one is sent again, to the main thread."""
    if not hasattr(signal, "pthread_kill"):  # Windows
        yield
        return
    main, ended = threading.main_thread().ident, threading.Event()
    assert main is not None
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def watch() -> None:
        while (number := os.read(reads, 1)) not in (b"", b"\0"):
            while number == bytes([signal.SIGINT]) and not ended.wait(NOTICED_SECONDS):
                signal.pthread_kill(main, signal.SIGINT)

    watching = threading.Thread(target=watch, name="interrupts", daemon=True)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.write(writes, b"\0")
        watching.join()
        os.close(reads)
        os.close(writes)
