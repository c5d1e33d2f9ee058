"""Answers as OpenAI's API writes them, from pieces as a gateway gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.chat_format import variables
from fusion.runtime.serving.http.schema import ChatRequest
from fusion.runtime.serving.http.shapes import (
    ChatReader,
    ChatShape,
    CompletionShape,
    EncodedLists,
    Shape,
    json_parts,
    token_text,
    usage,
)
from fusion.runtime.serving.requests.chat_format import ChatFormat
from fusion.runtime.serving.requests.request import Answer, Finish, Piece

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def said(texts: Sequence[str], tail: str = "", finish: Finish = "stop") -> list[Part]:
    """An answer in pieces, whose last text was held back until the end."""
    pieces = [Part(0, Piece(index=i, id=i, text=text)) for i, text in enumerate(texts)]
    whole = "".join(texts) + tail
    end = Answer(text=whole, tokens=(1, 2), finish=finish, prompt_tokens=3, route=(), seconds=0.0)
    return [*pieces, Part(0, end)]


def streamed(shape: Shape, parts: list[Part]) -> list[dict[str, Any]]:
    return [choice for part in parts for choice in shape.chunks(part)]


def whole(shape: Shape, parts: list[Part]) -> dict[str, Any]:
    for part in parts:
        if isinstance(part.output, Answer):
            found: dict[str, Any] = json.loads(b"".join(json_parts(shape.whole(part.choice, part.output))))
            return found
        shape.keep(part.choice, part.output)
    raise AssertionError("an answer ends")


def test_a_text_that_was_held_back_comes_at_the_end_and_pieces_without_text_do_not() -> None:
    parts = said(["a", "", "b"], "c", "length")
    chunks = streamed(CompletionShape({}), parts)
    assert [(each["text"], each["finish_reason"]) for each in chunks] == [
        ("a", None),
        ("b", None),
        ("c", "length"),
    ]
    deltas = streamed(ChatShape(ChatReader(()), {}), parts)
    assert [each["delta"] for each in deltas] == [{"content": "a"}, {"content": "b"}, {"content": "c"}, {}]
    assert whole(CompletionShape({}), parts)["text"] == "abc"
    assert whole(ChatShape(ChatReader(()), {}), parts)["message"] == {"role": "assistant", "content": "abc"}


@pytest.mark.parametrize("text", [CALL, f"Well.\n{CALL}"])
def test_tools_are_called(text: str) -> None:
    content = text.removesuffix(CALL)
    found = whole(ChatShape(ChatReader(["f"]), {}), said([text]))
    [call] = found["message"]["tool_calls"]
    assert found["message"]["content"] == (content or None) and found["finish_reason"] == "tool_calls"
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'} and call["id"].startswith("call_")
    chunks = streamed(ChatShape(ChatReader(["f"]), {}), said(list(text)))
    assert "".join(each["delta"].get("content", "") for each in chunks) == content
    assert chunks[-2]["delta"]["tool_calls"][0]["index"] == 0
    assert chunks[-1]["delta"] == {} and chunks[-1]["finish_reason"] == "tool_calls"
    assert whole(ChatShape(ChatReader(()), {}), said([text]))["message"]["content"] == text, (
        "nobody offered a tool"
    )
    assert (
        whole(ChatShape(ChatReader(["f"]), {}), said([text[:-20]], finish="length"))["finish_reason"]
        == "length"
    )


CUT = [
    (' {\n"name" :"f" , "arguments" :{"a": 1', "f", '{"a": 1'),
    ('{"name": "f\\"", "arguments": {"b": "}"}', 'f"', '{"b": "}"}'),
    ('{"name":"f","argu', "f", ""),
]


@pytest.mark.parametrize(("text", "name", "arguments"), CUT)
def test_a_call_that_had_to_be_and_was_cut_off_is_one(text: str, name: str, arguments: str) -> None:
    for finish in ("length", "stop"):  # by a text of `stop`: nobody reads it for a whole one
        parts = said(list(text), finish=finish)
        found = whole(ChatShape(ChatReader(["f"], must=True), {}), parts)
        *_, told, end = streamed(ChatShape(ChatReader(["f"], must=True), {}), parts)
        assert found["finish_reason"] == end["finish_reason"] == finish
        if finish == "stop":
            assert found["message"] == {"role": "assistant", "content": text}
            continue
        assert found["message"]["content"] is None and "content" not in told["delta"]
        for [call] in (found["message"]["tool_calls"], told["delta"]["tool_calls"]):
            assert call["function"] == {"name": name, "arguments": arguments}
    perhaps = whole(ChatShape(ChatReader(["f"]), {}), said([text], finish="length"))
    assert perhaps["message"]["content"] == text
    unnamed = whole(ChatShape(ChatReader(["f"], must=True), {}), said(['{"name": "f'], finish="length"))
    assert unnamed["message"]["content"] == '{"name": "f'


def test_one_tool_is_called_where_several_may_not_be() -> None:
    parts = said([CALL.replace("1", "0"), "\n", CALL])
    for several, arguments in ((True, ['{"a": 0}', '{"a": 1}']), (False, ['{"a": 0}'])):
        found = whole(ChatShape(ChatReader(["f"], several=several), {}), parts)
        *_, calling, end = streamed(ChatShape(ChatReader(["f"], several=several), {}), parts)
        assert found["finish_reason"] == end["finish_reason"] == "tool_calls"
        for told in (found["message"]["tool_calls"], calling["delta"]["tool_calls"]):
            assert [call["function"]["arguments"] for call in told] == arguments


def test_tokens_as_they_are_told() -> None:
    assert token_text(7, " é".encode()) == " é"
    assert token_text(7, "é".encode()[:1]) == "bytes:\\xc3"
    assert token_text(7, b"") == "token_id:7"
    piece = Piece(index=0, id=7, text="", logprob=-1.0, top_logprobs=((7, -1.0), (8, -2.0)))
    spelling = {7: b"\xc3", 8: b"a"}
    [chunk] = ChatShape(ChatReader(()), spelling).chunks(Part(0, piece))
    [told] = chunk["logprobs"]["content"]
    assert (told["token"], told["bytes"], told["logprob"]) == ("bytes:\\xc3", [0xC3], -1.0)
    assert [each["token"] for each in told["top_logprobs"]] == ["bytes:\\xc3", "a"]
    [chunk] = CompletionShape(spelling).chunks(Part(0, piece))
    assert chunk["logprobs"]["top_logprobs"] == [{"bytes:\\xc3": -1.0, "a": -2.0}]


def test_of_tokens_that_look_alike_the_most_probable_one_is_told() -> None:
    top = ((2, -0.5), (3, -1.0), (1, -2.0), (4, -7.0))
    piece = Piece(index=0, id=1, text="a", logprob=-2.0, top_logprobs=top)
    [chunk] = CompletionShape({1: b"a", 2: b"b", 3: b"a", 4: b"b"}).chunks(Part(0, piece))
    assert chunk["logprobs"]["token_logprobs"] == [-2.0]
    assert chunk["logprobs"]["top_logprobs"] == [{"a": -2.0, "b": -0.5}]


TOLD = {i: f"é{i}".encode() for i in range(9)}


@pytest.mark.parametrize("shape", [CompletionShape, lambda spelling: ChatShape(ChatReader(()), spelling)])
def test_log_probabilities_of_a_whole_answer_are_written_a_token_at_a_time(
    shape: Callable[[dict[int, bytes]], Shape],
) -> None:
    """All of a long answer's at once held the loop for seconds, and took gigabytes as objects."""
    pieces = [
        Piece(
            index=i, id=i % 9, text=f"é{i % 9}", logprob=-i / 7, top_logprobs=((i % 9, -1.5), (i % 8, -2.5))
        )
        for i in range(300)
    ]
    text = "".join(piece.text for piece in pieces)
    end = Answer(text=text, tokens=(1,), finish="length", prompt_tokens=1, route=(), seconds=0.0)
    made, streaming = shape(TOLD), shape(TOLD)
    for piece in pieces:
        made.keep(3, piece)
    parts = json_parts({"choices": [made.whole(3, end)]})
    assert max(map(len, parts)) < 2000
    [found] = json.loads(b"".join(parts))["choices"]
    chunks = [choice for piece in pieces for choice in streaming.chunks(Part(3, piece))]
    for name, entries in found["logprobs"].items():
        assert entries == [entry for chunk in chunks for entry in chunk["logprobs"][name]]
        assert len(entries) == 300


