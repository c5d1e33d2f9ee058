"""`peer.json` in a home: the addresses of the peer that runs with it, for commands on this machine. It may be left over from a peer
that was killed, so all of it is a hint only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fusion.swarm.transport import PeerId

PEER_FILE = "peer.json"
_ADDRESSES = 4  # of one peer, tried


@dataclass(frozen=True, kw_only=True)
class RunningPeer:
    peer_id: PeerId
    addresses: tuple[str, ...]  # full multiaddrs
    pid: int
    # The path of its control socket (`fusion.swarm.control.server`); "" in files of older versions
    control: str
    http: str = ""  # where its HTTP API is, if it has one


def running_peer(home: Path) -> RunningPeer | None:
    """The peer file of the peer that runs with this home; None where there is no valid file."""
    try:
        fields = json.loads((home / PEER_FILE).read_text())
        return RunningPeer(
            peer_id=PeerId(str(fields["peer_id"])),
            addresses=tuple(map(str, fields["addresses"][:_ADDRESSES])),
            pid=int(fields["pid"]),
            control=str(fields.get("control", "")),
            http=str(fields.get("http", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def peer_file_kept(home: Path, peer: RunningPeer) -> Iterator[None]:
    """Keep the file of the running peer, for the length of the block. Raises OSError in one line."""
    path = home / PEER_FILE
    scratch = path.with_suffix(".new")
    try:
        scratch.write_text(json.dumps(asdict(peer)))
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise OSError(
            f"cannot write {path}: {error.strerror}; free some space or choose another --home"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
