"""A plan for a job file and a swarm file, with nothing running: the model is captured without memory for its weights, and
no data is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.compression.reference_speeds import REFERENCE
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.network import Network
from fusion.dag.placement.place import Scheduler
from fusion.runtime.capture.capture import capture_language_model
from fusion.runtime.capture.huggingface import open_model, parameters_on_meta
from fusion.runtime.capture.model_dtype import FLOAT32
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import HuggingFaceConfig, JobSpec
from fusion.runtime.job.stage_graphs import training_memory
from fusion.runtime.placing.codec_placement import place_with_codecs
from fusion.runtime.placing.plan import Plan, planned
from fusion.runtime.placing.swarm_file import SwarmFile


def plan_training(spec: JobSpec, swarm: SwarmFile, scheduler: Scheduler = "op-fence") -> Plan:
    """Place the job on the peers of the swarm file. Raises JobError, CaptureError, PlacementError. Blocking: seconds
    for a large model."""
    network = swarm.network()
    if spec.placement.peers:
        chosen = _chosen(spec.placement.peers, swarm)
        network = Network(devices=tuple(d for d in network.devices if d.peer in chosen), links=network.links)
    graph, train = training_graph(spec), spec.train
    sizes = {"batch": train.microbatch_size, "sequence": train.sequence}
    memory = training_memory(spec.optimizer, spec.compression)
    found = place_with_codecs(
        graph,
        network,
        sizes,
        train.microbatches,
        spec.compression,
        REFERENCE,
        memory,
        asked=train.schedule,
        stages=spec.placement.stages,
        scheduler=scheduler,
    )
    return planned(
        graph,
        found.placement,
        network,
        sizes,
        memory,
        edge_costs=found.costs,
        compression=spec.compression,
        known=lambda a, b: swarm.pair(a, b).known,
    )


def training_graph(spec: JobSpec) -> Graph:
    """The graph that launching the job would place. Raises JobError, CaptureError."""
    if isinstance(spec.model, HuggingFaceConfig):
        with parameters_on_meta():
            model = open_model(spec.model.path, weights=False, dtype=FLOAT32)
        if spec.train.sequence > model.max_sequence:
            raise JobError(
                f"train.sequence must be at most {model.max_sequence}, what the model was built for"
            )
        return trained_graph(model.capture(training=True))
    with torch.device("meta"):
        module = GPT(spec.model)
    return trained_graph(capture_language_model(module, training=True, maximum_sequence=spec.model.sequence))


def _chosen(names: Sequence[str], swarm: SwarmFile) -> frozenset[str]:
    for name in names:
        if name not in swarm.by_name:
            raise JobError(f"placement.peers: the swarm file has no peer called {name!r:.80}")
    return frozenset(names)
