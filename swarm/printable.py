"""Makes text of others safe for a terminal, a log or a record.

Characters that Python's `str.isprintable` refuses can overwrite or hide terminal output: control characters (including escape
sequences), characters that change the direction of writing, lone surrogates, separators other than a space. The two joiners
that some scripts need are kept.
"""

from __future__ import annotations

from fusion.swarm.errors import TransportError

JOINERS = "\u200c\u200d"
ERROR_CHARACTERS = 300


def printable(text: str, allowed: str = "") -> str:
    """`text` with "\ufffd" in place of each character that is neither printable nor one of `allowed`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in allowed or c in JOINERS else "\ufffd" for c in text)


def one_line(text: str, limit: int = 300) -> str:
    """`text` as one line: unprintable characters become spaces, and it is cut at `limit` characters."""
    clean = text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(clean.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def error_line(error: BaseException) -> str:
    """The error's text as one line of bounded length, with the type's name in front unless it is a TransportError or ValueError."""
    text = one_line(str(error), ERROR_CHARACTERS)
    if not text:
        return type(error).__name__
    return text if isinstance(error, TransportError | ValueError) else f"{type(error).__name__}: {text}"
