from __future__ import annotations

import os
import stat
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.swarm.errors import IdentityError
from fusion.swarm.identity import Identity, friendly_name, is_peer_id, verify

ONE = Identity.generate()
TWO = Identity.generate()


def test_created_once_then_loaded(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.key"
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert made.path == path
    assert os.listdir(path.parent) == ["identity.key"]  # no scratch file stays


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = Identity.load_or_create(tmp_path / "id").path
    finally:
        os.umask(old)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_peer_id_is_libp2ps_own() -> None:
    # A fixed seed, its id worked out with an independent base58: "identity" multihash of the public key protobuf.
    identity = Identity(Ed25519PrivateKey.from_private_bytes(bytes(range(32))), None)
    public = identity.private_bytes()[-32:]
    assert identity.peer_id == base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + public).decode()
    assert identity.peer_id.startswith("12D3KooW")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\x08\x01\x12\x40" + bytes(63), "not an Ed25519"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----", "not an Ed25519"),
        (b"\x08\x01\x12\x40" + bytes(64), "two halves"),
        (bytes(10_000_000), "not an Ed25519"),
    ],
)
def test_a_file_that_is_no_key_says_so_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "id"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError) as caught:
        Identity.load_or_create(path)
    text = str(caught.value)
    assert reason in text and str(path) in text and "\n" not in text and "remove it" in text
    assert path.read_bytes() == content  # never overwritten


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "id"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="cannot use identity file"):
        Identity.load_or_create(tmp_path / "file" / "id")
    with pytest.raises(IdentityError):
        Identity.load_or_create(tmp_path)


def test_two_first_starts_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "id"
    real_link = os.link
    others: list[Identity] = []

    def link(source: str, target: str) -> None:
        if not others:  # another process wins between our look and our write
            others.append(Identity.generate())
            with open(os.open(target, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(others[0].private_bytes())
        real_link(source, target)

    monkeypatch.setattr(os, "link", link)
    assert Identity.load_or_create(path).peer_id == others[0].peer_id


@settings(max_examples=examples(50))
@given(data=st.binary(max_size=200), flip=st.integers(0, 64 * 8 - 1))
def test_a_signature_holds_for_its_author_and_data_only(data: bytes, flip: int) -> None:
    signature = ONE.sign(data)
    assert verify(ONE.peer_id, signature, data)
    assert not verify(TWO.peer_id, signature, data)
    assert not verify(ONE.peer_id, signature, data + b"\0")
    forged = bytearray(signature)
    forged[flip // 8] ^= 1 << flip % 8
    assert not verify(ONE.peer_id, bytes(forged), data)


@settings(max_examples=examples(100))
@given(
    peer_id=st.one_of(st.text(max_size=60), st.text("123456789ABCabc", min_size=52, max_size=52)),
    data=st.binary(),
)
def test_verify_never_raises_on_nonsense(peer_id: str, data: bytes) -> None:
    assert not verify(peer_id, data, data)
    assert not is_peer_id(peer_id)


def test_one_peer_has_one_spelling() -> None:
    assert is_peer_id(ONE.peer_id)
    for other in ("1" + ONE.peer_id, ONE.peer_id + " ", ONE.peer_id[1:], ONE.peer_id.swapcase()):
        assert not is_peer_id(other)
    rsa = base58.b58encode(b"\x12\x20" + bytes(32)).decode()
    assert not is_peer_id(rsa)  # holds only a hash of its key
    assert not is_peer_id(None)


def test_the_key_is_not_shown() -> None:
    assert ONE.peer_id in repr(ONE)
    assert ONE.private_bytes().hex() not in repr(vars(ONE))


def test_friendly_names_are_stable_and_differ() -> None:
    assert friendly_name("12D3KooWexample") == friendly_name("12D3KooWexample")
    names = {friendly_name(f"peer {number}") for number in range(300)}
    assert len(names) > 295
    adjective, animal, digits = friendly_name(ONE.peer_id).split("-")
    assert adjective.isalpha() and animal.isalpha() and len(digits) == 2
