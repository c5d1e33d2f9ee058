"""A response is the same told whole and in events, however its answer comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.errors import ApiError, Busy
from fusion.runtime.serving.http.responses.builder import ResponseBuilder
from fusion.runtime.serving.http.responses.schema import ResponsesRequest
from fusion.runtime.serving.requests.request import Answer, Finish, Piece

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "name": "f"}]


def builder(**fields: Any) -> ResponseBuilder:
    return ResponseBuilder(ResponsesRequest(input="U", tools=TOOLS, **fields), "m", 7, 5)


def parts_of(pieces: Sequence[str], finish: Finish = "stop") -> list[Part]:
    made: list[Piece | Answer] = [Piece(index=i, id=i, text=text) for i, text in enumerate(pieces)]
    end = Answer(
        text="".join(pieces), tokens=(1, 2), finish=finish, prompt_tokens=5, cached_tokens=4, route=(),
        seconds=0.0,
    )  # fmt: skip
    return [Part(0, each) for each in (*made, end)]


def built_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output of a response as a client puts it together."""
    output = list[dict[str, Any]]()
    for event in events:
        kind = event["type"].removeprefix("response.")
        item = output[event["output_index"]] if event.get("output_index", len(output)) < len(output) else {}
        match kind:
            case "output_item.added":
                assert event["output_index"] == len(output)
                output.append({**event["item"]})
            case "content_part.added":
                item["content"] = [*item["content"], {**event["part"]}]
            case "output_text.delta":
                assert event["item_id"] == item["id"] and event["delta"]
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "output_text.done":
                assert item["content"][event["content_index"]]["text"] == event["text"]
            case "content_part.done":
                assert item["content"][event["content_index"]] == event["part"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case "output_item.done":
                item["status"] = event["item"]["status"]
                assert item == event["item"]
    return output


def test_a_call_that_had_to_be_and_was_cut_off_is_incomplete() -> None:
    response = builder(tool_choice="required")
    parts = parts_of(['{"name": "f", "arg', 'uments": {"a'], "length")
    events = [*response.begin(), *(e for part in parts for e in response.add(part))]
    [call] = response.whole["output"]
    assert response.whole["output"] == built_of(events)
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a')
    assert call["status"] == response.whole["status"] == "incomplete"


@given(
    st.lists(st.sampled_from(["a", "b\n", "<tool", "_call>", "{", CALL, CALL[:20], CALL[20:]]), max_size=6),
    st.sampled_from(["stop", "length"]),
)
def test_events_put_together_are_the_response(pieces: list[str], finish: Finish) -> None:
    response = builder()
    events = [*response.begin(), *(e for part in parts_of(pieces, finish) for e in response.add(part))]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == ("response.completed" if finish == "stop" else "response.incomplete")
    assert last["response"] == response.whole and last["response"]["output"] == built_of(events)
    assert response.whole["output"], "there is a message where nothing was said"
    parsed = Response.model_validate(response.whole)  # as OpenAI's client knows one
    text = "".join(pieces)
    if CALL in text and not text.replace(CALL, "").strip():
        assert [item.type for item in parsed.output] == ["function_call"] * text.count(CALL)


@pytest.mark.parametrize("several", [True, False])
def test_a_message_and_the_calls_behind_it(several: bool) -> None:
    response = builder(parallel_tool_calls=several)
    kinds = [event["type"] for part in parts_of(["Hm ", *CALL, *CALL]) for event in response.add(part)]
    message, *calls = response.whole["output"]
    assert message["content"][0]["text"] == "Hm " and message["status"] == "completed"
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", '{"a": 1}')] * (1 + several)
    assert len({item["id"] for item in (message, *calls)}) == 2 + several
    assert kinds.count("response.output_item.done") == 2 + several
    assert kinds[-1] == "response.completed"
    assert response.whole["usage"] == {
        "input_tokens": 5, "output_tokens": 2, "total_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code"),
    [(Busy(), "rate_limit_exceeded"), (ApiError(503, "a line\nand another"), "server_error")],
)
def test_what_went_wrong_ends_a_response_that_keeps_what_was_said(error: ApiError, code: str) -> None:
    response = builder()
    response.begin()
    assert response.whole["output"] == []
    response.add(parts_of(["so far"])[0])
    [event] = response.fail(error)
    assert event["type"] == "response.failed" and event["response"] == response.whole
    assert response.whole["error"]["code"] == code and "\n" not in response.whole["error"]["message"]
    [message] = response.whole["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "so far")
    assert response.whole["incomplete_details"] is None and response.whole["usage"] is None
