"""What nodes and stages cost: FLOPs and bytes, by formula from shapes (the workload estimator of FusionLLM, arXiv
2410.12707, section 3.4; it times operators, we count them, so that a graph can be placed before it has run anywhere).

FLOPs: a product of (m, k) and (k, n) is 2 m k n; backward repeats it once for each factor that needs a gradient, which
makes the usual 2 to 1 (Kaplan et al., arXiv 2001.08361, section 2.1); attention as in FlashAttention-2 (arXiv 2307.08691).
Bytes: what autograd keeps for backward, each tensor once, views counted as what they look at; Adam keeps two float32
numbers a parameter. Seconds are no concern of this module: a device divides by what it was measured to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import bind
from fusion.dag.ir.graph import DTYPE_BYTES, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import spec
from fusion.dag.ir.opset_spec import Call, Family, OpSpec, elements, plain

# Views that change the order of elements in memory: a reshape of what they give has to copy.
_REORDER = frozenset(
    {"aten.transpose.int", "aten.permute", "aten.t", "aten.numpy_T", "aten.expand", "aten.expand_as"}
)
_COPY_IF_REORDERED = frozenset({"aten.reshape", "aten.flatten.using_ints", "aten.contiguous"})


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """Of one node and one microbatch. Sums over nodes are meaningful: what several nodes share is counted at the first."""

    family: Family
    forward_flops: int
    backward_flops: int
    moved_bytes: int  # read and written by the forward pass: what bounds the time of nodes with few FLOPs
    output_bytes: int  # of its results, views included
    saved_bytes: int  # by how much the node makes the stash of the backward pass grow
    parameter_bytes: int  # of the variables that no earlier node reads, buffers included
    trainable: int  # elements of those that an optimizer updates


@dataclass(frozen=True, kw_only=True)
class StageCost:
    forward_flops: int
    backward_flops: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int  # of one microbatch between its forward and its backward pass, received values included
    working_bytes: int  # at most, of values alive at once when each is dropped after its last use
    received_bytes: int  # a microbatch, forward
    sent_bytes: int  # a microbatch, forward, once to each consumer

    def training_bytes(self, in_flight: int) -> int:
        """Memory of a stage that keeps `in_flight` microbatches between their forward and backward pass."""
        held = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return held + in_flight * self.saved_bytes + self.working_bytes

    @property
    def serving_bytes(self) -> int:
        """Memory without gradients; the KV cache comes on top (`cache_bytes_per_position`)."""
        return self.parameter_bytes + self.working_bytes


def type_bytes(type_: TensorType) -> int:
    """Of a type whose dimensions are plain integers."""
    return elements(type_) * DTYPE_BYTES[type_.dtype]


def bound_types(graph: Graph, sizes: Mapping[str, int]) -> dict[Ref, TensorType]:
    """The type of every value where each symbol has the size given."""
    return {
        ref: replace(t, shape=tuple(max(0, bind(d, sizes)) for d in t.shape))
        for ref, t in graph.types.items()
    }


def differentiable(graph: Graph) -> frozenset[Ref]:
    """The floating values that depend on a trainable parameter through ops that have a gradient."""
    start = (v for v in graph.variables if v.trainable and v.kind == "parameter" and "float" in v.type.dtype)
    return _reach(graph, frozenset(Ref(v.name) for v in start))


def node_costs(
    graph: Graph, sizes: Mapping[str, int], gradients: frozenset[Ref] | None = None
) -> tuple[NodeCost, ...]:
    """The cost of each node, in order, where each symbol has the size given. GraphError on a symbol without a size.
    `gradients`: the values that need one, where the graph alone does not tell (a stage)."""
    types = bound_types(graph, sizes)
    needing = differentiable(graph) if gradients is None else gradients
    storage = _storage(graph)
    seen: set[Ref] = {Ref(v.name) for v in graph.variables}  # what the stash holds without keeping it
    variables = {v.name: v for v in graph.variables}
    costs = []
    for node in graph.nodes:
        found = spec(node.op)
        call = found.call(node.args, types)
        results = tuple(types[Ref(node.name, i)] for i in range(len(node.results)))
        flops = found.flops(call, results)
        read = [variables.pop(r.name) for r in node.refs() if r.name in variables]
        output = sum(map(type_bytes, results))
        costs.append(
            NodeCost(
                family=found.family,
                forward_flops=flops,
                backward_flops=int(flops * _backward_ratio(found, node, needing)),
                moved_bytes=0 if found.family == "view" else output + _read_bytes(found, call, results),
                output_bytes=output,
                saved_bytes=_saved_bytes(found, node, types, needing, storage, seen),
                parameter_bytes=sum(type_bytes(types[Ref(v.name)]) for v in read),
                trainable=sum(
                    elements(types[Ref(v.name)]) for v in read if v.trainable and v.kind == "parameter"
                ),
            )
        )
    return tuple(costs)


def stage_cost(stage: Stage, sizes: Mapping[str, int], optimizer_slots: int = 2) -> StageCost:
    """The cost of a stage for one microbatch; `optimizer_slots` float32 numbers are kept a trainable element (AdamW 2,
    SGD with momentum 1, plain SGD 0)."""
    graph = stage.graph
    received = frozenset(Ref(e.name) for e in stage.receives if e.needs_gradient)
    needing = _reach(graph, received | differentiable(graph))
    costs = node_costs(graph, sizes, needing)
    types = bound_types(graph, sizes)
    trained = [types[Ref(v.name)] for v in graph.variables if v.trainable and v.kind == "parameter"]
    edges = [(e, type_bytes(types[Ref(e.name)])) for e in stage.receives]
    return StageCost(
        forward_flops=sum(c.forward_flops for c in costs),
        backward_flops=sum(c.backward_flops for c in costs),
        parameter_bytes=sum(type_bytes(types[Ref(v.name)]) for v in graph.variables),
        gradient_bytes=sum(map(type_bytes, trained)),
        optimizer_bytes=sum(4 * optimizer_slots * elements(t) for t in trained),
        saved_bytes=sum(c.saved_bytes for c in costs),
        working_bytes=_working_bytes(graph, types),
        received_bytes=sum(b for _, b in edges),
        sent_bytes=sum(type_bytes(types[e.ref]) * len(e.consumers) for e in stage.sends),
    )


def cache_bytes_per_position(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Bytes of key and value that one position of a session of batch 1 adds to the caches of a serving graph."""
    types = bound_types(graph, {**sizes, "batch": 1})
    total = 0
    for node in graph.nodes:
        if node.op == "fusion.cached_attention":
            for ref in list(node.refs())[1:3]:
                _, heads, _, width = types[ref].shape
                total += plain(heads) * plain(width) * DTYPE_BYTES[types[ref].dtype]
    return total


