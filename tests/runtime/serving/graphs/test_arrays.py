"""Named arrays in a frame, and whether they are what a model takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.graphs.arrays import FIELD, Array, described, read_arrays
from fusion.runtime.serving.graphs.inputs import checked_inputs, most_samples
from fusion.swarm.errors import FrameError


def array(name: str, value: Any) -> Array:
    made = np.asarray(value)
    return Array(name, made.dtype.name, made.shape, made.tobytes())


X = array("x", np.arange(6, dtype=np.float32).reshape(2, 3))
N = array("n", np.array([4, 5]))


def test_arrays_go_through_a_frame() -> None:
    found = read_arrays(described([X, N]), b"".join(bytes(a.data) for a in (X, N)))
    assert [(a.name, a.dtype, a.shape, bytes(a.data)) for a in found] == [
        (a.name, a.dtype, a.shape, a.data) for a in (X, N)
    ]
    assert read_arrays({FIELD: []}, b"") == []


@pytest.mark.parametrize(
    ("said", "payload"),
    [
        (None, b""), ("x", b""), ([["x", "float32", [2]]] * 300, b""), ([["x", "float32"]], b""), ([[3, "float32", [1]]], b"1234"),
        ([["x", "float99", [1]]], b"1234"), ([["x", 3, [1]]], b"1234"), ([["x", "float32", 1]], b"1234"),
        ([["x", "float32", [1] * 9]], b"1234"), ([["x", "float32", [-1]]], b"1234"), ([["x", "float32", [0]]], b"1234"),
        ([["x", "float32", [2**62, 2**62]]], b"1234"), ([["x", "float32", [True]]], b"1234"), ([["x", "float32", [2]]], b"1234"),
        ([["x", "float32", [1]]], b"12345"), ([["x", "int8", [2]], ["x", "int8", [2]]], b"1234"), ([["", "int8", [4]]], b"1234"),
        ([["x" * 300, "int8", [4]]], b"1234"), ([["x", "int8", [1.0]]], b"1"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_nothing_allocated_for_it(said: Any, payload: bytes) -> None:
    with pytest.raises(FrameError):
        read_arrays({FIELD: said}, payload)


B = symbol("batch")
INPUTS = (Input("x", TensorType((B, 3), "float32")), Input("n", TensorType((B,), "int64")))
STAGE = Stage(0, Graph(INPUTS, (), (), (Ref("x"),)), (), (), (0,))


def check(*given: Array, most: int = 4) -> None:
    checked_inputs((STAGE,), {a.name: a for a in given}, {"batch": most, "sequence": 1})


def test_arrays_that_a_model_takes() -> None:
    check(X, N)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((X,), "input: n is missing; the model takes x float32[batch, 3], n int64[batch]"),
        ((X, N, array("y", [1.0])), "input: y is none of its inputs; the model takes"),
        ((array("x", np.zeros((2, 3))), N), "input: x float64[2, 3] does not fit; the model takes x float32[batch, 3]"),
        ((array("x", np.zeros((2, 4), np.float32)), N), "input: x float32[2, 4] does not fit"),
        ((array("x", np.zeros((2,), np.float32)), N), "input: x float32[2] does not fit"),
        ((X, array("n", [1, 2, 3])), "input: n int64[3] does not fit"),
    ],
)  # fmt: skip
def test_others_are_told_what_it_takes(given: tuple[Array, ...], says: str) -> None:
    with pytest.raises(JobError) as error:
        check(*given)
    assert says in str(error.value)


def test_more_samples_than_a_stage_has_memory_for() -> None:
    with pytest.raises(JobError, match=r"2 samples; at most 1 at once \(--batch 1 asks in parts\)"):
        check(X, N, most=1)


def test_no_other_symbol_asks_for_more_than_is_set_aside() -> None:
    """An edge that has no batch of its own, a symbol of texts, and one that nobody knows."""
    for dim, most in ((B * 8, 32), (symbol("sequence"), 1), (symbol("other"), 0)):
        stage = Stage(0, Graph((Input("x", TensorType((dim,), "int8")),), (), (), (Ref("x"),)), (), (), (0,))
        for size in (most, most + 1):
            given = {"x": array("x", np.zeros(size, np.int8))}
            if 0 < size <= most:
                checked_inputs((stage,), given, {"batch": 4, "sequence": 1}, edges=True)
            elif size:
                with pytest.raises(JobError, match="does not fit"):
                    checked_inputs((stage,), given, {"batch": 4, "sequence": 1}, edges=True)


def test_as_many_samples_as_the_widest_place_between_stages_has_room_for() -> None:
    sequence = symbol("sequence")
    narrow = Input("ids", TensorType((B, sequence), "int64"))
    wide = TensorType((B, sequence, 100), "bfloat16")
    first = Stage(0, Graph((narrow,), (), (Node("h", "made", (), (wide,)),), (Ref("h"),)), (), (), ())
    last = Stage(1, Graph((Input("h/0", wide),), (), (), ()), (), (), ())
    for stages in ((first,), (last,), (first, last)):
        for frame, most in ((10**9, 16), (200 * 7 * 5, 5), (200 * 7 * 6 - 1, 5), (1, 1)):
            assert most_samples(stages, {"batch": 16, "sequence": 7}, frame) == most
    assert most_samples((), {"batch": 16}, 1) == 16
