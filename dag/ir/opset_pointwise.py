"""Element-wise ops: each element of the result depends on one element of each argument, after broadcasting."""

from __future__ import annotations

from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_shapes import broadcast, floating, is_float, promote
from fusion.dag.ir.opset_spec import Call, Infer, OpSpec, Types, flops_per_result, op

KEEP = "fusion.keep"  # writes its value to a buffer, which the next run reads
BY_MODE = "fusion.by_mode"  # gives its first argument in training, its second in evaluation
SELF = "self: tensor"
BOTH = "self: tensor, other: tensor"
OPERAND = "self: tensor, other: operand"
SCALAR = "self: tensor, other: number"


def unary(call: Call) -> Types:
    return (call["self"],)


def unary_floating(call: Call) -> Types:
    t = call["self"]
    return (TensorType(t.shape, floating(t.dtype)),)


def float_only(call: Call) -> Types:
    t = call["self"]
    if not is_float(t.dtype):
        raise call.fail(f"needs a floating dtype, not {t.dtype}")
    return (t,)


def predicate(call: Call) -> Types:
    """Comparisons and logic: the broadcast shape, of booleans."""
    return (TensorType(broadcast(call, *(t.shape for t in call.tensors())), "bool"),)


def arithmetic(call: Call) -> Types:
    """self and other, promoted; numbers count by their category only."""
    a, b = call["self"], call["other"]
    shapes = [t.shape for t in (a, b) if isinstance(t, TensorType)]
    return (TensorType(broadcast(call, *shapes), promote((a, b))),)


def true_division(call: Call) -> Types:
    (t,) = arithmetic(call)
    return (TensorType(t.shape, floating(t.dtype)),)


def bits(call: Call) -> Types:
    (t,) = arithmetic(call)
    if is_float(t.dtype):
        raise call.fail("needs integers or booleans")
    return (t,)


def power(call: Call) -> Types:
    a, b = call["self"], call["exponent"]
    shapes = [t.shape for t in (a, b) if isinstance(t, TensorType)]
    return (TensorType(broadcast(call, *shapes), promote((a, b))),)


def all_tensors(call: Call) -> Types:
    """Broadcast and promote every tensor argument (lerp, addcmul, ...)."""
    tensors = call.tensors()
    return (TensorType(broadcast(call, *(t.shape for t in tensors)), promote(tensors)),)


def clamp(call: Call) -> Types:
    if call["min"] is None and call["max"] is None:
        raise call.fail("needs a minimum or a maximum")
    operands = [v for v in call.values.values() if v is not None]
    shapes = [t.shape for t in call.tensors()]
    return (TensorType(broadcast(call, *shapes), promote(operands)),)


def one_bound(call: Call) -> Types:
    t = call["self"]
    bound = call["min"] if "min" in call.values else call["max"]
    return (TensorType(t.shape, promote((t, bound))),)


def where(call: Call) -> Types:
    condition, a, b = call["condition"], call["self"], call["other"]
    if condition.dtype != "bool":
        raise call.fail(f"condition must be bool, not {condition.dtype}")
    shapes = [t.shape for t in (condition, a, b) if isinstance(t, TensorType)]
    return (TensorType(broadcast(call, *shapes), promote((a, b))),)


def masked_fill(call: Call) -> Types:
    t, mask, value = call["self"], call["mask"], call["value"]
    if mask.dtype != "bool" or (isinstance(value, TensorType) and value.shape):
        raise call.fail("needs a bool mask and a value without dimensions")
    return (TensorType(broadcast(call, t.shape, mask.shape), t.dtype),)


def to_dtype(call: Call) -> Types:
    return (TensorType(call["self"].shape, call["dtype"].name),)


def like_other(call: Call) -> Types:
    return (TensorType(call["self"].shape, call["other"].dtype),)


def overwritten(call: Call) -> Types:
    """The value, in the shape and dtype of self."""
    t = call["self"]
    value = call["src"] if "src" in call.values else call["value"]
    if isinstance(value, TensorType) and broadcast(call, t.shape, value.shape) != t.shape:
        raise call.fail(f"{value} does not fit {t}")
    if call.op == "aten.fill.Tensor" and value.shape:
        raise call.fail(f"needs a value without dimensions, not {value}")
    return (t,)


