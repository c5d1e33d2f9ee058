"""Use and misuse of the op-set: refusals, bounds. `test_opset_types` holds the table against the framework."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from fusion.dag.ir.dims import Poly, symbol
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Ref, TensorType
from fusion.dag.ir.opset import OPSET, infer, spec

_TYPES = {
    Ref("x"): TensorType((symbol("batch"), symbol("sequence"), 8), "float32"),
    Ref("w"): TensorType((4, 8), "float32"),
    Ref("n"): TensorType((3,), "int64"),
    Ref("big"): TensorType((2**40,), "float32"),
    Ref("ids"): TensorType((4,), "int64"),
    Ref("experts"): TensorType((3, 5, 8), "float32"),
    Ref("heads"): TensorType((2,), "float32"),
    Ref("rows"): TensorType((3, 2), "float32"),
    Ref("few"): TensorType((symbol("batch"), 2, 5, 8), "float32"),
    Ref("q"): TensorType((symbol("batch"), 2, symbol("sequence"), 8), "float32"),
    Ref("key"): TensorType((symbol("batch"), 1, symbol("sequence"), 8), "float32"),
    Ref("key_half"): TensorType((symbol("batch"), 1, symbol("sequence"), 8), "bfloat16"),
    Ref("head_weights"): TensorType((symbol("batch"), 2, symbol("sequence"), 1), "float32"),
    Ref("places"): TensorType((symbol("batch"), 1, symbol("sequence"), 3), "int64"),
    Ref("bytes"): TensorType((4,), "uint8"),
    Ref("short"): TensorType((4,), "int16"),
    Ref("row"): TensorType((1, 3), "float32"),
    Ref("text"): TensorType((1, symbol("sequence")), "float32"),
    Ref("half"): TensorType((4, 8), "bfloat16"),
}
_Q = Ref("q")


def relative(
    table: Any = Ref("rows"),  # noqa: B008 - frozen
    slot: int = 0,
    scale: float = 1.0,
    buckets: Any = (0, 2, 1),
) -> Any:
    return _Q, _Q, _Q, table, slot, scale, buckets


def selection(
    key: Any = Ref("key"),  # noqa: B008 - frozen
    weights: Any = Ref("head_weights"),  # noqa: B008
    slot: int = 0,
    scale: float = 1.0,
    count: int = 3,
) -> Any:
    return _Q, key, weights, slot, scale, count


def scored(
    bias: Any = None,
    sinks: Any = None,
    slot: int = 0,
    scale: float = 1.0,
    cap: Any = None,
    slopes: Any = None,
) -> Any:
    return _Q, _Q, _Q, bias, sinks, slot, scale, None, cap, slopes


_X, _W, _N, _BIG = Ref("x"), Ref("w"), Ref("n"), Ref("big")


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("aten.system", (_X,), "unknown op"),
        ("x\nimport os", (_X,), "unknown op"),
        ("aten.relu", (_X, _X), "takes 1 arguments"),
        ("aten.relu", (3,), "argument self"),
        ("aten.relu", ("x",), "argument self"),
        ("aten.relu", (Ref("later"),), "not defined before"),
        ("aten.relu", (Ref("x", 1),), "not defined before"),
        ("aten.linear", (_X, _X, None), "weight"),
        ("aten.linear", (_W, Ref("n"), None), "weight"),
        ("aten.matmul", (_X, _W), "inner dimension"),
        ("aten.embedding", (_W, _X, -1, False), "indices"),
        ("aten.transpose.int", (_X, 0, 3), "dimension 3"),
        ("aten.transpose.int", (_X, True, 1), "argument dim0"),
        ("aten.view", (_X, (7, -1)), "not a multiple"),
        ("aten.view", (_X, (-1, -1)), "unknown"),
        ("aten.view", (_X, (8, symbol("sequence"))), "number of elements"),
        ("aten.view", (_X, (1,) * 9), "rank"),
        ("aten.view", (_X, (1,) * 2000), "argument size"),
        ("aten.split.Tensor", (_BIG, 1, 0), "results"),
        ("aten.chunk", (_BIG, 2**40, 0), "results"),
        ("aten.unbind.int", (_BIG, 0), "results"),
        ("aten.full", ((2**40, 2**40), 0, None), "too large"),
        ("aten.arange", (float("inf"), None), "finite"),
        ("aten.arange", (-1, None), "disagree"),
        ("aten.arange.start", (-1e308, 1e308, None), "finite"),
        ("aten.arange.start_step", (0, 1e308, 1e-308, None), "too large"),
        ("aten.arange.start_step", (0, 1e200, 1e-100, None), "too large"),
        ("aten.arange.start_step", (0, 1, 0, None), "not zero"),
        ("aten.slice.Tensor", (_X, 1, 0, 4, 1), "cannot tell"),
        ("aten.slice.Tensor", (_X, 1, symbol("sequence") * -2, None, 1), "cannot tell"),
        ("aten.slice.Tensor", (_X, 1, 0, None, 0), "step"),
        ("aten.slice.Tensor", (_X, 1, 0, None, 3), "not a multiple"),
        ("aten.select.int", (_W, 0, 4), "index 4"),
        ("aten.cat", ((_X, _W), 0), "differ"),
        ("aten.cat", ((), 0), "argument tensors"),
        ("aten.add.Tensor", (_X, _N, 1), "broadcast"),
        ("aten.mean", (_N, None), "floating"),
        ("aten.dropout", (_X, 0.5, True), "fusion.dropout"),
        ("fusion.dropout", (_X, 1.5), "probability"),
        ("aten.index.Tensor", (_X, (None, _X)), "integers"),
        ("aten.index.Tensor", (_W, (Ref("bytes"),)), "integers"),
        ("aten.index.Tensor", (_W, (Ref("short"),)), "integers"),
        ("aten.index_put", (_W, (Ref("bytes"),), _W, False), "integers"),
        ("aten.index_add", (_W, 0, Ref("bytes"), _W, 1), "integers"),
        ("aten.cross_entropy_loss", (_W, Ref("n"), None, 1, -100, 0.0), "target"),
        ("aten.mse_loss", (_W, _W, 3), "reduction"),
        ("aten.huber_loss", (_N, Ref("heads"), 1, 1.0), "floating"),
        ("aten.max_pool1d", (Ref("row"), (2,), (1,), (1,), (4,), False), "in the padding of 3 alone"),
        ("aten.max_pool1d", (Ref("text"), (2,), (1,), (1,), (2,), False), "in the padding of sequence alone"),
        ("fusion.expert_linear", (_W, _N, Ref("experts"), None, 0, 3, False), "id for each row"),
        ("fusion.expert_linear", (_W, Ref("ids"), _W, None, 0, 3, False), "in numbers"),
        ("fusion.expert_linear", (_W, Ref("ids"), Ref("experts"), None, 0, 3, True), "input features"),
        ("fusion.expert_linear", (_W, Ref("ids"), Ref("experts"), _W, 0, 3, False), "bias"),
        ("fusion.expert_linear", (_W, Ref("ids"), Ref("experts"), None, 2, 4, False), "experts 2 to 4 of 4"),
        ("fusion.expert_linear", (_W, Ref("ids"), Ref("experts"), None, -1, 4, False), "experts -1"),
        ("fusion.expert_linear", (_W, Ref("ids"), Ref("experts"), None, 2**62, 2**63, False), "at most"),
        ("fusion.cached_attention_scored", scored(slot=-1), "slot"),
        ("fusion.cached_attention_scored", scored(bias=Ref("q")), "bias"),
        ("fusion.cached_attention_scored", scored(sinks=Ref("w")), "sinks"),
        ("fusion.cached_attention_scored", scored(sinks=Ref("n")), "dtypes"),
        ("fusion.cached_attention_scored", scored(slopes=(0.5,)), "1 numbers for 2 heads"),
        ("fusion.cached_attention_scored", scored(slopes=(0.5, float("inf"))), "not finite"),
        ("fusion.cached_attention_scored", scored(slopes=(0.5,) * 2000), "argument slopes"),
        ("fusion.cached_attention_scored", scored(slopes=(True, 1)), "argument slopes"),
        ("fusion.cached_attention_scored", scored(sinks=Ref("heads"), slopes=(0.5, 1)), "sinks would see"),
        ("fusion.cached_attention_relative", relative(table=Ref("w")), "number for each of 2 heads"),
        ("fusion.cached_attention_relative", relative(buckets=(0, 3)), "buckets"),
        ("fusion.cached_attention_relative", relative(buckets=(-1,)), "buckets"),
        ("fusion.cached_attention_relative", relative(buckets=()), "buckets"),
        ("fusion.cached_attention_relative", relative(buckets=(0,) * 2000), "argument buckets"),
        ("fusion.cached_attention_relative", relative(slot=-1), "slot"),
        ("fusion.cached_attention_relative", relative(scale=float("nan")), "scale"),
        ("fusion.cached_selection", selection(slot=-1), "slot"),
        ("fusion.cached_selection", selection(count=0), "count"),
        ("fusion.cached_selection", selection(count=2**17), "count"),
        ("fusion.cached_selection", selection(key=_Q), "does not fit query"),
        ("fusion.cached_selection", selection(key=Ref("key_half")), "dtypes"),
        ("fusion.cached_selection", selection(weights=_Q), "weights"),
        ("fusion.cached_selection", selection(scale=float("inf")), "scale"),
        ("fusion.cached_attention_selected", (_Q, _Q, _Q, _Q, 0, None), "selected"),
        ("fusion.cached_attention_selected", (_Q, _Q, _Q, Ref("ids"), 0, None), "selected"),
        ("fusion.cached_attention_selected", (_Q, _Q, _Q, Ref("places"), -1, None), "slot"),
        ("fusion.cached_attention_selected", (_Q, _Q, _Q, Ref("places"), 0, float("nan")), "scale"),
        ("fusion.source_attention", (_Q, _Q, _Q, -1, None), "slot"),
        ("fusion.source_attention", (_Q, _Q, Ref("few"), 0, None), "length of key and value"),
        ("fusion.source_attention", (_Q, Ref("w"), Ref("w"), 0, None), "heads, length, width"),
        ("fusion.source_attention", (_Q, _Q, _Q, 0, float("inf")), "scale"),
        ("fusion.source_attention_scored", (_Q, _Q, Ref("few"), 0, 1.0, None), "length of key and value"),
        ("aten.softmax.int", (Ref("x"), symbol("batch"), None), "dim has to be a number, and is batch"),
        ("fusion.source_attention_scored", (_Q, _Q, _Q, 0, 1.0, 0.0), "softcap"),
        ("fusion.cached_attention_scored", scored(cap=0.0), "softcap"),
        ("fusion.cached_attention_scored", scored(scale=float("-inf")), "scale"),
    ],
)  # fmt: skip
def test_wrong_uses_are_refused_in_one_line(op: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message) as error:
        infer(op, args, _TYPES)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_division_of_dimensions() -> None:
    b, s = symbol("batch"), symbol("sequence")
    types = {Ref("x"): TensorType((b, s - 1, 8), "float32")}
    (found,) = infer("aten.view", (Ref("x"), (b, s - 1, -1, 2)), types)
    assert found.shape == (b, s - 1, 4, 2)
    (found,) = infer("aten.view", (Ref("x"), (-1, 8)), types)
    assert found.shape == (b * (s - 1), 8) and isinstance(found.shape[0], Poly)
    (found,) = infer("aten.view", (Ref("x"), (s - 1, -1)), types)
    assert found.shape == (s - 1, b * 8)
    with pytest.raises(GraphError):
        infer("aten.view", (Ref("x"), (s + 1, -1)), types)


@pytest.mark.parametrize(
    "bounds", [(0.0, 0.9, 0.3), (0, 0.6, 0.2), (1.0, 1.3, 0.1), (0.0, 2.1, -0.7), (1, 0, -0.1)]
)
def test_numbers_between_floats_are_as_many_as_in_the_framework(bounds: tuple[float, ...]) -> None:
    """Whose quotient is rounded: 0.9 is a little more than three times 0.3."""
    start, end, step = bounds
    if (end - start) * step < 0:
        with pytest.raises(GraphError, match="disagree"):
            infer("aten.arange.start_step", (*bounds, None), {})
        return
    (found,) = infer("aten.arange.start_step", (*bounds, None), {})
    assert found.shape == tuple(torch.arange(start, end, step).shape)


def test_huge_polynomials_do_not_grow_without_bound() -> None:
    wide = sum((symbol(f"s{i}") for i in range(12)), start=symbol("t"))
    types = {Ref("x"): TensorType((wide,) * 8, "float32")}
    with pytest.raises(GraphError, match="intricate"):
        infer("aten.view", (Ref("x"), (-1,)), types)


def test_the_table_is_fixed_data() -> None:
    with pytest.raises(TypeError):
        OPSET["aten.system"] = spec("aten.relu")  # type: ignore[index]


def test_the_first_version_has_the_operators_that_it_had() -> None:
    """A peer of it is sent no graph with another one: what is added says since when it is there."""
    first = sorted(name for name, spec in OPSET.items() if spec.since == 1)
    digest = hashlib.sha256("\n".join(first).encode()).hexdigest()
    assert (len(first), digest[:16]) == (235, "4521cf64cc47f5bb")


def test_a_padded_pool_whose_windows_all_reach_into_the_input_is_one() -> None:
    for x, dilation in (("row", 3), ("text", 1)):
        (found,) = infer("aten.max_pool1d", (Ref(x), (2,), (1,), (1,), (dilation,), False), _TYPES)
        assert len(found.shape) == 2
    (found,) = infer("aten.max_pool1d", (Ref("text"), (2,), (1,), (0,), (2,), False), _TYPES)
    assert found.shape == (1, symbol("sequence") - 2)


@pytest.mark.parametrize(
    ("args", "dtypes"), [((1, 1.0), ("bfloat16", "float32")), ((None, None, 1), ("float32", "bfloat16"))]
)
def test_a_loss_of_two_dtypes_has_the_one_that_torch_gives_it(args: Any, dtypes: Any) -> None:
    op = "aten.huber_loss" if len(args) == 2 else "aten.binary_cross_entropy_with_logits"
    for (x, y), dtype in zip((("half", "w"), ("w", "half")), dtypes, strict=True):
        assert infer(op, (Ref(x), Ref(y), *args), _TYPES)[0].dtype == dtype
