"""A peer's identity: an Ed25519 key on disk, and the libp2p peer id that contains its public half.

The file is libp2p's own protobuf form of a private key, so p2pd can read it (`-id`). A peer id made from an
Ed25519 key *contains* that key (libp2p specs, peer-ids: keys of at most 42 bytes are inlined), so a signature is
verified with the signer's id alone, without a key lookup.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fusion.swarm.errors import IdentityError
from fusion.swarm.recent import recent
from fusion.swarm.transport import PeerId

# libp2p crypto.proto: field 1 = key type (1 is Ed25519), field 2 = the key's bytes.
_PRIVATE_PREFIX = b"\x08\x01\x12\x40"  # then 32 bytes of seed and 32 bytes of public key
_PUBLIC_PREFIX = b"\x08\x01\x12\x20"  # then 32 bytes of public key
_MULTIHASH_PREFIX = b"\x00\x24"  # the "identity" multihash of 36 bytes: the public key protobuf itself
_FILE_BYTES = len(_PRIVATE_PREFIX) + 64
_ID_CHARACTERS = 52  # base58 text of every Ed25519 peer id

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGIT = {character: value for value, character in enumerate(_ALPHABET)}


Verify = Callable[[str, bytes, bytes], bool]  # (peer, signature, data), as `verify`


class Signer(Protocol):
    """The part of `Identity` that signing needs."""

    peer_id: PeerId

    def sign(self, data: bytes) -> bytes: ...


class Identity:
    """A peer's key. Made by `load_or_create` (stored on disk) or `generate` (for this run only)."""

    def __init__(self, key: Ed25519PrivateKey, path: Path | None) -> None:
        self._key = key
        self._public = key.public_key().public_bytes_raw()
        self.path = path  # None: in memory only
        self.peer_id: PeerId = _peer_id(self._public)

    def __repr__(self) -> str:  # never the key
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> Identity:
        """A new identity in memory only, for clients and tests."""
        return cls(Ed25519PrivateKey.generate(), None)

    @classmethod
    def load_or_create(cls, path: Path | str) -> Identity:
        """The identity stored in the file `path`, created (atomically, readable by its owner only) if there is none.

        Raises IdentityError, one line with the remedy, for a file that is empty, corrupt, readable by others
        or cannot be read or written.
        """
        path = Path(path)
        try:
            data = _read(path)
            if data is None:
                _write_new(path, cls.generate().private_bytes())
                data = _read(path)  # another process may have been first: the file decides
            if data is None:
                raise IdentityError(f"identity file {path} vanished while it was being made; try again")
        except OSError as error:
            raise IdentityError(
                f"cannot use identity file {path}: {error.strerror or error}; fix it or choose another with --home"
            ) from error
        return cls(_decode_private(data, path), path)

    @classmethod
    def load(cls, path: Path) -> Identity:
        """The identity stored in the file. Raises IdentityError as `load_or_create`, and where there is none."""
        try:
            data = _read(path)
        except OSError as error:
            raise IdentityError(f"cannot use identity file {path}: {error.strerror or error}") from error
        if data is None:
            raise IdentityError(f"identity file {path} is not there")
        return cls(_decode_private(data, path), path)

    def private_bytes(self) -> bytes:
        """The key in the form that p2pd reads. A secret."""
        return _PRIVATE_PREFIX + self._key.private_bytes_raw() + self._public

    def sign(self, data: bytes) -> bytes:
        """64 bytes that `verify` accepts for our peer id and exactly this data."""
        return self._key.sign(data)


