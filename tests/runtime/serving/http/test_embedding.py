"""What a request for embeddings takes of a gateway's places, and what it is told of its texts."""

from __future__ import annotations

import asyncio
import json
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.instant_loop import run

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import EMBEDDING, ServeConfig
from fusion.runtime.job.text import ByteText, NoText, Text
from fusion.runtime.serving.answers.gateway import ANSWER_BYTES, IDLE_SECONDS, Gateway, GatewayConfig
from fusion.runtime.serving.graphs.arrays import Array
from fusion.runtime.serving.http.embedding import Embeddings
from fusion.runtime.serving.http.errors import ApiError, api_error
from fusion.runtime.serving.http.schema import EmbeddingRequest
from fusion.swarm.transport import PeerId

SERVE = ServeConfig(cache="recompute", max_sequence=100, vocabulary=256, outputs=(EMBEDDING,), batch=4)
REQUEST: Any = SimpleNamespace(state=SimpleNamespace(tenant=PeerId("http/one")))
SCOPE: Any = {"type": "http"}
NOTHING: Any = None


class Asked:
    """Embeddings of a model in a process of its own, in front of a gateway with so many places."""

    def __init__(self, places: int = 16, text: Text | None = None) -> None:
        clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        access = SimpleNamespace(chain=lambda job: ())
        context: Any = SimpleNamespace(
            transport=None, clock=clock, access=access, takeover=None, random=Random(1)
        )
        self.gateway = Gateway(context, NOTHING, GatewayConfig(max_sessions=places))
        manifest = SimpleNamespace(name="vectors", tokenizer=None)
        model = SimpleNamespace(job="job", manifest=manifest, serve=SERVE, text=text or ByteText())

        async def find(name: str) -> Any:
            return model

        async def samples_at_once(*_: object) -> int:
            return 4

        async def vectors(job: str, given: list[Array], client: PeerId) -> Any:
            made = np.ones((given[0].shape[0], 3), "<f4")
            return [Array(EMBEDDING, "float32", made.shape, made.tobytes())], []

        api: Any = SimpleNamespace(find=find, cancel_on_disconnect=lambda request, work: work)
        graphs: Any = SimpleNamespace(run=vectors, samples_at_once=samples_at_once)
        self._embeddings = Embeddings(api, self.gateway, graphs, PeerId("us"))

    @property
    def held(self) -> int:
        return len(self.gateway._answers)

    async def answer(self, given: Any) -> Any:
        return await self._embeddings.answer(REQUEST, EmbeddingRequest(input=given))


@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        (ByteText(), "a" * 10_000, "10000 bytes of text; the model takes 100 positions"),
        (ByteText(), ["a", "b" * 101], "101 tokens; the model takes 100 positions"),
        (NoText(), "a", "this model has no tokenizer; give token ids instead"),
    ],
)
def test_what_is_wrong_with_a_text_is_said_of_the_input(text: Text, given: Any, says: str) -> None:
    async def main() -> None:
        asked = Asked(text=text)
        with pytest.raises(JobError) as error:
            await asked.answer(given)
        told = api_error(error.value)
        assert (told.status, told.param) == (400, "input") and str(told).startswith(f"input: {says}")
        assert told.code == ("context_length_exceeded" if "positions" in says else None)
        assert "--" not in str(told), "that is for the command line"
        assert not asked.held

    run(main())


def test_more_texts_than_there_ever_is_a_place_for_are_refused_and_end_nobody_s_answer() -> None:
    async def main() -> None:
        asked = Asked(places=2)
        other = asked.gateway.admit(PeerId("other"), 0)
        await asyncio.sleep(2 * IDLE_SECONDS)
        texts = ["a"] * (2 * ANSWER_BYTES // 22_000)
        with pytest.raises(ApiError, match="input: too much at once") as error:
            await asked.answer(texts)
        assert (error.value.status, error.value.param) == (400, "input")
        assert other is not None and not other.done()

    run(main())


@pytest.mark.parametrize("gone", [False, True])
def test_an_answer_keeps_its_place_until_the_client_has_it_or_is_gone(gone: bool) -> None:
    async def main() -> None:
        asked, reads, sent = Asked(), asyncio.Event(), list[bytes]()
        whole = await asked.answer(["a", "bc", "d"])
        assert asked.held == 1

        async def send(message: Any) -> None:
            await reads.wait()
            if gone:
                raise OSError("nobody is there")
            sent.append(message.get("body", b""))

        sending = asyncio.create_task(whole(SCOPE, NOTHING, send))
        await asyncio.sleep(5.0)
        assert asked.held == 1
        reads.set()
        await asyncio.gather(sending, return_exceptions=True)
        assert not asked.held
        if not gone:
            data = json.loads(b"".join(sent))["data"]
            assert [each["embedding"] for each in data] == [[1.0] * 3] * 3

    run(main())
