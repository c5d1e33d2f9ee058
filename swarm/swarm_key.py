"""Closed swarms: the holders of a swarm's key are its members, and members answer nobody else.

The key is an Ed25519 key in a file, in the form of an identity's (`fusion-peer swarm-key new FILE`). A member signs its own token with
the key, valid for its peer id, which the connection authenticates, and for a day. The token precedes the first frame of each stream,
both ways, and is in every call of the DHT and its answer, so it needs no round trip and no state of a peer that restarts; the last
token of each peer is verified once.

A token is `msgpack([until, signature])`, `until` in unix seconds.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgpack
from cachetools import FIFOCache

from fusion.swarm.errors import IdentityError, SwarmKeyError
from fusion.swarm.identity import Identity, verify
from fusion.swarm.transport import PeerId

KEY_FILE = "swarm.key"  # in a home: the key of its peer's swarm
TOKEN_SECONDS = 86_400
SKEW_SECONDS = 3600  # between two members' clocks
MAX_TOKEN_BYTES = 96
REMEMBERED_PEERS = 4096
REFUSED_SECONDS = 1.0  # after a bad token, during which no other of the peer is verified: that takes 0.1 ms
NO_MEMBER = "no peer of this swarm answered: is it closed, has it another key, is a clock an hour wrong?"


class Authorizer:
    """A member's own token, and its checks of others'. `now`: unix seconds."""

    def __init__(self, key: Identity, peer: PeerId, now: Callable[[], float] = time.time) -> None:
        self._key = key
        self._peer = peer
        self._now = now
        self._own: tuple[int, bytes] = (0, b"")  # its expiry, and the token
        self._admitted: FIFOCache[PeerId, tuple[bytes, int]] = FIFOCache(REMEMBERED_PEERS)
        self._refused: FIFOCache[PeerId, float] = FIFOCache(REMEMBERED_PEERS)  # and when

    @property
    def token(self) -> bytes:
        """Our token, renewed after half of its time, and when our clock was set back."""
        now = self._now()
        if not now + TOKEN_SECONDS / 2 <= self._own[0] <= now + TOKEN_SECONDS:
            until = int(now) + TOKEN_SECONDS
            self._own = until, msgpack.packb([until, self._key.sign(_signed(self._peer, until))])
        return self._own[1]

    def admits(self, peer: PeerId, token: object) -> bool:
        """Whether the token proves that the (authenticated) peer holds the key."""
        now = self._now()
        known, until = self._admitted.get(peer, (b"", 0))
        if known and known == token:
            return now < until + SKEW_SECONDS
        if not isinstance(token, bytes) or len(token) > MAX_TOKEN_BYTES:
            return False
        if 0.0 <= now - self._refused.get(peer, -math.inf) < REFUSED_SECONDS:
            return False
        until = self._verified_expiry(peer, token)
        if not now - SKEW_SECONDS < until <= now + TOKEN_SECONDS + SKEW_SECONDS:
            self._refused.pop(peer, None)
            self._refused[peer] = now
            return False
        self._admitted.pop(peer, None)
        self._admitted[peer] = token, until
        return True

    def _verified_expiry(self, peer: PeerId, token: bytes) -> int:
        """The expiry of the peer's token; 0 where it is not valid."""
        caps = {"max_str_len": 0, "max_map_len": 0, "max_ext_len": 0, "max_array_len": 2, "max_bin_len": 64}
        try:
            match msgpack.unpackb(token, **caps):
                case [int() as until, bytes() as signature]:
                    signed = _signed(peer, until)
                    return until if verify(self._key.peer_id, signature, signed) else 0
        except (ValueError, OverflowError, msgpack.UnpackException):
            pass
        return 0


def _signed(peer: PeerId, until: int) -> bytes:
    signed: bytes = msgpack.packb(["fusion-swarm-member", peer, until])
    return signed


# Keys on disk.


def new_key(path: Path) -> Identity:
    """Create a key in a file that only its owner can read. Raises SwarmKeyError where the file exists or cannot be written."""
    key = Identity.generate()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        # Exclusive: two processes may create it at once.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SwarmKeyError(f"{path} exists already: a swarm's key is not overwritten") from None
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with open(descriptor, "wb") as file:
            file.write(key.private_bytes())
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise _unwritable(path, error) from error
    return key


def load_key(path: Path) -> Identity:
    """The key in the file. Raises SwarmKeyError, in one line, where there is none."""
    try:
        return Identity.load(path)
    except IdentityError as error:
        reason, _, remedy = str(error).replace("identity file", "swarm key").partition("; ")
        if not remedy.startswith("run: "):  # chmod, of a copy that others can read
            remedy = "copy it from a member, or make that of a new swarm with: fusion-peer swarm-key new FILE"
        raise SwarmKeyError(f"{reason}; {remedy}") from error


def find_key(home: Path, given: Path | None) -> Identity | None:
    """The swarm's key: of the file `given`, else of the home; None in an open swarm. Raises SwarmKeyError."""
    kept = home / KEY_FILE
    if given is not None:
        return load_key(given)
    return load_key(kept) if kept.exists() else None


def keep_key(home: Path, key: Identity) -> None:
    """Store the key in the home, for its peer and commands. Raises SwarmKeyError where it cannot be written."""
    path = home / KEY_FILE
    with suppress(SwarmKeyError):  # a damaged file is replaced
        if path.exists() and load_key(path).peer_id == key.peer_id:
            return
    _written(key, path)


def _written(key: Identity, path: Path) -> Identity:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(key.private_bytes())
            file.flush()
            os.fsync(file.fileno())  # a power cut must leave one of the two keys intact
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise _unwritable(path, error) from error
    return key


def _unwritable(path: Path, error: OSError) -> SwarmKeyError:
    return SwarmKeyError(f"cannot write the swarm key {path}: {error.strerror or error}")
