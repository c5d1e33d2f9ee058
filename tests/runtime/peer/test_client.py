"""What joining costs the disk: nothing that stays."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fusion.runtime.peer.client import CACHED_PEERS_FILE, ClientConfig, join_addresses, open_client
from fusion.runtime.peer.client_context import LOCK, own_store
from fusion.runtime.peer.peer_file import RunningPeer, peer_file_kept
from fusion.swarm.blobs import disk
from fusion.swarm.errors import BlobError, PeerUnreachable, QuotaExceeded
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId


@pytest.mark.process
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("ways", [(), (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}",)])
def test_who_cannot_join_leaves_no_folder_that_was_not_there(
    tmp_path: Path, ways: tuple[str, ...], there: bool
) -> None:
    home = tmp_path / "typo" / "home"
    if there:
        home.mkdir(parents=True)

    async def join() -> None:
        async with open_client(ClientConfig(home=home, bootstrap=ways, join_seconds=0.5)):
            pass

    with pytest.raises(PeerUnreachable):
        asyncio.run(join())
    assert list(tmp_path.rglob("*")) == ([home.parent, home] if there else [])


def address(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}"


def running(own: str, control: Path | str) -> RunningPeer:
    own_id = PeerId(own.rpartition("/")[2])
    return RunningPeer(peer_id=own_id, addresses=(own,), pid=os.getpid(), control=str(control))


@pytest.mark.parametrize("control", ["", "gone.sock"])
def test_where_the_peer_of_this_home_was_killed_those_that_it_had_met_are_tried_instead(
    tmp_path: Path, control: str
) -> None:
    own, met, given = (address(n) for n in (1, 2, 3))
    (tmp_path / CACHED_PEERS_FILE).write_text(json.dumps([met, own]))
    alone = ClientConfig(home=tmp_path, bootstrap=(given,))
    assert join_addresses(alone) == (given,)  # it ended in order: no peer of this home is to be asked
    assert join_addresses(ClientConfig(home=tmp_path)) == (met, own)  # nobody else is named
    # Its pid may be another's meanwhile.
    with peer_file_kept(tmp_path, running(own, control and tmp_path / control)):
        assert join_addresses(alone) == (given, met)
        assert join_addresses(ClientConfig(home=tmp_path, peer=given)) == (given,)


def test_a_command_may_store_what_its_own_disk_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of more than 50 GiB could be neither served, launched nor exported."""
    monkeypatch.setattr(disk, "spare_bytes", lambda folder: 60 << 30)

    async def store_one_of(size_bytes: int) -> None:
        async with own_store(tmp_path / "clients") as store:
            store.put_pieces(size_bytes, [])

    with pytest.raises(BlobError, match="grew or shrank"):  # it was begun: there was room
        asyncio.run(store_one_of(51 << 30))
    with pytest.raises(QuotaExceeded, match="the disk is full"):
        asyncio.run(store_one_of(61 << 30))


@pytest.mark.parametrize("known", [True, False])
def test_a_store_stays_while_its_client_runs_whatever_pids_say(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers that share a home may have the same pid twice, and two machines do not know each other's."""
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: known)

    async def main() -> None:
        async with own_store(tmp_path / "clients") as one:
            digest = one.put(b"weights")
            async with own_store(tmp_path / "clients") as two:
                assert two.root != one.root
            assert one.path(digest).read_bytes() == b"weights"

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_the_stores_of_clients_that_were_killed_go(tmp_path: Path) -> None:
    nobody = 2**22 + 1  # more than the kernel gives
    left, older, alive, new = (
        tmp_path / name for name in (f"{nobody}-ab", f"{nobody}", f"{os.getpid()}", f"{nobody}-cd")
    )
    for folder in (left, older, alive, new):
        folder.mkdir()
    (left / LOCK).touch()
    for folder in (older, alive):  # of the release before, without a lock
        os.utime(folder, (0, 0))

    async def main() -> None:
        async with own_store(tmp_path):
            assert [each.exists() for each in (left, older, alive, new)] == [False, False, True, True]

    asyncio.run(main())


def test_a_home_whose_peer_was_killed_and_met_nobody_says_so_at_once(
    tmp_path: Path,
) -> None:
    config = ClientConfig(home=tmp_path)

    async def join() -> None:
        async with open_client(config):
            pass

    with pytest.raises(PeerUnreachable, match=r"^no peer to join through"):
        asyncio.run(join())
    with peer_file_kept(tmp_path, running(address(1), tmp_path / "gone.sock")):
        assert join_addresses(config) == ()
        with pytest.raises(
            PeerUnreachable, match=r"^the peer of this home was killed; start it with: fusion"
        ):
            asyncio.run(join())


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_a_peer_that_listens_is_a_way_in_whatever_its_pid(family: socket.AddressFamily) -> None:
    """In another container it has a pid of its own, on another machine its control socket is not ours."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(family) as listening:  # a short path
        control = Path(folder) / "control.sock"
        listening.bind(str(control) if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listening.listen()
        own = address(1 if family == socket.AF_UNIX else listening.getsockname()[1])
        nobody = 2**22 + 1  # more than the kernel gives
        with peer_file_kept(Path(folder), replace(running(own, control), pid=nobody)):
            assert join_addresses(ClientConfig(home=Path(folder))) == (own,)
        listening.close()
        with peer_file_kept(Path(folder), running(own, control)):
            assert join_addresses(ClientConfig(home=Path(folder))) == ()
