"""The operators that the plane does not run. Does not import JAX."""

from __future__ import annotations

from fusion.dag.ir.opset import OPSET

LACKING = frozenset({
    # Products with quantised matrices: dequantised first, they would take the memory that they are to save.
    "fusion.linear_int8", "fusion.linear_int4", "fusion.embedding_int8", "fusion.embedding_int4",
    "fusion.expert_linear_int8", "fusion.expert_linear_int4",
    # Caches of other things than keys and values: a source, an indexer, a convolution, a recurrence.
    "fusion.source_attention", "fusion.source_attention_scored", "fusion.cached_attention_relative",
    "fusion.cached_selection", "fusion.cached_convolution", "fusion.cached_recurrence",
})  # fmt: skip
assert OPSET.keys() >= LACKING
