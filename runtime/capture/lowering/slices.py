"""Slices of sizes that are free: torch's own bounds may hold for the example alone."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._sympy.functions import Mod, PythonMod

from fusion.dag.ir.dims import Dim, Poly, named_symbols, symbols_of
from fusion.dag.ir.graph import Arg, TensorType
from fusion.runtime.capture.lowering.aten_names import op_name

SLICE = "aten.slice.Tensor"


def slice_from_front(args: tuple[Arg, ...], result: TensorType) -> tuple[Arg, ...]:
    """A slice whose end counts blocks, with the end counted from the front: from the back it may be 0."""
    source, dim, start, end, step = args
    if not isinstance(end, Poly) or step != 1 or named_symbols(end) == symbols_of(end):
        return args
    start = 0 if start is None else start
    if not isinstance(start, int) or start < 0 or not isinstance(dim, int):
        return args
    return source, dim, start, result.shape[dim] + start, step


def every_few_rows(args: tuple[Arg, ...], result: TensorType) -> tuple[Dim, int, int] | None:
    """How many rows a slice of every few rows has, the first one and the step, where their number is free (`x[1::2]`). None for any other
    slice."""
    _, dim, start, _, step = args
    start = 0 if start is None else start
    if type(step) is not int or type(start) is not int or type(dim) is not int or not 0 <= start < step:
        return None
    count = result.shape[dim]
    return (count, start, step) if step > 1 and isinstance(count, Poly) else None


def bounded_by_remainder(node: fx.Node) -> bool:
    """Whether the call is a slice up to or from a remainder of another size: the op-set has no size for it."""
    bounds = (arg.meta.get("val") for arg in node.args if isinstance(arg, fx.Node))
    return op_name(node.target) == SLICE and any(
        isinstance(bound, torch.SymInt) and bound.node.expr.has(Mod, PythonMod) for bound in bounds
    )
