"""Which nodes are recomputed in every stage that reads them, instead of being sent: masks, positions, rotary tables.

`fusion.dag.cutting.cuts.split` applies this. A node is repeatable if it is cheap and depends on positions and small buffers
alone, so that a stage needs no sample to compute it.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import DTYPE_BYTES, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import OPSET
from fusion.dag.ir.opset_pointwise import KEEP

# Inputs that every peer can compute itself. Others have the content of samples, and go only to stages that need them.
POSITIONAL = frozenset({"position_ids"})
_END = 2**63 - 1
BUFFER_BYTES = 4 << 20  # a larger table costs more to hold in every stage than its rows cost to send
_CHEAP = frozenset({"pointwise", "reduction", "move", "view", "make"})
_RANDOM = frozenset({"fusion.dropout", "aten.dropout"})
# Ops that write to their arguments: name -> indices of the written buffers, and of the flag that enables it, if there is one.
_WRITES: dict[str, tuple[tuple[int, ...], int | None]] = {"aten.batch_norm": ((3, 4), 5), KEEP: ((0,), None)}
MEAN, COUNTER = "running_mean", "num_batches_tracked"  # names of the buffers of a batch normalisation


def repeatable(graph: Graph) -> frozenset[str]:
    """Names of the nodes that depend only on positions, constants and small buffers, through cheap ops."""
    available = set(POSITIONAL & graph.input_names)
    written = {ref.name for ref in written_buffers(graph)}
    small = (v.name for v in graph.variables if v.kind == "buffer" and _bytes(v.type) <= BUFFER_BYTES)
    available.update(name for name in small if name not in written)
    names: set[str] = set()
    for node in graph.nodes:
        if _cheap(graph, node) and all(ref.name in available for ref in node.refs()):
            available.add(node.name)
            names.add(node.name)
    return frozenset(names)


def made_of_weights(graph: Graph) -> frozenset[str]:
    """Names of the nodes that depend on no input: constant from run to run."""
    from_inputs = set(graph.input_names)
    for node in graph.nodes:
        if any(ref.name in from_inputs for ref in node.refs()):
            from_inputs.add(node.name)
    return frozenset(node.name for node in graph.nodes if node.name not in from_inputs)


def written_buffers(graph: Graph) -> frozenset[Ref]:
    """The buffers that a node writes to, as batch normalisation in training and `fusion.keep` do."""
    return frozenset(ref for node in graph.nodes for ref in writes(node))


def writes(node: Node) -> tuple[Ref, ...]:
    """The buffers that the node writes to in training."""
    indices, flag = _WRITES.get(node.op, ((), None))
    if flag is not None and node.args[flag] is not True:
        return ()
    return tuple(a for a in (node.args[p] for p in indices) if isinstance(a, Ref))


def counted_batches(graph: Graph) -> Counter[str]:
    """By how much a run increments each `num_batches_tracked`. No node does so, as no value depends on it."""
    counts = Counter[str]()
    for node in graph.nodes:
        mean = node.args[3] if node.op == "aten.batch_norm" and node.args[5] is True else None
        if isinstance(mean, Ref) and mean.name.endswith(MEAN):
            counts[mean.name.removesuffix(MEAN) + COUNTER] += 1
    return counts


def _cheap(graph: Graph, node: Node) -> bool:
    if node.op in _RANDOM:
        return False
    if node.op in ("aten.matmul", "aten.bmm"):
        # The outer product of positions and frequencies of rotary embeddings.
        return graph.types[next(node.refs())].shape[-1] == 1
    spec = OPSET.get(node.op)
    return spec is not None and spec.family in _CHEAP


def _bytes(type_: TensorType) -> int:
    if not all(isinstance(d, int) for d in type_.shape):
        return BUFFER_BYTES + 1
    return prod(d for d in type_.shape if isinstance(d, int)) * DTYPE_BYTES[type_.dtype]


def keeps_last(graph: Graph, node: Node) -> bool:
    """Whether the node is the slice of `fusion.dag.rewrites.last_position`, whatever its name."""
    if node.op != "aten.slice.Tensor" or node.args[2:] != (-1, _END, 1):
        return False
    source, axis = node.args[:2]
    shape = graph.types[source].shape if isinstance(source, Ref) else ()
    return type(axis) is int and 0 <= axis < len(shape) and shape[axis] == symbol("sequence")
