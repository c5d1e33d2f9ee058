"""What a client may say."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from pydantic import BaseModel, ValidationError

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.http.responses.schema import ResponsesRequest
from fusion.runtime.serving.http.schema import MAX_TOOLS, ChatRequest, CompletionRequest
from fusion.runtime.serving.requests.json_schema import JSON_OBJECT

HI = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ("", ("",)),
    ],
)
def test_the_four_kinds_of_prompt(prompt: Any, expected: Any) -> None:
    assert CompletionRequest(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "said",
    [
        *({}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [True]}, {"prompt": [-1]}, {"prompt": [1.5]}),
        *({"prompt": ["a", 1]}, {"prompt": {"a": 1}}, {"prompt": None}, {"prompt": ["a"] * 65}, {"prompt": [1 << 40]}),
        *({"prompt": "a", name: value} for name, value in (
            ("n", 0), ("n", 17), ("max_tokens", 0), ("temperature", -1), ("temperature", "hot"), ("top_p", 2),
            ("stop", []  + ["a"] * 5), ("stop", [None]), ("stop", "x" * 300), ("stop", 1), ("logit_bias", {"1": 101}),
            ("seed", 1 << 64), ("stream", "perhaps"), ("logprobs", 21), ("echo", 2), ("suffix", "b"), ("best_of", 3),
            ("frequency_penalty", 3), ("model", "x" * 300), ("temperature", float("nan")), ("guided_regex", "a+"),
        )),
        {"prompt": ["a"] * 64, "n": 2},
    ],
)  # fmt: skip
def test_completions_that_are_refused(said: dict[str, Any]) -> None:
    _refused(CompletionRequest, said)


@pytest.mark.parametrize(
    "said",
    [
        *({}, {"messages": []}, {"messages": [{}]}, {"messages": [{"role": "god", "content": "x"}]}),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        {"messages": HI["messages"] * 3000},
        *({**HI, name: value} for name, value in (
            ("tools", [{}]), ("tools", [TOOL] * 129), ("tool_choice", "perhaps"), ("functions", [{}]),
            ("tool_choice", {"type": "function", "function": {"name": "g"}}), ("top_logprobs", 3),
            ("response_format", {"type": "json_schema"}), ("max_completion_tokens", 0), ("logprobs", 5),
            ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
            ("response_format", {"type": "xml"}), ("modalities", ["text", "audio"]), ("guided_choice", ["a", "b"]),
            ("structured_outputs", {"json": {"type": "object"}}),
        )),
    ],
)  # fmt: skip
def test_chats_that_are_refused(said: dict[str, Any]) -> None:
    _refused(ChatRequest, said)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *((CompletionRequest, {"prompt": prompt}) for prompt in (
            [""] * 5000, [-1] * 5000, [None] * 5000, [[""] * 5000], [[-1] * 5000] * 64,
        )),
        *((CompletionRequest, {"prompt": "a", name: value}) for name, value in (
            ("stop", [0] * 5000), ("logit_bias", dict.fromkeys(map(str, range(5000)), "")),
        )),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * 5000}] * 500}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * 120}] * 500}),
    ],
)  # fmt: skip
def test_errors_are_few_however_much_is_wrong(kind: type[BaseModel], said: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(said)
    assert found.value.error_count() <= 200


def _refused(kind: type[BaseModel], said: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(said)


def test_what_is_left_out_is_none_and_what_is_not_known_is_passed_over() -> None:
    said = ChatRequest.model_validate(
        {**HI, "user": "me", "store": True, "modalities": ["text"], "guided_json": None, "n": None}
    )
    assert (
        said.answers == 1 and said.tokens is None and said.temperature is None and not said.usage_at_the_end
    )


def test_parts_of_text_are_one_text() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "refusal", "refusal": "b"},
        {"type": "output_text", "text": "c"},
    ]
    said = ChatRequest.model_validate({"messages": [{"role": "assistant", "content": parts}]})
    assert said.messages[0].text == "abc"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        (None, ["f", "g"]),
        ("auto", ["f", "g"]),
        ("none", []),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
        (allowed("auto", "g"), ["g"]),
        (allowed("required", "f", "g", "h"), ["f", "g"]),
    ],
)
def test_the_tools_that_a_model_is_told_of(choice: Any, offered: list[str]) -> None:
    other = {"type": "function", "function": {"name": "g"}}
    said = ChatRequest.model_validate({**HI, "tools": [TOOL, other], "tool_choice": choice})
    assert [tool.function.name for tool in said.offered_tools] == offered


@pytest.mark.parametrize("choice", [None, "auto", "none", allowed("auto", "g")])
def test_an_answer_that_need_not_be_a_call_has_the_schema_of_its_format(choice: Any) -> None:
    said = {**HI, "tools": [TOOL, {"type": "function", "function": {"name": "g"}}], "tool_choice": choice}
    assert ChatRequest.model_validate(said).json_schema == ""
    form = {"response_format": {"type": "json_object"}}
    assert ChatRequest.model_validate({**said, **form}).json_schema == JSON_OBJECT


def test_the_schema_of_a_call_has_the_parameters_of_each_tool_with_what_they_refer_to() -> None:
    point = {
        "$defs": {"At": {"type": "integer"}},
        "properties": {"x": {"$ref": "#/$defs/At"}, "on": {"$ref": "#"}},
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("f", point), ("g", None), ("h", {"properties": {"$ref": {"const": "#/a"}}}))
    ]
    said = ChatRequest.model_validate({**HI, "tools": tools, "tool_choice": "required"})
    validator = jsonschema_rs.validator_for(json.loads(said.json_schema))
    for call, right in (
        ({"name": "f", "arguments": {"x": 3, "on": {"x": 4}}}, True),
        ({"name": "f", "arguments": {"x": "3"}}, False),
        ({"name": "f", "arguments": {"on": {"x": "4"}}}, False),
        ({"name": "f", "arguments": {"x": 3, "y": 4}}, False),
        ({"name": "g", "arguments": {}}, True),
        ({"name": "g", "arguments": {"x": "3"}}, False),
        ({"name": "g", "arguments": [3]}, False),
        ({"name": "g"}, False),
        ({"name": "h", "arguments": {"$ref": "#/a"}}, True),
        ({"name": "h", "arguments": {"$ref": "#/b"}}, False),
        ({"name": "i", "arguments": {}}, False),
    ):
        assert validator.is_valid(call) is right, call


@pytest.mark.parametrize(
    ("parameters", "further"),
    [
        (None, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": ["object", "null"], "properties": {"a": {}}}, False),
        ({}, True),
        ({"type": "object"}, True),
        ({"properties": {}, "additionalProperties": True}, True),
        ({"properties": {}, "patternProperties": {"b": {}}}, True),
        ({"properties": {}, "allOf": [{"properties": {"b": {}}}]}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {}}}}}, True),
    ],
)
def test_a_function_is_called_with_what_it_names(parameters: Any, further: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    said = ChatRequest.model_validate({**HI, "tools": tools, "tool_choice": "required"})
    validator = jsonschema_rs.validator_for(json.loads(said.json_schema))
    assert validator.is_valid({"name": "f", "arguments": {}})
    assert validator.is_valid({"name": "f", "arguments": {"b": 1}}) is further


def test_what_functions_say_to_the_model_alone_takes_no_room_in_the_schema_of_a_call() -> None:
    said_of = {"title": "T" * 300, "description": "D" * 300, "default": "x" * 300}
    parameters = {**said_of, "properties": {"title": said_of, "b": {"enum": ["a"], **said_of}}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}
        for i in range(MAX_TOOLS)
    ]
    said = ChatRequest.model_validate({**HI, "tools": tools, "tool_choice": "required"})
    validator = jsonschema_rs.validator_for(
        json.loads(said.json_schema)
    )  # of all of them, it is within the limit
    assert validator.is_valid({"name": "f7", "arguments": {"title": 5, "b": "a"}})
    assert not validator.is_valid({"name": "f7", "arguments": {"b": "b"}})
    assert said.offered_tools[7].function.parameters == parameters


def test_a_strict_function_is_held_to_every_word() -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
    for strict in (None, False, True):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        said = ChatRequest.model_validate({**HI, "tools": [tool], "tool_choice": "required"})
        validator = jsonschema_rs.validator_for(json.loads(said.json_schema))
        assert validator.is_valid({"name": "f", "arguments": {"a": 1}}) is (strict is not True)


@pytest.mark.parametrize("kind", ["string", ["array", "null"], None, 5])
def test_a_function_takes_an_object(kind: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    said = ChatRequest.model_validate({**HI, "tools": tools, "tool_choice": "required"})
    with pytest.raises(JobError, match="json_schema: the parameters of f are of type object, not "):
        assert said.json_schema


def test_a_call_without_tools_is_refused() -> None:
    with pytest.raises(ValidationError, match="tool_choice: required, and there are no tools"):
        ChatRequest.model_validate({**HI, "tool_choice": "required"})


def test_one_stop_is_a_list_of_one() -> None:
    assert CompletionRequest(prompt="a", stop="b").stop == ("b",)


@pytest.mark.parametrize("stop", [None, "", [], [""], ["", ""] * 9])
def test_stops_that_are_left_empty_stop_nothing(stop: Any) -> None:
    assert not CompletionRequest(prompt="a", stop=stop).stop


def test_of_several_stops_those_that_are_empty_are_left_out() -> None:
    assert CompletionRequest(prompt="a", stop=["", "b", "", "c"]).stop == ("b", "c")


def test_options_of_a_stream_that_are_null_are_off() -> None:
    said = {**HI, "stream_options": {"include_usage": None, "include_route": None}}
    asked = ChatRequest.model_validate(said)
    assert asked.usage_at_the_end is False and asked.reports_route is False


def test_a_response_format_is_the_schema_that_is_asked_for() -> None:
    def said(form: Any) -> str:
        return ChatRequest.model_validate({**HI, "response_format": form}).json_schema

    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    named = {"name": "n", "strict": True, "schema": schema}
    assert said({"type": "json_schema", "json_schema": named}) == json.dumps(schema, separators=(",", ":"))
    assert said({"type": "json_object"}) == '{"type":"object"}'
    assert said({"type": "text"}) == said(None) == ""
    for kind in ("json_object", "json_schema"):  # as llama.cpp, LM Studio and Together have it
        assert said({"type": kind, "schema": schema}) == json.dumps(schema, separators=(",", ":"))
    assert said({"type": "json_object", "schema": None}) == JSON_OBJECT
    with pytest.raises(JobError, match=r"^json_schema: \$ref"):
        said({"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}})


@pytest.mark.parametrize("said", [None, 0])
def test_no_log_probabilities_may_be_asked_for_by_their_number(said: int | None) -> None:
    for logprobs in (None, False):
        request = ChatRequest.model_validate({**HI, "logprobs": logprobs, "top_logprobs": said})
        assert not request.top_logprobs
    assert CompletionRequest.model_validate({"prompt": "a", "logprobs": False}).logprobs is None


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        (CompletionRequest, {"allowed_token_ids": [3]}, "allowed_token_ids: say logit_bias"),
        (CompletionRequest, {"prompt_logprobs": 0}, "prompt_logprobs: say echo and logprobs"),
        (CompletionRequest, {"max_tokens": 0}, "max_tokens: at least 1, or 0 with echo"),
        (CompletionRequest, {"max_completion_tokens": 3}, "max_completion_tokens: say max_tokens"),
        (ChatRequest, {"max_output_tokens": 3}, "max_output_tokens: say max_completion_tokens"),
        (ChatRequest, {"add_generation_prompt": False}, "add_generation_prompt: an answer is a message"),
        (ChatRequest, {"web_search_options": {}}, "web_search_options: no tool is run here"),
        (CompletionRequest, {"n_predict": 3}, "n_predict: say max_tokens"),
        (
            CompletionRequest,
            {"skip_special_tokens": False},
            "skip_special_tokens: special tokens are no text",
        ),
        (CompletionRequest, {"mirostat": 2}, "mirostat: say temperature"),
        (CompletionRequest, {"grammar": 'root ::= "a"'}, "grammar: say response_format"),
        (ChatRequest, {"echo": True}, "echo: the prompt is not repeated"),
        (ChatRequest, {"max_new_tokens": 3}, "max_new_tokens: say max_tokens"),
        (ChatRequest, {"add_special_tokens": True}, "add_special_tokens: a chat has the special tokens"),
        (ChatRequest, {"typical_p": 0.9}, "typical_p: say temperature"),
        (ChatRequest, {"return_token_ids": True}, "return_token_ids: answers are told as text"),
        (ResponsesRequest, {"max_tokens": 3}, "max_tokens: say max_output_tokens"),
        (ResponsesRequest, {"response_format": {"type": "json_object"}}, "response_format: say text.format"),
    ],
)
def test_what_would_be_missed_in_an_answer_is_refused(kind: Any, said: dict[str, Any], why: str) -> None:
    plain: dict[str, Any] = {"prompt": "a", "input": "a", **HI}
    plain.pop("prompt" if kind is ResponsesRequest else "input")
    with pytest.raises(ValidationError, match=why):
        kind.model_validate({**plain, **said})


def test_what_changes_nothing_may_be_said_by_any_name() -> None:
    said: dict[str, Any] = {"add_generation_prompt": True, "use_beam_search": False, "bad_words": []}
    said |= {"chat_template": None, "skip_special_tokens": True, "add_special_tokens": False, "echo": False}
    said |= {"typical_p": 1, "mirostat": 0, "top_n_sigma": -1, "max_tokens": 4, "n_predict": 4, "grammar": ""}
    ChatRequest.model_validate({**HI, **said, "max_output_tokens": 5, "max_completion_tokens": 4})


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_a_message_that_says_nothing_is_refused(role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}):
        with pytest.raises(ValidationError, match="content is missing: a text, or a list of parts"):
            ChatRequest.model_validate({"messages": [message]})
    ChatRequest.model_validate({"messages": [{"role": role, "content": ""}]})


def test_what_an_assistant_said_is_told_by_any_of_its_names() -> None:
    def said(**more: Any) -> Any:
        [message] = ChatRequest.model_validate({"messages": [{"role": "assistant", **more}]}).messages
        return message

    assert said(content=None, refusal="No.").text == "No." and said(content="a", refusal=None).text == "a"
    assert said(reasoning="r").reasoning_content == said(reasoning_content="r").reasoning_content == "r"
    with pytest.raises(ValidationError, match="function_call: say tool_calls"):
        said(content=None, function_call={"name": "f", "arguments": "{}"})
