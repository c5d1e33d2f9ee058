"""From a placed graph to the blobs and the manifest of a job: cut, shard, store. Everything ends up in the local store,
nothing is sent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom

import torch

from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.dag.ir.opset import needed_version
from fusion.runtime.capture.sources import Read
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.admission import AdmissionSpec, LimitsSpec
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest, ServeConfig, TrainConfig
from fusion.runtime.launch.prepared import Prepared, expected_seconds
from fusion.runtime.launch.weights import put_weights
from fusion.runtime.placing.placed_job import Placed
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.identity import Identity, friendly_name

ReportLine = Callable[[str], None]  # gets one line for each phase of the work
SYSTEM_RANDOM = SystemRandom()


def silent(line: str) -> None:
    """Drops the line."""


@dataclass(frozen=True, kw_only=True)
class GraphJob:
    """A captured graph with its variables by name, and the rest of what the manifest needs."""

    name: str
    graph: Graph
    variables: Mapping[str, torch.Tensor] | Read
    files: Mapping[str, bytes | Path] = field(default_factory=dict)  # that export writes beside the weights
    tokenizer: Path | bytes | None = None
    byte_level: bool = False
    author: Identity = field(default_factory=Identity.generate)  # its key may stop the job
    admission: AdmissionSpec = field(default_factory=AdmissionSpec)
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    parameters: int | None = None  # of the model, where its graph stores them in another form


def prepare_graph(
    job: GraphJob,
    placed: Placed,
    store: BlobStore,
    report: ReportLine = silent,
    random: Random = SYSTEM_RANDOM,
    now: Callable[[], float] = time.time,
) -> Prepared:
    """Cut, shard and store a job. `placed`: its placement (`fusion.runtime.placing.placed_job`). Blocking: run it in a thread."""
    config, parts, graph = placed.config, placed.parts, job.graph
    report(f"sharding its weights into {len(parts)} stages")
    read = job.variables if callable(job.variables) else _reader(job.variables)
    data = config.data if isinstance(config, TrainConfig) else None
    manifest = Manifest(
        name=job.name,
        kind="train" if isinstance(config, TrainConfig) else "serve",
        graph=store.put(serialise.encode(graph)),
        cuts=placed.cuts,
        opset=needed_version(graph),
        weights=tuple(put_weights(store, part.graph.variables, read) for part in parts),
        proposed=placed.proposed,
        replicas=placed.replicas,
        memory_bytes=placed.memory_bytes,
        train=config if isinstance(config, TrainConfig) else None,
        serve=config if isinstance(config, ServeConfig) else None,
        tokenizer=store.put(job.tokenizer) if job.tokenizer is not None else None,
        byte_level=job.byte_level,
        files=tuple((file, store.put(content)) for file, content in job.files.items()),
        author=job.author.peer_id,
        admission=job.admission.admission,
        limits=job.limits.limits,
        launched_at=int(now()),
        salt=random.randbytes(8).hex(),
    )
    _check_limits(manifest)
    digest = JobId(store.put(manifests.encode(manifest)))
    blobs = [Digest(digest), manifest.graph, *manifest.weights, *(digest for _, digest in manifest.files)]
    blobs += [d for d in (manifest.tokenizer, data and data.train, data and data.held_out) if d]
    if manifest.admission.kind != "open":
        store.keep_for(digest, [each for each in dict.fromkeys(blobs) if each != Digest(digest)])
    return Prepared(
        job=digest,
        manifest=manifest,
        author=job.author,
        blobs=tuple(dict.fromkeys(blobs)),
        predicted_seconds=expected_seconds(placed),
        parameters=graph.parameter_count if job.parameters is None else job.parameters,
        plan=placed.plan,
        stage_count=placed.stage_count,
        invited=job.admission.invited,
    )


def _check_limits(manifest: Manifest) -> None:
    """JobError where the job cannot run as placed."""
    most = manifest.limits.stages_per_owner
    peer, count = Counter(manifest.proposed).most_common(1)[0]
    if 0 < most < count:
        raise JobError(
            f"limits.stages_per_owner: {most}, and the placement gives {friendly_name(peer)} {count} stages: "
            "name more peers, or fewer stages"
        )


def _reader(values: Mapping[str, torch.Tensor]) -> Read:
    return lambda variables: {v.name: values[v.name] for v in variables}
