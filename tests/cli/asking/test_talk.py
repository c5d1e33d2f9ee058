"""What a conversation shows where something goes wrong."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from fusion.cli.asking.line_input import LineInput
from fusion.cli.asking.partner import Partner, Turn
from fusion.cli.asking.talk import Talk
from fusion.cli.terminal.loop import LoopThread
from fusion.cli.terminal.output import Output
from fusion.swarm.errors import StreamBroken


class Lines:
    """One line, and then no more."""

    interactive = True

    def __init__(self) -> None:
        self._left = ["Hi"]

    def read(self) -> str | None:
        return self._left.pop() if self._left else None


class Loop:
    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


class Failing:
    """Says `text` and breaks off."""

    name = "llama"

    def __init__(self, text: str, output: Output) -> None:
        self._text, self._output = text, output

    async def answer(self, messages: object, turn: Turn) -> None:
        turn.text += self._text
        self._output.write(self._text)
        raise StreamBroken("the peer is gone")


@pytest.mark.parametrize(("text", "shown"), [("half of", "half of\n"), ("", "")])
def test_an_error_in_the_middle_of_an_answer_is_on_a_line_of_its_own(text: str, shown: str) -> None:
    both = io.StringIO()  # as on a terminal
    output = Output(stdout=both, stderr=both)
    partner = cast(Partner, Failing(text, output))
    Talk(cast(LoopThread, Loop()), partner, cast(LineInput, Lines()), output).run()
    begun, _, said = both.getvalue().partition("ends\n")
    assert begun and said.startswith(shown + "the peer is gone")