def test_lists_that_are_written_already_stand_where_they_belong() -> None:
    value = {"a": EncodedLists({"x": [b"1", b"2"], "y": []}), "b": [EncodedLists({"z": [b'"q"']}), 5]}
    assert json.loads(b"".join(json_parts(value))) == {"a": {"x": [1, 2], "y": []}, "b": [{"z": ["q"]}, 5]}
    assert b"".join(json_parts({"a": 1})) == b'{"a":1}'


def test_usage_counts_a_prompt_once() -> None:
    ends = [part.output for part in (said(["a"])[-1], said(["b"])[-1]) if isinstance(part.output, Answer)]
    found = usage(3, [ends[0], replace(ends[1], cached_tokens=2)])
    assert found.pop("prompt_tokens_details") == {"cached_tokens": 1}  # on average
    assert found == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert usage(9, [])["prompt_tokens_details"] == {"cached_tokens": 0}


def test_what_a_template_is_told() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}, "strict": True}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = {
        "messages": [
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2", "name": "f"},
        ],
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": False, "messages": "not these", "bos_token": "<b>"},
    }
    form = ChatFormat("", {"bos_token": "<s>", "eos_token": "</s>"})
    found = variables(form, ChatRequest.model_validate(body))
    assert found == {
        "bos_token": "<b>",
        "eos_token": "</s>",
        "enable_thinking": False,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
                ],
            },
            {"role": "tool", "content": "2", "name": "f", "tool_call_id": "1"},
        ],
        "tools": [tool],
        "documents": None,
        "add_generation_prompt": True,
    }
    assert json.dumps(found)
    none = variables(form, ChatRequest.model_validate({**body, "tool_choice": "none"}))
    assert none["tools"] is None
