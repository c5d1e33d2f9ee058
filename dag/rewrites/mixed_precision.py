"""Training in half precision with float32 weights: casts before products, as in automatic mixed precision (Micikevicius
et al., arXiv 1710.03740; operators are classified as in PyTorch's autocast).

Products and attention compute in half precision, and their results stay in it, so that activations and gradients
cross between stages in two bytes. Norms, reductions, losses, powers and exponentials compute in float32, as do values
without a gradient (rotary tables: positions are not exact in bfloat16), and ops with a constant out of the range of half
precision. Any other op computes in the dtype of its operands, float32 where these differ. Variables stay float32:
they are the master weights, and their gradients are summed in float32.

The casts are nodes of the graph, so every owner and every plane rounds alike, and the job's digest covers the precision.
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

_HALF_FAMILIES = frozenset({"contraction", "attention", "convolution"})
_FLOAT32_FAMILIES = frozenset({"norm", "reduction"})
# Pointwise functions that lose the precision of half precision, or leave its range.
_FLOAT32_OPS = frozenset(
    f"aten.{name}"
    for name in (
        "exp", "expm1", "log", "log1p", "log2", "log10", "exp2", "rsqrt", "reciprocal", "square", "softplus", "erfinv", "log_sigmoid",
        "sinh", "cosh", "tan", "asin", "acos", "acosh", "atanh", "erfc", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "addcdiv", "type_as",
    )
)  # fmt: skip
# Types of parameters that are values of elements; others are indices and sizes, which need not fit half precision.
_VALUES = frozenset({"number", "operand", "float"})
_FLOAT32 = "float32"
_LARGEST: dict[Half, float] = {"bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504.0}


def mixed_precision(graph: Graph, half: Half) -> Graph:
    """`graph`, which is in float32 and includes its loss, with casts; values of other floating dtypes are left as they are. Nodes
    keep their names."""
    return _Casts(graph, half).graph()


class _Casts:
    def __init__(self, graph: Graph, half: Half) -> None:
        self._old, self._half = graph, half
        self._differentiable = differentiable(graph)
        named: tuple[Input | Variable, ...] = (*graph.inputs, *graph.variables)
        self._types: dict[Ref, TensorType] = {Ref(v.name): v.type for v in named}
        self._taken = {*graph.input_names, *graph.variable_names, *graph.node_index}
        self._casts: dict[tuple[Ref, str], Ref] = {}
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        renamed: dict[Ref, Ref] = {}
        for node in self._old.nodes:
            dtype = self._wanted(node, renamed)
            operands = {ref: self._cast_to(renamed.get(ref, ref), dtype) for ref in node.refs()}
            self._add(replace(node, args=substitute(node.args, operands)))
            if node.op == "aten.embedding" and Ref(node.name) in self._differentiable:
                # The rows are cast, not the table, which has far more of them.
                renamed[Ref(node.name)] = self._cast_to(Ref(node.name), self._half)
        outputs = tuple(self._cast_to(ref, _FLOAT32) for ref in self._old.outputs)
        return replace(self._old, nodes=tuple(self._nodes), outputs=outputs)

    def _wanted(self, node: Node, renamed: dict[Ref, Ref]) -> str | None:
        """The floating dtype that a node computes in; None: that of its operands."""
        refs = list(node.refs())
        if node.op == "aten.embedding":
            return None
        op_spec = spec(node.op)
        if op_spec.family in _HALF_FAMILIES:
            return self._half if any(ref in self._differentiable for ref in refs) else _FLOAT32
        if op_spec.family in _FLOAT32_FAMILIES or op_spec.loss or node.op in _FLOAT32_OPS:
            return _FLOAT32
        if op_spec.family in ("pointwise", "move") and any(map(self._too_large, _numbers(node))):
            return _FLOAT32
        dtypes = {self._types[renamed.get(ref, ref)].dtype for ref in refs}
        return _FLOAT32 if {_FLOAT32, self._half} <= dtypes else None

    def _too_large(self, number: object) -> bool:
        """Whether the number is out of the range of half precision, where PyTorch would refuse it or make it infinite."""
        return isinstance(number, int | float) and isfinite(number) and abs(number) > _LARGEST[self._half]

    def _cast_to(self, ref: Ref, dtype: str | None) -> Ref:
        """The value cast to that dtype, if it is in float32 or the half precision."""
        current = self._types[ref].dtype
        if dtype is None or current == dtype or current not in (_FLOAT32, self._half):
            return ref
        # A weight has a cast for each reader: a shared cast would be sent from stage to stage where two read a tied weight.
        shared = ref.name not in self._old.variable_names
        if shared and (ref, dtype) in self._casts:
            return self._casts[ref, dtype]
        name = f"{ref}:{dtype}"
        if name in self._taken or len(name) > MAX_NAME:
            name = next(
                f"cast_{i}" for i in range(len(self._taken), 1 << 62) if f"cast_{i}" not in self._taken
            )
        self._taken.add(name)
        args: tuple[Arg, ...] = (ref, DType(dtype))
        self._add(Node(name, "aten.to.dtype", args, ()))
        if shared:
            self._casts[ref, dtype] = Ref(name)
        return Ref(name)

    def _add(self, node: Node) -> None:
        results = infer(node.op, node.args, self._types)
        self._types.update({Ref(node.name, i): t for i, t in enumerate(results)})
        self._nodes.append(replace(node, results=results))


def _numbers(node: Node) -> Iterator[Arg]:
    """The arguments that are values of elements."""
    pairs = zip(spec(node.op).parameters, node.args, strict=True)
    return (arg for parameter, arg in pairs if parameter.type in _VALUES)
