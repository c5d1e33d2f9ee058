"""Bootstrap addresses: a file that people edit, and a file of peers met in earlier runs.

The format of `bootstrap_peers.txt`: one multiaddr a line, ending in /p2p/<peer id>; `#` starts a comment; blank lines
are skipped. No address at all starts a new swarm.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_CACHED = 64
_MAX_FILE_BYTES = 1 << 20
# The pattern is unambiguous and possessive: strangers write these, and backtracking would take exponential time.
_PART = r"/(?:quic|quic-v1|ws|wss|tls|p2p-circuit)(?=/|\Z)|/([A-Za-z0-9-]+)/([^\s/]+)"
_PARTS, _ADDRESS = re.compile(_PART), re.compile(f"(?>{_PART})++")
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,64}")


def parse(text: str) -> tuple[str, ...]:
    """The addresses in `text`, each once, in order. Raises ValueError that names the first bad line."""
    found: dict[str, None] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        address = re.sub(r"(^|\s)#.*", "", line).strip()
        if not address:
            continue
        if not is_address(address):
            raise ValueError(
                f"line {number}: {address[:100]!r} is not a multiaddr such as /ip4/192.0.2.1/tcp/31330/p2p/12D3KooW..."
            )
        found[address] = None
    return tuple(found)


def is_address(text: str) -> bool:
    """Whether `text` has the form of a multiaddr that ends in /p2p/<peer id>, with valid hosts and ports. Only dialling tells
    more."""
    where, _, peer = text.rpartition("/p2p/")
    if len(text) > 512 or not (_ADDRESS.fullmatch(where) and _PEER_ID.fullmatch(peer)):
        return False
    return all(_can_be(*part.groups()) for part in _PARTS.finditer(where))


def _can_be(protocol: str | None, value: str | None) -> bool:
    """Whether the value of a multiaddr part is valid; checks IP addresses and ports only."""
    if value is None or protocol not in ("ip4", "ip6", "tcp", "udp"):
        return True
    if protocol in ("tcp", "udp"):
        return value.isascii() and value.isdecimal() and int(value) < 1 << 16
    try:
        return ipaddress.ip_address(value).version == int(protocol[-1])
    except ValueError:
        return False


def load(path: Path) -> tuple[str, ...]:
    """The addresses in a file. Raises ValueError, one line, for a file that cannot be read or a bad line in it."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ValueError(f"more than {_MAX_FILE_BYTES} bytes")
        return parse(data.decode("utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read bootstrap file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"bootstrap file {path} is not text") from error
    except ValueError as error:
        raise ValueError(f"bootstrap file {path}: {error}") from error


def load_cached(path: Path) -> tuple[str, ...]:
    """Addresses of peers met in earlier runs; none of a missing or damaged file."""
    try:
        content = json.loads(path.read_bytes()[:_MAX_FILE_BYTES])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("ignored the peers remembered in %s: %s", path, error)
        return ()
    if not isinstance(content, list):
        return ()
    addresses = dict.fromkeys(item for item in content if isinstance(item, str) and is_address(item))
    return tuple(addresses)[:MAX_CACHED]


def save_cached(path: Path, addresses: Iterable[str]) -> None:
    """Replace the file atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(json.dumps(list(addresses)[:MAX_CACHED], indent=0))
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
