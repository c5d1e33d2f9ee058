from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.compression.codec import Encoded, Sparse, codec
from fusion.compression.encoding import DTYPES
from fusion.compression.spec import parse


def sparse(name: str) -> Sparse:
    found = codec(name)
    assert isinstance(found, Sparse)
    return found


def payload_of(encoded: Encoded) -> memoryview:
    return memoryview(bytearray().join(encoded.buffers))


@given(
    st.integers(2, 4000),
    st.sampled_from((0.001, 0.01, 0.1, 0.5)),
    st.sampled_from(("fp16", "int8")),
    st.sampled_from(("float32", "float16", "bfloat16")),
    st.integers(0, 1000),
    st.sampled_from((0, 1)),  # 0 digits: many equal magnitudes
)
@settings(max_examples=examples(200))
def test_the_largest_are_kept_and_the_others_are_zero(
    elements: int, density: float, values: str, dtype: str, seed: int, digits: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(elements, generator=generator)
    tensor = (tensor if digits else tensor.round()).to(DTYPES[dtype])
    one = sparse(f"topk:{density}:{values}")
    encoded = one.encode(tensor)
    decoded = one.decode_sparse(payload_of(encoded), (elements,), dtype)
    if encoded.indices is None:
        assert decoded.indices is None and torch.equal(decoded.tensor, tensor)
        return
    assert decoded.indices is not None and torch.equal(decoded.indices, encoded.indices)
    kept = torch.zeros(elements, dtype=torch.bool)
    kept[encoded.indices.long()] = True
    assert int(kept.sum()) == len(encoded.indices) == max(1, math.floor(elements * density + 0.5))
    magnitude = tensor.float().abs()
    assert magnitude[kept].min() >= magnitude[~kept].max()
    ties = torch.nonzero(magnitude == magnitude[kept].min()).flatten()
    assert bool(kept[ties].int().diff().le(0).all())  # of equal ones the first
    assert decoded.tensor[~kept].abs().sum() == 0
    error = (decoded.tensor.float() - tensor.float())[kept].abs().max()
    assert error <= float(magnitude.max()) * (0.012 if values == "int8" or dtype == "bfloat16" else 0.0011)


@pytest.mark.parametrize("density", [0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.15, 0.2])
@pytest.mark.parametrize("elements", [4_096, 131_072, 1_000_000])
@pytest.mark.parametrize("kind", ["normal", "clustered", "equal"])
def test_it_costs_at_most_a_fifth_more_than_the_information(density: float, elements: int, kind: str) -> None:
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    if kind == "clustered":
        tensor[: elements // 4] *= 100
    elif kind == "equal":
        tensor.fill_(1.0)
    encoded = codec(f"topk:{density}").encode(tensor)
    assert encoded.indices is not None
    kept = len(encoded.indices)
    d = kept / elements
    entropy = -d * math.log2(d) - (1 - d) * math.log2(1 - d)
    assert encoded.payload_bytes <= 1.2 * kept * (16 + entropy / d) / 8 + 64


@given(st.integers(1, 3000), st.sampled_from(("topk:0.02", "topk:0.3:int8")), st.integers(0, 100))
@settings(max_examples=examples(60))
def test_the_way_back_needs_the_values_alone(elements: int, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    forward, gradient = torch.randn(2, elements, generator=generator)
    one = sparse(name)
    there = one.encode(forward)
    here = one.decode_sparse(payload_of(there), (elements,), "float32")
    back = one.encode_at(gradient, here.indices)
    assert back.payload_bytes == parse(name).payload_bytes_at(elements, 4) <= one.cost(elements, "float32")
    decoded = one.decode_at(payload_of(back), (elements,), "float32", there.indices)
    if there.indices is None:
        assert torch.equal(decoded, gradient)
        return
    mask = torch.zeros(elements).index_fill_(0, there.indices.long(), 1.0)
    assert torch.equal(decoded != 0, (gradient * mask != 0) & (decoded != 0))
    assert torch.allclose(decoded, gradient * mask, atol=float((gradient * mask).abs().max()) * 0.005)


def test_positions_of_another_tensor_are_refused() -> None:
    one = sparse("topk:0.1")
    gradient = torch.randn(100)
    last = torch.arange(91, 101, dtype=torch.int32)
    for wrong in (None, torch.arange(9, dtype=torch.int32), last):
        with pytest.raises(ValueError, match="keeps 10"):
            one.encode_at(gradient, wrong)
        with pytest.raises(ValueError, match="keeps 10"):
            one.decode_at(memoryview(bytearray(22)), (100,), "float32", wrong)
    with pytest.raises(ValueError, match="22 are right"):
        one.decode_at(memoryview(bytearray(21)), (100,), "float32", torch.arange(10, dtype=torch.int32))


def test_a_payload_with_forged_positions_is_refused() -> None:
    one = sparse("topk:0.1")
    payload = payload_of(one.encode(torch.randn(100)))
    payload[22:] = bytes(len(payload) - 22)
    with pytest.raises(ValueError, match="0 positions where 10 are right"):
        one.decode(payload, (100,), "float32")


def test_an_edge_of_whole_numbers_goes_whole() -> None:
    tensor = torch.arange(100)
    encoded = codec("topk:0.01").encode(tensor)
    assert encoded.indices is None and encoded.payload_bytes == 800
    assert sparse("topk:0.01").encode_at(tensor, None).payload_bytes == 800
