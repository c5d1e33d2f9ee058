"""OpenAI's API over a real port, with real models behind it: OpenAI's own client gets the tokens that `generate()` gives."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
import torch
from support.http_api import TEMPLATE, ask, behind, client_of, go_away, served_over_http, until
from support.served import model, reference, seeded_reference

from fusion.runtime.job.model_files import CHAT_TEMPLATE_FILE
from fusion.runtime.serving.answers import gateway
from fusion.runtime.serving.answers.gateway import ANSWERS_BESIDE
from fusion.runtime.serving.http import shapes
from fusion.runtime.serving.http.body import MAX_BODY_BYTES
from fusion.runtime.serving.http.chat_page import FOLDER
from fusion.runtime.serving.http.config import HttpConfig
from fusion.runtime.serving.http.errors import TOO_LONG
from fusion.runtime.serving.http.guard import MAX_HEAD_BYTES
from fusion.runtime.serving.http.port import running, server
from fusion.runtime.serving.http.port.server import open_http
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring import openings
from fusion.swarm.directory.records import Digest
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import PeerId

pytestmark = [pytest.mark.process, pytest.mark.heavy]

PROMPT = [5, 9, 77, 1]
GREEDY: dict[str, Any] = {"model": "llama", "temperature": 0}
KEY = "a-key-of-sixteen-or-more"


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def test_completions_are_those_of_generate(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http), client_of(http) as client:
            whole = await client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=12)
            [choice] = whole.choices
            assert choice.text == text_of(reference("llama", PROMPT, 12)) and choice.finish_reason == "length"
            assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
            assert whole.usage is not None and whole.usage.model_dump(exclude_none=True) == {
                "prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16,
                "prompt_tokens_details": {"cached_tokens": 0},
            }  # fmt: skip
            short = await client.completions.create(**GREEDY, prompt="def ")
            assert short.choices[0].text == text_of(reference("llama", list(b"def "), 16))
            many = await client.completions.create(**GREEDY, prompt=["def ", "if"], max_tokens=6, n=2)
            expected = [text_of(reference("llama", list(p), 6)) for p in (b"def ", b"def ", b"if", b"if")]
            assert [each.text for each in many.choices] == expected
            assert [each.index for each in many.choices] == [0, 1, 2, 3]
            assert many.usage is not None and many.usage.prompt_tokens == 6
            await swarm.freed()

    asyncio.run(main())


def test_a_stream_is_the_same_text_in_pieces(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http), client_of(http) as client:
            stream = await client.completions.create(
                **GREEDY, prompt=PROMPT, max_tokens=12, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].text for c in chunks[:-1]) == text_of(reference("llama", PROMPT, 12))
            assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
                "length"
            ]
            assert chunks[-1].choices == [] and chunks[-1].usage is not None
            assert chunks[-1].usage.total_tokens == 16 and len({chunk.id for chunk in chunks}) == 1
            status, headers, body = await ask(
                *(http, "POST", "/v1/completions"), {**GREEDY, "prompt": PROMPT, "stream": True}
            )
            assert status == 200 and headers["content-type"].startswith("text/event-stream")
            events = body.decode().removesuffix("\n\n").split("\n\n")
            assert events[-1] == "data: [DONE]"
            assert all("usage" not in json.loads(each.removeprefix("data: ")) for each in events[:-1])

    asyncio.run(main())


def test_a_stream_tells_of_its_route_where_that_is_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http), client_of(http) as client:
            asked: Any = {**GREEDY, "prompt": PROMPT, "n": 2, "stream": True, "extra_body": {"seed": 1}}
            told: Any = {"include_usage": True, "include_route": True}
            stream = await client.completions.create(**asked, stream_options=told)
            chunks = [chunk.model_dump() async for chunk in stream]
            told_at = [i for i, chunk in enumerate(chunks) if "route" in chunk]
            begun = {
                c["choices"][0]["index"]: i for i, c in reversed(list(enumerate(chunks))) if c["choices"]
            }
            for index in (0, 1):
                [first, *_] = [i for i in told_at if chunks[i]["route"]["index"] == index]
                assert first < begun[index]
                assert chunks[first]["choices"] == []
                [stage] = chunks[first]["route"]["stages"]
                owner = str(swarm.peers[0].context.peer_id)
                assert stage == {
                    "peer": owner,
                    "name": friendly_name(PeerId(owner)),
                    "round_trip_ms": None,  # with one stage there is no next one
                }
                assert chunks[first]["route"]["gateway"]["peer"] == swarm.peers[1].context.peer_id
            stream = await client.completions.create(**asked)
            assert not [chunk async for chunk in stream if "route" in chunk.model_dump()]
            await swarm.freed()

    asyncio.run(main())


def test_a_chat_goes_through_the_models_own_template(tmp_path: Path) -> None:
    async def main() -> None:
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]
        prompt = list(b"<s>system: Be brief.\nuser: Hi\nassistant:")
        expected = text_of(reference("llama", prompt, 10))
        async with served_over_http(tmp_path, template=TEMPLATE) as (_, http), client_of(http) as client:
            whole = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=10)
            assert whole.choices[0].message.content == expected
            assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt)
            stream = await client.chat.completions.create(
                **GREEDY, messages=messages, max_completion_tokens=10, stream=True
            )
            deltas = [chunk.choices[0] async for chunk in stream]
            assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "length"
            assert "".join(each.delta.content or "" for each in deltas) == expected
            everything = await client.chat.completions.create(**GREEDY, messages=messages)
            assert everything.usage is not None and everything.usage.total_tokens == 96, "to the model's end"

    asyncio.run(main())


def test_seeds_and_several_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http), client_of(http) as client:
            asked: dict[str, Any] = {"model": "llama", "prompt": PROMPT, "max_tokens": 16, "top_p": 0.9}
            three = await client.completions.create(**asked, n=3, seed=7)
            texts = [choice.text for choice in three.choices]
            for i, text in enumerate(texts):
                sampling = Sampling(temperature=1.0, top_p=0.9, seed=7 + i)
                assert text == text_of(seeded_reference("llama", PROMPT, 16, sampling))
            assert len(set(texts)) == 3
            alone = await client.completions.create(**asked, seed=8, extra_body={"top_k": -1})
            assert alone.choices[0].text == texts[1]
            unseeded = [(await client.completions.create(**asked)).choices[0].text for _ in range(2)]
            assert unseeded[0] != unseeded[1]

    asyncio.run(main())


def test_a_prompt_that_begins_as_one_before_says_how_much_was_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http), client_of(http) as client:
            asked: dict[str, Any] = {**GREEDY, "prompt": list(range(70)), "max_tokens": 6}
            first = await client.completions.create(**asked)
            again = await client.completions.create(**asked)
            assert again.choices[0].text == first.choices[0].text
            assert first.usage is not None and again.usage is not None
            found = [each.prompt_tokens_details for each in (first.usage, again.usage)]
            assert [each and each.cached_tokens for each in found] == [0, 64]
            several = await client.completions.create(**{**asked, "prompt": [asked["prompt"], [1, 2]]}, n=2)
            assert several.usage is not None and several.usage.prompt_tokens_details is not None
            assert 0 <= (several.usage.prompt_tokens_details.cached_tokens or 0) <= 64
            assert "fusion_prompt_tokens_cached_total" in (await ask(http, "GET", "/metrics"))[2].decode()

    asyncio.run(main())


def test_models_health_and_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http), client_of(http) as client:
            [model] = (await client.models.list()).data
            assert (model.id, model.owned_by) == ("llama", swarm.author.peer_id)
            assert (await client.models.retrieve("llama")).id == "llama"
            for path in ("/v1/models", "/v1/models/"):
                status, _, listed = await ask(http, "GET", path)
                assert status == 200 and [each["id"] for each in json.loads(listed)["data"]] == ["llama"]
            assert (
                await client.models.retrieve(f"llama@{swarm.author.peer_id}")
            ).owned_by == swarm.author.peer_id
            with pytest.raises(openai.NotFoundError, match="nobody serves 'gpt/9'"):
                await client.models.retrieve("gpt/9")
            assert (await ask(http, "GET", "/health"))[2] == b'{"status":"ok"}'
            for path in (
                "/v1/completions",
                "/v1/completions/",
            ):  # no redirect, which has the scheme before a proxy
                status, headers, _ = await ask(http, "POST", path, {**GREEDY, "prompt": "a", "max_tokens": 1})
                assert status == 200 and "location" not in headers
            for path in ("/v1/nothing/", "/health//"):
                assert (await ask(http, "GET", path))[0] == 404
            await client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=5)
            text = (await ask(http, "GET", "/metrics"))[2].decode()
            for line in (
                'fusion_http_requests_total{path="/v1/completions",status="200"} 3.0',
                'fusion_http_requests_total{path="/v1/models/{model:path}",status="404"} 1.0',
                "fusion_completion_tokens_total 7.0",
                "fusion_prompt_tokens_total 6.0",
                "fusion_prompt_tokens_cached_total 0.0",
                "fusion_answers_running 0.0",
                "fusion_time_to_first_token_seconds_count 3.0",
                "fusion_time_between_tokens_seconds_count 4.0",
            ):
                assert line in text.splitlines()

    asyncio.run(main())


def test_what_is_wrong_is_told_as_openai_does(tmp_path: Path) -> None:
    ok: dict[str, Any] = {**GREEDY, "prompt": "a", "max_tokens": 1}
    hi = {**GREEDY, "messages": [{"role": "user", "content": "hi"}]}
    cases: list[tuple[str, Any, int, str | None, str]] = [
        ("/v1/completions", {**ok, "model": "none"}, 404, "model", "nobody serves"),
        ("/v1/completions", {**ok, "max_tokens": 999}, 400, "max_tokens", "at most 95"),
        ("/v1/completions", {**ok, "prompt": "x" * 9999}, 400, "prompt", "bytes of text"),
        ("/v1/completions", {**ok, "prompt": ""}, 400, "prompt", "at least one token"),
        (
            "/v1/completions",
            {**ok, "prompt": [200]},
            400,
            "prompt",
            "prompt: this model's tokens are 0 to 127",
        ),
        (
            "/v1/chat/completions",
            {**hi, "messages": [*hi["messages"], {"role": "user", "content": {}}]},
            *(400, "messages", "messages: 1.content: Input should be a valid"),
        ),
        (
            "/v1/chat/completions",
            {**hi, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            *(400, "messages", "messages: 0.content.0.text: Field required"),
        ),
        (
            "/v1/completions",
            {**ok, "logit_bias": {"5": 101}},
            400,
            "logit_bias",
            "logit_bias: 5: Input should",
        ),
        ("/v1/completions", {**ok, "prompt": 3}, 400, "prompt", "prompt: Input should be a valid string"),
        ("/v1/completions", {**ok, "temperature": 101}, 400, "temperature", "less than"),
        ("/v1/completions", {**ok, "top_p": -1}, 400, "top_p", "greater than"),
        (
            "/v1/completions",
            {**ok, "response_format": {"type": "json_schema"}},
            400,
            "response_format",
            "response_format: json_schema needs",
        ),
        *(
            (
                "/v1/completions",
                {**ok, "response_format": {"type": "json_schema", "json_schema": form}},
                400,
                "response_format",
                "response_format: json_schema.schema: Field required",
            )
            for form in ({}, {"name": "a"})
        ),
        (
            "/v1/chat/completions",
            {**hi, "messages": [{"content": "hi"}]},
            400,
            "messages",
            "messages: 0.role: Field required",
        ),
        (
            "/v1/chat/completions",
            {
                **hi,
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
            },
            400,
            "messages",
            "messages: 0.content.0.type: parts are text here, not 'image_url'",
        ),
        ("/v1/chat/completions", {**hi, "echo": True}, 400, "echo", "not repeated"),
        (
            "/v1/completions",
            {**ok, "echo": True, "logprobs": 21},
            400,
            "logprobs",
            "less than or equal to 20",
        ),
        ("/v1/completions", {**ok, "echo": True, "max_tokens": 96}, 400, "max_tokens", "at most 95 tokens"),
        ("/v1/completions", {**ok, "guided_regex": "a+"}, 400, "guided_regex", "say response_format"),
        ("/v1/chat/completions", {**hi, "modalities": ["audio"]}, 400, "modalities", "text here"),
        ("/v1/completions", {**ok, "prompt": [[]]}, 400, "prompt", "at least 1 item"),
        ("/v1/completions", b"{", 400, None, "JSON"),
        ("/v1/completions", b"[]", 400, None, "JSON object"),
        ("/v1/completions", b"[" * 99999, 400, None, "JSON"),
        ("/v1/chat/completions", hi, 400, "messages", "no chat template"),
        ("/v1/chat/completions", {**hi, "messages": []}, 400, "messages", "at least 1 item"),
        ("/v1/embeddings", {"model": "llama", "input": "a"}, 400, "model", "no embeddings"),
        ("/v1/nothing", {}, 404, None, "Not Found"),
        ("/v1/models", {}, 405, None, "Not Allowed"),
    ]

    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http):
            for path, body, status, param, words in cases:
                found, _, data = await ask(http, "POST", path, body)
                error = json.loads(data)["error"]
                assert (found, error["param"]) == (status, param), (path, body, error)
                assert words in error["message"] and error["message"].count("response_format") < 2
                assert error["type"] == "invalid_request_error"
            status, _, data = await ask(http, "POST", "/v1/completions", ok, Content_Type="text/plain")
            assert status == 400 and "application/json" in json.loads(data)["error"]["message"]
            await swarm.publish(*swarm.manifests, "llama", 1, state="stopped")
            await swarm.owners[0].context.leases.aclose()

    asyncio.run(main())


def test_templates_that_are_traps_cost_one_error_each(tmp_path: Path) -> None:
    async def main() -> None:
        template = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}" \
                   "{% endfor %}{% endfor %}{% endif %}{{ raise_exception('roles must take turns') }}"  # fmt: skip
        async with served_over_http(tmp_path, template=template) as (_, http), client_of(http) as client:

            async def chat(text: str) -> None:
                await client.chat.completions.create(
                    model="llama", messages=[{"role": "user", "content": text}]
                )

            with pytest.raises(openai.BadRequestError, match="roles must take turns"):
                await chat("hi")
            looping = asyncio.create_task(chat("loop"))
            for _ in range(3):
                await client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4)
            assert not looping.done(), "others are answered meanwhile"
            with pytest.raises(openai.BadRequestError, match="too long"):
                await looping

    asyncio.run(main())


def test_a_client_that_goes_away_frees_its_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http), client_of(http) as client:
            stream = await client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=90, stream=True, n=2)
            await go_away(swarm, stream, 2, client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=90))

    asyncio.run(main())


def test_a_peer_that_is_full_says_when_to_ask_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.served.GatewayConfig", partial(gateway.GatewayConfig, max_sessions=3))

    async def main() -> None:
        go = threading.Event()
        async with served_over_http(tmp_path) as (swarm, http), client_of(http) as client:
            blocked = asyncio.create_task(swarm.peers[0].context.compute.run(go.wait, 20))
            first = asyncio.create_task(client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4, n=2))
            async with asyncio.timeout(10):
                while len(swarm.peers[1].service.gateway._answers) < 2:
                    await asyncio.sleep(0.001)
            with pytest.raises(openai.RateLimitError, match="ask again later") as found:
                await client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4)
            assert int(found.value.response.headers["retry-after"]) > 0
            other = asyncio.create_task(swarm.ask(1, prompt_ids=tuple(PROMPT), max_tokens=4))
            with pytest.raises(openai.RateLimitError):  # gives way to a client that has less
                await first
            go.set()
            assert list((await other).tokens) == reference("llama", PROMPT, 4)
            await blocked
            await swarm.freed()

    asyncio.run(main())


def test_a_port_behind_which_nothing_can_run_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ImportError("half installed")

    monkeypatch.setattr(server, "_load", broken)

    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            async with asyncio.timeout(5):
                with pytest.raises(ConnectionError):
                    while True:  # the first is taken by the kernel
                        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
                        await reader.read()
                        writer.close()

    asyncio.run(main())
    assert "the HTTP API has ended: ImportError('half installed')" in caplog.text


def test_keys(tmp_path: Path) -> None:
    async def main() -> None:
        config = HttpConfig(keys=(hashlib.sha256(KEY.encode()).digest(),))
        async with served_over_http(tmp_path, config=config) as (_, http):
            async with client_of(http, KEY) as client:
                assert (await client.completions.create(**GREEDY, prompt=PROMPT)).choices
            async with client_of(http, KEY[:-1]) as client:
                with pytest.raises(openai.AuthenticationError, match="a key that this peer knows"):
                    await client.models.list()
            status, headers, _ = await ask(http, "GET", "/health")
            assert status == 401 and headers["www-authenticate"] == "bearer"

    asyncio.run(main())


def test_pages_of_other_sites_get_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
                for method in ("GET", "POST", "OPTIONS"):
                    status, found, data = await ask(http, method, "/v1/models", **headers)
                    assert status == 403 and json.loads(data)["error"]["type"] == "permission_error"
                    assert not any(name.startswith("access-control") for name in found)
            assert (await ask(http, "GET", "/v1/models", Origin=f"http://localhost:{http.port}"))[0] == 200

    asyncio.run(main())


def test_requests_are_bounded_in_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            large = {"Content_Length": str(MAX_BODY_BYTES + 1)}
            assert (await ask(http, "POST", "/v1/completions", b"{", **large))[0] == 413
            endless = {"Content_Length": "", "Transfer_Encoding": "chunked", "Connection": ""}
            parts = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
            assert (await ask(http, "POST", "/v1/completions", parts * 10, **endless))[0] == 413
            long = {**GREEDY, "prompt": "x" * (MAX_BODY_BYTES - 1000)}
            status, _, data = await ask(http, "POST", "/v1/completions", long)
            assert status == 400 and b"bytes of text" in data

    asyncio.run(main())


def test_ids_that_no_prompt_has_room_for_are_looked_at_once_and_not_for_every_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            body = {**GREEDY, "prompt": [1] * 1000, "n": 16}
            monkeypatch.setattr("fusion.runtime.serving.http.api.generate_requests", None)
            status, _, data = await ask(http, "POST", "/v1/completions", body)
            error = json.loads(data)["error"]
            assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
            assert "1000 tokens; the model takes 96 positions" in error["message"]
            assert TOO_LONG in error["message"] and "this model's maximum context length is" in TOO_LONG

    asyncio.run(main())


@pytest.mark.parametrize("parts", [1, 2, 40])
def test_heads_are_bounded_however_they_arrive(parts: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            for where in ("header", "target"):
                statuses = []
                for over in (-1, 1):
                    many = MAX_HEAD_BYTES + 100 * over
                    padding = "x" * (many if where == "target" else many - 40)
                    target, more = (f"?{padding}", "") if where == "target" else ("", f"a: {padding}\r\n")
                    head = f"GET /health{target} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()
                    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
                    size = -(-len(head) // parts)
                    for at in range(0, len(head), size):
                        writer.write(head[at : at + size])
                        await writer.drain()
                        await asyncio.sleep(0.002)
                    async with asyncio.timeout(10):
                        answer = await reader.readuntil(b"}")
                    writer.close()
                    statuses.append(int(answer[9:12]))
                    if over > 0:
                        error = json.loads(answer.partition(b"\r\n\r\n")[2] + b"}")["error"]
                        assert error["message"] == "the head of a request has at most 32 KiB"
                        assert error["type"] == "invalid_request_error"
                assert statuses == [200, 431], where

    asyncio.run(main())


def test_requests_are_bounded_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(running, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr("fusion.runtime.serving.http.body.READ_SECONDS", 0.1)

    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            assert (await ask(http, "POST", "/v1/completions", b"{", Content_Length="2"))[0] == 408
            for begun in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET"):
                reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
                writer.write(begun)
                async with asyncio.timeout(10):
                    await asyncio.gather(reader.read(), return_exceptions=True)
                writer.close()

    asyncio.run(main())


def test_a_client_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "UNREAD_SECONDS", 0.1)
    monkeypatch.setattr(running, "LOOK_SECONDS", 0.02)
    told = shapes.Heading.object
    monkeypatch.setattr(
        shapes.Heading, "object", lambda *args, **more: told(*args, **more, pad="x" * 200_000)
    )

    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http):
            body = json.dumps({**GREEDY, "prompt": PROMPT, "max_tokens": 80, "stream": True}).encode()
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", http.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            places = swarm.peers[1].service.gateway._answers
            await until(lambda: bool(places), 20)
            await until(lambda: not places, 20)
            await swarm.freed()
            sock.close()

    asyncio.run(main())


def test_what_is_wrong_with_a_chat_is_said_of_its_messages(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path, template=TEMPLATE) as (_, http):
            for text, says in (
                ("x" * 500, "the model takes 96 positions"),
                ("é" * 1000, "more than 1536 bytes of text; the model takes 96 positions"),
            ):
                asked = {**GREEDY, "messages": [{"role": "user", "content": text}]}
                for stream in (False, True):
                    status, _, data = await ask(
                        http, "POST", "/v1/chat/completions", {**asked, "stream": stream}
                    )
                    error = json.loads(data)["error"]
                    assert (status, error["param"]) == (400, "messages")
                    assert error["code"] == "context_length_exceeded"
                    assert error["message"].startswith("messages: ") and says in error["message"]
                    assert TOO_LONG in error["message"]

    asyncio.run(main())


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(running, "MAX_REFUSED", 1)
    monkeypatch.setattr(running, "REFUSED_SECONDS", 30.0)

    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            assert (await ask(http, "GET", "/health"))[0] == 200
            held = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(2)]
            for reader, writer in held:  # their bodies are to come
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n")
                writer.write(b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 100")
            status, headers, body = await ask(http, "POST", "/v1/completions", {**GREEDY, "prompt": PROMPT})
            assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (429, "2", "busy")
            assert "takes 2 connections" in json.loads(body)["error"]["message"]
            async with asyncio.timeout(10):
                while True:  # until the one before is gone
                    refused = await asyncio.open_connection("127.0.0.1", http.port)
                    if (await refused[0].read(13))[9:12] == b"429":
                        break
                    refused[1].close()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await ask(http, "GET", "/health")
            refused[1].close()
            held[0][1].close()
            async with asyncio.timeout(10):
                while True:
                    try:
                        if (await ask(http, "GET", "/health"))[0] == 200:
                            break
                    except (asyncio.IncompleteReadError, ConnectionError):
                        await asyncio.sleep(0.01)
            held[1][1].close()

    asyncio.run(main())


def test_a_stage_that_has_no_room_is_a_429_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings.Openings, "spend", lambda self, gateway: False)

    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http):
            for stream in (False, True):
                body = {**GREEDY, "prompt": PROMPT, "stream": stream}
                status, headers, said = await ask(http, "POST", "/v1/completions", body)
                assert (status, headers["retry-after"]) == (429, "2")
                assert "is busy" in json.loads(said)["error"]["message"]
            await swarm.freed()

    asyncio.run(main())


def test_the_end_of_the_peer_ends_every_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http), client_of(http) as client:
            stack = open_http(HttpConfig(), *behind(swarm.peers[0]))
            other = await stack.__aenter__()
            async with client_of(other) as through:
                stream = await through.completions.create(**GREEDY, prompt=PROMPT, max_tokens=90, stream=True)
                idle = await asyncio.open_connection("127.0.0.1", other.port)
                await stack.__aexit__(None, None, None)
                with pytest.raises(openai.APIError, match="this peer is stopping"):
                    async for _ in stream:
                        pass
                assert await idle[0].read() == b""
                idle[1].close()
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", other.port)
            await swarm.freed()
            assert (await client.completions.create(**GREEDY, prompt=PROMPT)).choices

    asyncio.run(main())


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, http):
            peer = swarm.peers[0]
            with pytest.raises(
                OSError, match=f"^--http: 127.0.0.1:{http.port}: Address already in use$"
            ) as found:
                async with open_http(HttpConfig(port=http.port), *behind(peer)):
                    pass
            assert "\n" not in str(found.value)

    asyncio.run(main())


def test_log_probabilities_of_each_token(tmp_path: Path) -> None:
    async def main() -> None:
        tokens = reference("llama", PROMPT, 8)
        async with served_over_http(tmp_path, template=TEMPLATE) as (_, http), client_of(http) as client:
            asked: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 8, "logprobs": 2}
            found = (await client.completions.create(**asked)).choices[0]
            assert found.logprobs is not None
            told = found.logprobs.model_dump()
            assert told["tokens"] == [chr(token) for token in tokens]
            assert [found.text[offset] for offset in told["text_offset"]] == told["tokens"]
            held = found.text[2:6] + "?"  # which a stop text holds back while it may come
            stopping = (await client.completions.create(**asked, stop=held)).choices[0]
            assert stopping.text == found.text and stopping.logprobs == found.logprobs
            for token, value, top in zip(
                told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
            ):
                assert top[token] == value == max(top.values()) <= 0.0 and len(top) == 2
            stream = await client.completions.create(**asked, stream=True)
            pieces = [chunk.choices[0].logprobs async for chunk in stream]
            assert [piece.token_logprobs[0] for piece in pieces if piece] == told["token_logprobs"]  # type: ignore[index]
            chat: dict[str, Any] = {
                **GREEDY,
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 4,
            }
            whole = await client.chat.completions.create(**chat, logprobs=True, top_logprobs=3)
            told_chat = whole.choices[0].logprobs
            assert told_chat is not None and told_chat.content is not None and len(told_chat.content) == 4
            text = whole.choices[0].message.content
            assert b"".join(bytes(each.bytes or ()) for each in told_chat.content) == (text or "").encode()
            assert all(each.logprob == each.top_logprobs[0].logprob for each in told_chat.content)
            assert all(len(each.top_logprobs) == 3 for each in told_chat.content)
            plain = await client.chat.completions.create(**chat, logprobs=True)
            assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.content is not None
            assert all(each.top_logprobs == [] for each in plain.choices[0].logprobs.content)

    asyncio.run(main())


def test_the_prompt_is_told_of_before_its_answer(tmp_path: Path) -> None:
    texts = ["a def ", "x"]
    prompts = [list(text.encode()) for text in texts]

    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http), client_of(http) as client:
            asked: dict[str, Any] = {
                **GREEDY,
                "prompt": prompts,
                "max_tokens": 3,
                "logprobs": 1,
                "echo": True,
            }
            found = await client.completions.create(**asked)
            for text, prompt, choice in zip(texts, prompts, found.choices, strict=True):
                tokens = [*prompt, *reference("llama", prompt, 3)]
                assert choice.logprobs is not None and choice.text == text + text_of(tokens[len(prompt) :])
                told = choice.logprobs.model_dump()
                assert all(len(each) == len(tokens) for each in told.values())
                assert told["text_offset"] == list(range(len(tokens)))
                with torch.inference_mode():
                    rows = model("llama")(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
                assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
                for row, token, value, top in zip(
                    rows, tokens[1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=False
                ):
                    assert (
                        abs(value - float(row[token])) < 1e-4
                        and abs(max(top.values()) - float(row.max())) < 1e-4
                    )
                alone = (
                    await client.completions.create(**{**asked, "prompt": prompt, "max_tokens": 0})
                ).choices[0]
                assert (alone.text, alone.finish_reason) == (text, "length") and alone.logprobs is not None
                for name, each in alone.logprobs.model_dump().items():
                    assert each == told[name][: len(prompt)]
            assert found.usage is not None and found.usage.completion_tokens == 6
            assert found.usage.prompt_tokens == sum(map(len, prompts))
            stream = await client.completions.create(**{**asked, "prompt": prompts[0]}, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            assert "".join(chunk.text for chunk in chunks) == found.choices[0].text
            values = [v for each in chunks if each.logprobs for v in each.logprobs.token_logprobs or ()]
            assert found.choices[0].logprobs and values == found.choices[0].logprobs.token_logprobs
            plain = await client.completions.create(
                **GREEDY, prompt="def ", max_tokens=0, extra_body={"echo": True}
            )
            assert (plain.choices[0].text, plain.choices[0].logprobs) == ("def ", None)

    asyncio.run(main())


def test_stop_texts_penalties_and_biases(tmp_path: Path) -> None:
    async def main() -> None:
        tokens = reference("llama", PROMPT, 20)
        text = text_of(tokens)
        async with served_over_http(tmp_path) as (swarm, http), client_of(http) as client:
            asked: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 20}
            stop = text[7:9]
            for options in ({"stop": stop}, {"stop": ["never said", stop]}):
                found = (await client.completions.create(**asked, **options)).choices[0]
                assert found.text == text[: text.index(stop)] and found.finish_reason == "stop"
            stream = await client.completions.create(**asked, stop=stop, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            assert "".join(each.text for each in chunks) == text[: text.index(stop)]
            assert chunks[-1].finish_reason == "stop"
            biased = (await client.completions.create(**asked, logit_bias={str(ord("A")): 100})).choices[0]
            assert biased.text == "A" * 20
            for options in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
                found = (await client.completions.create(**asked, logit_bias={"65": 5}, **options)).choices[0]
                again = await swarm.ask(
                    prompt_ids=tuple(PROMPT),
                    max_tokens=20,
                    sampling=Sampling(logit_bias=((65, 5.0),), **options),
                )
                assert found.text == again.text
            more = {"repetition_penalty": 1.3, "min_p": 0.1}
            found = (await client.completions.create(**asked, extra_body=more)).choices[0]
            again = await swarm.ask(prompt_ids=tuple(PROMPT), max_tokens=20, sampling=Sampling(**more))
            assert found.text == again.text != text
            for wrong in ({"logit_bias": {"x": 1}}, {"logit_bias": {"4000": 1}}):
                with pytest.raises(openai.BadRequestError, match="logit_bias"):
                    await client.completions.create(**asked, **wrong)
            await swarm.freed()

    asyncio.run(main())


def test_end_tokens_least_lengths_and_other_ends(tmp_path: Path) -> None:
    async def main() -> None:
        tokens = reference("llama", PROMPT, 20)
        end = tokens[4]
        first, other = tokens.index(end), tokens[1]
        options: dict[str, Any] = {"template": TEMPLATE, "serve": {"end_tokens": (end,)}}
        async with served_over_http(tmp_path, **options) as (swarm, http), client_of(http) as client:
            asked: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 20}

            async def answer(**more: Any) -> tuple[str, str, int]:
                found = await client.completions.create(**asked, extra_body=more)
                assert found.usage is not None
                [choice] = found.choices
                return choice.text, choice.finish_reason, found.usage.completion_tokens

            assert await answer() == (text_of(tokens[:first]), "stop", first + 1)
            assert await answer(ignore_eos=True) == (text_of(tokens), "length", 20)
            assert await answer(stop_token_ids=[other]) == (text_of(tokens[:1]), "stop", 2)
            longer, _, count = await answer(min_tokens=first + 3)
            assert count > first + 2 and chr(end) not in longer and longer.startswith(text_of(tokens[:first]))
            stop = {"stop": text_of(tokens[:2]), "ignore_eos": True}
            assert (await answer(**stop))[0] == "" and len((await answer(**stop, min_tokens=2))[0]) > 2
            chat = {**asked, "messages": [{"role": "user", "content": "Hi"}]}
            del chat["prompt"]
            whole = await client.chat.completions.create(**chat, extra_body={"ignore_eos": True})
            assert whole.choices[0].finish_reason == "length"
            form = {"response_format": {"type": "json_object"}}
            for wrong, line in (
                ({"min_tokens": 21}, "min_tokens: at most max_tokens, which is 20, not 21"),
                ({"min_tokens": -1}, "min_tokens: .* greater than or equal to 0"),
                ({"stop_token_ids": [128]}, "stop_token_ids: this model's tokens are 0 to 127, not 128"),
                ({"stop_token_ids": [1] * 65}, "stop_token_ids: .* at most 64 items"),
                ({"ignore_eos": True, **form}, "ignore_eos: an answer that follows a schema ends"),
            ):
                with pytest.raises(openai.BadRequestError, match=line) as found:
                    await answer(**wrong)
                assert found.value.param == next(iter(wrong))
            await swarm.freed()

    asyncio.run(main())


def test_the_page_and_what_it_may_load(tmp_path: Path) -> None:
    async def main() -> None:
        config = HttpConfig(keys=(hashlib.sha256(KEY.encode()).digest(),))
        async with served_over_http(tmp_path, config=config) as (_, http):
            status, headers, page = await ask(http, "GET", "/")
            assert status == 200 and headers["content-type"].startswith("text/html")
            for path in re.findall(r'(?:src|href)="([^"]+)"', page.decode()):
                status, found, data = await ask(http, "GET", f"/{path}")
                assert status == 200 and data and found["x-content-type-options"] == "nosniff"
                assert found["content-security-policy"] == headers["content-security-policy"]
            rules = dict(each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";"))
            assert rules.pop("default-src") == "'none'" and set(rules.values()) <= {"'self'", "'none'"}
            for inline in (b"<script>", b"<style>", b" style=", b" onclick=", b"http://", b"https://"):
                assert inline not in page
            assert (await ask(http, "GET", "/", Host="evil.example"))[0] == 403
            assert (await ask(http, "GET", "/../config.py"))[0] in (401, 404)
            assert (await ask(http, "GET", "/v1/models"))[0] == 401

    asyncio.run(main())


def test_the_script_makes_no_markup_of_what_a_model_says() -> None:
    script = (FOLDER / "page.js").read_text("utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "localStorage",
    ):
        assert word not in script


def test_a_template_that_nobody_has_any_more_keeps_no_stage_from_running(tmp_path: Path) -> None:
    async def main() -> None:
        files = ((CHAT_TEMPLATE_FILE, Digest("0" * 64)),)
        async with served_over_http(tmp_path, files=files) as (_, http), client_of(http) as client:
            assert (await client.completions.create(**GREEDY, prompt=PROMPT)).choices
            with pytest.raises(openai.InternalServerError, match="cannot fetch blob") as found:
                await client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": "hi"}])
            assert found.value.status_code == 503

    asyncio.run(main())


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\na: " + b"x" * 70_000,
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n",
        b"GET /%00%ff/..%2f HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ],
    ids=["tls", "http2", "head", "target", "lengths", "chunk", "upgrade", "path"],
)
def test_what_is_no_http_ends_a_connection_and_nothing_else(
    junk: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
            writer.write(junk)
            async with asyncio.timeout(30):
                [said] = await asyncio.gather(reader.read(), return_exceptions=True)
            writer.close()
            if isinstance(said, bytes) and said[9:12] != b"200":
                error, _ = json.JSONDecoder().raw_decode(said.partition(b"\r\n\r\n")[2].decode())
                assert error["error"]["message"]
            assert (await ask(http, "GET", "/health"))[0] == 200

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_body_that_goes_wrong_once_it_is_answered_ends_the_connection_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (_, http):
            for host, status in ((b"evil.example", b"403"), (b"localhost", b"404")):
                reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
                chunked = b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: "
                writer.write(b"POST /v1/nothing" + chunked + host + b"\r\n\r\n")
                async with asyncio.timeout(30):
                    assert (await reader.readuntil(b"}}"))[9:12] == status
                    writer.write(b"no length of a chunk\r\n")
                    assert await reader.read() == b""
                writer.close()
            assert (await ask(http, "GET", "/health"))[0] == 200

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_response_format_holds_for_completions_chats_and_streams(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
        "required": ["kind", "old"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": schema}}

    async def main() -> None:
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        async with (
            served_over_http(tmp_path, template=TEMPLATE, seconds=300) as (swarm, http),
            client_of(http) as client,
        ):
            asked: dict[str, Any] = {"model": "llama", "messages": messages, "max_tokens": 60, "seed": 3}
            asked["logit_bias"] = {"9": -100, "10": -100}  # the shortest of spaces
            whole = await client.chat.completions.create(**asked, response_format=form, n=2)
            for choice in whole.choices:
                assert choice.finish_reason == "stop"
                jsonschema_rs.validate(schema, json.loads(choice.message.content or ""))
            assert whole.usage is not None and whole.usage.completion_tokens == sum(
                len((choice.message.content or "").encode()) for choice in whole.choices
            )
            stream = await client.chat.completions.create(**asked, response_format=form, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == whole.choices[0].message.content
            plain = await client.completions.create(
                model="llama",
                prompt="def ",
                max_tokens=60,
                logit_bias={"9": -100, "10": -100},
                extra_body={"response_format": form},
            )
            jsonschema_rs.validate(schema, json.loads(plain.choices[0].text))
            for bad, line in (
                ({"$ref": "http://127.0.0.1:1/x"}, "json_schema: \\$ref"),
                ({"type": "string", "pattern": "(?=a)"}, "response_format: regex"),
                ({"type": "integer", "multipleOf": 999983}, "response_format: the schema takes too much"),
            ):
                named = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
                with pytest.raises(openai.BadRequestError, match=line) as found:
                    await client.chat.completions.create(**asked, response_format=named)  # type: ignore[call-overload]
                assert found.value.param == "response_format"
            await swarm.freed()

    asyncio.run(main())


def test_one_client_has_so_many_answers_at_once_while_others_have_some(tmp_path: Path) -> None:
    async def main() -> None:
        async with served_over_http(tmp_path) as (swarm, _):
            gateway = swarm.peers[1].service.gateway
            many, one = PeerId("http/many"), PeerId("http/one")
            held = [gateway.admit(many, 0) for _ in range(ANSWERS_BESIDE + 4)]
            assert all(held), "nobody else is there"
            own = gateway.admit(one, 0)
            assert own is not None and gateway.admit(many, 0) is None
            while len(held) >= ANSWERS_BESIDE:
                assert gateway.admit(many, 0) is None
                gateway.release(held.pop(), completed=True)
            again = gateway.admit(many, 0)
            assert again is not None
            for turn in (*held, again, own):
                gateway.release(turn, completed=True)
            await swarm.freed()

    asyncio.run(main())
