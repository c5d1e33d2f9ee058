"""The memory that each stage of a job needs on its peer, and the depth of the pipeline that its peers have memory for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from fusion.dag.cutting.costs import bound_types, type_bytes
from fusion.dag.cutting.cuts import legal_cuts
from fusion.dag.cutting.memory import measure_memory
from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph
from fusion.dag.ir.opset import kept
from fusion.dag.placement.misfit import size_text
from fusion.dag.placement.pipeline import max_in_flight
from fusion.runtime.job.manifest import ServeConfig, TrainConfig
from fusion.runtime.job.stage_graphs import Config, memory_config, serving_memory
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.transport import PeerId


def model_bytes(graph: Graph) -> int:
    """Of its weights, once: a tied variable is in several stages."""
    return sum(type_bytes(variable.type) for variable in graph.variables)


def kept_bytes(graph: Graph, config: ServeConfig) -> int:
    """Of the KV caches of all stages for the longest text; 0 without a cache."""
    types = bound_types(graph, config.sizes)
    return sum(type_bytes(types[ref]) for node in graph.nodes if (cache := kept(node)) for ref in cache[1])


def least_memory(
    graph: Graph, config: ServeConfig, most_stages: int, beside_bytes: int = 0
) -> tuple[int, ...]:
    """The least memory of the fullest of 1, 2, ... peers, over all ways to cut the model, up to `most_stages` peers and as many as
    there are cuts; `beside_bytes`: what the first stage needs beside its own memory."""
    bounds = (0, *legal_cuts(graph), len(graph.nodes))
    memory = serving_memory(config)
    tables = measure_memory(graph, bounds, config.sizes, False, memory)
    first, last = np.meshgrid(np.arange(len(bounds)), np.arange(len(bounds)), indexing="ij")
    needed = np.where(first < last, tables.bytes(first, last, 1), inf)
    needed[0] += beside_bytes
    fullest = needed[0]  # up to each bound
    found = [fullest[-1]]
    for _ in range(1, min(most_stages, len(bounds) - 1)):
        fullest = np.maximum(fullest[:, None], needed).min(0)
        found.append(fullest[-1])
    return tuple(int(bytes_) for bytes_ in found)


def fitted(
    graph: Graph,
    config: Config,
    cuts: Sequence[int],
    owners: Sequence[PeerId],
    peers: Sequence[PeerRecord],
) -> tuple[Config, tuple[int, ...]]:
    """The configuration with the deepest pipeline, up to its own, that the owners have memory for, and the bytes that
    each stage needs then. An owner that is not one of `peers` is taken to have enough; a stage without an owner needs
    one of them, if there are any. PlacementError where some stage fits no peer that may have it."""
    training = isinstance(config, TrainConfig)
    first, count = np.arange(len(owners)), len(owners)
    tables = measure_memory(
        graph, (0, *cuts, len(graph.nodes)), config.sizes, training, memory_config(config)
    )
    free = {peer.peer: peer.free_memory_bytes for peer in peers}
    most = max(free.values(), default=inf)
    room = [free.get(owner, inf) if owner else most for owner in owners]
    while True:
        in_flight = np.ones(count)
        if isinstance(config, TrainConfig):
            schedule, depth = config.schedule, config.depth
            in_flight = np.array(
                [max_in_flight(s, count, config.microbatches, True, schedule, depth) for s in range(count)]
            )
        needed = tuple(int(bytes_) for bytes_ in tables.bytes(first, first + 1, in_flight))
        short = [s for s in range(count) if needed[s] > room[s]]
        if not short:
            return config, needed
        if isinstance(config, ServeConfig) or config.schedule == "gpipe" or config.depth == 1:
            stage = short[0]
            names = {peer.peer: peer.name for peer in peers}
            who = f"its peer {names[owners[stage]]} offers" if owners[stage] else "no peer offers more than"
            raise PlacementError(
                f"stage {stage} needs {size_text(needed[stage])}: {who} {size_text(room[stage])}"
            )
        config = replace(config, depth=config.depth - 1)
