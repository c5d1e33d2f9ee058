"""A stage whose owner fails, or says so: the job goes on at other peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import lying_peer
from support.text_job import write_job

if TYPE_CHECKING:
    from conftest import Peers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS = 30


def train(
    peers: Peers, folder: Path, lie: str, *, first_lies: bool = False, second_lies: bool = True
) -> tuple[list[dict[str, object]], str]:
    """The records of a job of which a stage begins at a peer that lies so, and the second peer."""
    prefix = (sys.executable, lying_peer.__file__, lie)
    first = peers.start("first", prefix=prefix if first_lies else ())
    liar = peers.start("liar", bootstrap=(first.address,), prefix=prefix if second_lies else ())
    peers.start("third", bootstrap=(first.address,))
    job = write_job(
        folder / "job.toml",
        "lied-to",
        steps=STEPS,
        peers=(first.peer_id, liar.peer_id),
        live=False,
        snapshot_every=4,
    )
    said = peers.run("train", str(job), "--home", str(folder / "laptop"), "--peer", first.address)
    return said, liar.peer_id


@pytest.mark.parametrize("lie", ["fails", "nan"])
def test_a_stage_that_fails_at_one_peer_goes_to_another_and_the_job_ends_well(
    peers: Peers, tmp_path: Path, lie: str
) -> None:
    said, liar = train(peers, tmp_path, lie)
    owners = [record["owners"] for record in said if record["event"] == "progress" and record["owners"]]
    # Before it lied it had a few steps' time, in which nobody may have asked who owns what.
    assert "of lied-to: " in (peers.root / "liar.log").read_text(), "it never lied"
    assert said[-1]["state"] == "done" and said[-1]["step"] == STEPS
    assert liar not in owners[-1]


def test_a_number_that_is_wrong_once_costs_a_step_and_no_owner(peers: Peers, tmp_path: Path) -> None:
    said, liar = train(peers, tmp_path, "noise")
    last = [record for record in said if record["event"] == "progress"][-1]
    assert said[-1]["state"] == "done" and liar in last["owners"] and last["discarded"] == 1


def test_a_job_ends_though_an_owner_saves_no_state(peers: Peers, tmp_path: Path) -> None:
    """Both peers that are proposed lie about the shard of any stage but the first, so the owner of the second does."""
    said, liar = train(peers, tmp_path, "shards", first_lies=True)
    owners = [record["owners"] for record in said if record["event"] == "progress" and record["owners"]]
    assert said[-1]["state"] == "done" and said[-1]["step"] == STEPS
    assert liar in owners[0] and owners[-1][1] not in owners[0]


def test_a_job_ends_though_its_lead_saves_no_state(peers: Peers, tmp_path: Path) -> None:
    """The other owner checks the lead's shard once it has waited for three minutes, and votes against it."""
    said, _ = train(peers, tmp_path, "lead-shard", first_lies=True, second_lies=False)
    owners = [record["owners"] for record in said if record["event"] == "progress" and record["owners"]]
    assert said[-1]["state"] == "done" and said[-1]["step"] == STEPS
    assert owners[-1][0] not in owners[0] and owners[-1][1] == owners[0][1]
