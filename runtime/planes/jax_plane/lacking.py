"""The operators that this plane does not run, by name; without JAX."""

from __future__ import annotations

from fusion.dag.ir.opset import OPSET

LACKING = frozenset({
    # Matrices that stay quantised while they are multiplied are a product of the torch plane's own; made floats first they
    # would take the memory that they are to save.
    "fusion.linear_int8", "fusion.linear_int4", "fusion.embedding_int8", "fusion.embedding_int4",
    "fusion.expert_linear_int8", "fusion.expert_linear_int4",
    # What a session keeps beside keys and values: of a source, of an indexer, of a convolution, of a recurrence.
    "fusion.source_attention", "fusion.source_attention_scored", "fusion.cached_attention_relative",
    "fusion.cached_selection", "fusion.cached_convolution", "fusion.cached_recurrence",
})  # fmt: skip
assert OPSET.keys() >= LACKING
