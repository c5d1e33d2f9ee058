"""The handler of /v1/embeddings: a vector for each text of a request, as OpenAI's API writes them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray

from fusion.runtime.serving.answers.gateway import Gateway
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.graphs.embeddings import check_texts, embeddings
from fusion.runtime.serving.graphs.gateway import AT_ONCE, GraphGateway
from fusion.runtime.serving.http.api import Api
from fusion.runtime.serving.http.errors import ApiError, Busy, attributed_to
from fusion.runtime.serving.http.events import WholeAnswer
from fusion.runtime.serving.http.schema import EmbeddingRequest
from fusion.runtime.serving.http.shapes import json_text
from fusion.runtime.serving.requests.header_fields import TOKEN_BYTES
from fusion.swarm.transport import PeerId
from fusion.swarm.turns import Turn

MAX_BYTES = 16 << 20  # of a response
USUAL_SIZE = 1024  # of a vector: a request is admitted before any has been computed
NUMBER_BYTES = {True: 6, False: 22}  # of a response, in base64 or as text


class Embeddings:
    """Raises as `Api` does."""

    def __init__(self, api: Api, gateway: Gateway, graphs: GraphGateway, peer_id: PeerId) -> None:
        self._api = api
        self._gateway = gateway
        self._graphs = graphs
        self._peer_id = peer_id
        # For all requests together: a gateway keeps intermediate values, and the peers of the stages run no more of one client's.
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def answer(self, request: Request, body: EmbeddingRequest) -> Response:
        return await self._api.cancel_on_disconnect(request, self._answer(request.state.tenant, body))

    async def _answer(self, tenant: PeerId, body: EmbeddingRequest) -> Response:
        model = await self._api.find(body.model)
        if not model.serve.embeds:
            what = "answers in one run" if model.serve.outputs else "generates text"
            message = f"model: {model.manifest.name} {what} and makes no embeddings"
            raise ApiError(400, message, param="model")
        with attributed_to("input"):
            for text in body.texts:
                if isinstance(text, str):
                    self._gateway.texts.check(model, text)
        # Admitted before the texts are tokenized, which takes long where there are many.
        size = TOKEN_BYTES * sum(map(len, body.texts))
        size += len(body.texts) * USUAL_SIZE * NUMBER_BYTES[body.as_base64]
        if not self._gateway.can_admit(size):
            raise ApiError(400, "input: too much at once: ask for fewer texts", param="input")
        turn = self._gateway.admit(tenant, size)
        if turn is None:
            raise Busy
        whole, making = False, asyncio.create_task(self._make(model, tenant, body, turn))
        turn.add_done_callback(lambda _: making.cancel())
        async with AsyncExitStack() as resources:
            resources.callback(lambda: self._gateway.release(turn, completed=whole))
            try:
                parts = await making
                whole = True
            except asyncio.CancelledError:
                if not turn.done():
                    raise
                raise Busy from None  # preempted for a tenant that had fewer requests
            finally:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
            return WholeAnswer(parts, resources.pop_all())

    async def _make(
        self, model: ServedModel, tenant: PeerId, body: EmbeddingRequest, turn: Turn
    ) -> list[bytes]:
        """The JSON of the response, in parts."""
        with attributed_to("input"):
            texts = [
                await self._gateway.texts.encode(model, tenant, text) if isinstance(text, str) else text
                for text in body.texts
            ]
        check_texts(model, texts)
        entries_of = [b""] * len(texts)
        async with aclosing(embeddings(self._graphs, model, texts, self._peer_id, self._turns)) as runs:
            async for places, vectors in runs:
                self._gateway.touch(turn)
                _check(body, len(texts), vectors.shape[1])
                entries = await asyncio.to_thread(_entries, body.as_base64, places, vectors)
                for number, entry in zip(places, entries, strict=True):
                    entries_of[number] = entry
        tokens = sum(map(len, texts))
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        end = {"model": body.model or model.manifest.name, "usage": used}
        between = [part for each in entries_of for part in (b",", each)][1:]
        return [b'{"object":"list","data":[', *between, b"],", json_text(end)[1:]]


def _check(body: EmbeddingRequest, texts: int, size: int) -> None:
    if body.dimensions not in (None, size):
        raise ApiError(400, f"dimensions: the model's vectors have {size}, and no fewer", param="dimensions")
    each = size * NUMBER_BYTES[body.as_base64]
    if texts * each > MAX_BYTES:
        raise ApiError(400, f"input: at most {MAX_BYTES // each} texts at once of this model", param="input")


def _entries(as_base64: bool, places: Sequence[int], vectors: NDArray[np.float32]) -> list[bytes]:
    def json_value(vector: NDArray[np.float32]) -> object:
        return base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()

    return [
        json_text({"object": "embedding", "index": place, "embedding": json_value(vector)})
        for place, vector in zip(places, vectors, strict=True)
    ]
