"""Directories of models with quantised linear layers in the formats of GPTQ, AWQ, compressed-tensors and 8-bit floats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensor = torch.Tensor
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Numbers:
    """A matrix (rows, columns), quantised to unsigned integers."""

    numbers: Tensor
    scales: Tensor  # (rows, groups), float16
    zeros: Tensor  # (rows, groups)
    order: Tensor  # the group of each column

    @property
    def dense(self) -> Tensor:
        return (self.numbers - self.zeros[:, self.order]) * self.scales.float()[:, self.order]


def numbers_of(
    weight: Tensor, bits: int, group: int, *, symmetric: bool = False, shuffled: bool = False
) -> Numbers:
    """Round to the nearest number. `group`: how many columns share a scale; 0 for all."""
    rows, columns = weight.shape
    group = group or columns
    order = torch.arange(columns) // group
    if shuffled:
        order = order[torch.randperm(columns)]
    most = (1 << bits) - 1
    scales, zeros = [], []
    for each in range(columns // group):
        own = weight[:, order == each]
        least, largest = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if symmetric:
            largest = torch.maximum(largest, -least)
            scale, zero = (2 * largest / most).half(), torch.full((rows,), 1 << bits - 1)
        else:
            scale = ((largest - least) / most).half()
            zero = (-least / scale.float()).round().clamp(1, most).long()
        scales.append(scale)
        zeros.append(zero)
    both = torch.stack(scales, 1), torch.stack(zeros, 1)
    numbers = (weight / both[0].float()[:, order] + both[1][:, order]).round().clamp(0, most).long()
    return Numbers(numbers, *both, order)


def in_words(numbers: Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack numbers into 32-bit words along an axis, the first of each word in its lowest bits, or in the order of `order`."""
    each = 32 // bits
    moved = numbers.movedim(axis, -1)
    missing = -moved.shape[-1] % each
    grouped = torch.nn.functional.pad(moved, (0, missing)).unflatten(-1, (-1, each))[
        ..., list(order or range(each))
    ]
    words = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32).movedim(-1, axis).contiguous()


def gptq(made: Numbers, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": in_words(made.numbers.T, bits, 0),
        "qzeros": in_words(made.zeros.T - 1, bits, 1),
        "scales": made.scales.T.contiguous(),
        "g_idx": made.order.int(),
    }


def awq(made: Numbers, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": in_words(made.numbers.T, bits, 1, AWQ_ORDER),
        "qzeros": in_words(made.zeros.T, bits, 1, AWQ_ORDER),
        "scales": made.scales.T.contiguous(),
    }


def compressed(made: Numbers, bits: int) -> dict[str, Tensor]:
    found = {
        "weight_packed": in_words(made.numbers, bits, 1),
        "weight_scale": made.scales.bfloat16() if made.scales.shape[1] == 1 else made.scales,
        "weight_shape": torch.tensor(made.numbers.shape),
    }
    if (made.zeros != 1 << bits - 1).any():
        found["weight_zero_point"] = in_words(made.zeros, bits, 0)
    return found


def save_packed(
    model: Any,
    directory: Path,
    config: Mapping[str, Any],
    packed: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]],
    names: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
) -> Any:
    """Save the model with the matrices of these names as `packed` packs them. Returns the model with their dequantised values."""
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [*filter(names, tensors)]:
        parts, dense = packed(tensors.pop(name))
        tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        with torch.no_grad():
            model.get_parameter(name).copy_(dense)
    save_with(tensors, directory, config)
    return model


def save_with(tensors: dict[str, Tensor], directory: Path, config: Mapping[str, Any]) -> None:
    """Replace the directory's tensors, and write into its configuration how they are quantised."""
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    said = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**said, "quantization_config": config}))
