from __future__ import annotations

import math
import struct

import pytest
import torch

from fusion.compression.codec import codec


def decode(name: str, payload: bytes, elements: int) -> torch.Tensor:
    return codec(name).decode(memoryview(bytearray(payload)), (elements,), "float32")


def bfloat(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 3e38])
@pytest.mark.parametrize(("name", "codes"), [("int8", 70), ("int4", 35)])
def test_a_hostile_scale_is_refused(name: str, codes: int, scale: float) -> None:
    for scales in (bfloat(scale) + bfloat(1.0), bfloat(1.0) + bfloat(scale)):
        with pytest.raises(ValueError, match="a scale that is negative, not finite or too large"):
            decode(name, scales + b"\x01" * codes, 70)


@pytest.mark.parametrize("exponent", [-32768, -127, 114, 32767])
def test_a_hostile_exponent_is_refused(exponent: int) -> None:
    with pytest.raises(ValueError, match="scaled by"):
        decode("fp16", struct.pack("<h", exponent) + bytes(200), 100)


def test_codes_are_laid_out_as_documented() -> None:
    assert decode("int8", bfloat(0.5) + bytes([1, 0xFF, 127]), 3).tolist() == [0.5, -0.5, 63.5]
    # Five codes of four bits: the first three low, the other two high.
    assert decode("int4", bfloat(2.0) + bytes([0x41, 0xF2, 0x07]), 5).tolist() == [2.0, 4.0, 14.0, 8.0, -2.0]
    assert math.isnan(decode("int8", bfloat(1.0) + b"\x80\x00", 2)[0])
    assert math.isnan(decode("int4", bfloat(1.0) + b"\x08", 1)[0])
    halves = struct.pack("<h3e", 3, 1.0, -2.0, 0.25)
    assert decode("fp16", halves, 3).tolist() == [8.0, -16.0, 2.0]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_an_outlier_costs_its_block_alone(name: str) -> None:
    tensor = torch.ones(64 * 2000)
    tensor[70] = 1e6
    payload = bytearray().join(codec(name).encode(tensor).buffers)
    decoded = decode(name, payload, len(tensor))
    assert torch.allclose(decoded[:64], torch.ones(64), rtol=0.01)
    assert torch.allclose(decoded[128:], torch.ones(len(tensor) - 128), rtol=0.01)
    assert decoded[70] == pytest.approx(1e6, rel=0.01)


def test_small_gradients_survive_as_fp16() -> None:
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 1e-9
    decoded = decode("fp16", bytearray().join(codec("fp16").encode(tensor).buffers), 5000)
    large = tensor.abs() > 1e-11
    assert torch.allclose(decoded[large], tensor[large], rtol=2**-10, atol=0)


@pytest.mark.parametrize("name", ["fp16", "topk:0.5"])
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, 3.4025e38, 3.4e38])
def test_the_largest_numbers_stay_finite_as_fp16(name: str, value: float) -> None:
    """Of which one is the usual value of a mask."""
    tensor = torch.zeros(32)
    tensor[:4] = torch.tensor([-value, value, 2.0**127, 1e38])
    decoded = decode(name, bytearray().join(codec(name).encode(tensor).buffers), 32)
    assert torch.allclose(decoded, tensor, rtol=2.0**-11, atol=0)
    tensor[2:5] = torch.tensor([math.inf, -math.inf, math.nan])
    decoded = decode(name, bytearray().join(codec(name).encode(tensor).buffers), 32)
    assert decoded[2:4].tolist() == [math.inf, -math.inf] and math.isnan(decoded[4])
    assert torch.allclose(decoded[:2], tensor[:2], rtol=2.0**-11, atol=0)
