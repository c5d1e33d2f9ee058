"""Text that others wrote, made harmless before it reaches a terminal, a log or a record.

What Python's `str.isprintable` refuses paints over a terminal or hides what stands there: control characters (escape
sequences among them), characters that turn the direction of writing round, lone surrogates, separators other than a
space. The two joiners without which some scripts cannot be written are let through.
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
    """`text` as one line: what is not printable becomes a space, and it is cut at `limit` characters."""
    clean = text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(clean.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def error_line(error: BaseException) -> str:
    """The error's text as one line of bounded length; its type's name in front where the text alone says little."""
    text = one_line(str(error), ERROR_CHARACTERS)
    if not text:
        return type(error).__name__
    return text if isinstance(error, TransportError | ValueError) else f"{type(error).__name__}: {text}"
