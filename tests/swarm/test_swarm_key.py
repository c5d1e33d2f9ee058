from __future__ import annotations

import os
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.errors import SwarmKeyError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.swarm_key import (
    KEY_FILE,
    MAX_TOKEN_BYTES,
    NO_MEMBER,
    REFUSED_SECONDS,
    SKEW_SECONDS,
    TOKEN_SECONDS,
    Authorizer,
    find_key,
    keep_key,
    load_key,
    new_key,
)

KEY, ANN, BEN = Identity.generate(), Identity.generate(), Identity.generate()


def member(key: Identity = KEY, who: Identity = ANN, at: float = 1e9) -> tuple[Authorizer, ManualClock]:
    clock = ManualClock()
    clock.advance(at)
    return Authorizer(key, who.peer_id, clock), clock


def test_a_member_is_known_by_its_token_and_nobody_else_can_use_it() -> None:
    ann, _ = member()
    ben, _ = member(who=BEN)
    stranger, _ = member(Identity.generate(), BEN)
    assert len(ann.token) <= MAX_TOKEN_BYTES
    assert ben.admits(ANN.peer_id, ann.token) and ben.admits(ANN.peer_id, ann.token)
    assert not ann.admits(ANN.peer_id, ben.token), "signed for somebody else"
    assert not ben.admits(BEN.peer_id, ann.token)
    assert not ann.admits(BEN.peer_id, stranger.token), "of another swarm"
    for nothing in (None, b"", "", 7, ann.token[:-1], ann.token + b"x", msgpack.packb([2**63, b"x" * 64])):
        assert not member()[0].admits(ANN.peer_id, nothing)


def test_a_token_is_renewed_and_an_old_one_ends() -> None:
    ann, hers = member()
    ben, his = member(who=BEN)
    first = ann.token
    assert ann.token is first and ben.admits(ANN.peer_id, first)
    for clock in (hers, his):
        clock.advance(TOKEN_SECONDS / 2 + 1)
    assert ann.token != first and ben.admits(ANN.peer_id, ann.token)
    assert ben.admits(ANN.peer_id, first), "what is under way counts too"
    his.advance(TOKEN_SECONDS / 2 + SKEW_SECONDS)
    assert not ben.admits(ANN.peer_id, first)


@pytest.mark.parametrize("ahead", [-SKEW_SECONDS + 1, SKEW_SECONDS - 1])
def test_clocks_may_differ_a_little(ahead: float) -> None:
    ann, _ = member(at=1e9 + ahead)
    assert member(who=BEN)[0].admits(ANN.peer_id, ann.token)
    late, _ = member(at=1e9 - TOKEN_SECONDS - SKEW_SECONDS - 2)
    early, _ = member(at=1e9 + SKEW_SECONDS + 2)
    assert not member(who=BEN)[0].admits(ANN.peer_id, late.token)
    assert not member(who=BEN)[0].admits(ANN.peer_id, early.token)
    assert "clock" in NO_MEMBER, "whose key is right looks for what is not wrong with it"


def test_bad_tokens_of_one_peer_cost_a_signature_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    ben, clock = member(who=BEN)
    bad = msgpack.packb([int(1e9) + 60, b"x" * 64])
    checked: list[str] = []
    monkeypatch.setattr("fusion.swarm.swarm_key.verify", lambda *_: checked.append("") is not None)
    for _ in range(100):
        assert not ben.admits(ANN.peer_id, bad)
    assert len(checked) == 1
    clock.advance(REFUSED_SECONDS)
    assert not ben.admits(ANN.peer_id, bad) and len(checked) == 2


def test_a_clock_that_was_ahead_and_is_set_right_keeps_nobody_out() -> None:
    ann, hers = member(at=1e9 + 3 * TOKEN_SECONDS)
    ben, his = member(at=1e9 + 3 * TOKEN_SECONDS, who=BEN)
    honest, _ = member()
    assert not ben.admits(ANN.peer_id, honest.token), "long over, as it seems there"
    assert ann.token
    for clock in (hers, his):
        clock.advance(-3 * TOKEN_SECONDS)
    assert ben.admits(ANN.peer_id, honest.token)
    assert member(who=BEN)[0].admits(ANN.peer_id, ann.token), "ours is of the right time too"


@given(st.binary(max_size=2 * MAX_TOKEN_BYTES))
def test_no_bytes_are_a_token_by_chance(data: bytes) -> None:
    assert not member()[0].admits(BEN.peer_id, data)


def test_a_key_on_disk(tmp_path: Path) -> None:
    file, home = tmp_path / "keys" / "ours", tmp_path / "home"
    key = new_key(file)
    assert load_key(file).peer_id == key.peer_id and file.stat().st_mode & 0o077 == 0
    with pytest.raises(SwarmKeyError, match="exists already"):
        new_key(file)
    assert find_key(home, None) is None, "an open swarm"
    assert find_key(home, file).peer_id == key.peer_id and not home.exists()  # type: ignore[union-attr]
    keep_key(home, key)
    assert find_key(home, None).peer_id == key.peer_id  # type: ignore[union-attr]
    before = (home / KEY_FILE).stat().st_ino
    keep_key(home, key)
    assert (home / KEY_FILE).stat().st_ino == before
    other = new_key(tmp_path / "other")
    keep_key(home, other)
    assert find_key(home, None).peer_id == other.peer_id  # type: ignore[union-attr]
    assert (home / KEY_FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_a_file_that_is_no_key_is_named_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "it"
    if content is not None:
        file.write_bytes(content)
        os.chmod(file, 0o600)
    with pytest.raises(SwarmKeyError, match="swarm-key new") as caught:
        load_key(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "it"
    new_key(file)
    file.chmod(0o644)
    with pytest.raises(SwarmKeyError, match=f"can be read by other users; run: chmod 600 {file}$"):
        load_key(file)  # advice to make one would lead to another swarm


def test_of_two_keys_that_are_made_at_once_in_one_file_the_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, generate = tmp_path / "ours.key", Identity.generate
    first = list[Identity]()

    def another_is_faster() -> Identity:
        monkeypatch.setattr(Identity, "generate", generate)
        first.append(new_key(file))
        return generate()

    monkeypatch.setattr(Identity, "generate", another_is_faster)
    with pytest.raises(SwarmKeyError, match="exists already"):
        new_key(file)
    assert load_key(file).peer_id == first[0].peer_id


@pytest.mark.parametrize("kept", [False, True])
def test_a_full_disk_leaves_nothing_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    def write(key: Identity) -> bytes:
        raise OSError(28, "No space left on device")

    key = Identity.generate()
    monkeypatch.setattr(Identity, "private_bytes", write)
    with pytest.raises(SwarmKeyError, match="No space left"):
        if kept:
            keep_key(tmp_path, key)
        else:
            new_key(tmp_path / "ours.key")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("content", "mode"), [(b"", 0o600), (b"\0" * 68, 0o600), (None, 0o644)])
def test_the_key_of_a_home_takes_the_place_of_a_damaged_one(
    tmp_path: Path, content: bytes | None, mode: int
) -> None:
    key = Identity.generate()
    keep_key(tmp_path, key)
    kept = tmp_path / KEY_FILE
    if content is not None:
        kept.write_bytes(content)
    kept.chmod(mode)
    keep_key(tmp_path, key)
    assert load_key(kept).peer_id == key.peer_id


def test_the_disk_has_a_key_before_it_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would leave an empty file, and whoever follows its line a swarm of his own."""
    done, replace = list[str](), os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("written"))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replaced"), replace(*paths)))
    keep_key(tmp_path, Identity.generate())
    assert done == ["written", "replaced"]
