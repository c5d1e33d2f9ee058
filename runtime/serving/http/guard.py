"""Authentication: who is let in, before more of a request is read than its head.

On loopback, pages of other sites must not use the API through a browser of this machine: a page that points its own name
here (DNS rebinding) still sends that name as Host, and any other page sends its Origin. Where keys are configured, each
request presents one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from fusion.runtime.serving.http.config import HttpConfig
from fusion.runtime.serving.http.errors import ApiError
from fusion.swarm.transport import PeerId

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
MAX_HEAD_BYTES = 32 << 10
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def check_head(scope: Mapping[str, Any]) -> None:
    """ApiError (431) where the head of the request is too long. The server stops reading a head that arrives in several parts, but one
    that arrives at once it has read whole, however long."""
    line = len(scope["method"]) + len(scope.get("raw_path") or b"") + len(scope["query_string"])
    size = line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise head_too_long()


def head_too_long() -> ApiError:
    message = f"the head of a request has at most {MAX_HEAD_BYTES >> 10} KiB"
    return ApiError(431, message, code="request_head_too_large")


class Guard:
    def __init__(self, config: HttpConfig, port: int) -> None:
        self._config = config
        self._port = port

    def admit(self, headers: Headers, address: str, *, public: bool = False) -> PeerId:
        """The tenant of the request, with which it shares this peer's capacity: one for each API key, or address. `public`: no key is
        required, as a browser sends none when it opens a page. ApiError (401, 403)."""
        if self._config.local:
            self._check_origin(headers)
        if self._config.keys and not public:
            return tenant_of(_presented_key(headers, self._config.keys).hex())
        return tenant_of(address)

    def _check_origin(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _name(hosts[0]) not in self._names:
            raise ApiError(403, "Host: this API is for programs of this machine", code="foreign_host")
        for origin in headers.getlist("origin"):
            if not self._is_own(origin):
                raise ApiError(
                    403, "Origin: pages of other sites may not use this API", code="foreign_origin"
                )

    @property
    def _names(self) -> frozenset[str]:
        return LOCAL_NAMES | {self._config.host}

    def _is_own(self, origin: str) -> bool:
        try:
            parts = urlsplit(origin)
            port = parts.port or 80
        except ValueError:
            return False
        return parts.scheme == "http" and parts.hostname in self._names and port == self._port


def _name(host: str) -> str:
    """The name in a Host header, without its port; "" where it is none."""
    match = _HOST.fullmatch(host.lower())
    return match[1].strip("[]") if match else ""


def _presented_key(headers: Headers, keys: Sequence[bytes]) -> bytes:
    """The digest of the key that a request presents, compared in constant time. ApiError (401)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
    matches = [hmac.compare_digest(digest, one) for one in keys]
    if scheme.lower() != "bearer" or not any(matches):
        error_code = "invalid_api_key" if key else "missing_api_key"
        raise ApiError(401, "Authorization: Bearer and a key that this peer knows", code=error_code)
    return digest


def tenant_of(text: str) -> PeerId:
    """The tenant of requests with that key digest, or from that address."""
    try:
        if (address := ip_address(text)).version == 6:  # one user has a /64
            text = str(address.exploded[:19])
    except ValueError:
        pass
    return PeerId(f"http/{text[:64]}")  # no peer's id has a slash
