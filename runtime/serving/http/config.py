"""Where the HTTP API listens, and who may use it. Loads no library."""

from __future__ import annotations

import codecs
import hashlib
import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

MAX_KEYS_BYTES = 64 << 10
MAX_KEYS = 256
BACKLOG = 128
KEY_CHARACTERS = 16  # of a key, at least: a short one can be guessed


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """`port` 0: any that is free. `keys`: SHA-256 of each API key; empty, which only loopback allows: no key is required."""

    host: str = "127.0.0.1"
    port: int = 0
    keys: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not self.local and not self.keys:
            raise ValueError(
                f"--http: {self.host} can be reached from other machines, so the API needs a key: add --http-key FILE"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def listen(self) -> socket.socket:
        """A listening socket. OSError, in one line, where the port is not available."""
        host = "127.0.0.1" if self.host == "localhost" else self.host
        try:
            family, _, _, _, address = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server((str(address[0]), self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            number = error.errno or 0  # negative for a name that cannot be resolved
            reason = os.strerror(number) if number > 0 else error.strerror or str(error)
            raise OSError(f"--http: {self.host}:{self.port}: {reason}") from None
        listening.setblocking(False)
        return listening

    def url(self, port: int) -> str:
        """The URL of the API, as clients use it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}/v1"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8080" or "[::1]:8080". ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    right = colon and host and host.isprintable() and " " not in host and bracketed == (":" in host)
    if not right or not _has_encoding(host) or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--http: {text[:100]!r} is not HOST:PORT, such as 127.0.0.1:8080, or off")
    return host, int(port)


def _has_encoding(host: str) -> bool:
    """Whether the resolver accepts it: the labels of a name have 1 to 63 characters."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def read_keys(path: Path) -> tuple[bytes, ...]:
    """SHA-256 of each key in the file, one a line; empty lines and those that begin with # are passed over. ValueError
    for a file without keys or with one that is too short."""
    with path.open("rb") as file:
        data = file.read(MAX_KEYS_BYTES + 1)
    if len(data) > MAX_KEYS_BYTES:
        raise ValueError(f"--http-key: {path} has more than {MAX_KEYS_BYTES >> 10} KiB")
    lines = [line.strip() for line in data.removeprefix(codecs.BOM_UTF8).splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    for key in keys:
        if len(key) < KEY_CHARACTERS or not key.isascii() or any(byte <= 32 or byte == 127 for byte in key):
            raise ValueError(
                f"--http-key: a key in {path} is not {KEY_CHARACTERS} or more characters of ASCII without spaces"
            )
    if not 0 < len(keys) <= MAX_KEYS:
        raise ValueError(f"--http-key: {path} has {len(keys)} keys; it takes 1 to {MAX_KEYS}, one a line")
    return tuple(dict.fromkeys(hashlib.sha256(key).digest() for key in keys))
