"""OpenAI's own client, `llm` and curl ask real peers over HTTP, and get the tokens that `fusion-peer generate` gives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from support.chat_model import chat_prompt, save_model, teach, tokenizer
from support.families import greedy

pytestmark = pytest.mark.e2e

PROMPT, QUESTION = "def open(", "class Socket:"
NEXT, RESULT = "import os", "A socket is one end of a way."
ARGUMENTS = {"word": "socket", "most": 2}
CALL = f"<tool_call>{json.dumps({'name': 'look_up', 'arguments': ARGUMENTS})}</tool_call>"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What a word means.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
TOKENS, POSITIONS = 24, 512
WITH_TOOL = [("system", json.dumps([TOOL])), ("user", QUESTION)]
KEY = "a-key-of-sixteen-or-more"


def test_any_client_of_openai_asks_any_peer(peers: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    first = peers.start("peer-0")
    second = peers.start(
        "peer-1", "--http", "127.0.0.1:0", "--http-key", str(tmp_path / "keys"), bootstrap=(first.address,)
    )
    made = tokenizer()
    made.add_tokens([CALL])
    model = save_model(tmp_path / "model", made, POSITIONS, layers=2)
    teach(model, made, CALL, chat_prompt(made, WITH_TOOL), TOKENS // 2)
    model.save_pretrained(tmp_path / "model")
    peers.run(
        *("serve", str(tmp_path / "model"), "--name", "small", "--stages", "2", "--home", str(first.home))
    )
    [status] = peers.run("status", "--home", str(first.home))
    assert status["http"] == first.ready["http"]

    ask = ("generate", "--model", "small", "--max-tokens", str(TOKENS), "--home", str(first.home))
    [plain] = peers.run(*ask, PROMPT)
    ids = chat_prompt(made, [("user", QUESTION)])
    assert ids[0] == made.token_to_id("<s>") != ids[1] and made.token_to_id("<|im_end|>") in ids
    [chatted] = peers.run(*ask, "--prompt-ids", ",".join(map(str, ids)))
    assert plain["tokens"] == greedy(model, made.encode(PROMPT).ids, TOKENS)[0]
    options: dict[str, Any] = {"model": "small", "max_tokens": TOKENS, "temperature": 0}
    messages: Any = [{"role": "user", "content": QUESTION}]

    for peer, key in ((first, "none"), (second, KEY)):
        with openai.OpenAI(base_url=peer.ready["http"], api_key=key, max_retries=0) as client:
            assert [each.id for each in client.models.list()] == ["small"]
            whole = client.completions.create(**options, prompt=PROMPT)
            assert whole.choices[0].text == plain["text"] and whole.usage is not None
            assert whole.usage.prompt_tokens == len(made.encode(PROMPT).ids)
            stream = client.completions.create(**options, prompt=PROMPT, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == plain["text"]
            answer = client.chat.completions.create(**options, messages=messages)
            assert answer.choices[0].message.content == made.decode(chatted["tokens"])
            assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
            pieces = client.chat.completions.create(**options, messages=messages, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
            assert text == made.decode(chatted["tokens"])
            with pytest.raises(openai.NotFoundError, match="small"):
                client.completions.create(**{**options, "model": "large"}, prompt=PROMPT)
            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                client.completions.create(**{**options, "max_tokens": 10**6}, prompt=PROMPT)
            long = client.completions.create(**{**options, "max_tokens": 90}, prompt=PROMPT, stream=True)
            next(iter(long))
            long.close()
            nobody_waits(peer.ready["http"].removesuffix("/v1"), key)
    history: Any = [
        {"role": "system", "content": "def read(self, path):\n    return self.path\n" * 5},
        *messages,
    ]
    with openai.OpenAI(base_url=first.ready["http"], api_key="none", max_retries=0) as client:
        turn = client.chat.completions.create(**options, messages=history)
        history += [{"role": "assistant", "content": turn.choices[0].message.content}, *messages]
        goes_on = client.chat.completions.create(**options, messages=history)
    with openai.OpenAI(base_url=second.ready["http"], api_key=KEY, max_retries=0) as client:
        anew = client.chat.completions.create(**options, messages=history)
    assert goes_on.choices[0].message.content == anew.choices[0].message.content
    assert cached_tokens(goes_on) >= 64 and cached_tokens(anew) == 0

    with (
        openai.OpenAI(base_url=second.ready["http"], api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()

    curl = shutil.which("curl")
    if curl is not None:
        asked = json.dumps({**options, "messages": messages, "stream": True})
        url = f"{first.ready['http']}/chat/completions"
        done = subprocess.run(
            [curl, "-sSN", "--fail", url, "-H", "Content-Type: application/json", "-d", asked],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        lines = [line.removeprefix("data: ") for line in done.stdout.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        deltas = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines]
        assert "".join(deltas) == made.decode(chatted["tokens"])
    calls_a_tool_and_reads_what_it_gave(first.ready["http"], model, made)
    llm_talks(first.ready["http"], model, made, tmp_path / "llm")
    assert peers.stop(first, signal.SIGTERM) < 10.0


def calls_a_tool_and_reads_what_it_gave(url: str, model: Any, made: Any) -> None:
    said: Any = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "small", "max_tokens": TOKENS, "temperature": 0, "tools": [TOOL]}
    before, _, after = made.decode(greedy(model, chat_prompt(made, WITH_TOOL), TOKENS)[0]).partition(CALL)
    content = before + after.strip()  # white space around a call belongs to it
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**asked, messages=said).choices[0]
        assert answer.finish_reason == "length"  # as it goes on after the call
        assert answer.message.content == content
        assert answer.message.tool_calls is not None
        [call] = answer.message.tool_calls
        assert call.type == "function" and call.function.name == "look_up"
        assert json.loads(call.function.arguments) == ARGUMENTS

        chunks = list(client.chat.completions.create(**asked, messages=said, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == content
        [streamed] = [each for delta in deltas for each in delta.tool_calls or ()]
        assert streamed.function is not None and streamed.function.name == "look_up"
        assert json.loads(streamed.function.arguments or "") == ARGUMENTS

        result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        said += [answer.message.model_dump(exclude_none=True), result]
        goes_on = client.chat.completions.create(**asked, messages=said).choices[0].message
    called = json.dumps({"name": "look_up", "arguments": ARGUMENTS})
    turns = [*WITH_TOOL, ("assistant", content + called), ("tool", RESULT)]
    text = made.decode(greedy(model, chat_prompt(made, turns), TOKENS)[0])
    assert goes_on.content == text.replace(CALL, "")


def llm_talks(url: str, model: Any, made: Any, home: Path) -> None:
    """A command of somebody else (https://llm.datasette.io), which reads where the API is from a file of its own."""
    home.mkdir()
    about = [{"model_id": "fusion", "model_name": "small", "api_base": url}]
    (home / "extra-openai-models.yaml").write_text(json.dumps(about))
    first = made.decode(greedy(model, chat_prompt(made, [("user", QUESTION)]), TOKENS)[0])
    turns = [("user", QUESTION), ("assistant", first), ("user", NEXT)]
    second = made.decode(greedy(model, chat_prompt(made, turns), TOKENS)[0])
    ask = (
        sys.executable,
        "-m",
        "llm",
        "prompt",
        "-m",
        "fusion",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        str(TOKENS),
    )
    for arguments, text in (([QUESTION, "--no-stream"], first), ([NEXT, "-c"], second)):
        done = subprocess.run(
            [*ask, *arguments], capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "LLM_USER_PATH": str(home)},
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, f"{text}\n"), done.stderr


def cached_tokens(answer: Any) -> int:
    """Of the prompt, as the answer says."""
    found = answer.usage.prompt_tokens_details.cached_tokens
    assert isinstance(found, int)
    return found


def nobody_waits(url: str, key: str) -> None:
    """Until no answer runs any more."""
    deadline = time.monotonic() + 30
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    while True:
        with urllib.request.urlopen(request, timeout=30) as answer:
            if b"fusion_answers_running 0.0" in answer.read():
                return
        assert time.monotonic() < deadline, "the answer goes on without its client"
        time.sleep(0.05)
