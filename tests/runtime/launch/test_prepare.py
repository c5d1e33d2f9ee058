"""What a job file says is what the job does."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from fusion.runtime.job.manifest import DataConfig
from fusion.runtime.job.spec import DataSpec, GPTConfig, JobSpec, TrainSpec
from fusion.runtime.launch.prepare import train_config
from fusion.swarm.directory.records import Digest


def test_all_that_a_job_file_says_of_the_training_is_in_its_configuration() -> None:
    said = TrainSpec(
        steps=11, sequence=12, microbatches=13, microbatch_size=14, seed=15, schedule="gpipe", precision="fp16",
        snapshot_every=16, evaluate_every=17, evaluate_batches=18,
    )  # fmt: skip
    assert all(getattr(said, field.name) != field.default for field in fields(TrainSpec))
    spec = JobSpec(name="said", model=GPTConfig(), data=DataSpec(files=(Path("text"),)), train=said)
    config = train_config(spec, DataConfig(kind="tokens", train=Digest("5" * 64)))
    assert {f.name: getattr(config, f.name) for f in fields(TrainSpec)} == vars(said)
