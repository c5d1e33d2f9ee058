"""Rewrites a captured graph with a loss to the one that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from fusion.dag.ir.dims import bind
from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.experts import name_experts
from fusion.dag.rewrites.mixed_precision import Half, mixed_precision
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Precision

HALVES: dict[Precision, Half] = {"bf16": "bfloat16", "fp16": "float16"}


def trained_graph(graph: Graph, precision: Precision = "float32") -> Graph:
    """`graph`, as `capture_language_model(training=True)` returns it, cleaned and with experts as one op for each product; experts in another form
    stay as they are. In half precision, see `mixed_precision`."""
    cleaned = name_experts(clean(graph))
    return mixed_precision(cleaned, HALVES[precision]) if precision in HALVES else cleaned


def check_normalised(graph: Graph, sizes: Mapping[str, int]) -> None:
    """JobError where a batch normalisation has one number for each channel in a microbatch of these sizes: minus its own mean that is always 0,
    and the running variance becomes NaN. PyTorch checks this where a module runs; operators do not."""
    types = graph.types
    for node in graph.nodes:
        if node.op == "aten.batch_norm" and node.args[5] is True:
            assert isinstance(node.args[0], Ref), "the normalised value"
            batch, _, *sizes_of_channel = (bind(dim, sizes) for dim in types[node.args[0]].shape)
            if batch * prod(sizes_of_channel) == 1:
                raise JobError(
                    f"train.microbatch_size must be at least 2: {node.name} has one number a channel, and "
                    "normalises those of a microbatch by each other"
                )
