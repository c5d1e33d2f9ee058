"""Lines that the user writes: edited and recalled on a terminal, one message a line from a pipe or a file."""

from __future__ import annotations

import sys
from contextlib import suppress

PROMPT = "> "


class LineInput:
    """`read` in the main thread: Ctrl-C interrupts it there."""

    def __init__(self, *, interactive: bool = True) -> None:
        """`interactive`: whether it may be, where there is a terminal."""
        self.interactive = interactive and sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            with suppress(ImportError):  # not every Python has it; `input` then edits nothing
                import readline  # noqa: F401 - `input` goes through it from now on

    def read(self) -> str | None:
        """The next line without its end; None where there is none. Raises KeyboardInterrupt, UnicodeError."""
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return input(PROMPT)
        except EOFError:
            return None
