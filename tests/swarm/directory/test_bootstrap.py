from __future__ import annotations

import time
from pathlib import Path

import pytest

from fusion.swarm.directory.bootstrap import MAX_CACHED, load, load_cached, parse, save_cached
from fusion.swarm.identity import Identity

PEER = Identity.generate().peer_id
ADDRESS = f"/ip4/192.0.2.1/tcp/31330/p2p/{PEER}"
OTHERS = [
    f"/dns4/seed.example.org/tcp/443/wss/p2p/{PEER}",
    f"/ip6/2001:db8::1/udp/4001/quic-v1/p2p/{PEER}",
    f"/ip4/192.0.2.1/tcp/1/p2p/{Identity.generate().peer_id}/p2p-circuit/p2p/{PEER}",
]


def test_a_file_has_one_address_a_line_and_comments() -> None:
    text = f"\ufeff# seeds\n\n  {ADDRESS}  # the first\r\n{OTHERS[0]}\n#{OTHERS[1]}\n{ADDRESS}\n{OTHERS[2]}"
    assert parse(text) == (ADDRESS, OTHERS[0], OTHERS[2])
    assert parse("") == parse("# nobody yet\n") == ()
    assert parse(OTHERS[1]) == (OTHERS[1],)
    named_so = f"/dns4/tcp/tcp/1/p2p/{PEER}"
    assert parse(named_so) == (named_so,)


@pytest.mark.parametrize(
    "line",
    [
        "example.org:31330",
        "/ip4/192.0.2.1/tcp/31330",
        "/ip4/192.0.2.1/tcp/31330/p2p/",
        pytest.param(f"/p2p/{PEER}", id="no address"),
        f"{ADDRESS} {ADDRESS}",
        "/ip4/192.0.2.1/tcp/31330/p2p/0OIl" + "1" * 48,
        f"/ip4/{'9' * 600}/tcp/1/p2p/{PEER}",
        pytest.param(f"/ip4/300.0.2.1/tcp/1/p2p/{PEER}", id="no host"),
        pytest.param(f"/ip6/192.0.2.1/tcp/1/p2p/{PEER}", id="a host of the other kind"),
        pytest.param(f"/ip4/192.0.2.1/tcp/65536/p2p/{PEER}", id="no port"),
        pytest.param(f"/dns/tcp/tcp/x/p2p/{PEER}", id="no number"),
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"^line 2: ") as caught:
        parse(f"# a comment\n{line}\n{ADDRESS}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_user_gives_a_file(tmp_path: Path) -> None:
    file = tmp_path / "peers.txt"
    file.write_text(ADDRESS)
    assert load(file) == (ADDRESS,)
    for bad in (tmp_path / "no.txt", tmp_path):
        with pytest.raises(ValueError, match="cannot read"):
            load(bad)
    file.write_bytes(b"\xef\xbb\xbf" + ADDRESS.encode())  # as editors of Windows write it
    assert load(file) == (ADDRESS,)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not text"):
        load(file)
    file.write_text("nonsense")
    with pytest.raises(ValueError, match=r"peers\.txt: line 1"):
        load(file)


def test_peers_met_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "home" / "peers.json"
    assert load_cached(file) == ()
    save_cached(file, [ADDRESS, *OTHERS])
    assert load_cached(file) == (ADDRESS, *OTHERS)
    save_cached(file, [f"/ip4/192.0.2.1/tcp/{port}/p2p/{PEER}" for port in range(1, 200)])
    assert len(load_cached(file)) == MAX_CACHED
    assert [path.name for path in file.parent.iterdir()] == ["peers.json"]


@pytest.mark.parametrize("content", [b"", b"\x00", b"{}", b"[1, null]", b'["/ip4/1"]', b"[" * 100_000])
def test_a_damaged_memory_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "peers.json"
    file.write_bytes(content)
    assert load_cached(file) == ()


def test_what_a_stranger_calls_an_address_costs_no_start(tmp_path: Path) -> None:
    """Peers that were met are remembered with whatever addresses they had."""
    address = f"/ip4/192.0.2.1/tcp/443/tls/sni/a.b/ws/p2p-circuit/p2p/{PEER}"
    save_cached(
        tmp_path / "peers.json", [*(f"{way}/ /p2p/x" for way in ("/quic" * 30, "/ws/tls" * 15)), address]
    )
    began = time.process_time()
    assert load_cached(tmp_path / "peers.json") == (address,)
    assert time.process_time() - began < 1.0
