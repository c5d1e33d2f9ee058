from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.compression.codec import DTYPES, NONE, Encoded, Sparse, codec
from fusion.compression.encoding import LOSSY
from fusion.swarm.streams.frames import encode

SPECS = ("none", "fp16", "bf16", "int8", "int4", "topk:0.001", "topk:0.1", "topk:0.3:int8", "topk:0.5")
specs = st.sampled_from(SPECS)
dtypes = st.sampled_from(sorted(DTYPES))
floats = st.sampled_from(sorted(LOSSY))
shapes = st.lists(st.integers(0, 12), max_size=4)
seeds = st.integers(0, 1000)
# Of the largest magnitude in the tensor: what each codec may be wrong by, and what float16 or bfloat16 add.
BOUNDS = {"none": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.505 / 127, "int4": 0.505 / 7}
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def values(shape: list[int], dtype: str, seed: int, scale: float = 50.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DTYPES[dtype])


def payload_of(encoded: Encoded) -> memoryview:
    return memoryview(bytearray().join(encoded.buffers))


@given(dtypes, shapes, seeds)
@settings(max_examples=examples(60))
def test_a_dense_tensor_survives_the_wire_bit_for_bit(dtype: str, shape: list[int], seed: int) -> None:
    tensor = values(shape, dtype, seed)
    decoded = NONE.decode(payload_of(NONE.encode(tensor)), shape, dtype)
    assert decoded.dtype == tensor.dtype and torch.equal(decoded, tensor)


@given(specs, dtypes, shapes, seeds)
@settings(max_examples=examples(300))
def test_every_codec_keeps_shape_and_dtype_and_sends_what_it_accounts_for(
    name: str, dtype: str, shape: list[int], seed: int
) -> None:
    one, tensor = codec(name), values(shape, dtype, seed)
    encoded = one.encode(tensor)
    _, views, on_the_wire = encode("activation", {}, encoded.buffers)
    cost = one.cost(tensor.numel(), dtype)
    assert on_the_wire == sum(view.nbytes for view in views) == encoded.payload_bytes == cost
    assert cost <= NONE.cost(tensor.numel(), dtype)
    decoded = one.decode(payload_of(encoded), shape, dtype)
    assert decoded.dtype == tensor.dtype and decoded.shape == tensor.shape
    if dtype not in LOSSY or cost == NONE.cost(tensor.numel(), dtype):
        assert torch.equal(decoded, tensor)


@given(st.sampled_from(sorted(BOUNDS)), floats, shapes, seeds, st.sampled_from((1e-12, 1.0, 1e3)))
@settings(max_examples=examples(200))
def test_no_element_is_further_off_than_the_codec_says(
    name: str, dtype: str, shape: list[int], seed: int, scale: float
) -> None:
    tensor = values(shape, dtype, seed, scale)
    decoded = codec(name).decode(payload_of(codec(name).encode(tensor)), shape, dtype).double()
    peak = float(tensor.double().abs().max()) if tensor.numel() else 0.0
    error = float((decoded - tensor.double()).abs().max()) if tensor.numel() else 0.0
    tiny = 2.0**-25 if dtype == "float16" else 1e-40  # half of what the smallest float16 is
    assert error <= (BOUNDS[name] + ROUNDING[dtype]) * peak * (1 + 1e-5) + tiny


