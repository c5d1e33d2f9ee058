"""What the routes do with the answers of a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.runtime.serving.http.api import Api
from fusion.runtime.serving.http.metrics import Metrics
from fusion.runtime.serving.http.schema import CompletionRequest
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece
from fusion.swarm.transport import PeerId
from fusion.swarm.turns import Turn

SCOPE: Any = {"type": "http"}
NOTHING: Any = None


class _Gateway:
    """Answers with one token, or with an error."""

    def __init__(self, fails: bool) -> None:
        self.left = list[bool]()
        self._fails = fails
        self.plain = list[bool]()
        self.catalog = SimpleNamespace(find=self._find)
        self.texts = SimpleNamespace(encode=self._encode)

    async def _find(self, name: str) -> Any:
        serve = SimpleNamespace(longest_prompt=100, max_sequence=100, source=None)
        return SimpleNamespace(job="job", manifest=SimpleNamespace(name="m"), serve=serve)

    async def _encode(self, model: Any, tenant: PeerId, text: str, *, plain: bool = True) -> tuple[int, ...]:
        self.plain.append(plain)
        return (1, 2)

    def admit(self, *_: object) -> Turn:
        return asyncio.get_running_loop().create_future()

    def touch(self, turn: Turn) -> None: ...

    def release(self, turn: Turn, *, completed: bool) -> None:
        self.left.append(completed)

    async def generate(self, request: GenerateRequest, **_: object) -> AsyncGenerator[Piece | Answer, None]:
        if self._fails:
            raise RuntimeError("it broke")
        yield Piece(index=0, id=1, text="a")
        yield Answer(text="a", tokens=(1,), finish="length", prompt_tokens=2, route=(), seconds=0.0)


def asked(gateway: Any, **more: Any) -> Any:
    async def receive() -> Any:
        await asyncio.Event().wait()

    context: Any = SimpleNamespace(random=Random(1))
    request: Any = SimpleNamespace(state=SimpleNamespace(tenant=PeerId("http/one")), receive=receive)
    return Api(context, gateway, Metrics()).completions(request, CompletionRequest(prompt="x", n=2, **more))


def test_answers_keep_their_places_until_the_client_has_them() -> None:
    async def main() -> None:
        gateway, reads, sent = _Gateway(fails=False), asyncio.Event(), list[bytes]()
        whole = await asked(gateway)

        async def send(message: Any) -> None:
            await reads.wait()
            sent.append(message.get("body", b""))

        sending = asyncio.create_task(whole(SCOPE, NOTHING, send))
        for _ in range(10):
            await asyncio.sleep(0)
        assert gateway.left == []
        reads.set()
        await sending
        assert gateway.left == [True, True]
        assert [each["text"] for each in json.loads(b"".join(sent))["choices"]] == ["a", "a"]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(("said", "plain"), [({}, True), (None, True), (True, True), (False, False)])
def test_a_prompt_may_have_its_special_tokens_already(said: Any, plain: bool) -> None:
    async def main() -> None:
        gateway = _Gateway(fails=False)
        await asked(gateway, **({} if said == {} else {"add_special_tokens": said}))
        assert gateway.plain == [plain]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_answers_that_fail_leave_their_places_at_once() -> None:
    async def main() -> None:
        gateway = _Gateway(fails=True)
        with pytest.raises(RuntimeError, match="it broke"):
            await asked(gateway)
        assert gateway.left == [False, False]

    asyncio.run(asyncio.wait_for(main(), 20))
