"""py-libp2p, imported for less: of its seven hundred modules a client that dials over TCP needs sixty.

Its `__init__` loads every transport, discovery and the DHT, and its types name those of QUIC, of RSA and of secp256k1 keys.
Peers of ours have Ed25519 keys; whoever shows another is refused.
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
    """Stands for a class that is named and not used."""

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
    """It logs as errors what it raises as well, and what others' mistakes are: one line is enough, unless somebody debugs."""
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)


@contextmanager
def lean_libp2p() -> Iterator[None]:
    """Imports in the block take a quarter of the CPU time that `import libp2p` takes."""
    for name in _PACKAGES:
        skip_contents(name)
    for name, contents in _UNUSED.items():
        leave_out(name, dict.fromkeys(contents, _Unused))
    with without_collections():
        yield


def forget_libp2p() -> None:
    """After an import that failed because a release has its parts elsewhere: the next one is of the whole."""
    forget("libp2p")
