"""The messages of a chat, as chat templates take them, and what an input line means. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COMMANDS = {
    "/model": "/model NAME  go on with another model, which is told all that was said",
    "/route": "/route       which peers ran the stages of the last answer",
    "/new": "/new         forget what was said",
    "/help": "/help        this list",
    "/exit": "/exit        end; so does Ctrl-D. Ctrl-C stops an answer and keeps what came of it",
}


@dataclass(frozen=True)
class Command:
    name: str  # one of COMMANDS
    argument: str = ""


def parse(line: str) -> Command | str | None:
    """A command, a message to the model, or None for an empty line. A line is a command where its first character is "/":
    a message that begins so gets a space before it. ValueError for a command that is none."""
    if not line.startswith("/"):
        return line.strip() or None
    name, _, rest = line.strip().partition(" ")
    argument = rest.strip()
    if name not in COMMANDS:
        raise ValueError(f"{name[:40]} is no command; /help lists them")
    if (name == "/model") != bool(argument):
        raise ValueError(
            "/model: say which, as in /model NAME" if name == "/model" else f"{name}: takes nothing"
        )
    return Command(name, argument)


@dataclass
class Conversation:
    """Messages of user and assistant by turns, as many templates demand it."""

    messages: list[dict[str, str]] = field(default_factory=list)

    def with_question(self, text: str) -> list[Mapping[str, str]]:
        """The messages for the template, with `text` as the last one."""
        return [*self.messages, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """Remember a turn, unless the answer is empty."""
        if answer:
            self.messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]

    def forget(self) -> None:
        self.messages.clear()
