"""A conversation, line after line: the main thread reads, the event loop runs beside it, and Ctrl-C stops the answer that
comes and no more."""

from __future__ import annotations

from typing import Any

from fusion.cli.asking.answer_trace import answer_record, route_lines
from fusion.cli.asking.conversation import COMMANDS, Command, Conversation, parse
from fusion.cli.asking.line_input import LineInput
from fusion.cli.asking.partner import Partner, Turn
from fusion.cli.terminal import errors
from fusion.cli.terminal.loop import LoopThread
from fusion.cli.terminal.output import Output, seconds_text
from fusion.swarm.errors import SwarmError


class Talk:
    """Line after line, in the main thread."""

    def __init__(self, loop: LoopThread, partner: Partner, lines: LineInput, output: Output) -> None:
        self._loop = loop
        self._partner = partner
        self._lines = lines
        self._output = output
        self._conversation = Conversation()
        self._last: Turn | None = None

    def run(self) -> None:
        """Until the input ends. An error ends it, too, unless the input is interactive."""
        if self._lines.interactive:
            self._output.note(f"{self._partner.name}: /help lists commands, Ctrl-D ends")
        while True:
            try:
                line = self._lines.read()
                if line is None or not self._take(parse(line)):
                    return
            except KeyboardInterrupt:
                if not self._lines.interactive:
                    raise
                self._output.print_line()
            except (ValueError, SwarmError) as error:
                if not self._lines.interactive:
                    raise
                self._output.note(errors.explain(error).message)

    def _take(self, line: Command | str | None) -> bool:
        """Act on an input line. Whether the chat goes on."""
        match line:
            case str():
                self._reply(line)
            case Command("/exit"):
                return False
            case Command("/model", name):
                self._loop.run(self._partner.choose(name, "/model"))
                self._output.note(f"now with {self._partner.name}")
            case Command("/new"):
                self._conversation.forget()
                self._output.note("all that was said is forgotten")
            case Command("/route"):
                self._route()
            case Command("/help"):
                self._output.print_line("\n".join(COMMANDS.values()))
                self._output.emit({"commands": list(COMMANDS)})
        return True

    def _reply(self, question: str) -> None:
        turn = Turn()
        try:
            self._loop.run(self._partner.answer(self._conversation.with_question(question), turn))
        except KeyboardInterrupt:
            self._output.write("\n")
            self._output.note("stopped")
        except Exception:
            self._output.end_line()
            raise
        else:
            self._output.write("\n")
        self._last = turn
        self._conversation.add(question, turn.text)
        self._output.emit(_record(turn))

    def _route(self) -> None:
        answer = None if self._last is None else self._last.answer
        if self._last is None or answer is None:
            self._output.print_line("a route is known once an answer has come to its end")
            self._output.emit({"route": []})
            return
        trips = self._loop.run(self._partner.trips(answer.route))
        timing = self._last.trace.record()
        self._output.emit({"route": list(answer.route), "round_trip_seconds": trips, **timing})
        for line in route_lines(answer.route, trips):
            self._output.print_line(line)
        first, gap = timing["first_token_seconds"], timing["gap_p50_seconds"]
        if first is not None:
            rest = "" if gap is None else f", then {seconds_text(gap)} a token"
            self._output.print_line(f"the first token came after {seconds_text(first)}{rest}")


def _record(turn: Turn) -> dict[str, Any]:
    if turn.answer is None:
        return {"text": turn.text, "tokens": turn.tokens, "stopped": True}
    return answer_record(turn.answer)
