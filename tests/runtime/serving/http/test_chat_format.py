"""What a request says reaches the template as transformers has it, and no larger than the request was."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.runtime.serving.http.chat_format import MAX_ARGUMENTS, ChatFormats, variables
from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.schema import ChatRequest
from fusion.runtime.serving.requests.chat_format import ChatFormat


def arguments(given: str | dict[str, Any]) -> Any:
    """Of a call in the messages, as the template sees them."""
    call = {"function": {"name": "f", "arguments": given}}
    request = ChatRequest.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    said = variables(ChatFormat("", {}), request)
    return said["messages"][0]["tool_calls"][0]["function"]["arguments"]


def test_arguments_of_a_call_are_an_object() -> None:
    assert arguments('{"city": "Köln"}') == arguments({"city": "Köln"}) == {"city": "Köln"}
    assert arguments("sunny") == "sunny"


@pytest.mark.parametrize(
    ("said", "effort"),
    [
        ({}, None),
        ({"reasoning_effort": None}, None),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
    ],
)
def test_a_template_is_told_how_much_to_reason(said: dict[str, Any], effort: str | None) -> None:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **said})
    found = variables(ChatFormat("", {}), request)
    assert found.get("reasoning_effort") == effort
    assert effort is not None or "reasoning_effort" not in found, "a template has its own where none is given"


@pytest.mark.parametrize("text", ["", " ", "{}"])
def test_a_call_without_arguments_has_an_empty_object_of_them(text: str) -> None:
    assert arguments(text) == {}


@pytest.mark.parametrize(
    "text", ['{"a":' * 80 + "1" + "}" * 80, "[" * 900 + "]" * 900, '{"a": NaN}', '{"a": "\\ud800"}']
)
def test_arguments_beyond_what_a_request_may_hold_stay_text(text: str) -> None:
    json.loads(text)
    assert arguments(text) == text


def test_arguments_are_read_as_far_as_a_request_may_have_them() -> None:
    calls = [{"function": {"name": "f", "arguments": "[1]" + " " * (MAX_ARGUMENTS // 4)}} for _ in range(4)]
    request = ChatRequest.model_validate({"messages": [{"role": "assistant", "tool_calls": calls}]})
    with pytest.raises(ApiError, match="characters of arguments") as found:
        variables(ChatFormat("", {}), request)
    assert found.value.status == 400


@pytest.mark.parametrize(("embeds", "instead"), [(True, "/v1/embeddings"), (False, "fusion-peer run m")])
def test_a_model_that_generates_nothing_is_asked_in_another_way(embeds: bool, instead: str) -> None:
    serve = SimpleNamespace(outputs=("x",), embeds=embeds)
    model: Any = SimpleNamespace(job="job", manifest=SimpleNamespace(name="m"), serve=serve)
    context: Any = SimpleNamespace()
    with pytest.raises(ApiError, match=f"model: m generates nothing; ask .*{instead}$") as found:
        asyncio.run(ChatFormats(context).of(model))
    assert (found.value.status, found.value.param) == (400, "model")


def test_documents_reach_the_template() -> None:
    documents, said = [{"title": "a", "text": "b"}], {"messages": [{"role": "user", "content": "h"}]}
    for more in ({"documents": documents}, {"chat_template_kwargs": {"documents": documents}}):
        found = variables(ChatFormat("", {}), ChatRequest.model_validate({**said, **more}))
        assert found["documents"] == documents
    assert variables(ChatFormat("", {}), ChatRequest.model_validate(said))["documents"] is None
