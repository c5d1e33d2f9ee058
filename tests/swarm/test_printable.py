from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.errors import PeerUnreachable
from fusion.swarm.printable import error_line, one_line, printable

EVIL = [
    "\x1b]52;c;cm0gLXJmIC8=\x07",  # writes the clipboard
    "\x1b]0;title\x07",
    "\x9b2J",  # C1: the same as ESC [
    "\u202eevil\u202c",  # turns the writing round
    "\u2066hidden\u2069",
    "\r\x08\x7f",
    "\u2028\u2029\x85",
    "\ud800",
]


@pytest.mark.parametrize("text", EVIL)
def test_what_paints_over_a_terminal_is_replaced(text: str) -> None:
    for safe in (printable(text, "\n\t"), one_line(text), error_line(ValueError(text))):
        assert safe.isprintable()


@given(st.text())
def test_only_what_is_allowed_gets_through(text: str) -> None:
    safe = printable(text, "\n")
    assert len(safe) == len(text)
    assert all(c.isprintable() or c in "\n\u200c\u200d" for c in safe)
    assert printable(safe, "\n") == safe


def test_honest_text_stays() -> None:
    for text in ("grüße", "日本語", "नमस्ते", "می\u200cخواهم", "👩\u200d💻"):
        assert printable(text) == text


def test_a_line_is_cut_and_an_error_that_says_little_is_named() -> None:
    assert one_line("a" * 400) == "a" * 299 + "…"
    assert error_line(TimeoutError()) == "TimeoutError"
    assert error_line(RuntimeError("x")) == "RuntimeError: x"
    assert error_line(PeerUnreachable("nobody\nthere")) == "nobody there"
