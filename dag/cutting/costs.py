"""What nodes cost: FLOPs and bytes, by formula from shapes (the workload estimator of FusionLLM, arXiv
2410.12707, section 3.4; it times operators, we count them, so that a graph can be placed before it has run anywhere).

FLOPs: a product of (m, k) and (k, n) is 2 m k n; backward repeats it once for each factor that needs a gradient, which
makes the usual 2 to 1 (Kaplan et al., arXiv 2001.08361, section 2.1); attention as in FlashAttention-2 (arXiv 2307.08691).
Bytes: what autograd keeps for backward, each tensor once, views counted as what they look at; what a stage needs of
them is in `fusion.dag.cutting.memory`. Seconds are no concern of this module: a device divides by what it was measured to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.dag.cutting.mode import read_in_training
from fusion.dag.cutting.stage import Stage
from fusion.dag.cutting.strides import PARTS, Gaps, view_gaps
from fusion.dag.ir.dims import bind, bind_most
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DTYPE_BYTES, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import spec
from fusion.dag.ir.opset_contract import leads
from fusion.dag.ir.opset_shapes import broadcast, is_float, promote
from fusion.dag.ir.opset_spec import Call, Family, OpSpec, elements, plain

# Views that change the order of elements in memory: a reshape of what they give has to copy.
_REORDER = frozenset(
    {"aten.transpose.int", "aten.permute", "aten.t", "aten.numpy_T", "aten.expand", "aten.expand_as"}
)
_COPY_IF_REORDERED = frozenset(
    {"aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten.using_ints", "aten.contiguous"}
)
# Families that want what they read in full, one number after the other: an expanded tensor is copied for them.
_READ_IN_FULL = frozenset({"contraction", "attention", "convolution", "norm", "reduction"})
# What gives a part of what it reads: the gradient of that is of the whole, however little memory an expanded tensor takes.
_PARTS = PARTS | frozenset({
    "aten.index.Tensor", "aten.index_select", "aten.gather", "aten.embedding",
    "aten.constant_pad_nd",
})  # fmt: skip
_ATTENTION = frozenset({
    "aten.scaled_dot_product_attention", "fusion.source_attention", "fusion.dropout_attention",
})  # fmt: skip
_CONVOLUTIONS = frozenset({
    "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv_transpose1d", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
})  # fmt: skip
# How often these write out something of the size of their first argument.
_COPIES = {"aten.logsumexp": 1, "aten.roll": 1, "aten.binary_cross_entropy_with_logits": 2}
# Reductions that compute in the dtype of their result.
_REDUCED_IN = frozenset({
    "aten.sum", "aten.sum.dim_IntList", "aten.mean", "aten.mean.dim", "aten.prod", "aten.prod.dim_int", "aten.linalg_vector_norm",
    "aten.cumsum", "aten.cumprod", "aten.logsumexp",
})  # fmt: skip
_RECURRENCES = frozenset({"fusion.recurrence", "fusion.cached_recurrence"})
_SCORES = 2  # times that they are there at once: with their softmax
_STATES = 3  # the same: with what is read of a state, and what is added to it
# Of a value, however much of it is ever made: sums of bytes are exact, or near enough.
MAX_BOUND_ELEMENTS = 2**56
FLOAT32_BYTES = DTYPE_BYTES["float32"]
# What processors have no convolution for that reads its windows where they lie: all of them are written out first.
_WRITTEN_OUT = frozenset({"float64", "float16"})


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """Of one node and one microbatch. Sums over nodes are meaningful: what several nodes share is counted at the first."""

    family: Family
    forward_flops: int
    backward_flops: int
    moved_bytes: int  # read and written by the forward pass: what bounds the time of nodes with few FLOPs
    drawn_elements: int  # of masks of dropout
    trainable: int  # elements of the variables that no earlier node reads and an optimizer updates
    trainable_tensors: int  # how many these are


def type_bytes(type_: TensorType) -> int:
    """Of a type whose dimensions are plain integers."""
    return elements(type_) * DTYPE_BYTES[type_.dtype]


def bound_types(graph: Graph, sizes: Mapping[str, int], *, most: bool = False) -> dict[Ref, TensorType]:
    """The type of every value where each symbol has the size given, or, for `most`, with dimensions as large as they may be where
    it has that size at most. GraphError on a symbol without a size, and on a value of more than MAX_BOUND_ELEMENTS."""
    bound, found = bind_most if most else bind, dict[Ref, TensorType]()
    for ref, type_ in graph.types.items():
        found[ref] = replace(type_, shape=tuple(max(0, bound(d, sizes)) for d in type_.shape))
        if elements(found[ref]) > MAX_BOUND_ELEMENTS:
            raise GraphError(f"{ref.name:.80} is of more than {MAX_BOUND_ELEMENTS} elements")
    return found


def differentiable(graph: Graph, given: Iterable[Ref] = ()) -> frozenset[Ref]:
    """The floating values that depend on a trainable parameter, or on one of the inputs `given`, through ops that have a
    gradient."""
    start = (v for v in graph.variables if v.trainable and v.kind == "parameter" and "float" in v.type.dtype)
    found = {*given, *(Ref(v.name) for v in start)}
    for node in graph.nodes:
        if spec(node.op).differentiable and any(ref in found for ref in read_in_training(node)):
            found.update(Ref(node.name, i) for i, t in enumerate(node.results) if "float" in t.dtype)
    return frozenset(found)


def with_gradient(graph: Graph) -> frozenset[Ref]:
    """Those of `differentiable` that a gradient of the outputs comes back to: not what is read only behind a detach, or by an
    op that has none, as that of a backbone which runs under torch.no_grad."""
    able = differentiable(graph)
    found = {ref for ref in graph.outputs if ref in able}
    for node in reversed(graph.nodes):
        if spec(node.op).differentiable and any(Ref(node.name, i) in found for i in range(len(node.results))):
            found.update(ref for ref in read_in_training(node) if ref in able)
    return frozenset(found)


def cast_once(graph: Graph) -> frozenset[Ref]:
    """The casts of trained float32 parameters to half precision: a plane makes them once a step, not for each microbatch."""
    trained = {
        Ref(v.name)
        for v in graph.variables
        if v.trainable and v.kind == "parameter" and v.type.dtype == "float32"
    }
    return frozenset(
        Ref(node.name)
        for node in graph.nodes
        if node.op == "aten.to.dtype"
        and node.args[0] in trained
        and node.results[0].dtype in ("bfloat16", "float16")
    )


def node_costs(
    graph: Graph, sizes: Mapping[str, int], needing: frozenset[Ref] | None = None, *, most: bool = False
) -> tuple[NodeCost, ...]:
    """The cost of each node, in order, where each symbol has the size given; `needing` are the values that get a
    gradient (default: those that depend on a trainable variable). `most`: no less than it costs with any data, and sizes up to
    those given. GraphError on a symbol without a size."""
    types = bound_types(graph, sizes, most=most)
    needing = differentiable(graph) if needing is None else needing
    once = cast_once(graph)
    variables = {v.name: v for v in graph.variables}
    costs = []
    for node in graph.nodes:
        found = spec(node.op)
        call = found.call(node.args, types)
        call = found.worst(call) if most else call
        results = tuple(types[Ref(node.name, i)] for i in range(len(node.results)))
        flops = found.flops(call, results)
        read = [variables.pop(r.name) for r in node.refs() if r.name in variables]
        trained = [v for v in read if v.trainable and v.kind == "parameter"]
        output = sum(map(type_bytes, results))
        costs.append(
            NodeCost(
                family=found.family,
                forward_flops=flops,
                backward_flops=int(flops * _backward_ratio(found, node, needing)),
                moved_bytes=0
                if found.family == "view" or Ref(node.name) in once
                else output + _read_bytes(found, call, results),
                drawn_elements=_drawn(found, call, results),
                trainable=sum(elements(types[Ref(v.name)]) for v in trained),
                trainable_tensors=len(trained),
            )
        )
    return tuple(costs)


def stage_costs(stage: Stage, sizes: Mapping[str, int], *, most: bool = False) -> tuple[NodeCost, ...]:
    """The same of one stage, whose inputs from other stages get gradients."""
    given = [Ref(edge.name) for edge in stage.receives if edge.needs_gradient]
    return node_costs(stage.graph, sizes, differentiable(stage.graph, given), most=most)


def _drawn(found: OpSpec, call: Call, results: Sequence[TensorType]) -> int:
    """Each element that dropout may drop: of its result, or of the probabilities of attention."""
    if found.name == "fusion.dropout":
        return elements(results[0])
    if found.name == "fusion.dropout_attention":
        rows = TensorType(results[0].shape[:-1], results[0].dtype)
        return elements(rows) * plain(call["key"].shape[-2])
    return 0


def storages(graph: Graph) -> dict[Ref, Ref]:
    """For each value the value whose memory it looks at: its own, or for a view that of what it is a view of."""
    owner: dict[Ref, Ref] = {ref: ref for ref in graph.types}
    reordered, gaps = set[Ref](), dict[Ref, Gaps]()
    for node in graph.nodes:
        source = next(node.refs(), None)
        if spec(node.op).family != "view" or source is None or node.op == "aten.clone":
            continue
        copies, moved = node.op in _COPY_IF_REORDERED, node.op in _REORDER or source in reordered
        call = spec(node.op).call(node.args, graph.types)
        for i, type_ in enumerate(node.results):
            result = Ref(node.name, i)
            found = None if moved else view_gaps(call, type_.shape, gaps.get(source, frozenset()))
            if found is None and copies:
                continue
            owner[result] = owner.get(source, source)
            if found is None:
                reordered.add(result)
            elif found:
                gaps[result] = found
    return owner


def stashed(
    node: Node, types: Mapping[Ref, TensorType], needing: frozenset[Ref], storage: Mapping[Ref, Ref]
) -> tuple[int, frozenset[Ref]]:
    """What autograd keeps of a node for its backward pass: bytes that are this node's alone, and the values, by
    `storage`, that other nodes may keep too."""
    found = spec(node.op)
    given = _given(found, node)
    wanting = {name for name, refs in given.items() if any(r in needing for r in refs)}
    if not wanting or not found.differentiable:
        return 0, frozenset()
    own, values = 0, set[Ref]()
    if node.op == "aten.scaled_dot_product_attention":
        own += _scores_bytes(found.call(node.args, types), types[Ref(node.name)], "attn_mask" in wanting)
    spread = _spread_bytes(found.call(node.args, types)) if node.op == "aten.matmul" else {}
    for name in found.saves:
        if name == "copy":
            own += type_bytes(types[next(node.refs())])
        elif name == "scores":
            length = plain(types[given["key"][0]].shape[-2])
            rows = elements(types[Ref(node.name)]) // max(1, plain(types[Ref(node.name)].shape[-1]))
            own += 3 * rows * length * DTYPE_BYTES[types[Ref(node.name)].dtype]
        elif name == "max_indices":
            own += DTYPE_BYTES["int64"] * elements(types[Ref(node.name)])
        elif name == "positions":
            values.add(storage[Ref(node.name, 1)])
        elif name == "result":
            values.update(storage[Ref(node.name, i)] for i in range(len(node.results)))
        elif not found.bilinear or (wanting & set(found.saves)) - {name}:
            own += spread.get(name, 0)
            values.update(storage[ref] for ref in given.get(name, []))
    return own, frozenset(values)


def scratch_bytes(
    node: Node,
    types: Mapping[Ref, TensorType],
    storage: Mapping[Ref, Ref],
    needing: frozenset[Ref] = frozenset(),
) -> int:
    """What a node takes while it runs, beside what it reads and gives: expanded tensors in full, operands in another dtype, scores
    of attention, states, windows of convolutions. `needing`: the values that get a gradient."""
    given, cast = _scratch_bytes(node, types, storage, needing), _cast_bytes(node, types)
    # What these write out they read from an expanded tensor where it lies.
    return max(given, cast) if node.op in _COPIES else given + cast


def _cast_bytes(node: Node, types: Mapping[Ref, TensorType]) -> int:
    """Of operands in the dtype that an operator computes in, where they have another: PyTorch writes them out first on a CPU; and
    of what it writes out besides."""
    found, result = spec(node.op), types[Ref(node.name)]
    if found.family not in ("reduction", "pointwise") and node.op not in _COPIES:
        return 0
    call = found.call(node.args, types)
    if found.family == "reduction":
        operands, dtype = [call["self"]] if node.op in _REDUCED_IN else [], result.dtype
    elif found.family == "pointwise" and node.op != "aten.to.dtype":
        chosen = (v for name, v in call.values.items() if name not in ("condition", "mask"))
        operands = [v for v in chosen if isinstance(v, TensorType)]
        dtype = result.dtype if is_float(result.dtype) else promote(operands) if operands else ""
    else:
        operands, dtype = [], ""
    cast = (TensorType(t.shape, dtype) for t in operands if t.shape and t.dtype != dtype)
    whole = TensorType(call["self"].shape, result.dtype) if node.op in _COPIES else result
    return sum(map(type_bytes, cast)) + _COPIES.get(node.op, 0) * type_bytes(whole)


def _scratch_bytes(
    node: Node, types: Mapping[Ref, TensorType], storage: Mapping[Ref, Ref], needing: frozenset[Ref]
) -> int:
    found = spec(node.op)
    if node.op in _PARTS:
        whole = next(node.refs())
        expanded = type_bytes(types[whole]) > type_bytes(types[storage[whole]])
        return type_bytes(types[whole]) if expanded and whole in needing else 0
    if found.family not in _READ_IN_FULL and not node.op.startswith(("aten.upsample", "aten.diff")):
        return 0
    copied = sum(
        type_bytes(types[ref])
        for name, refs in _given(found, node).items()
        for ref in refs
        if name != "attn_mask" and type_bytes(types[ref]) > type_bytes(types[storage[ref]])
    )
    if node.op == "aten.matmul":
        return copied + sum(_spread_bytes(found.call(node.args, types)).values())
    if node.op in _ATTENTION:
        call = found.call(node.args, types)
        learned = any(ref in needing for ref in _given(found, node).get("attn_mask", []))
        copied += sum(_spread_bytes(call).values())
        return copied + _SCORES * _scores_bytes(call, types[Ref(node.name)], learned)
    if node.op in _RECURRENCES:
        call = found.call(node.args, types)
        (batch, heads, _, read), width = call["value"].shape, call["key"].shape[3]
        return copied + _STATES * FLOAT32_BYTES * plain(batch) * plain(heads) * plain(width) * plain(read)
    if node.op in _CONVOLUTIONS and types[Ref(node.name)].dtype in _WRITTEN_OUT:
        return copied + _windows_bytes(found.call(node.args, types), types[Ref(node.name)])
    return copied


def _windows_bytes(call: Call, result: TensorType) -> int:
    """Of the windows of a convolution, one group of channels at a time: those that the places of its result see, or, transposed,
    those that the places of its input write."""
    x, weight = call["input"], call["weight"]
    places, dims = x if "output_padding" in call.values else result, len(weight.shape) - 2
    lead, window = places.shape[: -dims - 1], TensorType(weight.shape[1:], weight.dtype)
    return elements(TensorType((*lead, *places.shape[-dims:]), x.dtype)) * type_bytes(window)


def _scores_bytes(call: Call, result: TensorType, learned: bool) -> int:
    """Of attention that no kernel computes piece by piece: with dropout, of tensors that do not fit one, or with a mask that does
    not or is `learned`."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    mask = call.values.get("attn_mask")
    fits = mask is None or (len(mask.shape) in (2, 4) and not learned)
    if call.op != "fusion.dropout_attention" and {len(query), len(key), len(value)} == {4} and fits:
        alike = len(set(leads(call, call.values.get("enable_gqa", True)))) == 1
        if alike and query[3] == value[3]:
            return 0
    rows = elements(TensorType(result.shape[:-1], result.dtype))
    return rows * plain(key[-2]) * max(FLOAT32_BYTES, DTYPE_BYTES[result.dtype])


def _spread_bytes(call: Call) -> dict[str, int]:
    """By parameter, what a product copies of a factor whose matrices go with several of the other's each, where it has several: a
    single one is read where it lies."""
    if call.op == "aten.matmul":
        names: tuple[str, ...] = ("self", "other")
        lead = [call[name].shape[:-2] for name in names]
    else:
        names = ("query", "key", "value")
        lead = leads(call, call.values.get("enable_gqa", True))
    full = broadcast(call, *lead)
    found = {}
    for name, own in zip(names, lead, strict=True):
        own = (1,) * (len(full) - len(own)) + own
        if own != full and any(plain(d) > 1 for d in own):
            matrix = TensorType((*full, *call[name].shape[-2:]), call[name].dtype)
            found[name] = type_bytes(matrix)
    return found


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
    shares = found.reads(call)
    if not shares:
        return sum(map(type_bytes, call.tensors()))
    given = ((name, value) for name, value in call.values.items() if isinstance(value, TensorType))
    return sum(int(type_bytes(value) * shares.get(name, 1.0)) for name, value in given)
