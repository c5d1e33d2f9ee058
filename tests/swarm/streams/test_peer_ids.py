from __future__ import annotations

import pytest

from fusion.swarm.identity import Identity
from fusion.swarm.streams.peer_ids import from_bytes, to_bytes, to_hivemind
from fusion.swarm.transport import PeerId


def test_a_peer_id_is_the_same_in_every_form() -> None:
    peer = Identity.generate().peer_id
    assert from_bytes(to_bytes(peer)) == peer
    assert to_hivemind(peer).to_bytes() == to_bytes(peer)
    assert to_hivemind(peer) is to_hivemind(peer)


@pytest.mark.parametrize("text", ["", "0OIl", "Qm", "x" * 500, "é"])
def test_what_is_no_peer_id_is_refused(text: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a peer id"):
            to_bytes(PeerId(text))
