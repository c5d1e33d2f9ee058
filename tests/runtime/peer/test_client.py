"""What joining costs the disk: nothing that stays."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from fusion.runtime.peer.client import CACHED_PEERS_FILE, ClientConfig, open_client, ways_in
from fusion.runtime.peer.client_context import own_store
from fusion.runtime.peer.peer_file import RunningPeer, written_down
from fusion.swarm.blobs import disk
from fusion.swarm.errors import BlobError, PeerUnreachable, QuotaExceeded
from fusion.swarm.identity import Identity


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


def test_where_the_peer_of_this_home_was_killed_those_that_it_had_met_are_tried_as_well(
    tmp_path: Path,
) -> None:
    own, met, given = (f"/ip4/127.0.0.1/tcp/{n}/p2p/{Identity.generate().peer_id}" for n in (1, 2, 3))
    (tmp_path / CACHED_PEERS_FILE).write_text(json.dumps([met, own]))
    alone = ClientConfig(home=tmp_path, bootstrap=(given,))
    assert ways_in(alone) == (given,)  # it ended in order: no peer of this home is to be asked
    assert ways_in(ClientConfig(home=tmp_path)) == (met, own)  # nobody else is named
    killed = RunningPeer(peer_id=Identity.generate().peer_id, addresses=(own,), pid=1, control="")
    with written_down(tmp_path, killed):
        assert ways_in(alone) == (own, given, met)
        assert ways_in(ClientConfig(home=tmp_path, peer=given)) == (given,)


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
