"""The Responses API over a real port, with OpenAI's own client: the tokens of a chat, its events, its errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from support.http_api import TEMPLATE, ask, client_of, go_away, served_over_http, until
from support.served import reference

from fusion.runtime.serving.answers import gateway
from fusion.runtime.serving.http.config import HttpConfig
from fusion.runtime.serving.http.errors import TOO_LONG
from fusion.runtime.serving.http.events import LINE_ENDS

pytestmark = [pytest.mark.process, pytest.mark.heavy]

GREEDY: dict[str, Any] = {"model": "llama", "temperature": 0, "max_output_tokens": 10}
KEY = "a-key-of-sixteen-or-more"
CALL = {"name": "look", "arguments": {"at": "it"}}
TOOL: dict[str, Any] = {
    "type": "function", "name": "look", "description": "Looks.", "strict": True,
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}  # fmt: skip
# The model has random weights: what it says is JSON of one value, which is a call of a tool where it was told of that.
CALLING: dict[str, Any] = {
    "type": "json_schema", "name": "call", "schema": {"const": CALL},
}  # fmt: skip
# Says everything that it is given.
TELLING = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments['a'] }}){% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)


def said_after(prompt: str, count: int = 10) -> str:
    return bytes(reference("llama", list(prompt.encode()), count)).decode(errors="replace")


def test_a_response_is_the_answer_of_a_chat(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path, template=TEMPLATE) as (swarm, http), client_of(http) as client:
            found = await client.responses.create(**GREEDY, instructions="Be brief.", input="Hi")
            prompt = "<s>system: Be brief.\nuser: Hi\nassistant:"
            assert found.output_text == said_after(prompt)
            assert (found.object, found.status, found.model) == ("response", "incomplete", "llama")
            assert found.incomplete_details is not None
            assert found.incomplete_details.reason == "max_output_tokens"
            assert found.id.startswith("resp_") and found.error is None and found.instructions == "Be brief."
            [item] = found.output
            assert item.type == "message" and (item.role, item.status) == ("assistant", "incomplete")
            assert found.usage is not None and found.usage.model_dump(exclude_none=True) == {
                "input_tokens": len(prompt), "output_tokens": 10, "total_tokens": len(prompt) + 10,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            }  # fmt: skip
            more = {"metadata": {"a": "b"}, "store": True, "top_p": 0.5, "parallel_tool_calls": False}
            echoed = await client.responses.create(**GREEDY, input="Hi", **more)
            assert (echoed.metadata, echoed.top_p) == ({"a": "b"}, 0.5)
            assert not echoed.parallel_tool_calls and not echoed.store and echoed.max_output_tokens == 10
            one = {**GREEDY, "max_output_tokens": None, "extra_body": {"stop": said_after(prompt)[1:3]}}
            whole = await client.responses.create(**one, instructions="Be brief.", input="Hi")
            assert (whole.status, whole.output_text) == ("completed", said_after(prompt)[:1])
            assert whole.incomplete_details is None
            await swarm.freed()

    asyncio.run(main())


def test_a_stream_tells_the_same_in_typed_events(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path, template=TEMPLATE) as (swarm, http), client_of(http) as client:
            asked: dict[str, Any] = {**GREEDY, "input": [{"role": "user", "content": "Hi"}]}
            stream = await client.responses.create(**asked, stream=True)
            events = [event async for event in stream]
            kinds = [event.type for event in events]
            deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
            assert kinds == [
                *("response.created", "response.in_progress"),
                *("response.output_item.added", "response.content_part.added"),
                *["response.output_text.delta"] * len(deltas),
                *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
                "response.incomplete",
            ]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            first, last = events[0], events[-1]
            assert first.type == "response.created" and last.type == "response.incomplete"
            assert (first.response.status, first.response.output) == ("in_progress", [])
            text = said_after("<s>user: Hi\nassistant:")
            assert "".join(deltas) == last.response.output_text == text and len(deltas) > 3
            assert first.response.id == last.response.id and last.response.usage is not None
            whole = await client.responses.create(**asked)
            ids = ("id", "created_at", "output", "usage")
            assert last.response.model_dump(exclude={*ids}) == whole.model_dump(exclude={*ids})
            stop = text[4:6]
            asked_to_stop: dict[str, Any] = {**asked, "extra_body": {"stop": stop}}
            async with client.responses.stream(
                **asked_to_stop
            ) as through:  # builds the response of the events
                async for _ in through:
                    pass
                assert (await through.get_final_response()).output_text == text[: text.index(stop)]
            await swarm.freed()
            status, headers, body = await ask(http, "POST", "/v1/responses", {**asked, "stream": True})
            assert status == 200 and headers["content-type"].startswith("text/event-stream")
            for each in body.decode().removesuffix("\n\n").split("\n\n"):
                kind, data = each.split("\n")
                said = json.loads(data.removeprefix("data: "))
                assert kind == f"event: {said['type']}"
                assert not any(end.decode() in data for end in LINE_ENDS)

    asyncio.run(main())


def test_the_items_of_a_conversation_go_through_the_template(tmp_path: Path) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": "x"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": "y"}'},
        {"type": "function_call_output", "call_id": "1", "output": "O"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "P"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": ""},
    ]
    prompt = "<system>D<user>U<assistant>A(1 f x)(2 g y)<tool>O1<tool>P2<assistant>(3 f )"

    async def main() -> None:
        async with served_over_http(tmp_path, template=TELLING) as (swarm, http), client_of(http) as client:
            found = await client.responses.create(**GREEDY, input=items)
            assert found.output_text == said_after(prompt)
            told = await client.responses.create(**GREEDY, input="U", tools=[TOOL, {**TOOL, "name": "f"}])
            assert told.output_text == said_after("[look][f]<user>U")
            assert [tool.type == "function" and tool.name for tool in told.tools] == ["look", "f"]
            for choice, shown in (
                ("none", ""),
                ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}, "[look]"),
            ):  # fmt: skip
                chosen = await client.responses.create(
                    **GREEDY, input="U", tools=[TOOL, {**TOOL, "name": "f"}], tool_choice=choice
                )
                assert chosen.output_text == said_after(f"{shown}<user>U")
                echoed: Any = chosen.tool_choice
                assert (echoed if isinstance(choice, str) else echoed.model_dump(exclude_none=True)) == choice
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("choice", "shown", "called"),
    [
        ("required", "[look][f]", {"look", "f"}),
        ({"type": "function", "name": "f"}, "[f]", {"f"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
            "[look]",
            {"look"},
        ),
    ],
)
def test_a_call_that_has_to_be_is_one(tmp_path: Path, choice: Any, shown: str, called: set[str]) -> None:
    parameters = {
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "propertyNames": {"type": "string"},
    }
    tools: Any = [{**TOOL, "name": name, "parameters": parameters, "strict": False} for name in ("look", "f")]
    asked: dict[str, Any] = {**GREEDY, "max_output_tokens": 70, "input": "U", "tools": tools}

    async def main() -> None:
        async with served_over_http(tmp_path, template=TELLING) as (swarm, http), client_of(http) as client:
            found = await client.responses.create(**asked, tool_choice=choice)
            [call] = found.output
            assert call.type == "function_call" and call.name in called
            assert json.loads(call.arguments) in ({"on": True}, {"on": False})
            assert found.usage is not None and found.usage.input_tokens == len(f"{shown}<user>U")
            await swarm.freed()

    asyncio.run(main())


def test_calls_of_functions_are_items_of_the_output(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            served_over_http(tmp_path, template="{{ messages[-1].content }}") as (swarm, http),
            client_of(http) as client,
        ):
            asked: dict[str, Any] = {
                **GREEDY, "max_output_tokens": 80, "input": "U", "tools": [TOOL], "text": {"format": CALLING},
                "extra_body": {"logit_bias": {"9": -100, "10": -100}},  # the shortest of spaces
            }  # fmt: skip
            found = await client.responses.create(**asked)
            [call] = found.output
            assert call.type == "function_call" and (call.name, call.status) == ("look", "completed")
            assert json.loads(call.arguments) == CALL["arguments"] and call.call_id.startswith("call_")
            assert found.status == "completed" and found.output_text == ""
            stream = await client.responses.create(**asked, stream=True)
            events = [event async for event in stream]
            assert [event.type for event in events] == [
                *("response.created", "response.in_progress", "response.output_item.added"),
                *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
                *("response.output_item.done", "response.completed"),
            ]
            last = events[-1]
            assert last.type == "response.completed"
            [again] = last.response.output
            assert again.type == "function_call" and json.loads(again.arguments) == CALL["arguments"]
            # Back into the next turn as it came, with what the function gave.
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
            before: list[Any] = [{"role": "user", "content": "U"}, *found.output, result]
            turn = await client.responses.create(**{**GREEDY, "input": before, "tools": [TOOL]})
            assert turn.output_text == said_after("seen")
            await swarm.freed()

    asyncio.run(main())


def test_the_client_without_asyncio_reads_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path, template=TEMPLATE) as (_, http):

            def through_threads() -> None:
                with openai.OpenAI(base_url=http.url, api_key="none", max_retries=0) as client:
                    whole = client.responses.create(**GREEDY, input="Hi")
                    events = list(client.responses.create(**GREEDY, input="Hi", stream=True))
                    assert events[-1].type == "response.incomplete"
                    assert events[-1].response.output_text == whole.output_text != ""
                    with pytest.raises(openai.NotFoundError, match="nobody serves 'none'"):
                        client.responses.create(model="none", input="Hi")
                    with pytest.raises(openai.NotFoundError):  # nothing is kept
                        client.responses.retrieve(whole.id)
                    parsed = client.responses.create(
                        **{**GREEDY, "max_output_tokens": 70}, input="Hi",
                        text={"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes"]}}},
                    )  # fmt: skip
                    assert json.loads(parsed.output_text) == "yes" and parsed.status == "completed"
                    assert parsed.text is not None and parsed.text.format is not None
                    assert parsed.text.format.type == "json_schema"

            await asyncio.to_thread(through_threads)

    asyncio.run(main())


def test_what_is_wrong_is_told_as_openai_does(tmp_path: Path) -> None:
    ok: dict[str, Any] = {**GREEDY, "input": "Hi"}
    image = {"type": "input_image", "image_url": "data:,"}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "reasoning"}]}, "input", "says nothing to the model"),
        ({"input": 3}, "input", "valid list"),
        ({"input": ["Hi"]}, "input", "an item is an object"),
        ({"input": [{"content": "Hi"}]}, "input", "0.message.role: Field required"),
        ({"input": [{"role": "user", "content": [image]}]}, "input", "parts are text here, not 'input_image'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "send the item itself (clients do with store: false)"),
        ({"input": [{"type": "web_search_call"}]}, "input", "their outputs here, not 'web_search_call'"),
        ({"input": "x" * 500}, "input", TOO_LONG),
        ({"max_output_tokens": 999}, "max_output_tokens", "at most 7"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools are functions here"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "none of the tools"),
        ({"tools": [{**TOOL, "parameters": {"$ref": "http://a/"}}], "tool_choice": "required"}, "tools", "$ref to a place in it"),
        ({"tools": [{**TOOL, "parameters": {"type": "nothing"}}], "tool_choice": "required"}, "tools", "nothing"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "json_schema needs {name, schema}"),
        ({"text": {"format": {**CALLING, "schema": {"$ref": "http://a/"}}}}, "text", "ref"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 entries, not 17"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept here"),
        ({"conversation": "conv_1"}, "conversation", "nothing is kept here"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "none are kept here"),
        ({"background": True}, "background", "whoever waits for it"),
        ({"truncation": "auto"}, "truncation", "nothing of the input is left out"),
        ({"top_logprobs": 2}, "top_logprobs", "told by /v1/chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "told by /v1/chat/completions"),
        ({"guided_json": {"a": 1}}, "guided_json", "say text.format"),
    ]  # fmt: skip

    async def main() -> None:
        async with served_over_http(tmp_path, template=TEMPLATE) as (swarm, http):
            for wrong, param, words in cases:
                for stream in (False, True):
                    body = {**ok, **wrong, "stream": stream}
                    status, _, data = await ask(http, "POST", "/v1/responses", body)
                    error = json.loads(data)["error"]
                    assert (status, error["param"]) == (400, param), (wrong, error)
                    assert words in error["message"] and error["message"].startswith(f"{param}: "), error
                    assert "\n" not in error["message"] and error["type"] == "invalid_request_error"
            await swarm.freed()

    asyncio.run(main())


def test_a_model_without_a_template_says_so_of_the_input(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http), client_of(http) as client:
            with pytest.raises(openai.BadRequestError, match=r"input: .* no chat template") as found:
                await client.responses.create(**GREEDY, input="Hi")
            assert (found.value.param, found.value.code) == ("input", "no_chat_template")

    asyncio.run(main())


def test_keys_and_other_sites(tmp_path: Path) -> None:
    async def main() -> None:
        config = HttpConfig(keys=(hashlib.sha256(KEY.encode()).digest(),))
        async with served_over_http(tmp_path, config=config, template=TEMPLATE) as (_, http):
            async with client_of(http, KEY) as client:
                assert (await client.responses.create(**GREEDY, input="Hi")).output_text
            async with client_of(http, KEY[:-1]) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.responses.create(**GREEDY, input="Hi")
            body = {**GREEDY, "input": "Hi"}
            assert (await ask(http, "POST", "/v1/responses", body, Origin="http://evil.example"))[0] == 403

    asyncio.run(main())


def test_a_client_that_goes_away_frees_its_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path, template=TEMPLATE) as (swarm, http), client_of(http) as client:
            asked: dict[str, Any] = {**GREEDY, "max_output_tokens": 60, "input": "Hi"}
            stream = await client.responses.create(**asked, stream=True)
            await go_away(swarm, stream, 1, client.responses.create(**asked))

    asyncio.run(main())


def test_a_peer_that_is_full_says_when_to_ask_again_also_in_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.served.GatewayConfig", partial(gateway.GatewayConfig, max_sessions=2))

    async def main() -> None:
        async with served_over_http(tmp_path, template=TEMPLATE) as (swarm, http), client_of(http) as client:
            asked: dict[str, Any] = {**GREEDY, "max_output_tokens": 60, "input": "Hi"}
            go = threading.Event()
            blocked = asyncio.create_task(swarm.peers[0].context.compute.run(go.wait, 20))
            first = asyncio.create_task(client.responses.create(**asked, stream=True))
            await until(lambda: bool(swarm.peers[1].service.gateway._answers))
            with pytest.raises(openai.RateLimitError, match="ask again later") as found:
                await client.responses.create(**asked)
            assert int(found.value.response.headers["retry-after"]) > 0
            go.set()
            await blocked
            events = [event async for event in await first]
            assert events[-1].type == "response.incomplete"
            await swarm.freed()

    asyncio.run(main())


def test_a_stream_whose_stage_vanishes_for_good_ends_with_a_failed_response(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path, template=TEMPLATE) as (swarm, http), client_of(http) as client:
            stream = await client.responses.create(
                **{**GREEDY, "max_output_tokens": 60}, input="Hi", stream=True
            )
            events: list[Any] = []
            async for event in stream:
                if event.type == "response.output_text.delta" and not any(
                    e.type == event.type for e in events
                ):
                    swarm.network.kill(swarm.owners[0].id)
                events.append(event)
            last = events[-1]
            assert last.type == "response.failed" and last.response.status == "failed"
            assert last.response.error.code == "server_error" and last.response.error.message
            text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
            [message] = last.response.output
            assert (message.status, last.response.output_text) == ("incomplete", text)
            assert [each.sequence_number for each in events] == list(range(len(events)))

    asyncio.run(main())