def verify(peer_id: str, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` was made by the holder of `peer_id`. False (never an error) for anything
    malformed, a peer id that holds no Ed25519 key included."""
    try:
        key = _public_key(peer_id)
        key.verify(signature, data)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def is_peer_id(text: object) -> bool:
    """Whether `text` is the peer id of an Ed25519 key, the only kind that can sign records here."""
    if not isinstance(text, str):
        return False
    try:
        _public_key(text)
    except ValueError:
        return False
    return True


def friendly_name(peer_id: str) -> str:
    """A pronounceable name, the same on every machine: "quiet-otter-3f". Not unique: only the peer id is."""
    digest = hashlib.sha256(peer_id.encode()).digest()
    return (
        f"{_ADJECTIVES[digest[0] % len(_ADJECTIVES)]}-{_ANIMALS[digest[1] % len(_ANIMALS)]}-{digest[2]:02x}"
    )


def _peer_id(public: bytes) -> PeerId:
    return PeerId(_base58(_MULTIHASH_PREFIX + _PUBLIC_PREFIX + public))


@recent(4096)
def _public_key(peer_id: str) -> Ed25519PublicKey:
    """Raises ValueError for text that is not the one canonical peer id of an Ed25519 key."""
    if not isinstance(peer_id, str) or len(peer_id) != _ID_CHARACTERS:
        raise ValueError("not the peer id of an Ed25519 key")
    value = 0
    for character in peer_id:
        digit = _DIGIT.get(character)
        if digit is None:
            raise ValueError("not base58 text")
        value = value * 58 + digit
    # The multihash starts with exactly one zero byte, which base58 writes as exactly one "1".
    body = value.to_bytes(38, "big") if value < 1 << 304 else b""
    prefix = _MULTIHASH_PREFIX + _PUBLIC_PREFIX
    if len(body) != 38 or not body.startswith(prefix) or _base58(body) != peer_id:
        raise ValueError("not the peer id of an Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(body[len(prefix) :])


def _base58(data: bytes) -> str:
    value = int.from_bytes(data, "big")
    digits = []
    while value:
        value, digit = divmod(value, 58)
        digits.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def _read(path: Path) -> bytes | None:
    """The file's bytes, at most one more than a key has; None where there is no file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise IdentityError(f"identity file {path} is not a file; move it away and start again")
            if os.name == "posix" and mode & 0o077:
                raise IdentityError(f"identity file {path} can be read by other users; run: chmod 600 {path}")
            return file.read(_FILE_BYTES + 1)
    except FileNotFoundError:
        return None


def _write_new(path: Path, data: bytes) -> None:
    """Create `path` atomically; never overwrites a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)
        except FileExistsError:  # two starts at once: the first one's key stands
            return
        except OSError:  # a file system without hard links
            os.rename(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _decode_private(data: bytes, path: Path) -> Ed25519PrivateKey:
    remedy = "restore it from a backup, or remove it to become a new peer"
    if not data:
        raise IdentityError(f"identity file {path} is empty; {remedy}")
    if len(data) != _FILE_BYTES or not data.startswith(_PRIVATE_PREFIX):
        raise IdentityError(f"identity file {path} is not an Ed25519 libp2p key; {remedy}")
    body = data[len(_PRIVATE_PREFIX) :]
    key = Ed25519PrivateKey.from_private_bytes(body[:32])
    if key.public_key().public_bytes_raw() != body[32:]:
        raise IdentityError(f"identity file {path} is corrupt: its two halves do not match; {remedy}")
    return key


# fmt: off
_ADJECTIVES = (
    "amber", "ancient", "autumn", "bold", "brave", "breezy", "bright", "brisk", "calm", "candid", "clever", "copper",
    "cosmic", "crimson", "curious", "daring", "dusty", "eager", "early", "fancy", "fearless", "fleet", "fond", "frosty",
    "gentle", "glad", "golden", "grand", "green", "happy", "hardy", "hazel", "honest", "humble", "icy", "jolly", "keen",
    "kind", "lively", "lucky", "mellow", "merry", "mild", "misty", "noble", "patient", "plucky", "proud", "quick",
    "quiet", "rapid", "rosy", "rustic", "shy", "silver", "sleek", "snowy", "solar", "steady", "sunny", "swift",
    "tidy", "velvet", "witty",
)
_ANIMALS = (
    "badger", "bat", "bear", "beaver", "bee", "bison", "boar", "bobcat", "camel", "cat", "cheetah", "cobra", "condor",
    "cougar", "coyote", "crab", "crane", "crow", "deer", "dingo", "dolphin", "dove", "duck", "eagle", "falcon",
    "ferret", "finch", "fox", "frog", "gecko", "goat", "goose", "hare", "hawk", "heron", "ibex", "jackal", "jay",
    "koala", "lark", "lemur", "llama", "lynx", "marten", "mole", "moose", "newt", "okapi", "orca", "otter", "owl",
    "panda", "puffin", "quail", "raven", "robin", "seal", "stoat", "swan", "tapir", "toad", "vole", "wolf", "wren",
)
# fmt: on