def kept_value(call: Call) -> Types:
    """The value, which is written to `buffer` for the next run. In evaluation, the buffer as it is."""
    buffer, value = call["buffer"], call["value"]
    if buffer != value:
        raise call.fail(f"{value} does not fit the buffer {buffer}")
    return (value,)


def chosen_by_mode(call: Call) -> Types:
    """The first argument in training, the second in evaluation."""
    training, evaluated = call["training"], call["evaluated"]
    if training != evaluated:
        raise call.fail(f"{training} in training is {evaluated} in evaluation")
    return (training,)


def evaluation_dropout(call: Call) -> Types:
    if call["train"]:
        raise call.fail("draws from a global generator when training: use fusion.dropout")
    return (call["input"],)


def fusion_dropout(call: Call) -> Types:
    if not 0 <= call["p"] <= 1:
        raise call.fail(f"p = {call['p']} is not a probability")
    return float_only(call)


def prelu(call: Call) -> Types:
    t, weight = call["self"], call["weight"]
    if weight.shape not in ((), (1,)) and (len(t.shape) < 2 or weight.shape != (t.shape[1],)):
        raise call.fail(f"weight {weight} does not fit the channels of {t}")
    return float_only(call)


def _p(
    name: str,
    parameters: str,
    infer: Infer,
    saves: str = "",
    flops: int = 1,
    smooth: bool = True,
    since: int = 1,
) -> OpSpec:
    return op(
        name, parameters, infer, "pointwise",
        saves=tuple(saves.split()), bilinear=saves == "self other", flops=flops_per_result(flops), differentiable=smooth,
        since=since,
    )  # fmt: skip


def _unary(names: str, infer: Infer, saves: str, flops: int = 1, since: int = 1) -> list[OpSpec]:
    return [_p(f"aten.{name}", SELF, infer, saves, flops, since=since) for name in names.split()]


def _both(
    names: str, infer: Infer, saves: str = "", smooth: bool = True, tensor: str = OPERAND
) -> list[OpSpec]:
    """Each name with the overloads Tensor, whose `other` may be a number too in arithmetic, and Scalar."""
    return [
        _p(f"aten.{name}.{overload}", parameters, infer, saves, 1, smooth)
        for name in names.split()
        for overload, parameters in (("Tensor", tensor), ("Scalar", SCALAR))
    ]


