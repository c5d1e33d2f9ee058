"""Calls of tools are found in what models say, however it is cut into pieces, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.http.tool_calls import Call, ToolCallStream

WEATHER = Call("weather", '{"city": "Köln"}')
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Köln"}}'
CASES = [
    (HERMES, "", (WEATHER,)),
    (f"Let me see.\n{HERMES}", "Let me see.\n", (WEATHER,)),
    (f"{HERMES}\n{HERMES}", "", (WEATHER, WEATHER)),
    (HERMES.removesuffix("</tool_call>"), "", (WEATHER,)),
    (
        '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        (Call("weather", '{"a": 1}'),),
    ),
    *(
        (said.replace("Köln", f"{tag}{tag}"), "", (Call("weather", f'{{"city": "{tag}{tag}"}}'),))
        for tag in ("<tool_call>", "</tool_call>")
        for said in (HERMES, LLAMA)
    ),
    (
        f"One {HERMES} or {HERMES.replace('Köln', '</tool_call>')} two",
        "One or  two",
        (WEATHER, Call("weather", '{"city": "</tool_call>"}')),
    ),
    (LLAMA, "", (WEATHER,)),
    (f"<|python_tag|>{LLAMA}", "", (WEATHER,)),
    (f"\n{LLAMA}; {LLAMA}", "", (WEATHER, WEATHER)),
    # Text.
    ("", "", ()),
    ("  ", "  ", ()),
    ("a < b <tool", "a < b <tool", ()),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", ()),
    (HERMES.replace("}}", "}} more"), HERMES.replace("}}", "}} more"), ()),
    ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', ()),
    ('{"name": "else", "parameters": {}}', '{"name": "else", "parameters": {}}', ()),
    (f"{LLAMA} and so on", f"{LLAMA} and so on", ()),
    ('{"answer": 42}', '{"answer": 42}', ()),
    ("{" * 5000, "{" * 5000, ()),
    ("<|python", "<|python", ()),
    # What no JSON can say, or no UTF-8.
    *(
        (said, said, ())
        for said in (
            LLAMA.replace('"Köln"', "NaN"),
            LLAMA.replace('"Köln"', "1e999"),
            LLAMA.replace("Köln", "\\ud800"),
            HERMES.replace("Köln", "\\ud800"),
            HERMES.replace("weather", "\\ud800"),
            '<tool_call>{"name": "weather", "arguments": "{\\"a\\": NaN}"}</tool_call>',
            '<tool_call>{"name": "weather", "arguments": "{\\"\\ud800\\": 1}"}</tool_call>',
        )
    ),
]


def read(pieces: list[str]) -> tuple[str, tuple[Call, ...]]:
    stream = ToolCallStream(["weather"])
    texts = [stream.push(piece) for piece in pieces]
    rest, calls = stream.finish()
    return "".join(texts) + rest, calls


@pytest.mark.parametrize(("said", "text", "calls"), CASES)
def test_whole_and_by_character(said: str, text: str, calls: tuple[Call, ...]) -> None:
    assert read([said]) == (text, calls) == read(list(said))
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


@given(st.lists(st.text('<tool_cal>/ {}a"', max_size=8), max_size=12))
def test_nothing_is_lost_of_what_is_no_call(pieces: list[str]) -> None:
    text, calls = read(pieces)
    assert calls == () and text == "".join(pieces)


def test_text_is_not_held_back_without_a_reason() -> None:
    stream = ToolCallStream(["weather"])
    assert [stream.push(piece) for piece in ("Hel", "lo <", "b> <tool_", "x")] == [
        "Hel",
        "lo ",
        "<b> ",
        "<tool_x",
    ]
