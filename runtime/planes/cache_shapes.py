"""What a stage keeps of a session, by its graph: pure."""

from __future__ import annotations

from fusion.dag.cutting.source import SOURCE_ATTENTION
from fusion.dag.ir.graph import Graph
from fusion.dag.ir.opset import kept
from fusion.dag.ir.opset_recurrence import state_bytes
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.kv_cache import KeptShape


def slot_shapes(graph: Graph) -> dict[int, tuple[KeptShape, ...]]:
    """What each attention of the stage that has a cache keeps there."""
    found: dict[int, tuple[KeptShape, ...]] = {}
    for node in graph.nodes:
        cache = kept(node)
        if cache is None or node.op == SOURCE_ATTENTION:
            continue
        slot, values = cache
        if slot in found:
            raise JobError(f"two attention nodes share slot {slot} of the KV cache")
        shapes = []
        for type_ in (graph.types[ref] for ref in values):
            heads, width = type_.shape[1], type_.shape[3]
            if not (isinstance(heads, int) and isinstance(width, int)):
                raise JobError(f"the heads of attention slot {slot} have no fixed size")
            shapes.append(KeptShape(heads, width, TORCH_DTYPES[type_.dtype]))
        found[slot] = tuple(shapes)
    return found


def state_bytes_of(graph: Graph) -> int:
    """Of its recurrences, whatever positions a session has."""
    return sum(state_bytes(graph.types, node) for node in graph.nodes)