SPECS: list[OpSpec] = [
    *_unary("neg sign", unary, ""),
    *_unary("abs", unary, "self"),
    *_unary("relu", unary, "result"),
    *_unary("exp sqrt rsqrt reciprocal sigmoid tanh", unary_floating, "result"),
    *_unary("log log1p log2 sin cos erf expm1", unary_floating, "self"),
    *_unary("tan exp2", unary_floating, "result", since=2),
    *_unary("sinh cosh asin acos atan asinh acosh atanh log10 erfc erfinv", unary_floating, "self", since=2),
    *_unary("silu mish hardswish hardsigmoid", float_only, "self", 4),
    *_unary("log_sigmoid", float_only, "self copy", 4),
    *_unary("relu6 selu", unary, "result"),
    *_unary("floor ceil round trunc", unary, ""),
    *[_p(f"aten.{n}", SELF, predicate, smooth=False) for n in ("logical_not", "isnan", "isinf", "isfinite")],
    _p("aten.bitwise_not", SELF, unary, smooth=False),
    _p("aten.square", SELF, unary, "self"),
    _p("aten.gelu", SELF, float_only, "self", 8),  # approximate="none"
    _p("fusion.gelu_tanh", SELF, float_only, "self", 12),  # approximate="tanh"
    _p("aten.softplus", "self: tensor, beta: number = 1, threshold: number = 20", float_only, "self", 4),
    _p("aten.leaky_relu", "self: tensor, negative_slope: number = 0.01", float_only, "self"),
    _p(
        "aten.elu",
        "self: tensor, alpha: number = 1, scale: number = 1, input_scale: number = 1",
        float_only,
        "self",
        3,
    ),
    _p("aten.celu", "self: tensor, alpha: number = 1.0", float_only, "self", 3),
    _p("aten.hardtanh", "self: tensor, min_val: number = -1, max_val: number = 1", unary, "self"),
    _p("aten.threshold", "self: tensor, threshold: number, value: number", unary, "self"),
    _p("aten.prelu", "self: tensor, weight: tensor", prelu, "self weight"),
    _p("aten.clamp", "self: tensor, min: number? = None, max: number? = None", clamp, "self"),
    _p("aten.clamp.Tensor", "self: tensor, min: tensor? = None, max: tensor? = None", clamp, "self min max"),
    _p("aten.clamp_min", "self: tensor, min: number", one_bound, "self"),
    _p("aten.clamp_max", "self: tensor, max: number", one_bound, "self"),
    _p("aten.add.Tensor", OPERAND + ", alpha: number = 1", arithmetic),
    _p("aten.add.Scalar", SCALAR + ", alpha: number = 1", arithmetic),
    _p("aten.sub.Tensor", OPERAND + ", alpha: number = 1", arithmetic),
    _p("aten.sub.Scalar", SCALAR + ", alpha: number = 1", arithmetic),
    _p("aten.rsub.Tensor", OPERAND + ", alpha: number = 1", arithmetic),
    _p("aten.rsub.Scalar", SCALAR + ", alpha: number = 1", arithmetic),
    *_both("mul", arithmetic, "self other"),
    *_both("div", true_division, "self other"),
    *_both("remainder fmod", arithmetic, "self other"),
    _p("aten.floor_divide", OPERAND, arithmetic, smooth=False),
    _p("fusion.div_floor", OPERAND, arithmetic, smooth=False),  # rounding_mode="floor"
    _p("fusion.div_trunc", OPERAND, arithmetic, smooth=False),  # rounding_mode="trunc"
    _p("aten.pow.Tensor_Scalar", "self: tensor, exponent: number", power, "self"),
    _p("aten.pow.Tensor_Tensor", "self: tensor, exponent: tensor", power, "self exponent result", 4),
    _p("aten.pow.Scalar", "self: number, exponent: tensor", power, "exponent result", 4),
    _p("aten.maximum", BOTH, arithmetic, "self other"),
    _p("aten.minimum", BOTH, arithmetic, "self other"),
    _p("aten.atan2", BOTH, true_division, "self other", 4),
    *_both("eq ne lt le gt ge", predicate, smooth=False, tensor=BOTH),
    *[_p(f"aten.{n}", BOTH, predicate, smooth=False) for n in ("logical_and", "logical_or", "logical_xor")],
    *_both("bitwise_and bitwise_or bitwise_xor __and__ __or__", bits, smooth=False, tensor=BOTH),
    _p("aten.where.self", "condition: tensor, self: tensor, other: tensor", where, "condition"),
    _p("aten.where.ScalarOther", "condition: tensor, self: tensor, other: number", where, "condition"),
    _p("aten.where.ScalarSelf", "condition: tensor, self: number, other: tensor", where, "condition"),
    _p("aten.where.Scalar", "condition: tensor, self: number, other: number", where, smooth=False),
    _p("aten.masked_fill.Scalar", "self: tensor, mask: tensor, value: number", masked_fill, "mask"),
    _p("aten.masked_fill.Tensor", "self: tensor, mask: tensor, value: tensor", masked_fill, "mask"),
    _p("aten.lerp.Scalar", "self: tensor, end: tensor, weight: number", all_tensors, "", 3),
    _p("aten.lerp.Tensor", "self: tensor, end: tensor, weight: tensor", all_tensors, "self end weight", 3),
    _p(
        "aten.addcmul",
        "self: tensor, tensor1: tensor, tensor2: tensor, value: number = 1",
        all_tensors,
        "tensor1 tensor2",
        3,
    ),
    _p(
        "aten.addcdiv",
        "self: tensor, tensor1: tensor, tensor2: tensor, value: number = 1",
        all_tensors,
        "tensor1 tensor2",
        3,
    ),
    _p("aten.to.dtype", "self: tensor, dtype: dtype", to_dtype),
    _p("aten.copy", "self: tensor, src: tensor", overwritten, since=2),
    _p("aten.fill.Scalar", "self: tensor, value: number", overwritten, since=2),
    _p("aten.fill.Tensor", "self: tensor, value: tensor", overwritten, since=2),
    _p("aten.type_as", BOTH, like_other),
    _p("aten.dropout", "input: tensor, p: float, train: bool", evaluation_dropout, flops=0),
    _p("fusion.dropout", "self: tensor, p: float", fusion_dropout, "copy", 2),
    _p(KEEP, "buffer: tensor, value: tensor", kept_value, flops=0, since=3),
    _p(BY_MODE, "training: tensor, evaluated: tensor", chosen_by_mode, flops=0, since=3),
]
