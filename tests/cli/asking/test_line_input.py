"""Lines on a terminal, and Ctrl-C at any moment."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys

import pytest

from fusion.cli.asking import line_input
from fusion.cli.asking.line_input import LineInput

WAIT_SECONDS = 60.0
# A signal goes to whichever thread the system picks; here it picks one that does not wait for the key.
PROGRAM = """
import signal, sys, threading, time
from fusion.cli.asking.line_input import LineInput

def interrupt():
    time.sleep(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

lines = LineInput()
assert lines.interactive
for number in range(2):
    threading.Thread(target=interrupt).start()
    try:
        lines.read()
    except KeyboardInterrupt:
        print("interrupted", number, flush=True)
print("said", lines.read(), flush=True)
print("end", lines.read(), flush=True)
"""


@pytest.mark.process
def test_an_interruption_ends_the_wait_for_a_key_whichever_thread_gets_it() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs)
    os.close(theirs)
    try:
        until(ours, b"interrupted 0")
        until(ours, b"interrupted 1")
        until(ours, b"> ")
        os.write(ours, b"a lineX\x7f\n")
        until(ours, b"said a line\r\n")
        until(ours, b"> ")
        os.write(ours, b"\x04")
        until(ours, b"end None")
        assert process.wait(WAIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes, errors: str = "strict") -> LineInput:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8", errors))
    return LineInput()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_are_told_whatever_the_locale(
    errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnicodeError):
        piped(monkeypatch, b"\xff\xfe\n", errors).read()


def test_a_line_without_an_end_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_input, "MAX_CHARACTERS", 4)
    lines = piped(monkeypatch, b"four\r\nfive\n!" + b"a" * 99)
    assert [lines.read(), lines.read()] == ["four", "five"]
    with pytest.raises(ValueError, match="a line of more than 4 characters is no message"):
        lines.read()


def until(terminal: int, text: bytes) -> bytes:
    """What it shows up to this text."""
    shown = b""
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], WAIT_SECONDS)
        assert ready, f"it says no more after {shown!r}"
        shown += os.read(terminal, 1)
    return shown