def _reach(graph: Graph, start: frozenset[Ref]) -> frozenset[Ref]:
    found = set(start)
    for node in graph.nodes:
        if spec(node.op).differentiable and any(ref in found for ref in node.refs()):
            found.update(Ref(node.name, i) for i, t in enumerate(node.results) if "float" in t.dtype)
    return frozenset(found)


def _given(found: OpSpec, node: Node) -> dict[str, list[Ref]]:
    """The values that a node reads, by parameter."""
    pairs = zip(found.parameters, node.args, strict=True)
    return {
        p.name: [a for a in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(a, Ref)]
        for p, arg in pairs
    }


def _backward_ratio(found: OpSpec, node: Node, needing: frozenset[Ref]) -> float:
    if not found.differentiable:
        return 0.0
    share = found.backward
    return sum(
        1.0 if share is None else share.get(name, 0.0)
        for name, refs in _given(found, node).items()
        for ref in refs
        if ref in needing
    )


def _read_bytes(found: OpSpec, call: Call, results: tuple[TensorType, ...]) -> int:
    """Look-ups by index read as much as they write; everything else reads its arguments."""
    if found.family == "move" or found.family == "make":
        return sum(map(type_bytes, results)) if found.family == "move" else 0
    return sum(map(type_bytes, call.tensors()))


def _storage(graph: Graph) -> dict[Ref, Ref]:
    """For each value the value whose memory it looks at: its own, or for a view that of what it is a view of."""
    owner: dict[Ref, Ref] = {ref: ref for ref in graph.types}
    reordered: set[Ref] = set()
    for node in graph.nodes:
        source = next(node.refs(), None)
        if spec(node.op).family != "view" or source is None or node.op == "aten.clone":
            continue
        if node.op in _COPY_IF_REORDERED and source in reordered:
            continue
        for i in range(len(node.results)):
            result = Ref(node.name, i)
            owner[result] = owner.get(source, source)
            if node.op in _REORDER or source in reordered:
                reordered.add(result)
    return owner


def _saved_bytes(
    found: OpSpec,
    node: Node,
    types: Mapping[Ref, TensorType],
    needing: frozenset[Ref],
    storage: Mapping[Ref, Ref],
    seen: set[Ref],
) -> int:
    """Bytes that the node adds to the stash; remembers in `seen` what is in it."""
    given = _given(found, node)
    wanting = {name for name, refs in given.items() if any(r in needing for r in refs)}
    if not wanting or not found.differentiable:
        return 0
    total = 0
    for name in found.saves:
        if name == "copy":
            total += type_bytes(types[next(node.refs())])
        elif name == "scores":
            length = plain(types[given["key"][0]].shape[-2])
            rows = elements(types[Ref(node.name)]) // max(1, plain(types[Ref(node.name)].shape[-1]))
            total += 3 * rows * length * DTYPE_BYTES[types[Ref(node.name)].dtype]
        elif name == "positions":
            total += _keep([Ref(node.name, 1)], types, storage, seen)
        elif name == "result":
            total += _keep([Ref(node.name, i) for i in range(len(node.results))], types, storage, seen)
        elif not found.bilinear or (wanting & set(found.saves)) - {name}:
            total += _keep(given.get(name, []), types, storage, seen)
    return total


def _keep(
    refs: Iterable[Ref], types: Mapping[Ref, TensorType], storage: Mapping[Ref, Ref], seen: set[Ref]
) -> int:
    fresh = {storage[ref] for ref in refs} - seen
    seen |= fresh
    return sum(type_bytes(types[ref]) for ref in fresh)


def _working_bytes(graph: Graph, types: Mapping[Ref, TensorType]) -> int:
    storage = _storage(graph)
    variables = {Ref(v.name) for v in graph.variables}
    last: dict[Ref, int] = {Ref(i.name): -1 for i in graph.inputs}
    made: dict[Ref, int] = dict.fromkeys(last, -1)
    for index, node in enumerate(graph.nodes):
        for ref in (*node.refs(), *(Ref(node.name, i) for i in range(len(node.results)))):
            owner = storage[ref]
            made.setdefault(owner, index)
            last[owner] = index
    for ref in graph.outputs:
        last[storage[ref]] = len(graph.nodes)
    change = [0] * (len(graph.nodes) + 3)
    for owner, index in made.items():
        if owner not in variables:
            change[index + 1] += type_bytes(types[owner])
            change[last[owner] + 2] -= type_bytes(types[owner])
    peak = alive = 0
    for step in change:
        alive += step
        peak = max(peak, alive)
    return peak
