"""The cost of nodes: FLOPs and bytes, by formula from shapes (the workload estimator of FusionLLM, arXiv
2410.12707, section 3.4; it times operators, we count, so that a graph can be placed before it has run).

FLOPs: a product of (m, k) and (k, n) is 2 m k n; backward repeats it for each factor that needs a gradient, which
is the usual ratio of 2 to 1 (Kaplan et al., arXiv 2001.08361, section 2.1); attention as in FlashAttention-2 (arXiv 2307.08691).
Bytes: what autograd saves for backward, each tensor once, views counted as their base; the sum for a stage is in
`fusion.dag.cutting.memory`. Seconds follow from the measured speeds of a device, elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.dag.cutting.mode import read_in_training
from fusion.dag.cutting.stage import Stage
from fusion.dag.cutting.strides import PARTS, Gaps, view_gaps
from fusion.dag.ir.dims import bind, bind_upper_bound
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DTYPE_BYTES, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import spec
from fusion.dag.ir.opset_contract import leads
from fusion.dag.ir.opset_shapes import broadcast, is_float, promote
from fusion.dag.ir.opset_spec import Call, Family, OpSpec, elements, plain

# Views that change the order of elements in memory: a reshape of the result has to copy.
_REORDER = frozenset(
    {"aten.transpose.int", "aten.permute", "aten.t", "aten.numpy_T", "aten.expand", "aten.expand_as"}
)
_COPY_IF_REORDERED = frozenset(
    {"aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten.using_ints", "aten.contiguous"}
)
# Families that need dense operands: an expanded tensor is copied for them.
_NEED_DENSE = frozenset({"contraction", "attention", "convolution", "norm", "reduction"})
# Ops whose result is a part of their operand: its gradient is dense and of full size, even if the operand is expanded.
_SELECTIONS = PARTS | frozenset({
    "aten.index.Tensor", "aten.index_select", "aten.gather", "aten.embedding",
    "aten.constant_pad_nd",
})  # fmt: skip
_ATTENTION = frozenset({
    "aten.scaled_dot_product_attention", "fusion.source_attention", "fusion.dropout_attention",
})  # fmt: skip
_CONVOLUTIONS = frozenset({
    "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv_transpose1d", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
})  # fmt: skip
# Temporaries of the size of the first argument.
_COPIES = {"aten.logsumexp": 1, "aten.roll": 1, "aten.binary_cross_entropy_with_logits": 2}
# Reductions that cast their operand to the dtype of the result.
_REDUCED_IN_RESULT_DTYPE = frozenset({
    "aten.sum", "aten.sum.dim_IntList", "aten.mean", "aten.mean.dim", "aten.prod", "aten.prod.dim_int", "aten.linalg_vector_norm",
    "aten.cumsum", "aten.cumprod", "aten.logsumexp",
})  # fmt: skip
_RECURRENCES = frozenset({"fusion.recurrence", "fusion.cached_recurrence"})
_SCORE_COPIES = 2  # copies of the scores alive at once: with their softmax
_STATE_COPIES = 3  # the same for states: with the value read from one, and the update
# Of one value: keeps sums of bytes exact, or nearly so, in float64.
MAX_BOUND_ELEMENTS = 2**56
FLOAT32_BYTES = DTYPE_BYTES["float32"]
# Dtypes in which CPUs convolve by im2col: all windows are written out first.
_UNFOLDED = frozenset({"float64", "float16"})


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """The cost of one node for one microbatch. Costs may be summed: what several nodes share is counted at the first."""

    family: Family
    forward_flops: int
    backward_flops: int
    moved_bytes: int  # read and written by the forward pass; bounds the time of nodes with few FLOPs
    drawn_elements: int  # of masks of dropout
    trainable: int  # elements of the trainable variables that no earlier node reads
    trainable_tensors: int  # the number of these variables


def type_bytes(type_: TensorType) -> int:
    """Bytes of a type whose dimensions are integers."""
    return elements(type_) * DTYPE_BYTES[type_.dtype]


def bound_types(
    graph: Graph, sizes: Mapping[str, int], *, upper_bound: bool = False
) -> dict[Ref, TensorType]:
    """The type of every value with each symbol bound to its size, or, for `upper_bound`, with bounds of every dimension for
    sizes up to these. GraphError on a symbol without a size, and on a value of more than MAX_BOUND_ELEMENTS."""
    bound, types = bind_upper_bound if upper_bound else bind, dict[Ref, TensorType]()
    for ref, type_ in graph.types.items():
        types[ref] = replace(type_, shape=tuple(max(0, bound(d, sizes)) for d in type_.shape))
        if elements(types[ref]) > MAX_BOUND_ELEMENTS:
            raise GraphError(f"{ref.name:.80} is of more than {MAX_BOUND_ELEMENTS} elements")
    return types


def differentiable(graph: Graph, inputs: Iterable[Ref] = ()) -> frozenset[Ref]:
    """The floating-point values that depend on a trainable parameter, or on one of `inputs`, through differentiable ops."""
    parameters = (
        v for v in graph.variables if v.trainable and v.kind == "parameter" and "float" in v.type.dtype
    )
    values = {*inputs, *(Ref(v.name) for v in parameters)}
    for node in graph.nodes:
        if spec(node.op).differentiable and any(ref in values for ref in read_in_training(node)):
            values.update(Ref(node.name, i) for i, t in enumerate(node.results) if "float" in t.dtype)
    return frozenset(values)


def with_gradient(graph: Graph) -> frozenset[Ref]:
    """Those of `differentiable` that get a gradient from the outputs: not those read only before a detach or an op without a
    gradient, as of a backbone under torch.no_grad."""
    candidates = differentiable(graph)
    values = {ref for ref in graph.outputs if ref in candidates}
    for node in reversed(graph.nodes):
        if spec(node.op).differentiable and any(
            Ref(node.name, i) in values for i in range(len(node.results))
        ):
            values.update(ref for ref in read_in_training(node) if ref in candidates)
    return frozenset(values)


def cast_once(graph: Graph) -> frozenset[Ref]:
    """The casts of trained float32 parameters to half precision, which a plane computes once a step, not for each microbatch."""
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
    graph: Graph,
    sizes: Mapping[str, int],
    needs_gradient: frozenset[Ref] | None = None,
    *,
    upper_bound: bool = False,
) -> tuple[NodeCost, ...]:
    """The cost of each node, in order, with each symbol bound to its size; `needs_gradient` are the values that get a gradient
    (default: those that depend on a trainable variable). `upper_bound`: an upper bound for any data and for sizes up to these.
    GraphError on a symbol without a size."""
    types = bound_types(graph, sizes, upper_bound=upper_bound)
    needs_gradient = differentiable(graph) if needs_gradient is None else needs_gradient
    casts = cast_once(graph)
    variables = {v.name: v for v in graph.variables}
    costs = []
    for node in graph.nodes:
        op_spec = spec(node.op)
        call = op_spec.call(node.args, types)
        call = op_spec.worst(call) if upper_bound else call
        results = tuple(types[Ref(node.name, i)] for i in range(len(node.results)))
        flops = op_spec.flops(call, results)
        new_variables = [variables.pop(r.name) for r in node.refs() if r.name in variables]
        trained = [v for v in new_variables if v.trainable and v.kind == "parameter"]
        result_bytes = sum(map(type_bytes, results))
        costs.append(
            NodeCost(
                family=op_spec.family,
                forward_flops=flops,
                backward_flops=int(flops * _backward_ratio(op_spec, node, needs_gradient)),
                moved_bytes=0
                if op_spec.family == "view" or Ref(node.name) in casts
                else result_bytes + _read_bytes(op_spec, call, results),
                drawn_elements=_drawn_elements(op_spec, call, results),
                trainable=sum(elements(types[Ref(v.name)]) for v in trained),
                trainable_tensors=len(trained),
            )
        )
    return tuple(costs)


def stage_costs(stage: Stage, sizes: Mapping[str, int], *, upper_bound: bool = False) -> tuple[NodeCost, ...]:
    """`node_costs` of one stage, whose inputs from other stages get gradients."""
    given = [Ref(edge.name) for edge in stage.receives if edge.needs_gradient]
    return node_costs(stage.graph, sizes, differentiable(stage.graph, given), upper_bound=upper_bound)


def _drawn_elements(op_spec: OpSpec, call: Call, results: Sequence[TensorType]) -> int:
    """The random numbers that dropout draws: one for each element of its result, or of the weights of attention."""
    if op_spec.name == "fusion.dropout":
        return elements(results[0])
    if op_spec.name == "fusion.dropout_attention":
        rows = TensorType(results[0].shape[:-1], results[0].dtype)
        return elements(rows) * plain(call["key"].shape[-2])
    return 0


def storages(graph: Graph) -> dict[Ref, Ref]:
    """For each value the value whose storage it uses: itself, or the base of a view."""
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
            result_gaps = None if moved else view_gaps(call, type_.shape, gaps.get(source, frozenset()))
            if result_gaps is None and copies:
                continue
            owner[result] = owner.get(source, source)
            if result_gaps is None:
                reordered.add(result)
            elif result_gaps:
                gaps[result] = result_gaps
    return owner


def stashed(
    node: Node, types: Mapping[Ref, TensorType], needs_gradient: frozenset[Ref], storage: Mapping[Ref, Ref]
) -> tuple[int, frozenset[Ref]]:
    """What autograd saves of a node for its backward pass: bytes of this node alone, and the values, by `storage`, that other
    nodes may save too."""
    op_spec = spec(node.op)
    arguments = _refs_by_parameter(op_spec, node)
    differentiated = {name for name, refs in arguments.items() if any(r in needs_gradient for r in refs)}
    if not differentiated or not op_spec.differentiable:
        return 0, frozenset()
    own_bytes, values = 0, set[Ref]()
    if node.op == "aten.scaled_dot_product_attention":
        own_bytes += _scores_bytes(
            op_spec.call(node.args, types), types[Ref(node.name)], "attn_mask" in differentiated
        )
    copies = _broadcast_copies(op_spec.call(node.args, types)) if node.op == "aten.matmul" else {}
    for name in op_spec.saves:
        if name == "copy":
            own_bytes += type_bytes(types[next(node.refs())])
        elif name == "scores":
            length = plain(types[arguments["key"][0]].shape[-2])
            rows = elements(types[Ref(node.name)]) // max(1, plain(types[Ref(node.name)].shape[-1]))
            own_bytes += 3 * rows * length * DTYPE_BYTES[types[Ref(node.name)].dtype]
        elif name == "max_indices":
            own_bytes += DTYPE_BYTES["int64"] * elements(types[Ref(node.name)])
        elif name == "positions":
            values.add(storage[Ref(node.name, 1)])
        elif name == "result":
            values.update(storage[Ref(node.name, i)] for i in range(len(node.results)))
        elif not op_spec.bilinear or (differentiated & set(op_spec.saves)) - {name}:
            own_bytes += copies.get(name, 0)
            values.update(storage[ref] for ref in arguments.get(name, []))
    return own_bytes, frozenset(values)


def scratch_bytes(
    node: Node,
    types: Mapping[Ref, TensorType],
    storage: Mapping[Ref, Ref],
    needs_gradient: frozenset[Ref] = frozenset(),
) -> int:
    """Temporary bytes of a node while it runs, beside operands and results: dense copies of expanded tensors, casts of operands,
    scores of attention, states, windows of convolutions. `needs_gradient`: the values that get a gradient."""
    scratch, cast = _scratch_bytes(node, types, storage, needs_gradient), _cast_bytes(node, types)
    # These read an expanded tensor in place.
    return max(scratch, cast) if node.op in _COPIES else scratch + cast


def _cast_bytes(node: Node, types: Mapping[Ref, TensorType]) -> int:
    """Bytes of operands that PyTorch casts on a CPU to the dtype that an operator computes in, and of its other temporaries."""
    op_spec, result = spec(node.op), types[Ref(node.name)]
    if op_spec.family not in ("reduction", "pointwise") and node.op not in _COPIES:
        return 0
    call = op_spec.call(node.args, types)
    if op_spec.family == "reduction":
        operands, dtype = [call["self"]] if node.op in _REDUCED_IN_RESULT_DTYPE else [], result.dtype
    elif op_spec.family == "pointwise" and node.op != "aten.to.dtype":
        chosen = (v for name, v in call.values.items() if name not in ("condition", "mask"))
        operands = [v for v in chosen if isinstance(v, TensorType)]
        dtype = result.dtype if is_float(result.dtype) else promote(operands) if operands else ""
    else:
        operands, dtype = [], ""
    cast = (TensorType(t.shape, dtype) for t in operands if t.shape and t.dtype != dtype)
    whole = TensorType(call["self"].shape, result.dtype) if node.op in _COPIES else result
    return sum(map(type_bytes, cast)) + _COPIES.get(node.op, 0) * type_bytes(whole)


def _scratch_bytes(
    node: Node, types: Mapping[Ref, TensorType], storage: Mapping[Ref, Ref], needs_gradient: frozenset[Ref]
) -> int:
    op_spec = spec(node.op)
    if node.op in _SELECTIONS:
        source = next(node.refs())
        expanded = type_bytes(types[source]) > type_bytes(types[storage[source]])
        return type_bytes(types[source]) if expanded and source in needs_gradient else 0
    if op_spec.family not in _NEED_DENSE and not node.op.startswith(("aten.upsample", "aten.diff")):
        return 0
    copied = sum(
        type_bytes(types[ref])
        for name, refs in _refs_by_parameter(op_spec, node).items()
        for ref in refs
        if name != "attn_mask" and type_bytes(types[ref]) > type_bytes(types[storage[ref]])
    )
    if node.op == "aten.matmul":
        return copied + sum(_broadcast_copies(op_spec.call(node.args, types)).values())
    if node.op in _ATTENTION:
        call = op_spec.call(node.args, types)
        learned = any(ref in needs_gradient for ref in _refs_by_parameter(op_spec, node).get("attn_mask", []))
        copied += sum(_broadcast_copies(call).values())
        return copied + _SCORE_COPIES * _scores_bytes(call, types[Ref(node.name)], learned)
    if node.op in _RECURRENCES:
        call = op_spec.call(node.args, types)
        (batch, heads, _, read), width = call["value"].shape, call["key"].shape[3]
        return copied + _STATE_COPIES * FLOAT32_BYTES * plain(batch) * plain(heads) * plain(width) * plain(
            read
        )
    if node.op in _CONVOLUTIONS and types[Ref(node.name)].dtype in _UNFOLDED:
        return copied + _windows_bytes(op_spec.call(node.args, types), types[Ref(node.name)])
    return copied


def _windows_bytes(call: Call, result: TensorType) -> int:
    """Bytes of the im2col matrix of a convolution for one group of channels: a window for each position of its result, or of its
    input if transposed."""
    x, weight = call["input"], call["weight"]
    places, dims = x if "output_padding" in call.values else result, len(weight.shape) - 2
    lead, window = places.shape[: -dims - 1], TensorType(weight.shape[1:], weight.dtype)
    return elements(TensorType((*lead, *places.shape[-dims:]), x.dtype)) * type_bytes(window)


def _scores_bytes(call: Call, result: TensorType, learned: bool) -> int:
    """Bytes of the scores of attention without a fused kernel: with dropout, with shapes or a mask that no kernel supports, or
    with a `learned` mask; else 0."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    mask = call.values.get("attn_mask")
    fits = mask is None or (len(mask.shape) in (2, 4) and not learned)
    if call.op != "fusion.dropout_attention" and {len(query), len(key), len(value)} == {4} and fits:
        same_batch = len(set(leads(call, call.values.get("enable_gqa", True)))) == 1
        if same_batch and query[3] == value[3]:
            return 0
    rows = elements(TensorType(result.shape[:-1], result.dtype))
    return rows * plain(key[-2]) * max(FLOAT32_BYTES, DTYPE_BYTES[result.dtype])


