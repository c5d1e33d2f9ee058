"""Mixtures of experts: products of rows with the matrix that each row has chosen."""

from __future__ import annotations

from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_contract import one_dtype
from fusion.dag.ir.opset_shapes import is_float, same
from fusion.dag.ir.opset_spec import Call, Mixed, OpSpec, Types, elements, op, plain

MAX_EXPERTS = 1 << 16  # of a layer


def expert_linear(call: Call) -> Types:
    """Row r of input (rows, in) with the matrix ids[r] - first of weight (held, out, in), or (held, in, out) if
    `transposed`, and the row ids[r] - first of bias (held, out). Of `of` experts in all, those from `first` on are held here:
    a row that has chosen another one gets zeros, so that the results for all parts of the experts add up to the whole."""
    x, w, b = call["input"], call["weight"], call["bias"]
    if len(w.shape) != 3 or not all(isinstance(d, int) and d > 0 for d in w.shape):
        raise call.fail(f"weight {w} is not (experts, out, in) in numbers")
    held = w.shape[0]
    require_choice(call, held)
    inner, out = (w.shape[1], w.shape[2]) if call["transposed"] else (w.shape[2], w.shape[1])
    same(call, x.shape[1], inner, "input features")
    if b is not None and b.shape != (held, out):
        raise call.fail(f"bias {b} does not fit weight {w}")
    dtype = one_dtype(call, x, w, b)
    if not is_float(dtype):
        raise call.fail(f"needs a floating dtype, not {dtype}")
    return (TensorType((x.shape[0], out), dtype),)


def require_choice(call: Call, held: int) -> None:
    """That each row has an id, and that `held` experts from `first` on are some of all."""
    x, ids, first = call["input"], call["ids"], call["first"]
    if len(x.shape) != 2 or ids.dtype != "int64" or ids.shape != x.shape[:1]:
        raise call.fail(f"needs (rows, in) and an int64 id for each row, not {x} and {ids}")
    if first < 0 or not first + held <= call["of"] <= MAX_EXPERTS:
        raise call.fail(f"experts {first} to {first + held - 1} of {call['of']}; at most {MAX_EXPERTS}")


def _mixes(call: Call) -> Mixed:
    mixed = {"input": {1}, "weight": {0, 1 if call["transposed"] else 2}}
    return mixed | ({"bias": {0}} if call["bias"] is not None else {})


def chosen_flops(call: Call, results: Types) -> int:
    """Of the experts that are chosen, each taken to be chosen as often as another."""
    inner = plain(call["input"].shape[1])
    held = plain(call["weight"].shape[0])
    return elements(results[0]) * (2 * inner + (call["bias"] is not None)) * held // int(call["of"])


def chosen_reads(call: Call) -> dict[str, float]:
    """The shares of the arguments that are read: no more experts than there are rows."""
    share = min(1.0, plain(call["input"].shape[0]) / int(call["of"]))
    held = ("weight", "scales", "minimums", "bias")
    return {name: share for name in held if name in call.values}


def all_held(call: Call) -> Call:
    """Every row has chosen one of the experts that are held here."""
    return Call(call.op, {**call.values, "first": 0, "of": call["weight"].shape[0]})


SPECS: list[OpSpec] = [
    op("fusion.expert_linear", "input: tensor, ids: tensor, weight: tensor, bias: tensor?, first: int, of: int, transposed: bool", expert_linear, "contraction",
       mixes=_mixes, flops=chosen_flops, reads=chosen_reads, worst=all_held, saves=("input", "ids", "weight"), bilinear=True, backward={"input": 1.0, "weight": 1.0}, since=2),
]  # fmt: skip
