"""The page at `/`: a chat in a browser, over the same API. Three static files; nothing is loaded from other
sites, and the Content-Security-Policy forbids that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Response

FOLDER = Path(__file__).with_name("page")
FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, name in FILES.items():
        router.add_api_route(path, _file(name), response_class=Response)
    return router


def _file(name: str) -> Callable[[], Awaitable[Response]]:
    content, kind = (FOLDER / name).read_bytes(), TYPES[Path(name).suffix]

    async def answer() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return answer
