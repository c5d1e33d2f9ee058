"""A job that still trains is served: its newest snapshot, each newer one in its place, and the last when it is over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file
from support.models import greedy
from support.text_job import write_job

from fusion.runtime.capture.models import GPT
from fusion.runtime.job.spec import GPTConfig

if TYPE_CHECKING:
    from conftest import Peers

pytestmark = pytest.mark.e2e
MODEL = GPTConfig(blocks=2, width=32, heads=2, sequence=32)


@pytest.mark.slow
def test_newer_snapshots_take_the_place_of_older_ones(peers: Peers, tmp_path: Path) -> None:
    swarm = peers.swarm(2)
    steps = 4000
    job = write_job(tmp_path / "job.toml", "life", steps=steps, snapshot_every=400)
    laptop = ("--home", str(tmp_path / "laptop"), "--peer", swarm[0].address)
    peers.run("train", str(job), "--detach", *laptop)

    told: list[dict[str, Any]] = peers.run("serve", "life", "--name", "live", *laptop)
    serving = [record for record in told if record["event"] == "serving"]
    assert len(serving) >= 2, "it was over before a second snapshot was served: the test shows nothing"
    reached = [record["step"] for record in serving]
    assert reached == sorted(set(reached)) and reached[0] < steps and reached[-1] == steps
    replaced = [record["job"] for record in told if record["event"] == "replaced"]
    assert replaced == [record["job"] for record in serving[:-1]]

    directory = tmp_path / "model"
    peers.run("jobs", "export", "life", str(directory), *laptop)
    module = GPT(MODEL)
    module.load_state_dict(load_file(directory / "model.safetensors"), strict=True)
    again = peers.run("serve", "life", "--name", "again", "--once", *laptop)
    assert again[-1]["step"] == steps
    for name in ("live", "again"):
        said = peers.run(
            "generate", "def ", "--model", name, "--max-tokens", "20", "--home", str(swarm[1].home)
        )
        assert said[-1]["tokens"] == greedy(module, b"def ", 20)
    [listed] = peers.run("jobs", "--home", str(swarm[0].home))
    going = [each["job"] for each in listed["jobs"] if each["name"] == "live" and each["state"] == "running"]
    assert going == [serving[-1]["job"]]
