"""The op-set: every operator that a graph may use, by name. Fixed and versioned; a peer runs nothing else.

An op is named after the framework call it stands for: "aten.<packet>", with ".<overload>" unless it is the default one;
its parameters are those of that call, in its order, less those that do not change values (device, layout,
memory_format, generator, ...). "fusion." ops are our own. The rules for result types are written by hand; a test
compares them with the framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fusion.dag.ir import (
    opset_attention,
    opset_contract,
    opset_convolution,
    opset_experts,
    opset_index,
    opset_make,
    opset_pointwise,
    opset_quantised,
    opset_recurrence,
    opset_reduce,
    opset_views,
)
from fusion.dag.ir.dims import blocks
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Arg, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset_spec import MAX_LIST, MAX_RANK, REQUIRED, Call, OpSpec, Parameter

__all__ = [
    "MAX_LIST", "MAX_RANK", "OPSET", "OPSET_VERSION", "REQUIRED", "Call", "OpSpec", "Parameter",
    "infer", "kept", "mixed_dims", "needed_version", "next_slot", "spec",
]  # fmt: skip

OPSET_VERSION = 3  # raised when operators are added; the semantics of one never change
_BLOCKS_SINCE = 3  # the first version with symbols that count blocks

_TABLES = (
    opset_attention,
    opset_contract,
    opset_convolution,
    opset_experts,
    opset_index,
    opset_make,
    opset_pointwise,
    opset_quantised,
    opset_recurrence,
    opset_reduce,
    opset_views,
)
OPSET: Mapping[str, OpSpec] = MappingProxyType({s.name: s for table in _TABLES for s in table.SPECS})
assert len(OPSET) == sum(len(table.SPECS) for table in _TABLES), "an op is listed twice"


def spec(op: str) -> OpSpec:
    """The entry of `op`. GraphError for an unknown op."""
    try:
        return OPSET[op]
    except KeyError:
        raise GraphError(f"unknown op {op!r:.100}") from None


def needed_version(graph: Graph) -> int:
    """The first version of the op-set that has every operator and symbol of the graph, so that peers from it on can run it."""
    symbols_version = _BLOCKS_SINCE if any(map(blocks, graph.symbols)) else 1
    return max([symbols_version, *(spec(op).since for op in {node.op for node in graph.nodes})])


def infer(op: str, args: tuple[Arg, ...], types: Mapping[Ref, TensorType]) -> tuple[TensorType, ...]:
    """The types of the results of `op` on `args` (positional and complete), `types` being those of all values
    defined so far. GraphError on an unknown op, or a wrong number of arguments, type, shape or dtype."""
    op_spec = spec(op)
    return op_spec.infer(op_spec.call(args, types))


def mixed_dims(
    op: str, args: tuple[Arg, ...], types: Mapping[Ref, TensorType]
) -> tuple[tuple[Ref, frozenset[int]], ...]:
    """For each tensor argument, in order, the dimensions over which the op combines or moves values of different
    positions: reductions, softmax, contractions, windows, slices, look-ups, joins. A dimension that is not listed is
    passed on position by position, though perhaps under another number or merged with its neighbours, which shapes show.
    Attention to a cache does not list its length, as the cache supplies earlier positions. Ops that create positions from
    sizes (aten.arange) have no tensor argument, so nothing is listed for them."""
    op_spec = spec(op)
    mixed = op_spec.mixes(op_spec.call(args, types))
    result = []
    for parameter, arg in zip(op_spec.parameters, args, strict=True):
        dims = frozenset(mixed.get(parameter.name, ()))
        for ref in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(ref, Ref):
                result.append((ref, dims & frozenset(range(len(types[ref].shape)))))
    return tuple(result)


def kept(node: Node) -> tuple[int, tuple[Ref, ...]] | None:
    """The cache slot of a node and the operands that it caches for every position; None for a node without a cache."""
    op_spec = spec(node.op)
    if not op_spec.keeps:
        return None
    arguments = dict(zip((p.name for p in op_spec.parameters), node.args, strict=True))
    slot = arguments["slot"]
    assert isinstance(slot, int)
    return slot, tuple(ref for ref in (arguments[name] for name in op_spec.keeps) if isinstance(ref, Ref))


def next_slot(graph: Graph) -> int:
    """The first cache slot after those in use."""
    return 1 + max((cache[0] for node in graph.nodes if (cache := kept(node)) is not None), default=-1)
