"""How fast the codecs are on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

import torch

from fusion.compression.adaptive import CodecSpeed
from fusion.compression.codec import codec

FAMILIES = ("fp16", "int8", "topk")
# The density moves the speed of top-k by less than a factor of two between a thousandth and a tenth.
STANDS_FOR = {"topk": "topk:0.05"}


def measure_families(families: Iterable[str] = FAMILIES, elements: int = 1 << 18) -> dict[str, CodecSpeed]:
    """What `adaptive.choose` wants to know: tens of milliseconds of computing."""
    return {family: measure_codec(STANDS_FOR.get(family, family), elements) for family in families}


def measure_codec(spec: str, elements: int = 1 << 18, repeats: int = 5) -> CodecSpeed:
    """Dense float32 bytes a second for a tensor of normal values: medians, after one round to warm up."""
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    one = codec(spec)
    encodes, decodes = [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        encoded = one.encode(tensor)
        encodes.append(time.perf_counter() - began)
        payload = memoryview(bytearray().join(encoded.buffers))
        began = time.perf_counter()
        one.decode(payload, (elements,), "float32")
        decodes.append(time.perf_counter() - began)
    return CodecSpeed(
        encode_bytes_per_second=tensor.nbytes / median(encodes[1:]),
        decode_bytes_per_second=tensor.nbytes / median(decodes[1:]),
    )
