"""The hand-written table against the framework it describes: names, parameters, result types, mixing, FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from torch.utils.flop_counter import FlopCounterMode

from fusion.dag.ir.dims import bind, symbol
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DType, Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.opset import OPSET, REQUIRED, OpSpec, infer, mixed_dims, spec
from fusion.runtime.planes.recurrence import recurrence
from tests.support.stage_costs import node_saved_bytes

Test = Callable[[tuple[Any, ...]], None]

B, S = 11, 5  # batch and sequence in the samples; no other dimension has these sizes


@dataclass(frozen=True)
class T:
    """A tensor argument."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int = 2  # integers are drawn from [0, high)


def f(*shape: int) -> T:
    return T(shape)


def i(*shape: int, high: int = 2) -> T:
    return T(shape, "int64", high)


def b(*shape: int) -> T:
    return T(shape, "bool")


@dataclass(frozen=True)
class D:
    """A dtype argument."""

    name: str


X = f(B, S, 8)
_LONG, _INT8, _INT4 = f(B, S, 32), T((4, 32), "int8"), T((4, 16), "uint8", 256)
_HALVES, _IDS = T((4, 2), "float16"), i(B, S)
_INT8S, _INT4S, _HALVES3 = T((3, 4, 32), "int8"), T((3, 4, 16), "uint8", 256), T((3, 4, 2), "float16")
QUANTISED: list[tuple[Any, ...]] = [
    *[(f"fusion.linear_{n}", _LONG, w, f(4, 2), None, f(4)) for n, w in (("int8", _INT8), ("int4", _INT4))],
    *[(f"fusion.linear_{n}", _LONG, w, _HALVES, _HALVES, None) for n, w in (("int8", _INT8), ("int4", _INT4))],
    *[(f"fusion.expert_linear_{n}", f(B * S, 32), i(B * S, high=6), w, f(3, 4, 2), None, f(3, 4), 2, 6) for n, w in (("int8", _INT8S), ("int4", _INT4S))],
    *[(f"fusion.expert_linear_{n}", f(B * S, 32), i(B * S), w, _HALVES3, _HALVES3, None, 0, 3) for n, w in (("int8", _INT8S), ("int4", _INT4S))],
    *[(f"fusion.embedding_{n}", w, f(4, 2), None, _IDS, D("float32")) for n, w in (("int8", _INT8), ("int4", _INT4))],
    *[(f"fusion.embedding_{n}", w, _HALVES, _HALVES, _IDS, D("float16")) for n, w in (("int8", _INT8), ("int4", _INT4))],
]  # fmt: skip
SAMPLES: list[tuple[Any, ...]] = [  # (op, argument, ...): trailing arguments with defaults may be left out
    *[(f"aten.{n}", X) for n in ["tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "log10", "exp2", "erfc"]],
    *[(f"aten.{n}", X) for n in ["relu", "neg", "abs", "sign", "exp", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "log", "log1p", "log2", "sin", "cos", "erf", "expm1", "silu", "mish", "hardswish", "hardsigmoid", "log_sigmoid", "relu6", "selu", "floor", "ceil", "round", "trunc", "logical_not", "isnan", "isinf", "isfinite", "square", "gelu", "softplus", "leaky_relu", "elu", "celu", "hardtanh", "numpy_T", "sum", "mean", "prod", "max", "min", "any", "all", "argmax", "argmin", "alias", "detach", "contiguous", "clone", "zeros_like", "ones_like", "sort", "argsort", "squeeze"]],
    *[(f"aten.{n}", i(B, S)) for n in ["exp", "sqrt", "neg", "sigmoid", "sum", "prod", "bitwise_not", "relu", "abs", "any", "all", "argmax", "floor", "cos", "log", "isnan"]],
    *[(f"aten.{n}", b(B, S)) for n in ["exp", "sum", "prod", "bitwise_not", "logical_not", "any", "all"]],
    ("aten.any", T((B, S), "uint8")), ("aten.sum", T((B,), "float16")), ("aten.mean", T((B,), "bfloat16")), ("aten.sum", X, D("float64")),
    ("fusion.gelu_tanh", X), ("fusion.dropout", X, 0.25), ("fusion.keep", f(8), f(8)), ("fusion.keep", i(), i()), ("fusion.by_mode", X, X), ("fusion.by_mode", i(B), i(B)), ("aten.dropout", X, 0.5, False),
    *[(f"aten.{n}.Tensor", X, f(B, 1, 8)) for n in ["add", "sub", "rsub", "mul", "div", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"]],
    *[(f"aten.{n}.Tensor", i(B, S), i(1, S)) for n in ["add", "sub", "mul", "div", "eq", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__"]],
    *[(f"aten.{n}.Tensor", i(B, S), f()) for n in ["add", "mul", "div", "eq"]],
    *[(f"aten.{n}.Tensor", i(B, S), 2) for n in ["add", "sub", "mul", "div"]],
    *[(f"aten.{n}.Tensor", i(B, S), 2.5) for n in ["add", "sub", "mul", "div"]],
    *[(f"aten.{n}.Scalar", X, 2) for n in ["add", "sub", "rsub", "mul", "div", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"]],
    *[(f"aten.{n}.Scalar", i(B), 3) for n in ["add", "mul", "div", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__"]],
    ("aten.add.Tensor", T((B,), "float16"), T((), "float32")), ("aten.add.Tensor", T((B,), "float16"), T((B,), "bfloat16")),
    ("aten.add.Tensor", T((), "float64"), T((B,), "int32")), ("aten.add.Tensor", T((B,), "uint8"), T((B,), "int8")),
    ("aten.mul.Tensor", b(B), T((), "int32")), ("aten.mul.Tensor", b(B), 2), ("aten.mul.Tensor", b(B), 2.0), ("aten.add.Tensor", i(), 1.5),
    ("aten.add.Tensor", T((B,), "int16"), T((), "int64")), ("aten.__and__.Tensor", b(B, 1, 1, S), b()),
    ("aten.floor_divide", X, 2), ("aten.floor_divide", i(B), 2), ("fusion.div_floor", i(B, S), 2), ("fusion.div_trunc", X, f(8)),
    ("aten.pow.Tensor_Scalar", X, 2), ("aten.pow.Tensor_Scalar", i(B), 2.0), ("aten.pow.Tensor_Tensor", f(), T((4,), "int32")),
    ("aten.pow.Scalar", 2, X), ("aten.pow.Scalar", 2.0, i(B)),
    *[(f"aten.{n}", X, f(8)) for n in ["maximum", "minimum", "atan2", "logical_and", "logical_or", "logical_xor"]],
    ("aten.threshold", X, 0, 1), ("aten.prelu", f(B, 8, S), f(8)), ("aten.prelu", X, f(1)),
    ("aten.clamp", X, 0, None), ("aten.clamp", i(B), None, 2.5), ("aten.clamp.Tensor", X, f(8), None), ("aten.clamp_min", i(B), 0), ("aten.clamp_max", X, 1),
    ("aten.where.self", b(B, S), f(B, 1), f(S)), ("aten.where.ScalarOther", b(B, S), f(), -math.inf), ("aten.where.ScalarSelf", b(B, S), 1.0, i(S)),
    ("aten.where.Scalar", b(B), 0.0, -1.0), ("aten.masked_fill.Scalar", X, b(S, 1), -math.inf), ("aten.masked_fill.Tensor", X, b(B, S, 1), f()),
    ("aten.lerp.Scalar", X, X, 0.5), ("aten.lerp.Tensor", X, X, f(8)), ("aten.addcmul", X, X, f(8)), ("aten.addcdiv", X, X, f(8), 2.0),
    ("aten.to.dtype", X, D("int32")), ("aten.type_as", i(B), f(S)),
    ("aten.view", X, (B, S, 2, 4)), ("aten.view", X, (B * S, -1)), ("aten.view", X, (-1,)), ("aten._unsafe_view", X, (B, S * 8)), ("aten.reshape", X, (S, -1, 2)),
    ("aten.reshape", f(), (1, 1)), ("aten.flatten.using_ints", X), ("aten.flatten.using_ints", X, 1, 2), ("aten.unflatten.int", X, -1, (2, -1)),
    ("aten.transpose.int", X, 1, -1), ("aten.permute", X, (2, 0, -2)), ("aten.t", f(B, S)), ("aten.squeeze", f(1, B, 1)), ("aten.squeeze.dim", f(B, 1), -1),
    ("aten.squeeze.dim", f(B, S), 0), ("aten.squeeze.dims", f(1, B, 1), (0, 1)), ("aten.unsqueeze", X, -1), ("aten.unsqueeze", f(), 0),
    ("aten.expand", f(B, 1, 8), (B, S, -1)), ("aten.expand", f(1), (2, B, 4)), ("aten.expand_as", f(8), X),
    ("aten.slice.Tensor", X, 1, 0, 2**63 - 1), ("aten.slice.Tensor", X, 2, 3, -1, 2), ("aten.slice.Tensor", X, 1, 0, 1), ("aten.slice.Tensor", X, 1, 1),
    ("aten.slice.Tensor", X, 1, -1), ("aten.slice.Tensor", X, 1, -S), ("aten.slice.Tensor", X, 1, None, -1), ("aten.slice.Tensor", X, 2, -100, 100), ("aten.slice.Tensor", X, 2, 6, 2),
    ("aten.slice.Tensor", f(1, 1, 16, 16), 3, 0, S), ("aten.select.int", X, 1, -1), ("aten.select.int", X, 2, 3), ("aten.narrow", X, 2, 1, 4), ("aten.narrow", f(16), 0, 0, S),
    ("aten.split.Tensor", X, 3, 2), ("aten.split.Tensor", X, 8, -1), ("aten.split.sizes", X, (1, 7), 2), ("aten.split_with_sizes", X, (2, 4, 2), -1),
    ("aten.chunk", X, 4, -1), ("aten.chunk", X, 3, 2), ("aten.chunk", f(B, 4 * S), 2, 1), ("aten.unbind.int", X, 2),
    ("aten.repeat", X, (2, 1, 1, 4)), ("aten.repeat", f(1, 8), (B, 1)), ("aten.repeat_interleave.self_int", X, 2, -1), ("aten.repeat_interleave.self_int", f(B, 4), 2),
    ("aten.cat", (X, f(B, S, 2)), -1), ("aten.cat", (i(B), f(4))), ("aten.cat", (f(B, 1), f(B, S)), 1), ("aten.stack", (X, X), -1), ("aten.stack", (X, X, X), 1),
    ("aten.index.Tensor", X, (None, i(4))), ("aten.index.Tensor", X, (i(B, 1, 4), i(1, S, 1))), ("aten.index.Tensor", X, (i(4), None, i(4))),
    ("aten.index_select", X, 1, i(4)), ("aten.gather", X, 2, i(B, S, 4)), ("aten.gather", X, 1, i(B, 1, 8)), ("aten.scatter.src", X, 2, i(B, S, 4), f(B, S, 4)),
    ("aten.index_put", X, (None, i(4)), f(B, 4, 8)), ("aten.index_put", X, (i(B, 1), i(B, 4)), f(8), True), ("aten.index_put", X, (b(B, S),), f()),
    ("aten.select_scatter", X, f(B, S), 2, 1), ("aten.select_scatter", X, f(B, 8), -2, -1), ("aten.slice_scatter", X, f(B, S, 4), 2, 0, 8, 2), ("aten.slice_scatter", X, X, 1),
    ("aten.erfinv", X), ("aten.copy", X, f(1, 8)), ("aten.copy", X, i(B, S, 8)), ("aten.fill.Scalar", X, 2), ("aten.fill.Tensor", i(B, S), f()),
    ("aten.scatter_add", X, 2, i(B, S, 4), f(B, S, 4)), ("aten.scatter_add", X, 1, i(B, 2, 8), f(B, 4, 8)),
    ("aten.scatter.value", X, 1, i(B, 1, 8), 1.0), ("aten.index_add", X, 1, i(4), f(B, 4, 8)),
    ("aten.flip", X, (1, -1)), ("aten.flip", X, ()), ("aten.roll", X, (1,), (1,)), ("aten.roll", X, (2,)), ("aten.tril", X), ("aten.triu", X, 1),
    ("aten.diff", X), ("aten.diff", i(B, S), 1, -1, i(B, 1)), ("aten.diff", X, 2, 1, None, f(B, 2, 8)), ("aten.constant_pad_nd", X, (1, 2, 0, 1)), ("aten.constant_pad_nd", X, (-1, 0), 2.0),
    ("aten.one_hot", i(B, S), 4), ("aten.pixel_shuffle", f(B, 8, S, 4), 2), ("aten.upsample_nearest2d", f(B, 2, 4, 4), (8, 6)),
    ("aten.sum.dim_IntList", X, (1, -1), True), ("aten.sum.dim_IntList", i(B, S), (0,)), ("aten.sum.dim_IntList", X, None), ("aten.sum.dim_IntList", X, ()),
    ("aten.mean.dim", X, (-1,), True), ("aten.mean.dim", i(B, S), (0,), False, D("float32")), ("aten.prod.dim_int", X, 1), ("aten.var.correction", X, (-1,), 0, True), ("aten.var.correction", X),
    ("aten.std.correction", X, (1,)), ("aten.var.dim", X, (1,)), ("aten.std.dim", X, (0, 2), False, True), ("aten.linalg_vector_norm", X, 2, (-1,), True),
    ("aten.logsumexp", X, (-1,)), ("aten.amax", X), ("aten.amin", X, (1, 2), True), ("aten.max.dim", X, -1), ("aten.min.dim", X, 1, True), ("aten.any.dim", b(B, S), 1),
    ("aten.all.dim", i(B, S), 0, True), ("aten.argmax", X, -1), ("aten.argmin", X, 1, True), ("aten.cumsum", b(B, S), -1), ("aten.cumsum", X, 1, D("float64")), ("aten.cumprod", X, 0),
    ("aten.softmax.int", X, -1), ("aten.softmax.int", i(B, S), 1, D("float32")), ("aten.log_softmax.int", X, 1), ("aten.topk", X, 2), ("aten.topk", X, 1, 1), ("aten.sort", i(B, S), 0, True),
    ("aten.arange", S), ("aten.arange", 7.5), ("aten.arange", S, D("float32")), ("aten.arange.start", 1, S), ("aten.arange.start_step", 1, 10, 3), ("aten.arange.start_step", 10, 0, -3), ("aten.arange.start_step", 0.0, 1.0, 0.25),
    ("aten.linspace", 0, 1, 4), ("aten.full", (B, S), -math.inf), ("aten.full", (), 3), ("aten.full", (2,), True), ("aten.full", (B,), 1, D("float16")), ("aten.zeros", (B, S)), ("aten.ones", (), D("bool")),
    ("aten.full_like", X, 1), ("aten.zeros_like", i(B), D("float32")), ("aten.new_full", X, (S,), 1), ("aten.new_zeros", i(B), (2, S)), ("aten.new_ones", X, (), D("bool")), ("aten.scalar_tensor", 3), ("aten.scalar_tensor", 2, D("int64")),
    ("aten.linear", X, f(4, 8), f(4)), ("aten.linear", f(8), f(4, 8)), ("aten.matmul", X, f(8, 4)), ("aten.matmul", X, f(8)), ("aten.matmul", f(8), f(8)), ("aten.matmul", f(S), f(B, S, 2)), ("aten.matmul", f(B, 2, S, 8), f(2, 8, S)),
    ("aten.mm", f(S, 8), f(8, 4)), ("aten.bmm", X, f(B, 8, 4)), ("aten.addmm", f(4), f(S, 8), f(8, 4)), ("aten.addmm", f(S, 1), f(S, 8), f(8, 4)), ("aten.baddbmm", f(B, 1, 4), X, f(B, 8, 4), 1.0, 0.25),
    ("aten.embedding", f(16, 8), i(B, S)), ("aten.layer_norm", X, (8,), f(8), f(8)), ("aten.layer_norm", X, (S, 8)), ("aten.rms_norm", X, (8,), f(8), 1e-6), ("aten.group_norm", f(B, 8, S), 2, f(8), f(8)),
    ("aten.batch_norm", f(B, 8, S), f(8), f(8), f(8), f(8), True, 0.1, 1e-5), ("aten.batch_norm", f(B, 8, 4, 4), f(8), f(8), f(8), f(8), False, 0.1, 1e-5),
    ("aten.scaled_dot_product_attention", f(B, 4, S, 8), f(B, 4, S, 8), f(B, 4, S, 2)), ("aten.scaled_dot_product_attention", f(B, 4, S, 8), f(B, 4, 7, 8), f(B, 4, 7, 8), b(B, 1, S, 7), 0.0, False, 0.5),
    ("aten.scaled_dot_product_attention", f(B, 4, S, 8), f(B, 2, S, 8), f(B, 2, S, 8), None, 0.0, True, None, True), ("fusion.dropout_attention", f(B, 4, S, 8), f(B, 4, S, 8), f(B, 4, S, 8), f(S, S), 0.1, False, None, False),
    ("fusion.cached_attention", f(B, 4, S, 8), f(B, 2, S, 8), f(B, 2, S, 4), 0, 0.25, None),
    ("fusion.expert_linear", f(B * S, 8), i(B * S), f(2, 4, 8), f(2, 4), 0, 2, False), ("fusion.expert_linear", f(B * S, 8), i(B * S, high=6), f(3, 8, 4), None, 2, 6, True),
    ("fusion.cached_attention_scored", f(B, 4, S, 8), f(B, 2, S, 8), f(B, 2, S, 4), f(1, 4, S, 1), f(4), 0, 0.25, 3, 30.0, None),
    ("fusion.cached_attention_scored", f(B, 4, S, 8), f(B, 1, S, 8), T((B, 1, S, 4), "float16"), None, None, 0, 1.0, None, None, (0.5, 0.25, 0.125, 0.0)),
    ("fusion.recurrence", f(B, 2, S, 8), f(B, 2, S, 8), f(B, 4, S, 6), f(B, 4, S, 1), None, f(4, 8)),
    ("fusion.cached_recurrence", f(B, 2, S, 8), f(B, 2, S, 8), f(B, 4, S, 6), f(B, 4, S, 8), f(B, 4, S, 1), None, 0),
    ("fusion.cached_attention_relative", f(B, 4, S, 8), f(B, 2, S, 8), f(B, 2, S, 4), f(6, 4), 0, 0.5, (0, 1, 5)),
    ("fusion.cached_selection", f(B, 4, S, 8), f(B, 1, S, 8), f(B, 4, S, 1), 0, 0.5, 3), ("fusion.cached_attention_selected", f(B, 4, S, 8), f(B, 2, S, 8), f(B, 2, S, 4), i(B, 1, S, 3), 0, 0.5),
    ("fusion.source_attention", f(B, 4, S, 8), f(B, 2, 7, 8), f(B, 2, 7, 4), 0, 0.5), ("fusion.source_attention_scored", f(B, 4, S, 8), f(B, 2, 7, 8), f(B, 2, 7, 4), 0, 0.5, 30.0),
    *QUANTISED, ("fusion.cached_convolution", f(B, 1, S, 8), f(8, 1, 3), f(8), 0), ("aten.conv1d", f(B, 4, S), f(8, 4, 3), f(8), (1,), (1,)), ("aten.conv1d", f(B, 4, S), f(8, 4, 1)), ("aten.conv1d", f(B, 4, 16), f(8, 4, 3), None, (2,)), ("aten.conv2d", f(B, 4, 16, 12), f(8, 2, 3, 3), f(8), (2, 2), (1, 1), (1, 1), 2),
    ("aten.conv2d", f(4, 16, 12), f(8, 4, 3, 3), None, (1, 2), (2,), (2, 2)), ("aten.conv3d", f(B, 2, 4, 4, 4), f(4, 2, 2, 2, 2)), ("aten.conv_transpose1d", f(B, 4, S), f(4, 8, 3), f(8), (2,), (1,), (1,)), ("aten.conv_transpose2d.input", f(B, 4, 6, 6), f(4, 2, 2, 2), f(4), (2, 2), (0, 0), (0, 0), 2),
    ("aten.conv_transpose3d.input", f(B, 4, 3, 4, 5), f(4, 2, 2, 3, 2), f(4), (2, 2, 1), (0, 1, 0), (1, 0, 0), 2), ("aten.max_pool3d", f(B, 4, 8, 9, 6), (3, 3, 2), (2, 2, 2), (1, 1, 0), (1, 1, 1), True),
    ("aten.avg_pool3d", f(B, 4, 7, 8, 6), (2, 2, 2)), ("aten.adaptive_avg_pool3d", f(B, 4, 4, 8, 6), (1, 3, 2)),
    ("aten.max_pool1d", f(B, 4, 16), (2,)), ("aten.max_pool2d", f(B, 4, 16, 15), (3, 3), (2, 2), (1, 1), (1, 1), True), ("aten.avg_pool1d", f(B, 4, 7), (2,), (2,), (0,), True), ("aten.avg_pool2d", f(B, 4, 7, 8), (2, 2)), ("aten.adaptive_avg_pool1d", f(B, 4, 8), (2,)), ("aten.adaptive_avg_pool2d", f(B, 4, 8, 8), (1, 1)),
    ("aten.upsample_nearest2d", f(B, 4, 3, 6), (6, 12), 2.0, 2.0), ("aten.upsample_bilinear2d", f(B, 4, 3, 6), (6, 12), False, 2.0, 2.0), ("aten.upsample_bilinear2d", f(B, 4, 3, 6), (7, 4), True),
    ("aten.cross_entropy_loss", f(B * S, 16), i(B * S)), ("aten.cross_entropy_loss", f(B, 4, S), i(B, S), f(4), 0), ("aten.cross_entropy_loss", f(4), i()), ("aten.cross_entropy_loss", f(B, 4), f(B, 4)), ("aten.nll_loss_nd", f(B, 4, S), i(B, S)), ("aten.nll_loss", f(B, 4), i(B)),
    *[(f"aten.{n}", X, X, r) for n in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"] for r in (0, 1, 2)], ("aten.binary_cross_entropy", X, X), ("aten.binary_cross_entropy_with_logits", X, X, None, f(8)),
]  # fmt: skip


# Parameters of the framework's schemas that do not change values, and so are not parameters of ours.
HINTS = frozenset(
    [
        "device",
        "layout",
        "pin_memory",
        "memory_format",
        "generator",
        "non_blocking",
        "copy",
        "requires_grad",
        "cudnn_enabled",
        "cudnn_enable",
        "sparse",
        "sparse_grad",
        "implicit",
    ]
)
LEFT_OUT = {"aten.gelu": {"approximate"}, "aten.repeat_interleave.self_int": {"output_size"}}


def overload(name: str) -> Any:
    _, packet, *rest = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), rest[0] if rest else "default")


def matrix(
    weight: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, middle: int
) -> torch.Tensor:
    """What a stored matrix stands for, in float32; `middle`: what is taken from each number of a symmetric kind."""
    if weight.dtype == torch.uint8:
        weight = torch.stack([weight & 15, weight >> 4], -1).flatten(-2)
    each = weight.shape[-1] // scales.shape[-1]
    numbers, wide = weight.float(), scales.float().repeat_interleave(each, -1)
    if minimums is None:
        return wide * (numbers - middle)
    return wide * numbers + minimums.float().repeat_interleave(each, -1)


OURS = {
    "fusion.linear_int8": lambda x, w, s, m, b: F.linear(x, matrix(w, s, m, 0), b),
    "fusion.linear_int4": lambda x, w, s, m, b: F.linear(x, matrix(w, s, m, 8), b),
    "fusion.embedding_int8": lambda w, s, m, ids, dtype: F.embedding(ids, matrix(w, s, m, 0)).to(dtype),
    "fusion.embedding_int4": lambda w, s, m, ids, dtype: F.embedding(ids, matrix(w, s, m, 8)).to(dtype),
    "fusion.gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "fusion.div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "fusion.div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fusion.dropout": lambda x, p: x * (1 - p),
    "fusion.keep": lambda buffer, value: value.clone(),
    "fusion.by_mode": lambda training, evaluated: training.clone(),
    "fusion.dropout_attention": lambda q, k, v, m, p, c, s, g: F.scaled_dot_product_attention(
        q, k, v, m, 0.0, c, scale=s, enable_gqa=g
    ),
    "fusion.expert_linear": lambda *args: _experts(*args),
    "fusion.expert_linear_int8": lambda x, ids, w, s, m, *more: _experts(
        x, ids, matrix(w, s, m, 0), *more, False
    ),
    "fusion.expert_linear_int4": lambda x, ids, w, s, m, *more: _experts(
        x, ids, matrix(w, s, m, 8), *more, False
    ),
    "fusion.recurrence": lambda *args: recurrence(*args),
    "fusion.cached_recurrence": lambda *args: recurrence(*args[:-1]),
    "fusion.cached_convolution": lambda x, w, b, slot: F.conv1d(
        x[:, 0].mT, w, b, padding=w.shape[2] - 1, groups=len(w)
    )[..., : x.shape[2]].mT[:, None],
    "fusion.cached_attention": lambda q, k, v, slot, scale, window: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    ),
    "fusion.cached_attention_relative": lambda q, k, v, *_: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ),
    "fusion.cached_selection": lambda q, k, w, slot, scale, count: (
        (F.relu(q @ k.mT * scale) * w).sum(1, keepdim=True).topk(count).indices
    ),
    "fusion.cached_attention_selected": lambda q, k, v, selected, *_: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ),
    "fusion.source_attention_scored": lambda q, k, v, slot, scale, softcap: F.scaled_dot_product_attention(
        q, k, v, scale=scale, enable_gqa=True
    ),
    "fusion.source_attention": lambda q, k, v, slot, scale: F.scaled_dot_product_attention(
        q, k, v, scale=scale, enable_gqa=True
    ),
    "fusion.cached_attention_scored": lambda q, k, v, *_: F.scaled_dot_product_attention(
        q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True
    ),
}


def _experts(x: Any, ids: Any, w: Any, b: Any, first: int, of: int, transposed: bool) -> torch.Tensor:
    """Every row with every matrix, and of these the one that it has chosen."""
    every = (x[:, None, None] * (w.mT if transposed else w)).sum(-1)
    every = every if b is None else every + b
    chosen = (
        F.one_hot(ids.clamp(0, of - 1), of)[:, first : first + len(w)]
        if x.device.type != "meta"
        else ids[:, None]
    )
    return (every * chosen[:, :, None]).sum(1)


def run(name: str, args: list[Any]) -> tuple[torch.Tensor, ...]:
    if name in OURS:
        result = OURS[name](*args)
    else:
        call = overload(name)
        only = {a.name for a in call._schema.arguments if a.kwarg_only}
        keyed = {p.name: a for p, a in zip(spec(name).parameters, args, strict=True)}
        given = {a.name for a in call._schema.arguments} & set(keyed)
        hidden = (
            {"cudnn_enabled": False} if "cudnn_enabled" in {a.name for a in call._schema.arguments} else {}
        )
        result = call(
            *(v for n, v in keyed.items() if n not in only),
            **{n: v for n, v in keyed.items() if n in only & given},
            **hidden,
        )
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def complete(name: str, given: tuple[Any, ...]) -> list[Any]:
    rest = spec(name).parameters[len(given) :]
    assert all(p.default is not REQUIRED for p in rest), name
    return [*given, *(p.default for p in rest)]


def build(args: list[Any], tensor: Any, dtype: Any, number: Any = lambda n: n) -> list[Any]:
    def one(a: Any) -> Any:
        if isinstance(a, T):
            return tensor(a)
        if isinstance(a, (D, DType)):
            return dtype(a)
        if isinstance(a, tuple):
            return tuple(map(one, a))
        return number(a) if type(a) is int else a

    return [one(a) for a in args]


def typed(
    name: str, given: tuple[Any, ...], dim: Any = lambda n: n
) -> tuple[tuple[Any, ...], dict[Ref, TensorType]]:
    """Arguments of the IR and the types of their values; `dim` may make symbols of sizes."""
    types: dict[Ref, TensorType] = {}

    def tensor(t: Any) -> Ref:
        ref = Ref(f"x{len(types)}")
        types[ref] = TensorType(tuple(map(dim, t.shape)), t.dtype)
        return ref

    sizes = {
        "aten.view",
        "aten._unsafe_view",
        "aten.reshape",
        "aten.expand",
        "aten.full",
        "aten.zeros",
        "aten.arange",
        "aten.layer_norm",
    }
    number = dim if name in sizes or name.startswith("aten.new_") else (lambda n: n)
    return tuple(build(complete(name, given), tensor, lambda d: DType(d.name), number)), types


def real(t: Any, device: str) -> torch.Tensor:
    dtype = getattr(torch, t.dtype)
    if device == "meta":
        return torch.empty(t.shape, dtype=dtype, device="meta")
    if t.dtype == "bool":
        return torch.rand(t.shape) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, t.high, t.shape, dtype=dtype)
    return (torch.rand(t.shape) * 0.8 + 0.1).to(dtype)


def in_framework(name: str, given: tuple[Any, ...], device: str) -> list[Any]:
    return build(complete(name, given), lambda t: real(t, device), lambda d: getattr(torch, d.name))


def over(samples: Iterable[tuple[Any, ...]]) -> Callable[[Test], Callable[[str], None]]:
    """A test for each family of operators, of all of its samples: a test for each of a thousand would cost more than it does."""
    families: dict[str, list[tuple[Any, ...]]] = {}
    for sample in samples:
        families.setdefault(spec(sample[0]).family, []).append(sample)

    def made(test: Test) -> Callable[[str], None]:
        def of_family(family: str) -> None:
            failed = {}
            for number, sample in enumerate(families[family]):
                try:
                    test(sample)
                except Exception as error:
                    failed[f"{number}-{sample[0]}"] = f"{sample}: {error!r}"
            assert not failed

        return pytest.mark.parametrize("family", sorted(families))(of_family)

    return made


def test_every_op_has_a_sample() -> None:
    assert {s[0] for s in SAMPLES} == set(OPSET)


@pytest.mark.parametrize("op", [s for n, s in OPSET.items() if n.startswith("aten.")], ids=lambda s: s.name)
def test_parameters_are_those_of_the_schema(op: OpSpec) -> None:
    def plain(value: Any) -> Any:
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    skip = HINTS | LEFT_OUT.get(op.name, set())
    arguments = [a for a in overload(op.name)._schema.arguments if a.name not in skip]
    wanted = [(a.name, plain(a.default_value) if a.has_default_value() else REQUIRED) for a in arguments]
    assert [(p.name, plain(p.default)) for p in op.parameters] == wanted


@over(SAMPLES)
def test_result_types_are_the_framework_s(sample: tuple[Any, ...]) -> None:
    name, *given = sample
    expected = run(name, in_framework(name, tuple(given), "meta"))
    args, types = typed(name, tuple(given))
    found = infer(name, args, types)
    assert [(t.shape, t.dtype) for t in found] == [
        (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in expected
    ]


@over(SAMPLES)
def test_symbols_give_the_same_types_once_bound(sample: tuple[Any, ...]) -> None:
    name, *given = sample
    batch, sequence = symbol("batch"), symbol("sequence")
    sizes = {B: batch, S: sequence, B * S: batch * sequence, S * 8: sequence * 8, 4 * S: sequence * 4}
    plain_args, plain_types = typed(name, tuple(given))
    args, types = typed(name, tuple(given), lambda n: sizes.get(n, n))
    bound = [
        TensorType(tuple(bind(d, {"batch": B, "sequence": S}) for d in t.shape), t.dtype)
        for t in infer(name, args, types)
    ]
    assert tuple(bound) == infer(name, plain_args, plain_types)


@over(SAMPLES)
def test_dims_not_mixed_carry_positions_through(sample: tuple[Any, ...]) -> None:
    """Change an argument at position 0 and at position 1 of a dimension that is not listed as mixed: no element of
    the results may depend on both."""
    name, *given = sample
    if spec(name).keeps or name.endswith("_like") or "new_" in name:
        return  # length is the cache's business, or the values are not read
    torch.manual_seed(0)
    args, types = typed(name, tuple(given))
    mixed = dict(mixed_dims(name, args, types))
    assert set(mixed) == set(types)
    values = in_framework(name, tuple(given), "cpu")
    flat = [v for a in values for v in (a if isinstance(a, tuple) else (a,)) if isinstance(v, torch.Tensor)]
    before = [r.clone() for r in run(name, values)]
    for ref, tensor in zip(types, flat, strict=True):
        assert all(0 <= d < tensor.dim() for d in mixed[ref])
        for dim in set(range(tensor.dim())) - mixed[ref]:
            if tensor.shape[dim] < 2:
                continue
            touched = []
            for position in (0, 1):
                kept = tensor.clone()
                part = tensor.select(dim, position)
                part.copy_(
                    ~part
                    if tensor.dtype == torch.bool
                    else 1 - part
                    if tensor.dtype == torch.int64
                    else part * 0.5 + 0.3
                )
                after = run(name, values)
                touched.append(
                    [(a != b) & ~((a != a) & (b != b)) for a, b in zip(after, before, strict=True)]
                )
                after = [a.clone() for a in after]
                tensor.copy_(kept)
            assert not any((a & b).any() for a, b in zip(*touched, strict=True)), f"{ref} dim {dim}"


@over(s for s in SAMPLES if spec(s[0]).family in ("contraction", "convolution"))
def test_flops_are_the_framework_s_count(sample: tuple[Any, ...]) -> None:
    name, *given = sample
    args, types = typed(name, tuple(given))
    call = spec(name).call(args, types)
    ours = spec(name).flops(call, infer(name, args, types))
    values = in_framework(name, tuple(given), "cpu")
    with FlopCounterMode(display=False) as counter:
        (result,) = run(name, values)
    counted = counter.get_total_flops()
    if counted == 0:  # the counter does not know this form
        return
    assert counted <= ours <= counted + 2 * result.numel()  # it leaves out the bias


# What autograd keeps besides: means, deviations and the like.
UNCOUNTED = 0.26
# Forms in which the framework copies or expands first; our formula is for the usual one.
APART = ("index_add", "adaptive_avg_pool2d", "binary_cross_entropy_with_logits")


@over(
    s for s in SAMPLES if s[0].startswith("aten.") and not s[0].endswith(APART) and spec(s[0]).differentiable
)
def test_saved_bytes_are_what_autograd_keeps(sample: tuple[Any, ...]) -> None:
    name, *given = sample
    args, types = typed(name, tuple(given))
    node = Node("node", name, args, infer(name, args, types))
    graph = Graph(tuple(Input(r.name, t) for r, t in types.items()), (), (node,), (Ref("node"),))
    floats = frozenset(r for r, t in types.items() if "float" in t.dtype)
    loss = spec(name).loss
    no_gradient = {"running_mean", "running_var"} | ({"target"} if name != "aten.kl_div" else set())
    if name == "aten.matmul" and 3 <= len(given[0].shape) != len(given[1].shape) >= 3:
        return  # the framework expands a copy first
    (saved,) = node_saved_bytes(graph, {}, floats)
    if not floats or "float" not in node.results[0].dtype:
        assert saved == 0
        return
    values = in_framework(name, tuple(given), "cpu")
    for parameter, value in zip(spec(name).parameters, values, strict=True):
        if parameter.name not in no_gradient and not (loss and parameter.name == "weight"):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point:
                    tensor.requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        results = run(name, values)
    actual = sum(kept.values())
    assert abs(saved - actual) <= UNCOUNTED * max(saved, actual) + 64
    del results


_AXIS = st.tuples(
    st.integers(0, 7), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.integers(1, 9)
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(_AXIS, min_size=1, max_size=3), st.booleans())
def test_every_maximum_of_a_pool_that_is_accepted_lies_in_its_plane(
    axes: list[tuple[int, ...]], ceil: bool
) -> None:
    space, *windows = (tuple(v) for v in zip(*axes, strict=True))
    shape, n = (1, 2, *space), len(axes)
    for symbolic in (False, True):  # the same of a dimension whose size is not known beforehand
        dims = (1, 2, *((symbol("sequence"),) * n if symbolic else space))
        try:
            (found,) = infer(
                f"aten.max_pool{n}d", (Ref("x"), *windows, ceil), {Ref("x"): TensorType(dims, "float32")}
            )
        except GraphError:
            continue
        x = torch.rand(shape, requires_grad=True)
        pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[n]
        try:
            result, places = pool(x, *windows, ceil_mode=ceil, return_indices=True)
        except RuntimeError:
            assert symbolic or 0 in space  # the windows do not fit the size that it has
            continue
        assert symbolic or result.shape == found.shape
        assert places.min() >= 0 and places.max() < math.prod(space)
        result[:, 0].sum().backward()
        assert x.grad is not None and x.grad[:, 0].sum() == result[:, 0].numel() and not x.grad[:, 1].any()
