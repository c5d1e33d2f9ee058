"""From a captured graph with a loss to the one that is trained."""

from __future__ import annotations

from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.experts import name_experts
from fusion.dag.rewrites.mixed_precision import Half, mixed_precision
from fusion.runtime.job.manifest import Precision

HALVES: dict[Precision, Half] = {"bf16": "bfloat16", "fp16": "float16"}


def trained_graph(graph: Graph, precision: Precision = "float32") -> Graph:
    """`graph` as `capture_language_model(training=True)` gives it, without what changes no value, and with experts as one op a
    product: experts in another form are run as the model spells them. In half precision as `mixed_precision`."""
    found = name_experts(clean(graph))
    return mixed_precision(found, HALVES[precision]) if precision in HALVES else found
