"""Where the HTTP API may listen, and the file of its keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fusion.cli.terminal.options import http_config
from fusion.runtime.serving.http.config import HttpConfig, parse_address, read_keys

KEY = "a-key-of-sixteen-or-more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
    ],
)
def test_an_address(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "8080",
            ":8080",
            "127.0.0.1",
            "127.0.0.1:",
            "::1:8080",
            "[::1]",
            "h:65536",
            "h:-1",
            "h:８",
            "a b:1",
        ),
        *("a..b:1", f"{'a' * 64}:1"),  # no name of a machine
    ],
)
def test_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"--http: .*is not HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:5/v1"), ("::1", "http://[::1]:5/v1")]
)
def test_loopback_needs_no_key(host: str, url: str) -> None:
    assert HttpConfig(host=host).url(5) == url


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.example.org"])
def test_what_others_can_reach_needs_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--http-key"):
        HttpConfig(host=host)
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{KEY}\n{KEY}\n")
    address = f"[{host}]:1" if ":" in host else f"{host}:1"
    assert http_config(address, file).keys == (hashlib.sha256(KEY.encode()).digest(),)


def test_a_file_of_keys_may_begin_with_a_mark(tmp_path: Path) -> None:
    """As editors of Windows write them."""
    for text in (KEY, f"# ours\r\n{KEY}\r\n"):
        (tmp_path / "keys").write_text(text, "utf-8-sig")
        assert read_keys(tmp_path / "keys") == (hashlib.sha256(KEY.encode()).digest(),)


@pytest.mark.parametrize(
    "text", ["", "# none\n", "short\n", f"{KEY} {KEY}\n", f"{KEY}\u00e9\n", f"{KEY}\n" * 9000]
)
def test_a_file_of_keys_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text, "utf-8")
    with pytest.raises(ValueError, match="--http-key"):
        read_keys(tmp_path / "keys")
