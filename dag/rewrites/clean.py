"""Drop what does not change a value: dead nodes, no-op casts and views, repeated nodes; write views and layers one way.

Sound for training and for serving: values and gradients stay what they were, and random draws keep their names.
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

# One function, whatever the strides (`view` needs some that fit, which dropping copies could take away) and whatever
# the sizes (`squeeze` would take away a batch of 1).
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
# Two calls with the same arguments are not the same value, or not without effect.
_IMPURE = frozenset({"fusion.dropout", "fusion.dropout_attention", "aten.batch_norm", KEEP})


def clean(graph: Graph) -> Graph:
    """The graph without the nodes that only pass on a value, are computed already, or that no output needs.
    The nodes that stay keep their names; inputs and variables stay."""
    types = dict(graph.types)
    same: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    seen: dict[object, Node] = {}
    made: dict[str, Node] = {}
    for node in graph.nodes:
        args = substitute(node.args, same)
        node = _canonical(node if args == node.args else replace(node, args=args), types, made)
        product = _rows_first(node, types, made)
        if product is not None:
            node, rows = product
            types[Ref(rows.name)] = rows.results[0]
            made[rows.name] = rows
            nodes.append(rows)
        ref = _passes_on(node, types)
        if ref is not None:
            same[Ref(node.name)] = ref
            continue
        key = (node.op, argument_key(node.args))
        twin = seen.get(key)
        if twin is not None:
            same.update({Ref(node.name, i): Ref(twin.name, i) for i in range(len(node.results))})
            continue
        if node.op not in _IMPURE:
            seen[key] = node
        made[node.name] = node
        nodes.append(node)
    outputs = tuple(same.get(ref, ref) for ref in graph.outputs)
    return without_dead_nodes(replace(graph, nodes=tuple(nodes), outputs=outputs))


def without_detach(graph: Graph) -> Graph:
    """The same of a graph of which no gradient is taken."""
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


def _canonical(node: Node, types: Types, made: Mapping[str, Node]) -> Node:
    """One way to write a reshape, over what a chain of them started from; a linear layer; constants that read no tensor."""
    if node.op in _RESHAPES:
        source = node.args[0]
        assert isinstance(source, Ref)
        before = made.get(source.name)
        if before is not None and before.op == "aten.reshape":
            source = before.args[0]
        return replace(node, op="aten.reshape", args=(source, _shape_argument(node.results[0])))
    if node.op == "aten.matmul":
        return _layer(node, types, made)
    make = _MAKES.get(node.op)
    if make is None:
        return node
    type_ = node.results[0]
    op, value = make(node)
    fill = () if value is None else (value,)
    return replace(node, op=op, args=(type_.shape, *fill, DType(type_.dtype)))


def _layer(node: Node, types: Types, made: Mapping[str, Node]) -> Node:
    """`aten.linear` for a product with a matrix that lies the other way round: to the library they are the same call."""
    given, other = node.args
    assert isinstance(given, Ref) and isinstance(other, Ref)
    turned = made.get(other.name)
    if turned is None or not _turns(turned, types) or len(types[given].shape) < 2:
        return node
    return replace(node, op="aten.linear", args=(given, turned.args[0], None))


def _rows_first(node: Node, types: Types, made: Mapping[str, Node]) -> tuple[Node, Node] | None:
    """Of a matrix times rows that lie the other way round, as Mamba has it, the same product turned, and that of the rows with
    the matrix: each row stands for a position there."""
    if node.op != "aten.matmul":
        return None
    matrix, other = node.args
    assert isinstance(matrix, Ref) and isinstance(other, Ref)
    turned, name = made.get(other.name), f"{node.name}_rows"
    if turned is None or turned.op != "aten.transpose.int" or Ref(name) in types:
        return None
    given, *ends = turned.args
    assert isinstance(given, Ref)
    rank = len(types[given].shape)
    if {end % rank for end in ends if isinstance(end, int)} != {rank - 1, rank - 2}:
        return None
    if len(types[matrix].shape) != 2 or any(isinstance(size, Poly) for size in types[matrix].shape):
        return None
    args = (given, matrix, None)
    rows = Node(name, "aten.linear", args, infer("aten.linear", args, types))
    return replace(node, op="aten.transpose.int", args=(Ref(name), -2, -1)), rows


def _turns(node: Node, types: Types) -> bool:
    """Whether it is a matrix the other way round."""
    match node.op, *node.args:
        case (("aten.t" | "aten.numpy_T"), Ref() as matrix):
            return len(types[matrix].shape) == 2
        case "aten.transpose.int", Ref() as matrix, int(one), int(other):
            return len(types[matrix].shape) == 2 and (one - other) % 2 == 1
        case "aten.permute", Ref(), (int(first), int(second)):  # what decompositions make of it
            return (first % 2, second % 2) == (1, 0)
    return False


def _shape_argument(type_: TensorType) -> tuple[Dim, ...]:
    """The shape; where a single dimension has symbols it is -1, so that running it needs no sizes."""
    if sum(isinstance(d, Poly) for d in type_.shape) == 1 and 0 not in type_.shape:
        return tuple(-1 if isinstance(d, Poly) else d for d in type_.shape)
    return type_.shape


# Only the type of their tensor argument counts: as constants they depend on nothing.
_MAKES: dict[str, Callable[[Node], tuple[str, Arg]]] = {
    "aten.new_ones": lambda _: ("aten.ones", None),
    "aten.ones_like": lambda _: ("aten.ones", None),
    "aten.new_zeros": lambda _: ("aten.zeros", None),
    "aten.zeros_like": lambda _: ("aten.zeros", None),
    "aten.new_full": lambda node: ("aten.full", node.args[2]),
    "aten.full_like": lambda node: ("aten.full", node.args[1]),
}


def _passes_on(node: Node, types: Types) -> Ref | None:
    """The argument that the node's only result equals, if it plainly does."""
    if len(node.results) != 1:
        return None
    first = node.args[0] if node.args else None
    if node.op == "aten.cat" and isinstance(first, tuple) and len(first) == 1:
        return first[0] if isinstance(first[0], Ref) else None
    if not isinstance(first, Ref) or types[first] != node.results[0]:
        return None
    return first if node.op in _COPIES | _SAME_IF_SAME_TYPE or _neutral(node) else None


def _neutral(node: Node) -> bool:
    """Whether the constant arguments make the op the identity, given that the types of argument and result agree."""
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
    """Equal for arguments that are the same constant: 1, 1.0 and True are not, nor are 0.0 and -0.0."""
    if isinstance(arg, tuple):
        return tuple(map(argument_key, arg))
    if isinstance(arg, float):
        return float, repr(arg)
    return (bool, arg) if isinstance(arg, bool) else arg
