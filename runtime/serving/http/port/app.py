"""The routes of the API, and what precedes them: authentication, limits, error responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fusion.runtime.serving.http.api import Api
from fusion.runtime.serving.http.body import BoundedRoute
from fusion.runtime.serving.http.chat_page import FILES, page_routes
from fusion.runtime.serving.http.embedding import Embeddings
from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.events import ClientDisconnected
from fusion.runtime.serving.http.guard import Guard, check_head
from fusion.runtime.serving.http.metrics import CONTENT_TYPE, Metrics
from fusion.runtime.serving.http.responses.api import Responses
from fusion.runtime.serving.http.responses.schema import ResponsesRequest
from fusion.runtime.serving.http.schema import ChatRequest, CompletionRequest, EmbeddingRequest

GONE = 499  # nginx's status for a client that disconnected; nobody reads it
MAX_PLACE = 100  # characters of the path within a field
# A type in pydantic's error path, which is not part of the client's path
_TYPE = re.compile(r"str|int|float|bool|[A-Z]\w*|.*[\[(].*")
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "It cannot be answered; `error.param` names the field."},
    401: {"description": "No key, or one that this peer does not know."},
    403: {"description": "A page of another site, or a model that is not for everybody."},
    404: {"description": "No such model."},
    413: {"description": "Too long a request."},
    431: {"description": "Too long a head of a request."},
    429: {"description": "This peer answers as many as it can; `Retry-After` says when to ask again."},
    503: {"description": "Nobody runs some stage of the model now."},
}


def make_app(
    api: Api, responses: Responses, embeddings: Embeddings, guard: Guard, metrics: Metrics
) -> ASGIApp:
    # FastAPI's documentation pages load scripts from other sites. A redirect would name this port's own scheme, which is not that of a
    # TLS proxy in front of it.
    app = FastAPI(title="Fusion Peer", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.large_bodies = set()
    app.include_router(_routes(api, responses, embeddings, metrics))
    app.include_router(page_routes())
    app.add_exception_handler(HTTPException, _unknown)
    return _Gate(app, guard, metrics)


def _routes(api: Api, responses: Responses, embeddings: Embeddings, metrics: Metrics) -> APIRouter:
    router = APIRouter(route_class=_route_class(api), responses=ERRORS)

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Go on from a prompt."""
        return await api.completions(request, body)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a chat, as the model's own template writes it."""
        return await api.chat(request, body)

    @router.post("/v1/responses", response_model=None)
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        """Answer a chat as the Responses API has it: text and calls of functions; nothing of it is kept."""
        return await responses.answer(request, body)

    @router.post("/v1/embeddings", response_model=None)
    async def embed(request: Request, body: EmbeddingRequest) -> Response:
        """A vector of each text."""
        return await embeddings.answer(request, body)

    @router.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        """What the swarm serves."""
        return {"object": "list", "data": await api.models()}

    @router.get("/v1/models/{model:path}", response_model=None)
    async def model(model: str) -> dict[str, Any]:
        return await api.model(model)

    @router.get("/health", response_model=None)
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @router.get("/metrics", response_model=None)
    async def shown_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return router


def _route_class(api: Api) -> type[BoundedRoute]:
    class Route(BoundedRoute):
        """Reports errors in OpenAI's form."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_errors(request: Request) -> Response:
                try:
                    return await handle(request)
                except RequestValidationError as error:
                    return reply(_wrong_field(error.errors()))
                except ClientDisconnected:
                    return Response(status_code=GONE)
                except HTTPException as error:  # FastAPI's, perhaps around an ApiError that `body` raised
                    cause = error.__cause__
                    api_error = (
                        cause if isinstance(cause, ApiError) else ApiError(error.status_code, error.detail)
                    )
                    return reply(api_error)
                except Exception as error:
                    return reply(api.failed(error))

            return handle_errors

    return Route


def reply(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, dict(error.headers))


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = reply(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


def _wrong_field(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors; of a field of several types, an error within the type that matches."""
    first = min(errors, key=lambda error: str(error["type"]).endswith("_type"))
    field = str(first["loc"][1]) if len(first["loc"]) > 1 else ""
    message = str(first["msg"]).removeprefix("Value error, ")
    if field:
        inner = ".".join(str(each) for each in first["loc"][2:] if not _TYPE.fullmatch(str(each)))[:MAX_PLACE]
        return ApiError(400, f"{field}: {inner}{': ' if inner else ''}{message}", param=field)
    if first["type"] == "value_error":  # says itself which field
        return ApiError(400, message, param=message.partition(":")[0])
    return ApiError(400, f"the body: a JSON object with Content-Type application/json ({message})")


class _Gate:
    """Authenticates a request before its body is read, and counts it afterwards."""

    def __init__(self, app: ASGIApp, guard: Guard, metrics: Metrics) -> None:
        self._app = app
        self._guard = guard
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # HEAD is handled as GET: the server leaves the body out. A trailing slash changes nothing.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": scope["path"].removesuffix("/") or "/"}
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app
        try:
            check_head(scope)
            address = (scope.get("client") or ("",))[0]
            scope.setdefault("state", {})["tenant"] = self._guard.admit(
                Headers(scope=scope), address, public=scope["path"] in FILES
            )
        except ApiError as error:
            app = reply(error)
        try:
            await app(scope, receive, counted)
        finally:
            self._metrics.request(getattr(scope.get("route"), "path", "other"), status)
