"""Imports py-libp2p without its unused parts: of its seven hundred modules a client that dials over TCP needs sixty.

Its `__init__` loads every transport, discovery and the DHT, and its annotations name types of QUIC, RSA and secp256k1. Our peers
have Ed25519 keys; any other is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fusion.swarm.lean_imports import forget, leave_out, skip_contents, without_collections

_PACKAGES = (
    *("libp2p", "libp2p.crypto", "libp2p.host", "libp2p.network", "libp2p.security", "libp2p.tools"),
    *("libp2p.tools.anyio_service", "libp2p.transport"),
)


class _Unused:
    """A stand-in for a class that is named but not used."""

    @staticmethod
    def from_bytes(data: bytes) -> None:
        raise ValueError("a key of a kind that no peer of this swarm has")


_UNUSED = {
    "libp2p.crypto.rsa": ("RSAPrivateKey", "RSAPublicKey"),
    "libp2p.crypto.secp256k1": ("Secp256k1PrivateKey", "Secp256k1PublicKey"),
    "libp2p.tools.anyio_service.api": ("ServiceAPI",),
    "libp2p.transport.quic.stream": ("QUICStream",),
    "libp2p.utils.address_validation": (
        *("expand_wildcard_address", "find_free_port", "get_available_interfaces"),
        "get_optimal_binding_address",
    ),
}


def keep_quiet() -> None:
    """Silence its log, unless debugging: it logs as errors what it also raises, and others' mistakes."""
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)


@contextmanager
def lean_libp2p() -> Iterator[None]:
    """Imports in the block take a quarter of the CPU time of `import libp2p`."""
    for name in _PACKAGES:
        skip_contents(name)
    for name, contents in _UNUSED.items():
        leave_out(name, dict.fromkeys(contents, _Unused))
    with without_collections():
        yield


def forget_libp2p() -> None:
    """Undo a failed lean import (another release with other modules), so that the next import loads all of it."""
    forget("libp2p")
