"""What is wrong with a chat template is known before anybody chats."""

from __future__ import annotations

import asyncio
import re

import pytest

from fusion.runtime.serving.requests.chat_format import ChatFormat, format_of
from fusion.runtime.serving.requests.chat_trial import chat_fault, template_fault

pytestmark = pytest.mark.process

GOOD = "{% for m in messages %}{{ m.role }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tools", "said"),
    [
        (GOOD, None, ""),
        (GOOD, "{{ tools[0].function.name }}", ""),
        ("{% for m in messages %}", None, "chat template does not take a plain message.*: Unexpected end of"),
        ("{{ nothing.at.all }}", None, "chat template does not take .*: 'nothing' is undefined"),
        (GOOD, "{{ raise_exception('no\n tools') }}", "template for tools does not take .*: no tools$"),
    ],
)
def test_a_template_is_tried(template: str, tools: str | None, said: str) -> None:
    line = asyncio.run(template_fault(ChatFormat(template, {}, tools)))
    assert re.search(said, line)
    assert bool(line) == bool(said) and "\n" not in line


def test_a_fault_is_told_in_another_thread_as_well() -> None:
    async def main() -> str:
        return await asyncio.to_thread(chat_fault, {"chat_template.jinja": b"{% if %}"})

    assert "does not take a plain message" in asyncio.run(main()) and chat_fault({}) == ""


def test_where_tools_are_given_their_template_is_rendered() -> None:
    files = {"chat_template.jinja": b"a", "special_tokens_map.json": b"{}"}
    assert format_of(files).template_for([{}]) == "a"
    both = format_of({**files, "chat_template_tool_use.jinja": b"b"})
    assert (both.template_for(None), both.template_for([]), both.template_for([{}])) == ("a", "a", "b")
