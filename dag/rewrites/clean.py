"""Dead code elimination, common subexpressions, no-op casts and views, and canonical forms of views and layers.

Sound for training and for serving: values and gradients do not change, and random draws keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fusion.dag.cutting.references import substitute, without_dead_nodes
from fusion.dag.ir.dims import Dim, Poly
from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref, TensorType
from fusion.dag.ir.opset import infer
from fusion.dag.ir.opset_pointwise import BY_MODE, KEEP

Types = Mapping[Ref, TensorType]

# All become `reshape`: it needs no particular strides, which dropping copies could change under a `view`, and its result does
# not depend on sizes, as that of `squeeze` does for a batch of 1.
_RESHAPES = frozenset({
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze",
    "aten.squeeze.dims",
})  # fmt: skip
_COPIES = frozenset({"aten.alias", "aten.contiguous", "aten.clone"})
# Ops that return their argument whenever the result has its type. (A transpose of equal sizes is not among them.)
_SAME_IF_SAME_TYPE = frozenset({
    "aten.to.dtype", "aten.type_as", "aten.reshape", "aten.expand", "aten.expand_as", "aten.squeeze.dim",
    "aten.repeat", "aten.narrow",
})  # fmt: skip
# Equal calls have different values, or side effects.
_IMPURE = frozenset({"fusion.dropout", "fusion.dropout_attention", "aten.batch_norm", KEEP})


def clean(graph: Graph) -> Graph:
    """The graph without nodes that are identities, duplicates or dead. The other nodes keep their names; inputs and variables
    stay."""
    types = dict(graph.types)
    same: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    seen: dict[object, Node] = {}
    producers: dict[str, Node] = {}
    for node in graph.nodes:
        args = substitute(node.args, same)
        node = _canonical(node if args == node.args else replace(node, args=args), types, producers)
        product = _as_linear_of_rows(node, types, producers)
        if product is not None:
            node, rows = product
            types[Ref(rows.name)] = rows.results[0]
            producers[rows.name] = rows
            nodes.append(rows)
        ref = _identity_of(node, types)
        if ref is not None:
            same[Ref(node.name)] = ref
            continue
        key = (node.op, argument_key(node.args))
        duplicate = seen.get(key)
        if duplicate is not None:
            same.update({Ref(node.name, i): Ref(duplicate.name, i) for i in range(len(node.results))})
            continue
        if node.op not in _IMPURE:
            seen[key] = node
        producers[node.name] = node
        nodes.append(node)
    outputs = tuple(same.get(ref, ref) for ref in graph.outputs)
    return without_dead_nodes(replace(graph, nodes=tuple(nodes), outputs=outputs))


def without_detach(graph: Graph) -> Graph:
    """The graph without `aten.detach`, for one of which no gradient is taken."""
    same: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        args = substitute(node.args, same)
        if node.op == "aten.detach":
            [value] = args
            assert isinstance(value, Ref)
            same[Ref(node.name)] = value
        else:
            nodes.append(replace(node, args=args))
    return replace(graph, nodes=tuple(nodes), outputs=tuple(same.get(ref, ref) for ref in graph.outputs))


def _canonical(node: Node, types: Types, producers: Mapping[str, Node]) -> Node:
    """The canonical form of a reshape (of the first source of a chain), of a linear layer, and of constants (which read no tensor)."""
    if node.op in _RESHAPES:
        source = node.args[0]
        assert isinstance(source, Ref)
        before = producers.get(source.name)
        if before is not None and before.op == "aten.reshape":
            source = before.args[0]
        return replace(node, op="aten.reshape", args=(source, _shape_argument(node.results[0])))
    if node.op == "aten.matmul":
        return _as_linear(node, types, producers)
    make = _CONSTANTS.get(node.op)
    if make is None:
        return node
    type_ = node.results[0]
    op, value = make(node)
    fill = () if value is None else (value,)
    return replace(node, op=op, args=(type_.shape, *fill, DType(type_.dtype)))


def _as_linear(node: Node, types: Types, producers: Mapping[str, Node]) -> Node:
    """`aten.linear` for a product with a transposed matrix: the framework makes the same call of both."""
    rows, other = node.args
    assert isinstance(rows, Ref) and isinstance(other, Ref)
    transpose = producers.get(other.name)
    if transpose is None or not _is_transpose(transpose, types) or len(types[rows].shape) < 2:
        return node
    return replace(node, op="aten.linear", args=(rows, transpose.args[0], None))


def _as_linear_of_rows(node: Node, types: Types, producers: Mapping[str, Node]) -> tuple[Node, Node] | None:
    """For matrix @ rows^T, as Mamba has it: (rows @ matrix^T)^T as a transpose and a linear layer, in which each row is a
    position."""
    if node.op != "aten.matmul":
        return None
    matrix, other = node.args
    assert isinstance(matrix, Ref) and isinstance(other, Ref)
    transpose, name = producers.get(other.name), f"{node.name}_rows"
    if transpose is None or transpose.op != "aten.transpose.int" or Ref(name) in types:
        return None
    rows, *ends = transpose.args
    assert isinstance(rows, Ref)
    rank = len(types[rows].shape)
    if {end % rank for end in ends if isinstance(end, int)} != {rank - 1, rank - 2}:
        return None
    if len(types[matrix].shape) != 2 or any(isinstance(size, Poly) for size in types[matrix].shape):
        return None
    args = (rows, matrix, None)
    linear = Node(name, "aten.linear", args, infer("aten.linear", args, types))
    return replace(node, op="aten.transpose.int", args=(Ref(name), -2, -1)), linear


def _is_transpose(node: Node, types: Types) -> bool:
    """Whether the node transposes a matrix."""
    match node.op, *node.args:
        case (("aten.t" | "aten.numpy_T"), Ref() as matrix):
            return len(types[matrix].shape) == 2
        case "aten.transpose.int", Ref() as matrix, int(one), int(other):
            return len(types[matrix].shape) == 2 and (one - other) % 2 == 1
        case "aten.permute", Ref(), (int(first), int(second)):  # as decompositions write it
            return (first % 2, second % 2) == (1, 0)
    return False


def _shape_argument(type_: TensorType) -> tuple[Dim, ...]:
    """The shape, with -1 for a single symbolic dimension, so that running it needs no sizes."""
    if sum(isinstance(d, Poly) for d in type_.shape) == 1 and 0 not in type_.shape:
        return tuple(-1 if isinstance(d, Poly) else d for d in type_.shape)
    return type_.shape


# They read only the type of their tensor argument, so they are constants.
_CONSTANTS: dict[str, Callable[[Node], tuple[str, Arg]]] = {
    "aten.new_ones": lambda _: ("aten.ones", None),
    "aten.ones_like": lambda _: ("aten.ones", None),
    "aten.new_zeros": lambda _: ("aten.zeros", None),
    "aten.zeros_like": lambda _: ("aten.zeros", None),
    "aten.new_full": lambda node: ("aten.full", node.args[2]),
    "aten.full_like": lambda node: ("aten.full", node.args[1]),
}


def _identity_of(node: Node, types: Types) -> Ref | None:
    """The argument that the node's only result equals, if the node is an identity."""
    if len(node.results) != 1:
        return None
    first = node.args[0] if node.args else None
    if node.op == "aten.cat" and isinstance(first, tuple) and len(first) == 1:
        return first[0] if isinstance(first[0], Ref) else None
    if not isinstance(first, Ref) or types[first] != node.results[0]:
        return None
    return first if node.op in _COPIES | _SAME_IF_SAME_TYPE or _neutral(node) else None


