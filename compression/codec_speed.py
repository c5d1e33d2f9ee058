"""Measures the speed of the codecs on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

import torch

from fusion.compression.adaptive import CodecSpeed
from fusion.compression.codec import codec

FAMILIES = ("fp16", "int8", "topk")
# The speed of top-k varies by less than a factor of two between densities of 0.001 and 0.1.
MEASURED_SPECS = {"topk": "topk:0.05"}


def measure_families(families: Iterable[str] = FAMILIES, elements: int = 1 << 18) -> dict[str, CodecSpeed]:
    """The speeds that `adaptive.choose` takes, measured in tens of milliseconds."""
    return {family: measure_codec(MEASURED_SPECS.get(family, family), elements) for family in families}


def measure_codec(spec: str, elements: int = 1 << 18, repeats: int = 5) -> CodecSpeed:
    """The speed of one codec on a float32 tensor of normal values: medians, after one round to warm up."""
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    measured = codec(spec)
    encodes, decodes = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        encoded = measured.encode(tensor)
        encodes.append(time.perf_counter() - start)
        payload = memoryview(bytearray().join(encoded.buffers))
        start = time.perf_counter()
        measured.decode(payload, (elements,), "float32")
        decodes.append(time.perf_counter() - start)
    return CodecSpeed(
        encode_bytes_per_second=tensor.nbytes / median(encodes[1:]),
        decode_bytes_per_second=tensor.nbytes / median(decodes[1:]),
    )