def _broadcast_copies(call: Call) -> dict[str, int]:
    """Bytes, by parameter, of the copies that a batched product makes to broadcast a factor; a single matrix is not copied."""
    if call.op == "aten.matmul":
        names: tuple[str, ...] = ("self", "other")
        lead = [call[name].shape[:-2] for name in names]
    else:
        names = ("query", "key", "value")
        lead = leads(call, call.values.get("enable_gqa", True))
    full = broadcast(call, *lead)
    copies = {}
    for name, batch in zip(names, lead, strict=True):
        batch = (1,) * (len(full) - len(batch)) + batch
        if batch != full and any(plain(d) > 1 for d in batch):
            matrix = TensorType((*full, *call[name].shape[-2:]), call[name].dtype)
            copies[name] = type_bytes(matrix)
    return copies


def _refs_by_parameter(op_spec: OpSpec, node: Node) -> dict[str, list[Ref]]:
    """The operands of a node, by parameter."""
    pairs = zip(op_spec.parameters, node.args, strict=True)
    return {
        p.name: [a for a in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(a, Ref)]
        for p, arg in pairs
    }


def _backward_ratio(op_spec: OpSpec, node: Node, needs_gradient: frozenset[Ref]) -> float:
    if not op_spec.differentiable:
        return 0.0
    share = op_spec.backward
    return sum(
        1.0 if share is None else share.get(name, 0.0)
        for name, refs in _refs_by_parameter(op_spec, node).items()
        for ref in refs
        if ref in needs_gradient
    )


def _read_bytes(op_spec: OpSpec, call: Call, results: tuple[TensorType, ...]) -> int:
    """Bytes that a node reads: for look-ups as many as they write, else those of its arguments."""
    if op_spec.family == "move" or op_spec.family == "make":
        return sum(map(type_bytes, results)) if op_spec.family == "move" else 0
    shares = op_spec.reads(call)
    if not shares:
        return sum(map(type_bytes, call.tensors()))
    tensors = ((name, value) for name, value in call.values.items() if isinstance(value, TensorType))
    return sum(int(type_bytes(value) * shares.get(name, 1.0)) for name, value in tensors)