@given(specs, dtypes, shapes, st.binary(max_size=600), st.booleans())
@settings(max_examples=examples(400))
def test_hostile_bytes_are_a_tensor_of_the_plan_or_one_line(
    name: str, dtype: str, shape: list[int], data: bytes, cut: bool
) -> None:
    one = codec(name)
    right = one.cost(math.prod(shape), dtype)
    if cut:  # else of the right length, whatever they say
        payload = memoryview(bytearray(data))
    else:
        payload = memoryview(bytearray((data * (right // max(1, len(data)) + 1) + bytes(right))[:right]))
    try:
        decoded = one.decode(payload, shape, dtype)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 200
    else:
        assert payload.nbytes == right
        assert decoded.dtype == DTYPES[dtype] and list(decoded.shape) == shape


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(1 << 30,), (1 << 20, 1 << 20)])
def test_a_short_payload_for_a_vast_shape_is_refused_before_anything_is_allocated(
    name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="are right"):
        codec(name).decode(memoryview(bytearray(100)), shape, "float32")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", sorted(LOSSY))
def test_a_number_that_is_not_finite_never_arrives_as_one_that_is(name: str, odd: float, dtype: str) -> None:
    tensor = values([300], dtype, 1)
    tensor[217] = odd
    decoded = codec(name).decode(payload_of(codec(name).encode(tensor)), (300,), dtype)
    if name == "topk:0.001":
        assert decoded.isfinite().sum() == 299
    assert not decoded[217].isfinite()
    others = torch.cat((decoded[:217], decoded[218:]))
    assert others.isfinite().all()


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "topk:0.1", "topk:0.1:int8"])
@pytest.mark.parametrize("scale", [3.4e38, 1e-30, 0.0])
def test_the_range_of_float32_is_kept(name: str, scale: float) -> None:
    tensor = torch.linspace(-1, 1, 1000) * scale
    decoded = codec(name).decode(payload_of(codec(name).encode(tensor)), (1000,), "float32")
    assert decoded.isfinite().all()
    assert float(decoded.abs().max()) == pytest.approx(scale, rel=0.02)
    assert torch.equal(decoded.sign() * decoded.abs(), decoded) and not (decoded * tensor < 0).any()


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4", "topk:0.1", "topk:0.1:int8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("share", [1.0, 0.995, -1.0])
def test_the_largest_number_of_a_half_dtype_arrives_as_a_number(name: str, dtype: str, share: float) -> None:
    tensor = values([300], dtype, 1)
    tensor[217] = share * torch.finfo(DTYPES[dtype]).max
    decoded = codec(name).decode(payload_of(codec(name).encode(tensor)), (300,), dtype)
    assert decoded.isfinite().all()
    assert float(decoded[217]) == pytest.approx(float(tensor[217]), rel=0.01)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_sent_is_a_function_of_the_values_alone(name: str) -> None:
    tensor = values([40, 30], "float32", 3).t()
    other = tensor.clone(memory_format=torch.contiguous_format).requires_grad_()
    assert payload_of(codec(name).encode(tensor)) == payload_of(codec(name).encode(other))


def test_strides_do_not_reach_the_wire() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    payload = memoryview(b"".join(codec("none").encode(tensor).buffers))
    assert torch.equal(codec("none").decode(payload, (4, 3), "float32"), tensor)


def test_dense_shares_memory_with_what_it_sends() -> None:
    tensor = torch.zeros(4)
    (buffer,) = codec("none").encode(tensor).buffers
    tensor[0] = 1.0
    assert bytes(buffer[:4]) == b"\x00\x00\x80\x3f"


def test_a_decoded_dense_tensor_shares_memory_with_its_payload() -> None:
    payload = memoryview(bytearray(64))
    decoded = codec("none").decode(payload, (16,), "float32")
    payload[:4] = b"\x00\x00\x80\x3f"
    assert decoded[0] == 1.0


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_payload_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="16 are right"):
        codec("none").decode(memoryview(bytes(size)), (4,), "float32")


def test_hostile_bools_become_bools() -> None:
    decoded = codec("none").decode(memoryview(bytearray(b"\x00\x01\x07")), (3,), "bool")
    assert decoded.tolist() == [False, True, True] and decoded.view(torch.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize("name", SPECS)
def test_an_unaligned_payload_is_read_right(name: str) -> None:
    tensor = values([500], "float32", 2)
    payload = payload_of(codec(name).encode(tensor))
    data = bytearray(b"x" + payload)
    right = codec(name).decode(payload, (500,), "float32")
    assert torch.equal(codec(name).decode(memoryview(data)[1:], (500,), "float32"), right)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ValueError, match="zip"):
        codec("zip")


def test_only_topk_is_sparse() -> None:
    assert [name for name in SPECS if isinstance(codec(name), Sparse)] == [
        name for name in SPECS if name.startswith("topk")
    ]
