"""What joining costs the disk: nothing that stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.swarm.errors import PeerUnreachable
from fusion.swarm.identity import Identity

pytestmark = pytest.mark.process


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
