from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.compression.codec import CODECS, DTYPES, codec


@given(
    st.sampled_from(sorted(CODECS)),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_tensor_survives_the_wire_bit_for_bit(name: str, dtype: str, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator) * 50).to(DTYPES[dtype])
    encoded = codec(name).encode(tensor)
    payload = memoryview(bytearray(b"".join(encoded.buffers)))
    assert payload.nbytes <= codec(name).largest(shape, dtype)
    decoded = codec(name).decode(payload, encoded.header, shape, dtype)
    assert decoded.dtype == tensor.dtype and torch.equal(decoded, tensor)


def test_strides_do_not_reach_the_wire() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    payload = memoryview(b"".join(codec("none").encode(tensor).buffers))
    assert torch.equal(codec("none").decode(payload, {}, (4, 3), "float32"), tensor)


def test_dense_shares_memory_with_what_it_sends() -> None:
    tensor = torch.zeros(4)
    (buffer,) = codec("none").encode(tensor).buffers
    tensor[0] = 1.0
    assert bytes(buffer[:4]) == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_payload_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="16 are right"):
        codec("none").decode(memoryview(bytes(size)), {}, (4,), "float32")


def test_hostile_bools_become_bools() -> None:
    decoded = codec("none").decode(memoryview(bytearray(b"\x00\x01\x07")), {}, (3,), "bool")
    assert decoded.tolist() == [False, True, True] and decoded.view(torch.uint8).tolist() == [0, 1, 1]


def test_an_unaligned_payload_is_read_right() -> None:
    data = bytearray(b"x" + b"".join(codec("none").encode(torch.arange(3.0)).buffers))
    assert codec("none").decode(memoryview(data)[1:], {}, (3,), "float32").tolist() == [0.0, 1.0, 2.0]


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ValueError, match="zip"):
        codec("zip")
