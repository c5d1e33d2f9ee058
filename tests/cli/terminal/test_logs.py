from __future__ import annotations

import io
import logging

from hypothesis import given
from hypothesis import strategies as st

from fusion.cli.terminal.logs import BURST, SECONDS_PER_LINE, Harmless, RateLimit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def logger(clock: Clock) -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Harmless("%(levelname).1s %(message)s"))
    handler.addFilter(RateLimit(clock))
    made = logging.Logger("of this test")
    made.addHandler(handler)
    return made, stream


@given(st.text())
def test_whatever_a_stranger_says_is_one_harmless_line(said: str) -> None:
    log, stream = logger(Clock())
    log.warning("from a stranger: %s", said)
    line = stream.getvalue()
    assert line.count("\n") == 1 and line.endswith("\n")
    assert all(c.isprintable() or c in "\u200c\u200d" for c in line[:-1])


def test_a_traceback_keeps_its_lines() -> None:
    log, stream = logger(Clock())
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.exception("broken")
    assert stream.getvalue().count("\n") > 2
    assert "\x1b" not in stream.getvalue()


def test_ten_thousand_refusals_are_a_few_lines_that_say_so() -> None:
    clock = Clock()
    log, stream = logger(clock)

    def refuse() -> None:
        log.warning("refused %s", "a stream")

    for _ in range(10_000):
        refuse()
    assert stream.getvalue().count("\n") == BURST
    clock.now += SECONDS_PER_LINE
    log.warning("another kind of line")
    refuse()
    assert stream.getvalue().endswith(f"refused a stream ({10_000 - BURST} more lines like this left out)\n")
    assert "another kind of line\n" in stream.getvalue()
