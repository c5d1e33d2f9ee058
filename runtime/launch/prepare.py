"""From a job file or a model directory to the blobs and the manifest of a job: capture, pack, place, shard.

Blocking, for seconds; everything ends up in the local store, nothing is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import DataConfig, TrainConfig
from fusion.runtime.job.spec import JobSpec
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, ReportLine, prepare_graph, silent
from fusion.runtime.placing.place_job import place_job
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.identity import Identity, friendly_name


def prepare_training(
    spec: JobSpec,
    peers: Sequence[PeerRecord],
    store: BlobStore,
    *,
    links: Sequence[LinkRecord] = (),
    author: Identity | None = None,
    report: ReportLine = silent,
    note: ReportLine = silent,
    now: Callable[[], float] = time.time,
) -> Prepared:
    """Capture the model, place it on `peers`, shard weights, pack data. `links`: as measured by peers; `now`: unix seconds; `note` gets
    lines on data that are not trained on. Raises JobError, CaptureError, PlacementError. Blocking, for seconds: run it in a
    thread."""
    from fusion.runtime.launch.training_job import training_job  # with all that captures a model

    made = training_job(spec, store, report, note)
    config = replace(train_config(spec, made.data), evaluate_batches=made.evaluate_batches)
    admitted = spec.admission.among(peers, lambda peer: peer.peer)
    chosen = _chosen(admitted, spec.placement.peers)
    report(f"placing it on {len(chosen)} peers")
    placed = place_job(made.graph, config, chosen, links, spec.placement.stages)
    job = GraphJob(
        name=spec.name,
        graph=made.graph,
        variables=made.read,
        files=made.files,
        tokenizer=made.tokenizer,
        byte_level=made.byte_level,
        author=author or Identity.generate(),
        admission=spec.admission,
        limits=spec.limits,
    )
    return prepare_graph(job, placed, store, report, now=now)


def train_config(spec: JobSpec, data: DataConfig) -> TrainConfig:
    """The manifest's training, from a job file and its packed data."""
    train = spec.train
    return TrainConfig(
        steps=train.steps,
        microbatches=train.microbatches,
        microbatch_size=train.microbatch_size,
        sequence=train.sequence,
        seed=train.seed,
        optimizer=spec.optimizer,
        data=data,
        schedule=train.schedule,
        snapshot_every=train.snapshot_every,
        evaluate_every=train.evaluate_every,
        evaluate_batches=train.evaluate_batches,
        compression=spec.compression,
        precision=train.precision,
    )


def _chosen(peers: Sequence[PeerRecord], names: Sequence[str]) -> list[PeerRecord]:
    """The peers of these ids or friendly names; all where none is named. JobError for an unknown one."""
    if not names:
        return list(peers)
    known = {name: peer for peer in peers for name in (peer.peer, peer.name, friendly_name(peer.peer))}
    for name in names:
        if name not in known:
            raise JobError(f"placement.peers: {name!r:.80} is not in the swarm now")
    return list({known[name].peer: known[name] for name in names}.values())
