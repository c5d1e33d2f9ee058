"""Products and look-ups whose matrix is stored quantised, in groups along its last dimension.

A group is a run of elements of a row that share a scale and, if the kind is asymmetric, a minimum. The value of a
number q is, in float32:

    int8                       scale * q                  q in -128 .. 127
    int4                       scale * (q - 8)            q in 0 .. 15
    either, with minimums      scale * q + minimum

Two adjacent int4 numbers share a byte, the first in its lower half. GGUF's blocks fit without requantising: Q8_0, Q6_K
and Q4_0 have no minimums, Q4_1, Q5_1, Q4_K and Q5_K have them. Products are computed and summed in float32, and the result
has the dtype of the input.
"""

from __future__ import annotations

from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_experts import all_rows_held, require_routing, routed_flops, routed_reads
from fusion.dag.ir.opset_shapes import Shape, same
from fusion.dag.ir.opset_spec import Call, Infer, Mixed, OpSpec, Types, elements, op, plain

LEAST_GROUP = 8  # elements; the size of a group is a multiple of it
INPUTS = ("float32", "bfloat16", "float16")
SCALES = ("float32", "float16")


def stored_shape(call: Call, dtype: str, per_byte: int, rank: int = 2) -> Shape:
    """The shape (..., rows, columns) of the matrices that weight, scales and minimums, each of this rank, store."""
    weight, scales, minimums = call["weight"], call["scales"], call["minimums"]
    if weight.dtype != dtype or len(weight.shape) != rank or len(scales.shape) != rank:
        raise call.fail(
            f"weight {weight} and scales {scales} are not {dtype} and floats, each of rank {rank}"
        )
    if scales.dtype not in SCALES:
        raise call.fail(f"scales {scales} are not float32 or float16")
    *rows, stored = weight.shape
    groups = scales.shape[-1]
    if not isinstance(stored, int) or not isinstance(groups, int) or groups < 1:
        raise call.fail(f"weight {weight} and scales {scales}: sizes that are not known, or no group")
    columns = stored * per_byte
    if columns == 0 or columns % (groups * LEAST_GROUP):
        raise call.fail(
            f"{groups} groups of {columns} columns: each of a multiple of {LEAST_GROUP}, at least one"
        )
    for size, scale_size in zip(rows, scales.shape, strict=False):
        same(call, size, scale_size, "rows of weight and scales")
    if minimums is not None and minimums != scales:
        raise call.fail(f"minimums {minimums} do not fit scales {scales}")
    return (*rows, columns)


def quantised_linear(dtype: str, per_byte: int) -> Infer:
    def infer(call: Call) -> Types:
        """input (..., in) with the stored matrix (out, in), and bias (out)."""
        x, bias = call["input"], call["bias"]
        rows, columns = stored_shape(call, dtype, per_byte)
        if not x.shape or x.dtype not in INPUTS:
            raise call.fail(f"input {x} is not of {', '.join(INPUTS)} with dimensions")
        same(call, x.shape[-1], columns, "input features")
        if bias is not None and (bias.shape != (rows,) or bias.dtype != x.dtype):
            raise call.fail(f"bias {bias} does not fit {rows} rows and input {x}")
        return (TensorType((*x.shape[:-1], rows), x.dtype),)

    return infer


def quantised_expert_linear(dtype: str, per_byte: int) -> Infer:
    def infer(call: Call) -> Types:
        """`fusion.expert_linear` with the stored matrices (held, out, in), and bias (held, out)."""
        x, bias = call["input"], call["bias"]
        held, rows, columns = stored_shape(call, dtype, per_byte, rank=3)
        if not isinstance(held, int) or not isinstance(rows, int) or not held or not rows:
            raise call.fail(f"weight {call['weight']} is not (experts, out, in) in numbers")
        require_routing(call, held)
        if x.dtype not in INPUTS:
            raise call.fail(f"input {x} is not of {', '.join(INPUTS)}")
        same(call, x.shape[1], columns, "input features")
        if bias is not None and (bias.shape != (held, rows) or bias.dtype != x.dtype):
            raise call.fail(f"bias {bias} does not fit {held} times {rows} rows and input {x}")
        return (TensorType((x.shape[0], rows), x.dtype),)

    return infer


def quantised_embedding(dtype: str, per_byte: int) -> Infer:
    def infer(call: Call) -> Types:
        """The rows `indices` (...) of the stored matrix, as `dtype`."""
        _, columns = stored_shape(call, dtype, per_byte)
        indices, dtype_name = call["indices"], call["dtype"].name
        if indices.dtype not in ("int32", "int64") or dtype_name not in INPUTS:
            raise call.fail(
                f"indices {indices}, result of {dtype_name}: int32 or int64, and {', '.join(INPUTS)}"
            )
        return (TensorType((*indices.shape, columns), dtype_name),)

    return infer


def _linear_mixes(call: Call) -> Mixed:
    mixed = {"input": {len(call["input"].shape) - 1}, "weight": {1}, "scales": {1}, "minimums": {1}}
    return {name: dims for name, dims in mixed.items() if call[name] is not None}


def _expert_mixes(call: Call) -> Mixed:
    mixed = {"input": {1}, "weight": {0, 2}, "scales": {0, 2}, "minimums": {0, 2}, "bias": {0}}
    return {name: dims for name, dims in mixed.items() if call[name] is not None}


def _embedding_mixes(call: Call) -> Mixed:
    return {name: {0, 1} for name in ("weight", "scales", "minimums") if call[name] is not None}


def _linear_flops(call: Call, results: Types) -> int:
    return elements(results[0]) * (2 * plain(call["input"].shape[-1]) + (call["bias"] is not None))


def _specs(dtype: str, name: str, per_byte: int) -> list[OpSpec]:
    return [
        op(f"fusion.linear_{name}", "input: tensor, weight: tensor, scales: tensor, minimums: tensor?, bias: tensor?",
           quantised_linear(dtype, per_byte), "contraction",
           mixes=_linear_mixes, flops=_linear_flops, differentiable=False, since=2),
        op(f"fusion.embedding_{name}", "weight: tensor, scales: tensor, minimums: tensor?, indices: tensor, dtype: dtype",
           quantised_embedding(dtype, per_byte), "move",
           mixes=_embedding_mixes, differentiable=False, since=2),
        op(f"fusion.expert_linear_{name}", "input: tensor, ids: tensor, weight: tensor, scales: tensor, minimums: tensor?, bias: tensor?, first: int, of: int",
           quantised_expert_linear(dtype, per_byte), "contraction",
           mixes=_expert_mixes, flops=routed_flops, reads=routed_reads, worst=all_rows_held, differentiable=False, since=2),
    ]  # fmt: skip


SPECS: list[OpSpec] = [*_specs("int8", "int8", 1), *_specs("uint8", "int4", 2)]
