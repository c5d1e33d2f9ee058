"""Blocks of a file as stored matrices: the very numbers that the `gguf` package makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from fusion.runtime.capture.gguf.blocks import layout_of, unpacked
from fusion.runtime.planes.products.quantised import dequantised

KINDS = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ1_S",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_what_it_was(kind: str) -> None:
    number = GGMLQuantizationType[kind]
    block_elements, block_bytes = GGML_QUANT_SIZES[number]
    layout = layout_of(kind)
    assert layout is not None
    rows = np.random.default_rng(0).integers(0, 256, (7, 3 * block_bytes), dtype=np.uint8)
    parts = unpacked(rows, kind, block_bytes)
    assert len(parts) == (3 if layout.minimums else 2)
    assert parts[1].shape == (7, 3 * block_elements // layout.group)
    assert str(parts[1].dtype) == f"torch.{layout.scales}"
    numbers, scales, minimums = (*parts, None)[:3]
    assert numbers is not None and scales is not None
    with np.errstate(invalid="ignore"):
        wanted = dequantize(rows, number)
    assert np.array_equal(dequantised(numbers, scales, minimums).numpy(), wanted, equal_nan=True)
    assert np.isfinite(wanted).mean() > 0.5


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "IQ1_M", "TQ1_0"])
def test_others_become_numbers(kind: str) -> None:
    assert layout_of(kind) is None
