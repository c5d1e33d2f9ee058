"""The op-set: every operator that a graph may use, by name. Fixed and versioned; a peer runs nothing else.

An op is named after the framework call it stands for: "aten.<packet>", with ".<overload>" unless it is the default one;
its parameters are those of that call, in its order, less those that do not change values (device, layout,
memory_format, generator, ...). "fusion." ops are our own. Rules of the result types are written by hand, and a test
holds them against the framework.
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

OPSET_VERSION = 3  # raised where operators are added; what one of them computes never changes
_OF_BLOCKS = 3  # the first that knows symbols which count blocks

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
    """The entry of `op`. GraphError where there is none."""
    try:
        return OPSET[op]
    except KeyError:
        raise GraphError(f"unknown op {op!r:.100}") from None


def needed_version(graph: Graph) -> int:
    """The first version of the op-set that has every operator of the graph, and its symbols: whoever knows it can run the graph."""
    of_symbols = _OF_BLOCKS if any(map(blocks, graph.symbols)) else 1
    return max([of_symbols, *(spec(op).since for op in {node.op for node in graph.nodes})])


def infer(op: str, args: tuple[Arg, ...], types: Mapping[Ref, TensorType]) -> tuple[TensorType, ...]:
    """The types of the results of `op` on `args` (positional and complete), `types` being those of all values
    defined so far. GraphError on an unknown op, a wrong number or sort of argument, shape or dtype."""
    found = spec(op)
    return found.infer(found.call(args, types))


def mixed_dims(
    op: str, args: tuple[Arg, ...], types: Mapping[Ref, TensorType]
) -> tuple[tuple[Ref, frozenset[int]], ...]:
    """For each tensor argument, in order, the dimensions over which the op combines or moves values of different
    positions: reductions, softmax, contractions, windows, slices, look-ups, joins. A dimension that is not listed is
    carried through position by position (but perhaps under another number, or merged with its neighbours: shapes tell).
    Attention to a cache does not list its length: the cache makes up for a sequence given in pieces. Ops that make
    positions from sizes (aten.arange) have no tensor argument and so say nothing here."""
    found = spec(op)
    mixed = found.mixes(found.call(args, types))
    result = []
    for parameter, arg in zip(found.parameters, args, strict=True):
        dims = frozenset(mixed.get(parameter.name, ()))
        for ref in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(ref, Ref):
                result.append((ref, dims & frozenset(range(len(types[ref].shape)))))
    return tuple(result)


def kept(node: Node) -> tuple[int, tuple[Ref, ...]] | None:
    """Of a node that keeps values of every position (attention to a cache): the slot of its cache, and what is kept."""
    found = spec(node.op)
    if not found.keeps:
        return None
    named = dict(zip((p.name for p in found.parameters), node.args, strict=True))
    slot = named["slot"]
    assert isinstance(slot, int)
    return slot, tuple(ref for ref in (named[name] for name in found.keeps) if isinstance(ref, Ref))


def next_slot(graph: Graph) -> int:
    """The first number of a cache that no node of the graph has taken."""
    return 1 + max((cache[0] for node in graph.nodes if (cache := kept(node)) is not None), default=-1)
