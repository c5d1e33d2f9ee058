"""Request bodies, bounded in bytes, time, depth and memory, before anything interprets them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from fusion.runtime.job.protocol import MAX_PROMPT_BYTES
from fusion.runtime.serving.http.errors import ApiError, Busy

MAX_BODY_BYTES = MAX_PROMPT_BYTES + (1 << 20)
READ_SECONDS = 30.0  # for a whole body to arrive
LARGE_BYTES = 256 << 10
LARGE_BODIES = 8  # at once, until their responses begin
MAX_DEPTH = 64
MAX_BRACKETS = 200_000  # lists and objects: each takes a hundred times its two characters of memory
MAX_TEXTS = 200_000  # names among them
MAX_VALUES = (
    MAX_PROMPT_BYTES // 8 + MAX_TEXTS
)  # a prompt of token ids, 8 bytes each on the wire, has the most
# Their opening brackets, also escaped: the arguments of a tool call are JSON in JSON.
_BRACKETS = (b"[", b"{", rb"\u005b", rb"\u005B", rb"\u007b", rb"\u007B")


_LOOKED_INTO = frozenset({str, list, dict})


class BoundedRequest(Request):
    """`body` and `json` raise ApiError (400, 408, 413, 415, 429)."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await _read(self)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse(await self.body())
        return self._json


class BoundedRoute(APIRoute):
    """A route whose handlers get a BoundedRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            bounded_request = BoundedRequest(request.scope, request.receive)
            try:
                return await handle(bounded_request)
            finally:
                request.app.state.large_bodies.discard(bounded_request)

        return bounded


async def _read(request: Request) -> bytes:
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding: a body is read as it is, not {encoding[:40]!r}")
    length = request.headers.get("content-length", "")
    declared = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0
    if declared > MAX_BODY_BYTES or len(length) >= 16:
        raise _too_large()
    large: set[object] = request.app.state.large_bodies
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                if size > LARGE_BYTES and request not in large:
                    if len(large) >= LARGE_BODIES:
                        raise Busy("this peer reads as many large requests as it can: ask again later")
                    large.add(request)
                parts.append(part)
        return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {READ_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away") from None


def _too_large() -> ApiError:
    return ApiError(413, f"a request has at most {MAX_BODY_BYTES} bytes", code="request_too_large")


def parse(body: bytes) -> Any:
    """Parse JSON. ApiError (400) where it is not JSON, or is nested deeper or has more values than any request needs."""
    if sum(map(body.count, _BRACKETS)) > MAX_BRACKETS:
        raise ApiError(400, f"JSON: at most {MAX_BRACKETS} lists and objects")
    if body.count(b'"') > 2 * MAX_TEXTS or body.count(b",") > MAX_VALUES:
        _check_counts(body)
    try:
        value = json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"JSON: {reason}", code="invalid_json") from None
    _check(value)
    return value


def _check_counts(body: bytes) -> None:
    """ApiError for more values than any request needs: parsing them would block the loop."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 2 * MAX_TEXTS:
        raise ApiError(400, f"JSON: at most {MAX_TEXTS} texts and names")
    around = unescaped.split(b'"')[::2]  # outside of strings
    if sum(part.count(b",") for part in around) > MAX_VALUES:
        raise ApiError(400, f"JSON: at most {MAX_VALUES} values")


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _check(value: Any) -> None:
    """ApiError for too deep nesting, and for text that cannot be encoded in UTF-8."""
    level, depth = [value], 0
    while level:
        below = list[Any]()
        _check_text("".join([each for each in level if type(each) is str]))
        for each in level:
            if type(each) is dict:
                _check_text("".join(each))
                below += _inside(each.values())
            elif type(each) is list:
                below += _inside(each)
        level, depth = below, depth + 1
        if depth == MAX_DEPTH and any(not isinstance(each, str) for each in level):
            raise ApiError(400, f"JSON: at most {MAX_DEPTH} levels", code="invalid_json")


def _inside(values: Collection[Any]) -> list[Any]:
    """The values that need checking."""
    if _LOOKED_INTO.isdisjoint(map(type, values)):
        return []
    return [each for each in values if type(each) in _LOOKED_INTO]


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise ApiError(400, "JSON: text that UTF-8 cannot hold", code="invalid_json") from None