def _neutral(node: Node) -> bool:
    """Whether constant arguments make the op the identity, given equal types of argument and result."""
    op, args = node.op, node.args
    if op == "aten.slice.Tensor":
        return args[4] == 1  # as long as its argument, so all of it
    if op == "aten.permute":
        rank = len(node.results[0].shape)
        return isinstance(args[1], tuple) and [d % rank for d in args[1] if isinstance(d, int)] == list(
            range(rank)
        )
    if op == "aten.dropout":
        return args[2] is False
    if op == "fusion.dropout":
        return args[1] == 0
    if op == BY_MODE:
        return args[0] == args[1]
    if op in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"):
        return _is_number(args[1], 1)
    if op in ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar"):
        # Not for floats: -0.0 + 0 is 0.0.
        return _is_number(args[1], 0) and "float" not in node.results[0].dtype
    return False


def _is_number(arg: Arg, value: int) -> bool:
    return type(arg) in (int, float) and arg == value


def argument_key(arg: Arg) -> object:
    """A key that is equal for equal constants; it tells 1, 1.0 and True apart, and 0.0 and -0.0."""
    if isinstance(arg, tuple):
        return tuple(map(argument_key, arg))
    if isinstance(arg, float):
        return float, repr(arg)
    return (bool, arg) if isinstance(arg, bool) else arg
