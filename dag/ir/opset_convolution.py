"""Convolutions and pooling over the last one to three dimensions."""

from __future__ import annotations

from math import prod

from fusion.dag.ir.dims import Dim
from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_contract import one_dtype
from fusion.dag.ir.opset_shapes import divide, is_float, lower_bound, same
from fusion.dag.ir.opset_spec import Call, Flops, Infer, Mixed, Mixes, OpSpec, Types, elements, op

MAX_WINDOW = 64  # kernel size of `fusion.cached_convolution`; models have 3 or 4


def per_dimension(call: Call, name: str, n: int, empty: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """A list of one value or of n, as n values."""
    values = call[name]
    if not values and empty is not None:
        return empty
    if len(values) not in (1, n):
        raise call.fail(f"{name} has {len(values)} values for {n} dimensions")
    if any(v < 0 or (v == 0 and "padding" not in name) for v in values):
        raise call.fail(f"{name} {values} is out of range")
    return tuple(values) * n if len(values) == 1 else tuple(values)


def _windows(
    call: Call, length: Dim, window: int, stride: int, pad: int, dilation: int, ceil: bool = False
) -> Dim:
    """The number of windows (PyTorch's formula for convolutions and pooling)."""
    span = length + 2 * pad - dilation * (window - 1) - 1
    if not isinstance(span, int):
        if ceil and stride != 1:
            raise call.fail(f"cannot round the number of windows over {length}")
        return divide(call, span, stride) + 1
    if span < 0:
        raise call.fail(f"a window of {dilation * (window - 1) + 1} does not fit {length + 2 * pad}")
    if not ceil:
        return span // stride + 1
    count = -(-span // stride) + 1
    # the last window must start inside the input or its left pad
    return count - 1 if (count - 1) * stride >= length + pad else count  # type: ignore[operator]


def _frame(call: Call, n: int) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """(batch and channels, spatial dimensions) of the input, batch being optional."""
    x = call.values.get("input") or call["self"]
    if len(x.shape) not in (n + 1, n + 2) or not is_float(x.dtype):
        raise call.fail(f"needs (batch, channels, {n} dimensions) of a floating dtype, not {x}")
    return x.shape[:-n], x.shape[-n:]


def convolution(n: int, transposed: bool = False) -> Infer:
    def infer(call: Call) -> Types:
        x, w, b, groups = call["input"], call["weight"], call["bias"], call["groups"]
        lead, space = _frame(call, n)
        if len(w.shape) != n + 2 or not all(isinstance(d, int) and d > 0 for d in w.shape) or groups <= 0:
            raise call.fail(f"weight {w}, groups {groups}")
        inside, outside = (
            (w.shape[0], w.shape[1] * groups) if transposed else (w.shape[1] * groups, w.shape[0])
        )
        same(call, lead[-1], inside, "channels")
        if inside % groups or outside % groups:
            raise call.fail(f"{inside} to {outside} channels in {groups} groups")
        if b is not None and b.shape != (outside,):
            raise call.fail(f"bias {b} does not fit {outside} channels")
        stride, pad, dilation = (per_dimension(call, name, n) for name in ("stride", "padding", "dilation"))
        windows = list(zip(space, w.shape[2:], stride, pad, dilation, strict=True))
        if transposed:
            more = per_dimension(call, "output_padding", n)
            result = tuple(
                (d - 1) * s - 2 * p + g * (k - 1) + m + 1
                for (d, k, s, p, g), m in zip(windows, more, strict=True)
            )
            if any(isinstance(d, int) and d <= 0 for d in result):
                raise call.fail("the result is empty")
        else:
            result = tuple(_windows(call, d, k, s, p, g) for d, k, s, p, g in windows)
        return (TensorType((*lead[:-1], outside, *result), one_dtype(call, x, w, b)),)

    return infer


def pool(n: int) -> Infer:
    def infer(call: Call) -> Types:
        lead, space = _frame(call, n)
        kernel = per_dimension(call, "kernel_size", n)
        stride, pad = per_dimension(call, "stride", n, kernel), per_dimension(call, "padding", n)
        dilation = per_dimension(call, "dilation", n) if "dilation" in call.values else (1,) * n
        if any(2 * p > k for p, k in zip(pad, kernel, strict=True)):
            raise call.fail(f"padding {pad} is over half the window {kernel}")
        for length, p, step in zip(space, pad, dilation, strict=True):
            _require_no_window_in_padding(call, length, p, step)
        windows = zip(space, kernel, stride, pad, dilation, strict=True)
        sizes = tuple(_windows(call, *w, ceil=call["ceil_mode"]) for w in windows)
        return (TensorType((*lead, *sizes), call["self"].dtype),)

    return infer


def _require_no_window_in_padding(call: Call, length: Dim, pad: int, dilation: int) -> None:
    """GraphError if a window may be in the padding alone: PyTorch would take a position outside the tensor for its maximum, and
    write a gradient there. A window that begins in the padding has its first position inside before index `dilation`. PyTorch
    itself refuses an empty dimension."""
    shortest = lower_bound(length)
    if pad and dilation > (max(1, shortest) if shortest is not None else 1):
        raise call.fail(f"a window of dilation {dilation} may lie in the padding of {length} alone")


def adaptive_pool(n: int) -> Infer:
    def infer(call: Call) -> Types:
        lead, _ = _frame(call, n)
        return (TensorType((*lead, *per_dimension(call, "output_size", n)), call["self"].dtype),)

    return infer


def _convolution_mixes(n: int, transposed: bool) -> Mixes:
    def mixes(call: Call) -> Mixed:
        rank = len(call["input"].shape)
        is_pointwise = (
            call["weight"].shape[2:] == (1,) * n
            and set(call["stride"]) == {1}
            and set(call["padding"]) == {0}
        )
        return {
            "input": {rank - n - 1} if is_pointwise else set(range(rank - n - 1, rank)),
            "weight": set(range(n + 2)) - {int(transposed)},
        }

    return mixes


def _pool_mixes(n: int) -> Mixes:
    return lambda call: {"self": set(range(len(call["self"].shape) - n, len(call["self"].shape)))}


def _convolution_flops(call: Call, results: Types) -> int:
    """2 * window * channels of a group, for each element of the result."""
    w = call["weight"]
    return elements(results[0]) * (2 * elements(w) // max(1, int(w.shape[0])) + (call["bias"] is not None))


def _transposed_flops(call: Call, _: Types) -> int:
    w = call["weight"]
    return elements(call["input"]) * 2 * elements(w) // max(1, int(w.shape[0]))


def _c(name: str, n: int, transposed: bool = False, since: int = 1) -> OpSpec:
    ones, zeros = str((1,) * n), str((0,) * n)
    parameters = f"input: tensor, weight: tensor, bias: tensor? = None, stride: ints = {ones}, padding: ints = {zeros}, "
    parameters += (
        f"output_padding: ints = {zeros}, groups: int = 1, dilation: ints = {ones}"
        if transposed
        else f"dilation: ints = {ones}, groups: int = 1"
    )
    return op(
        name, parameters, convolution(n, transposed), "convolution",
        mixes=_convolution_mixes(n, transposed), flops=_transposed_flops if transposed else _convolution_flops,
        saves=("input", "weight"), bilinear=True, backward={"input": 1.0, "weight": 1.0}, since=since,
    )  # fmt: skip


def _pool_flops(n: int) -> Flops:
    def flops(call: Call, results: Types) -> int:
        if "kernel_size" not in call.values:
            return max(elements(call["self"]), elements(results[0]))
        return elements(results[0]) * prod(per_dimension(call, "kernel_size", n))

    return flops


def _p(name: str, n: int, parameters: str, infer: Infer, saves: tuple[str, ...], since: int = 1) -> OpSpec:
    return op(
        name, f"self: tensor, {parameters}", infer, "reduction",
        mixes=_pool_mixes(n), flops=_pool_flops(n), saves=saves, backward={"self": 1.0}, since=since,
    )  # fmt: skip


def _max(n: int) -> str:
    zeros, ones = (0,) * n, (1,) * n
    return f"kernel_size: ints, stride: ints = (), padding: ints = {zeros}, dilation: ints = {ones}, ceil_mode: bool = False"


def _average(n: int) -> str:
    zeros = (0,) * n
    return f"kernel_size: ints, stride: ints = (), padding: ints = {zeros}, ceil_mode: bool = False, count_include_pad: bool = True"


def cached_convolution(call: Call) -> Types:
    """input (batch, 1, length, channels) of the new positions, weight (channels, 1, window), bias (channels) -> as input. A causal
    depthwise convolution over the last `window` positions, with zeros before the first one; earlier positions are in the cache of
    `slot`. `window` is at most MAX_WINDOW, as each tap is a product of its own."""
    x, w, b = call["input"], call["weight"], call["bias"]
    if len(x.shape) != 4 or x.shape[1] != 1 or call["slot"] < 0 or not is_float(x.dtype):
        raise call.fail(f"needs (batch, 1, length, channels) and a slot of at least 0, not {x}")
    if (
        len(w.shape) != 3
        or w.shape[:2] != (x.shape[3], 1)
        or not isinstance(w.shape[2], int)
        or not 1 <= w.shape[2] <= MAX_WINDOW
    ):
        raise call.fail(f"weight {w} does not fit {x}, or sees more than {MAX_WINDOW} positions")
    if b is not None and b.shape != w.shape[:1]:
        raise call.fail(f"bias {b} does not fit weight {w}")
    one_dtype(call, x, w, b)
    return (x,)


def _cached_flops(call: Call, results: Types) -> int:
    window = call["weight"].shape[2]
    return elements(results[0]) * (2 * int(window) + (call["bias"] is not None))


SPECS: list[OpSpec] = [
    _c("aten.conv1d", 1),
    _c("aten.conv2d", 2),
    _c("aten.conv3d", 3),
    _c("aten.conv_transpose1d", 1, transposed=True),
    _c("aten.conv_transpose2d.input", 2, transposed=True),
    _c("aten.conv_transpose3d.input", 3, transposed=True, since=2),
    _p("aten.max_pool1d", 1, _max(1), pool(1), ("self", "max_indices")),
    _p("aten.max_pool2d", 2, _max(2), pool(2), ("self", "max_indices")),
    _p("aten.max_pool3d", 3, _max(3), pool(3), ("self", "max_indices"), since=2),
    _p("aten.avg_pool1d", 1, _average(1), pool(1), ("self",)),
    _p("aten.avg_pool2d", 2, _average(2) + ", divisor_override: int? = None", pool(2), ("self",)),
    _p("aten.avg_pool3d", 3, _average(3) + ", divisor_override: int? = None", pool(3), ("self",), since=2),
    _p("aten.adaptive_avg_pool1d", 1, "output_size: ints", adaptive_pool(1), ("self",)),
    _p("aten.adaptive_avg_pool2d", 2, "output_size: ints", adaptive_pool(2), ("self",)),
    _p("aten.adaptive_avg_pool3d", 3, "output_size: ints", adaptive_pool(3), ("self",), since=2),
    # In the family of attention: sequences run one by one, and the cache takes the time.
    op(
        "fusion.cached_convolution",
        "input: tensor, weight: tensor, bias: tensor?, slot: int",
        cached_convolution,
        "attention",
        mixes=lambda c: {"weight": {2}},
        flops=_cached_flops,
        differentiable=False,
        keeps=("input",),
        since=2,
    ),
]
