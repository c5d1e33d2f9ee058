"""A job that is not for everybody: a stranger neither owns, stands by, reads nor asks until it is invited, and no longer
once that has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.text_job import write_job

from fusion.cli.local.fleet import FleetError, LocalPeer

if TYPE_CHECKING:
    from conftest import Peers

pytestmark = pytest.mark.e2e
PATIENCE_SECONDS = 60.0
QUESTION = ("generate", "import ", "--max-tokens", "4", "--model")


def refused(peers: Peers, *arguments: str) -> str:
    """Why the command fails."""
    with pytest.raises(FleetError) as error:
        peers.run(*arguments)
    return str(error.value)


def until(met: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while not met():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.5)


def parts(peers: Peers, way: tuple[str, ...], peer: LocalPeer) -> list[str]:
    """What the peer has to do with stages of jobs, as the swarm sees it."""
    (seen,) = peers.run("status", *way)
    return [
        kind
        for kind in ("stages", "standbys", "replicas")
        for claim in seen[kind]
        if claim["peer"] == peer.peer_id
    ]


@dataclass
class Cast:
    """Two peers that may take part, one that may not, the home of whoever launches, and one that nobody knows."""

    ids: tuple[str, str]
    second: LocalPeer
    stranger: LocalPeer
    laptop: tuple[str, ...]
    foreign: tuple[str, ...]
    through: tuple[str, str]


def trained(peers: Peers, folder: Path) -> Cast:
    """A job that two of three peers were invited to, run to its end and exported to `folder`/model."""
    one, two, stranger = peers.swarm(3)
    homes = [("--home", str(folder / name)) for name in ("laptop", "foreign")]
    cast = Cast((one.peer_id, two.peer_id), two, stranger, *homes, ("--peer", one.address))
    job = write_job(folder / "job.toml", "ours", steps=12, live=False)
    admitted = "".join(f'"{each}", ' for each in cast.ids)
    limits = "[limits]\nstages_per_owner = 1\n"
    job.write_text(job.read_text() + f'[admission]\nkind = "granted"\npeers = [{admitted}]\n{limits}')
    said = peers.run("train", str(job), *cast.laptop, *cast.through)
    assert said[-1]["state"] == "done" and said[-1]["step"] == 12
    owners = [record["owners"] for record in said if record["event"] == "progress" and record["owners"]]
    assert set(owners[-1]) == set(cast.ids)
    peers.run("jobs", "export", "ours", str(folder / "model"), *cast.laptop, *cast.through)
    return cast


def test_whoever_was_not_invited_neither_trains_nor_reads_what_was_trained(
    peers: Peers, tmp_path: Path
) -> None:
    cast = trained(peers, tmp_path)
    stolen = ("jobs", "export", "ours", str(tmp_path / "stolen"))
    assert "for peers with a grant" in refused(peers, *stolen, *cast.foreign, *cast.through)
    assert "for peers with a grant" in refused(peers, *stolen, "--home", str(cast.stranger.home))
    assert not (tmp_path / "stolen").exists()


@pytest.mark.slow
def test_a_stranger_takes_no_part_until_it_is_invited_and_no_longer_once_it_is_revoked(
    peers: Peers, tmp_path: Path
) -> None:
    cast = trained(peers, tmp_path)
    ids, stranger, laptop, foreign, through = cast.ids, cast.stranger, cast.laptop, cast.foreign, cast.through
    home = ("--home", str(stranger.home))
    # Prompts.
    admit = [word for each in ids for word in ("--admit", each)]
    model = ("serve", str(tmp_path / "model"), "--name", "hers", "--stages", "2", "--admission", "granted")
    peers.run(*model, *admit, *laptop, *through)
    answer = peers.run(*QUESTION, "hers", *laptop, *through)[-1]
    assert len(answer["tokens"]) == 4 and stranger.peer_id not in answer["route"]
    other_way = peers.run(*QUESTION, "hers", *laptop, "--peer", stranger.address)[-1]
    assert other_way["tokens"] == answer["tokens"], "a peer that may not ask names those that may"
    assert "not for everybody" in refused(peers, *QUESTION, "hers", *foreign, *through)
    assert "not for everybody" in refused(peers, *QUESTION, "hers", *home)

    # An invite for a minute, to ask; it is nobody else's.
    invite = ("jobs", "invite", "hers", stranger.peer_id, *laptop, *through)
    text = peers.run(*invite, "--role", "ask", "--hours", "0.01")[-1]["invite"]
    assert "is for" in refused(peers, "jobs", "accept", text, *foreign)
    granted_at = time.monotonic()
    peers.run("jobs", "accept", text, *home)
    assert peers.run(*QUESTION, "hers", *home)[-1]["tokens"] == answer["tokens"]
    time.sleep(max(0.0, granted_at + 37.0 - time.monotonic()))
    assert "not for everybody" in refused(peers, *QUESTION, "hers", *home)
    assert parts(peers, (*laptop, *through), cast.second) and not parts(peers, (*laptop, *through), stranger)

    # An invite to all there is: now it may take the place of an owner that is killed.
    peers.run("jobs", "accept", peers.run(*invite)[-1]["invite"], *home)
    until(lambda: bool({"standbys", "replicas"} & set(parts(peers, (*laptop, *through), stranger))))
    cast.second.process.kill()
    until(lambda: "stages" in parts(peers, (*laptop, *through), stranger))
    after = peers.run(*QUESTION, "hers", *laptop, *through)[-1]
    assert after["tokens"] == answer["tokens"] and stranger.peer_id in after["route"]

    # Until it is revoked: its claim counts for nothing, and it is refused what it could have before.
    peers.run("jobs", "revoke", "hers", stranger.peer_id, *laptop, *through)
    until(lambda: not parts(peers, (*laptop, *through), stranger))
    assert "its grant was revoked" in refused(peers, *QUESTION, "hers", *home)
