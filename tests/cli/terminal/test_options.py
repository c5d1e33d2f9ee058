from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.cli.terminal import options
from fusion.runtime.job.size_text import parse_size
from fusion.runtime.peer.keys import IDENTITY_FILE
from fusion.swarm.errors import TransportError
from fusion.swarm.identity import Identity

ADDRESS = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWGrJ5S1hz7HYPzF5bxVqk3R3zQ9o2jQ4n8F2dTq3vEaHs"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("500MB", 500_000_000),
        ("2g", 2_000_000_000),
        ("1048576", 1 << 20),
        (" 1.5 gib ", 3 << 29),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "4 cows", "-1", "0", "1e9", "0.1b", "4GiBiB", "٤GiB"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="--memory"):
        parse_size(text, "--memory")


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        assert parse_size(text, "--memory") >= 1
    except ValueError as error:
        assert str(error).startswith("--memory")


@given(st.lists(st.integers(min_value=0, max_value=2**40), min_size=1))
def test_ids_come_back(ids: list[int]) -> None:
    assert options.parse_ids(",".join(map(str, ids))) == tuple(ids)


@pytest.mark.parametrize("text", ["", "1,,2", "a", "-1", "1.5"])
def test_not_ids(text: str) -> None:
    with pytest.raises(ValueError, match="--prompt-ids"):
        options.parse_ids(text)


def test_bootstrap_takes_files_and_addresses_each_once(tmp_path: Path) -> None:
    file = tmp_path / "peers.txt"
    file.write_text(f"# a comment\n\n{ADDRESS}  # ours\n")
    assert options.bootstrap_addresses([str(file), ADDRESS]) == (ADDRESS,)


@pytest.mark.parametrize("given", ["", "no/file", "/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/me"])
def test_neither_a_file_nor_an_address(given: str) -> None:
    with pytest.raises(ValueError, match=r"--bootstrap: .* neither a file nor"):
        options.bootstrap_addresses([given])


def test_an_empty_bootstrap_file_starts_a_new_swarm(tmp_path: Path) -> None:
    (tmp_path / "peers.txt").write_text("")
    assert options.bootstrap_addresses([str(tmp_path / "peers.txt")]) == ()
    assert options.bootstrap_addresses(["/dev/null"]) == ()


def test_the_default_file_is_the_one_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(options.BOOTSTRAP_FILE).write_text(ADDRESS)
    assert options.bootstrap_addresses(None) == (ADDRESS,)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "peers.txt").write_text(f"{ADDRESS}\nnonsense\n")
    with pytest.raises(ValueError, match="2"):
        options.bootstrap_addresses([str(tmp_path / "peers.txt")])


def test_the_file_we_ship_parses() -> None:
    shipped = Path(__file__).resolve().parents[3] / options.BOOTSTRAP_FILE
    assert options.bootstrap_addresses([str(shipped)]) == ()


@pytest.mark.parametrize(
    "address", ["/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/0/ws"]
)
def test_listen(address: str) -> None:
    assert options.listen_addresses([address]) == (address,)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "0.0.0.0:80",
            "/tcp/80",
            "/ip4/0.0.0.0/tcp/x",
            "/ip4/0.0.0.0/tcp/0\n/x",
            "/ip4/0.0.0.0/tcp/65536",
        ),
        *("/ip4/300.0.0.1/tcp/0", "/ip6/127.0.0.1/tcp/0", "/dns4/localhost/tcp/0", "/ip4/127.0.0.1/udp/0"),
        *(
            "/ip4/0.0.0.0/udp/0/quic-v1/webtransport",
            "/ip4/0.0.0.0/tcp/0/quic-v1",
            "/ip4/0.0.0.0/tcp/0/p2p/me",
        ),
    ],
)
def test_not_listen(address: str) -> None:
    with pytest.raises(ValueError, match="--listen"):
        options.listen_addresses([address])


def test_a_size_to_lend_has_a_unit() -> None:
    assert options.parse_lent("1KiB", "--memory") == 1024
    with pytest.raises(ValueError, match=r"--memory: '4' is 4 bytes, .*such as 4GiB"):
        options.parse_lent("4", "--memory")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_not_rates(rate: float) -> None:
    with pytest.raises(ValueError, match="--upload-mbps"):
        options.checked_rate(rate, "--upload-mbps")


def test_a_home_is_that_of_a_user_who_is_there() -> None:
    with pytest.raises(ValueError, match=r"--home: ~nobody-is-called-so/x is in the home of a user"):
        options.home_folder(Path("~nobody-is-called-so/x"))


def test_home_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--home"):
        options.home_folder(tmp_path / "file")
    assert options.home_folder(tmp_path / "new") == tmp_path / "new"


def test_a_home_is_for_one_peer(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert options.peer_home(home) == home and not home.exists()
    identity = Identity.load_or_create(home / IDENTITY_FILE)
    assert options.peer_home(home) == home
    with open(home / IDENTITY_FILE) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a peer holds it
        with pytest.raises(
            TransportError, match=rf"a peer with the identity {identity.path} is running already"
        ):
            options.peer_home(home)
    assert options.peer_home(home) == home


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_can_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for home in (tmp_path, tmp_path / "new"):
        with pytest.raises(ValueError, match=rf"--home: {tmp_path} is no folder that we can write to"):
            options.peer_home(home)
    tmp_path.chmod(0o700)


def test_debug_after_two_dashes_is_a_prompt() -> None:
    assert options.debug_asked(["status", "--debug"])
    assert not options.debug_asked(["generate", "--", "--debug"])


def test_an_example_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped, own = Path("examples/swarm.toml"), Path("swarm.toml")
    assert options.job_file(shipped) == options.PACKAGE / shipped
    assert options.job_file(own) == own and options.job_file(Path("examples/none.toml")) == Path(
        "examples/none.toml"
    )
    shipped.parent.mkdir()
    shipped.touch()
    assert options.job_file(shipped) == shipped
