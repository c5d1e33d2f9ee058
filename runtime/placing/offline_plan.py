"""A plan for a job file and a swarm file, with nothing running: the model is captured without memory for its weights, and
no data is read, but for a model in Python, whose inputs are as the data has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.compression.reference_speeds import REFERENCE
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.place import Scheduler
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import JobSpec
from fusion.runtime.job.stage_graphs import training_memory
from fusion.runtime.placing.codec_placement import place_with_codecs
from fusion.runtime.placing.offline_graph import training_graph
from fusion.runtime.placing.plan import Plan, planned
from fusion.runtime.placing.swarm_file import SwarmFile


def plan_training(spec: JobSpec, swarm: SwarmFile, scheduler: Scheduler = "op-fence") -> Plan:
    """Place the job on the peers of the swarm file. Raises JobError, CaptureError, PlacementError. Blocking: seconds
    for a large model."""
    return plan_graph(training_graph(spec), spec, swarm, scheduler)


def plan_graph(graph: Graph, spec: JobSpec, swarm: SwarmFile, scheduler: Scheduler = "op-fence") -> Plan:
    """The same with the job's `training_graph` at hand: for many plans of one job."""
    network = swarm.network(spec.train.precision)
    if spec.placement.peers:
        chosen = _chosen(spec.placement.peers, swarm)
        network = network.only(chosen)
    train = spec.train
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
        requested=train.schedule,
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
        trace=found.trace,
        price_usd=swarm.price(d.peer for d in network.devices),
    )


def _chosen(names: Sequence[str], swarm: SwarmFile) -> frozenset[str]:
    for name in names:
        if name not in swarm.by_name:
            raise JobError(f"placement.peers: the swarm file has no peer called {name!r:.80}")
    return frozenset(names)
