"""Mixtures of experts: products of rows with the matrix of the expert that each is routed to."""

from __future__ import annotations

from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_contract import one_dtype
from fusion.dag.ir.opset_shapes import is_float, same
from fusion.dag.ir.opset_spec import Call, Mixed, OpSpec, Types, elements, op, plain

MAX_EXPERTS = 1 << 16  # of a layer


def expert_linear(call: Call) -> Types:
    """Row r of input (rows, in) with the matrix ids[r] - first of weight (held, out, in), or (held, in, out) if
    `transposed`, and the row ids[r] - first of bias (held, out). Of `of` experts in all, `held` from `first` on are here:
    a row routed to another one gets zeros, so that the results of all parts add up."""
    x, w, b = call["input"], call["weight"], call["bias"]
    if len(w.shape) != 3 or not all(isinstance(d, int) and d > 0 for d in w.shape):
        raise call.fail(f"weight {w} is not (experts, out, in) in numbers")
    held = w.shape[0]
    require_routing(call, held)
    inner, out = (w.shape[1], w.shape[2]) if call["transposed"] else (w.shape[2], w.shape[1])
    same(call, x.shape[1], inner, "input features")
    if b is not None and b.shape != (held, out):
        raise call.fail(f"bias {b} does not fit weight {w}")
    dtype = one_dtype(call, x, w, b)
    if not is_float(dtype):
        raise call.fail(f"needs a floating dtype, not {dtype}")
    return (TensorType((x.shape[0], out), dtype),)


def require_routing(call: Call, held: int) -> None:
    """GraphError unless each row has an id, and the `held` experts from `first` on are some of all."""
    x, ids, first = call["input"], call["ids"], call["first"]
    if len(x.shape) != 2 or ids.dtype != "int64" or ids.shape != x.shape[:1]:
        raise call.fail(f"needs (rows, in) and an int64 id for each row, not {x} and {ids}")
    if first < 0 or not first + held <= call["of"] <= MAX_EXPERTS:
        raise call.fail(f"experts {first} to {first + held - 1} of {call['of']}; at most {MAX_EXPERTS}")


def _mixes(call: Call) -> Mixed:
    mixed = {"input": {1}, "weight": {0, 1 if call["transposed"] else 2}}
    return mixed | ({"bias": {0}} if call["bias"] is not None else {})


def routed_flops(call: Call, results: Types) -> int:
    """FLOPs for the rows routed here, if routing is uniform."""
    inner = plain(call["input"].shape[1])
    held = plain(call["weight"].shape[0])
    return elements(results[0]) * (2 * inner + (call["bias"] is not None)) * held // int(call["of"])


def routed_reads(call: Call) -> dict[str, float]:
    """The share of each expert tensor that is read: at most one expert for each row."""
    share = min(1.0, plain(call["input"].shape[0]) / int(call["of"]))
    held = ("weight", "scales", "minimums", "bias")
    return {name: share for name in held if name in call.values}


def all_rows_held(call: Call) -> Call:
    """The call with every row routed to one of the experts held here."""
    return Call(call.op, {**call.values, "first": 0, "of": call["weight"].shape[0]})


SPECS: list[OpSpec] = [
    op("fusion.expert_linear", "input: tensor, ids: tensor, weight: tensor, bias: tensor?, first: int, of: int, transposed: bool", expert_linear, "contraction",
       mixes=_mixes, flops=routed_flops, reads=routed_reads, worst=all_rows_held, saves=("input", "ids", "weight"), bilinear=True, backward={"input": 1.0, "weight": 1.0}, since=2),
]  # fmt: skip
