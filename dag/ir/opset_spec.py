"""The specification of an operator: parameters, the rule for result types, mixed dimensions, and costs.

The tables (`opset_pointwise`, `opset_views`, ...) have one `OpSpec` for each operator, made with `op`; nothing is derived from a
framework at run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from fusion.dag.ir.dims import Dim, Poly
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Arg, DType, Ref, TensorType

MAX_RANK = 8
MAX_LIST = 1024  # elements of a list argument, and results of a node

# What limits the speed of an op: a device has a measured speed for each.
Family = Literal[
    "contraction", "attention", "convolution", "norm", "pointwise", "reduction", "move", "view", "make"
]
Types = tuple[TensorType, ...]
Mixed = dict[str, set[int]]


class Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = Required()


@dataclass(frozen=True)
class Parameter:
    """`type` is tensor, tensors, maybe_tensors, operand (tensor or number), int, dim (int or polynomial), number
    (bool, int, float or polynomial), float, floats, bool, dtype, ints or dims; `optional` allows None."""

    name: str
    type: str
    optional: bool = False
    default: Arg | Required = REQUIRED


@dataclass(frozen=True)
class Call:
    """A call of an op: arguments by parameter name, each Ref replaced by the type of its value."""

    op: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def fail(self, why: str) -> GraphError:
        return GraphError(f"{self.op}: {why}")

    def tensors(self) -> list[TensorType]:
        """The types of tensor arguments that are not None, in parameter order."""
        tensors: list[TensorType] = []
        for value in self.values.values():
            if isinstance(value, TensorType):
                tensors.append(value)
            elif isinstance(value, tuple):
                tensors.extend(v for v in value if isinstance(v, TensorType))
        return tensors


Infer = Callable[[Call], Types]
Mixes = Callable[[Call], Mixed]
# FLOPs of the forward pass; all shapes in the call and the results are integers.
Flops = Callable[[Call, Types], int]
# The share of an argument that is read, by parameter name, for those not read in full; shapes are integers too.
Reads = Callable[[Call], Mapping[str, float]]
# The call with the data that cost the most, for an op whose FLOPs and bytes are those of average data.
Worst = Callable[[Call], Call]


def no_mixing(_: Call) -> Mixed:
    return {}


def no_flops(_: Call, __: Types) -> int:
    return 0


def all_read(_: Call) -> Mapping[str, float]:
    return {}


def elements(type_: TensorType) -> int:
    """Number of elements of a type whose dimensions are integers."""
    return prod(plain(d) for d in type_.shape)


def plain(dim: Dim) -> int:
    assert isinstance(dim, int), f"{dim} was to be bound to a number first"
    return dim


def same_call(call: Call) -> Call:
    return call


def flops_per_result(count: int) -> Flops:
    return lambda _, results: count * sum(elements(r) for r in results)


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """`saves`: the tensor parameters that autograd saves for the backward pass; besides their names, "result" is the op's first
    result, "positions" its second one, "max_indices" an int64 for each element of its result, "scores" the weights of
    attention three times (softmax, mask, product), and "copy" a tensor like the first argument.
    `backward`: FLOPs of the gradient of each argument over those of the forward pass; None means 1 for each.
    `keeps`: the tensor parameters that it caches for every position of a sequence, in the cache of its argument `slot`."""

    name: str
    parameters: tuple[Parameter, ...]
    infer: Infer
    family: Family
    loss: bool = False
    mixes: Mixes = no_mixing
    flops: Flops = no_flops
    reads: Reads = all_read
    worst: Worst = same_call
    backward: Mapping[str, float] | None = None
    saves: tuple[str, ...] = ()
    bilinear: bool = False  # each saved argument is needed only for the gradient of another one
    differentiable: bool = True
    keeps: tuple[str, ...] = ()
    since: int = 1  # the first version of the op-set with this op

    def call(self, args: tuple[Arg, ...], types: Mapping[Ref, TensorType]) -> Call:
        """The arguments by name, checked against the parameters. GraphError on a wrong number or type of arguments."""
        if len(args) != len(self.parameters):
            raise GraphError(f"{self.name} takes {len(self.parameters)} arguments, not {len(args)}")
        values: dict[str, Any] = {}
        for parameter, arg in zip(self.parameters, args, strict=True):
            if arg is None and parameter.optional:
                values[parameter.name] = None
            elif not _ACCEPTS[parameter.type](arg):
                if isinstance(arg, Poly):
                    raise GraphError(
                        f"{self.name}: argument {parameter.name} has to be a number, and is {arg}"
                    )
                raise GraphError(
                    f"{self.name}: argument {parameter.name} is not of the sort {parameter.type}"
                )
            else:
                values[parameter.name] = _resolve(self.name, arg, types)
        return Call(self.name, values)


def _resolve(op: str, arg: Arg, types: Mapping[Ref, TensorType]) -> Any:
    if isinstance(arg, Ref):
        try:
            return types[arg]
        except KeyError:
            raise GraphError(f"{op} reads {arg}, which is not defined before it") from None
    if isinstance(arg, tuple):
        return tuple(_resolve(op, a, types) for a in arg)
    return arg


def _is_int(a: object) -> bool:
    return type(a) is int


def _is_dim(a: object) -> bool:
    return type(a) is int or isinstance(a, Poly)


def _is_number(a: object) -> bool:
    return type(a) in (bool, int, float) or isinstance(a, Poly)


def _is_ref(a: object) -> bool:
    return isinstance(a, Ref)


def _list_of(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda a: isinstance(a, tuple) and len(a) <= MAX_LIST and all(map(accepts, a))


_ACCEPTS: dict[str, Callable[[object], bool]] = {
    "tensor": _is_ref,
    "tensors": lambda a: bool(a) and _list_of(_is_ref)(a),
    "maybe_tensors": lambda a: bool(a) and _list_of(lambda e: e is None or isinstance(e, Ref))(a),
    "operand": lambda a: isinstance(a, Ref) or _is_number(a),
    "int": _is_int,
    "dim": _is_dim,
    "number": _is_number,
    "float": lambda a: type(a) in (int, float),
    "floats": _list_of(lambda a: type(a) in (int, float)),
    "bool": lambda a: type(a) is bool,
    "dtype": lambda a: isinstance(a, DType),
    "ints": _list_of(_is_int),
    "dims": _list_of(_is_dim),
}

_PARAMETER = re.compile(r"(\w+): (\w+)(\??)(?: = (\([^)]*\)|[^,]+))?(?:, |$)")
_CONSTANTS: dict[str, Arg] = {"None": None, "True": True, "False": False, "bool": DType("bool")}


def signature(text: str) -> tuple[Parameter, ...]:
    """Parameters from text such as "self: tensor, dim: ints?, keepdim: bool = False"."""
    parameters, end = [], 0
    for match in _PARAMETER.finditer(text):
        name, type_, optional, default = match.groups()
        assert match.start() == end and type_ in _ACCEPTS, text
        end = match.end()
        parameters.append(
            Parameter(name, type_, bool(optional), REQUIRED if default is None else _constant(default))
        )
    assert end == len(text), text
    return tuple(parameters)


def _constant(text: str) -> Arg:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text.startswith("("):
        return tuple(int(t) for t in text[1:-1].split(",") if t.strip())
    return float(text) if "." in text or "e" in text else int(text)


def op(name: str, parameters: str, infer: Infer, family: Family, **fields: Any) -> OpSpec:
    return OpSpec(name=name, parameters=signature(parameters), infer=infer, family=family, **fields)
