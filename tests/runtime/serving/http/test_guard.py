"""No page of another site gets through to a peer of this machine, and nobody without a key where there are keys."""

from __future__ import annotations

import hashlib

import pytest
from starlette.datastructures import Headers

from fusion.runtime.serving.http.config import HttpConfig
from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.guard import Guard

PORT = 8080
KEYS = ("first-key-0123456789", "other-key-0123456789")
LOCAL = Guard(HttpConfig(), PORT)
KEYED = Guard(HttpConfig(host="0.0.0.0", keys=tuple(hashlib.sha256(k.encode()).digest() for k in KEYS)), PORT)


def headers(*pairs: tuple[str, str]) -> Headers:
    return Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in pairs])


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8080"]
)
def test_programs_of_this_machine(host: str) -> None:
    assert LOCAL.admit(headers(("host", host)), "127.0.0.1") == "http/127.0.0.1"


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "[::1",
            "::1",
        ),
        *("evil.example@localhost", "localhost/evil", "localhost:x", "localhost?", "0.0.0.0", "192.168.1.5"),
    ],
)
def test_a_name_that_was_made_to_point_here(host: str) -> None:
    with pytest.raises(ApiError, match="Host") as found:
        LOCAL.admit(headers(("host", host)), "127.0.0.1")
    assert found.value.status == 403


def test_no_host_or_two() -> None:
    for given in ((), (("host", "localhost"), ("host", "localhost"))):
        with pytest.raises(ApiError, match="Host"):
            LOCAL.admit(headers(*given), "127.0.0.1")


@pytest.mark.parametrize("origin", ["http://localhost:8080", "http://127.0.0.1:8080", "http://[::1]:8080"])
def test_the_api_s_own_pages(origin: str) -> None:
    LOCAL.admit(headers(("host", "localhost:8080"), ("origin", origin)), "127.0.0.1")


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "null",
            "",
            "http://evil.example",
            "http://localhost",
            "http://localhost:3000",
            "https://localhost:8080",
        ),
        *(
            "http://localhost:8080.evil.example",
            "http://localhost:80a",
            "file://",
            "http://evil@localhost:80",
        ),
    ],
)
def test_pages_of_other_sites(origin: str) -> None:
    with pytest.raises(ApiError, match="Origin") as found:
        LOCAL.admit(headers(("host", "localhost:8080"), ("origin", origin)), "127.0.0.1")
    assert found.value.status == 403


def test_a_key_has_a_share_of_its_own() -> None:
    shares = {KEYED.admit(headers(("authorization", f"Bearer {key}")), "192.0.2.1") for key in KEYS}
    assert len(shares) == 2
    assert shares == {KEYED.admit(headers(("authorization", f"bearer  {key} ")), "192.0.2.9") for key in KEYS}
    assert not any(key in share for key in KEYS for share in shares)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ((), "missing_api_key"),
        ((("authorization", "Bearer"),), "missing_api_key"),
        ((("authorization", "Bearer wrong"),), "invalid_api_key"),
        ((("authorization", f"Basic {KEYS[0]}"),), "invalid_api_key"),
        ((("authorization", f"Bearer {KEYS[0]}x"),), "invalid_api_key"),
        ((("authorization", "Bearer \u00ff\u00fe"),), "invalid_api_key"),
    ],
)
def test_without_a_key(given: tuple[tuple[str, str], ...], code: str) -> None:
    with pytest.raises(ApiError) as found:
        KEYED.admit(headers(*given), "192.0.2.1")
    assert (found.value.status, found.value.code) == (401, code)
    assert found.value.headers["WWW-Authenticate"] == "Bearer"


def test_addresses_of_one_network_share() -> None:
    hosts = headers(("host", "localhost"))
    assert (
        LOCAL.admit(hosts, "2001:db8::1")
        == LOCAL.admit(hosts, "2001:db8::2")
        != LOCAL.admit(hosts, "2001:db9::1")
    )
