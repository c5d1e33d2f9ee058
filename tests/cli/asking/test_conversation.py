"""What a line means, and what the model is told of what was said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.cli.asking.conversation import COMMANDS, Command, Conversation, parse


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Hello there ", "Hello there"),
        ("", None),
        ("  \t", None),
        (" /etc/passwd is a file", "/etc/passwd is a file"),
        ("/new", Command("/new")),
        ("/route  ", Command("/route")),
        ("/model  my-model@12D3 ", Command("/model", "my-model@12D3")),
        ("/exit", Command("/exit")),
    ],
)
def test_a_line_is_a_message_or_a_command(line: str, said: object) -> None:
    assert parse(line) == said


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("/", "/ is no command"),
        ("/frobnicate", "/frobnicate is no command; /help"),
        ("/etc/passwd is a file", "/etc/passwd is no command"),
        ("/model", "/model: say which"),
        ("/model  ", "/model: say which"),
        ("/new all", "/new: takes nothing"),
    ],
)
def test_a_command_that_is_none_is_one_line(line: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as failed:
        parse(line)
    assert "\n" not in str(failed.value)


@given(st.text())
def test_any_line_has_a_meaning_or_is_refused(line: str) -> None:
    try:
        said = parse(line)
    except ValueError:
        assert line.startswith("/")
    else:
        assert said is None or (said.name in COMMANDS if isinstance(said, Command) else said == line.strip())


def test_every_command_is_explained() -> None:
    assert all(text.startswith(name + " ") for name, text in COMMANDS.items())


def test_the_model_is_told_what_was_said_by_turns() -> None:
    talk = Conversation()
    first = {"role": "user", "content": "Hi"}
    assert talk.with_question("Hi") == [first] and talk.messages == []
    talk.add("Hi", "Hello")
    second = [first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    assert talk.with_question("And?") == second
    talk.add("And?", "")  # stopped before anything came
    assert talk.with_question("And?") == second
    talk.forget()
    assert talk.with_question("Hi") == [first]
