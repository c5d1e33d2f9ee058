"""Training in half precision with float32 weights: casts where products begin, as automatic mixed precision has them (Micikevicius
et al., arXiv 1710.03740; the sorts of operators are those of PyTorch's autocast).

Products and attention compute in half precision, and what they give stays in it, so that activations and gradients
cross between stages in two bytes. Norms, reductions, losses, powers and exponentials compute in float32, as does what
needs no gradient (rotary tables: positions are not exact in bfloat16), and what is given a number that half precision
does not hold. Anything else takes the dtype of what it reads, float32 where that differs. Variables stay float32:
they are the master weights, and their gradients are summed in float32.

The graph says all of it, so every owner and every plane rounds alike. A graph is a job's content: the precision needs no trust.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from typing import Literal

from fusion.dag.cutting.costs import differentiable
from fusion.dag.cutting.references import substitute
from fusion.dag.ir.graph import Arg, DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer, spec
from fusion.dag.ir.validation import MAX_NAME

Half = Literal["bfloat16", "float16"]

_HALF = frozenset({"contraction", "attention", "convolution"})  # families
_FULL = frozenset({"norm", "reduction"})
# Functions of one element that lose what half precision has of it, or leave its range.
_STEEP = frozenset(
    f"aten.{name}"
    for name in (
        "exp", "expm1", "log", "log1p", "log2", "log10", "exp2", "rsqrt", "reciprocal", "square", "softplus", "erfinv", "log_sigmoid",
        "sinh", "cosh", "tan", "asin", "acos", "acosh", "atanh", "erfc", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "addcdiv", "type_as",
    )
)  # fmt: skip
# Sorts of arguments that are values of elements; others are places and sizes, which no half precision has to hold.
_VALUES = frozenset({"number", "operand", "float"})
_FLOAT32 = "float32"
_LARGEST: dict[Half, float] = {"bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504.0}


def mixed_precision(graph: Graph, half: Half) -> Graph:
    """`graph` is in float32, with its loss; numbers of other floating dtypes are left as they are. Nodes keep their names."""
    return _Casts(graph, half).graph()


class _Casts:
    def __init__(self, graph: Graph, half: Half) -> None:
        self._old, self._half = graph, half
        self._learned = differentiable(graph)
        named: tuple[Input | Variable, ...] = (*graph.inputs, *graph.variables)
        self._types: dict[Ref, TensorType] = {Ref(v.name): v.type for v in named}
        self._taken = {*graph.input_names, *graph.variable_names, *graph.node_index}
        self._cast: dict[tuple[Ref, str], Ref] = {}
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        renamed: dict[Ref, Ref] = {}
        for node in self._old.nodes:
            wanted = self._wanted(node, renamed)
            given = {ref: self._as(renamed.get(ref, ref), wanted) for ref in node.refs()}
            self._add(replace(node, args=substitute(node.args, given)))
            if node.op == "aten.embedding" and Ref(node.name) in self._learned:
                # Looked up in the table as it is, which would cost more to cast than its few rows.
                renamed[Ref(node.name)] = self._as(Ref(node.name), self._half)
        outputs = tuple(self._as(ref, _FLOAT32) for ref in self._old.outputs)
        return replace(self._old, nodes=tuple(self._nodes), outputs=outputs)

    def _wanted(self, node: Node, renamed: dict[Ref, Ref]) -> str | None:
        """The floating dtype that a node reads; None: as it comes."""
        refs = list(node.refs())
        if node.op == "aten.embedding":
            return None
        found = spec(node.op)
        if found.family in _HALF:
            return self._half if any(ref in self._learned for ref in refs) else _FLOAT32
        if found.family in _FULL or found.loss or node.op in _STEEP:
            return _FLOAT32
        if found.family in ("pointwise", "move") and any(map(self._too_large, _numbers(node))):
            return _FLOAT32
        dtypes = {self._types[renamed.get(ref, ref)].dtype for ref in refs}
        return _FLOAT32 if {_FLOAT32, self._half} <= dtypes else None

    def _too_large(self, number: object) -> bool:
        """Whether half precision has no such number: with it PyTorch fills nothing, or with infinity."""
        return isinstance(number, int | float) and isfinite(number) and abs(number) > _LARGEST[self._half]

    def _as(self, ref: Ref, dtype: str | None) -> Ref:
        """The value in that dtype, if it is a number of one of our two."""
        have = self._types[ref].dtype
        if dtype is None or have == dtype or have not in (_FLOAT32, self._half):
            return ref
        # A weight has a cast for each reader: else a stage would send its weights to another that reads them too.
        shared = ref.name not in self._old.variable_names
        if shared and (ref, dtype) in self._cast:
            return self._cast[ref, dtype]
        name = f"{ref}:{dtype}"
        if name in self._taken or len(name) > MAX_NAME:
            name = next(
                f"cast_{i}" for i in range(len(self._taken), 1 << 62) if f"cast_{i}" not in self._taken
            )
        self._taken.add(name)
        args: tuple[Arg, ...] = (ref, DType(dtype))
        self._add(Node(name, "aten.to.dtype", args, ()))
        if shared:
            self._cast[ref, dtype] = Ref(name)
        return Ref(name)

    def _add(self, node: Node) -> None:
        results = infer(node.op, node.args, self._types)
        self._types.update({Ref(node.name, i): t for i, t in enumerate(results)})
        self._nodes.append(replace(node, results=results))


def _numbers(node: Node) -> Iterator[Arg]:
    """The arguments that stand for values of elements."""
    pairs = zip(spec(node.op).parameters, node.args, strict=True)
    return (arg for parameter, arg in pairs if parameter.type in _VALUES)
