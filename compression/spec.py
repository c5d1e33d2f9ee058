"""Names of codecs and sizes of their payloads: arithmetic for planning, without torch.

    none | fp16 | bf16 | int8 | int4 | topk:<density>[:fp16|int8]        topk:0.01 is topk:0.01:fp16

The length of a payload is a function of (spec, number of elements, element size) alone. Both ends compute it, so a
payload carries no length of its own, plans are exact, and a payload of any other length is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fusion.compression.position_sizes import MAX_ELEMENTS, position_bytes

Family = Literal["none", "fp16", "bf16", "int8", "int4", "topk"]
Values = Literal["fp16", "int8"]
PLAIN: tuple[Family, ...] = ("none", "fp16", "bf16", "int8", "int4")

BLOCK = 64  # elements that share a scale
SCALE_BYTES = 2  # a bfloat16
EXPONENT_BYTES = 2  # the power of two that a payload of fp16 is scaled by

MILLION = 1_000_000
MIN_MILLIONTHS, MAX_MILLIONTHS = 100, 500_000  # millionths of the elements that topk may keep

_TOPK = re.compile(r"topk:(0\.[0-9]{1,6})(?::(fp16|int8))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Spec:
    family: Family
    millionths: int = 0  # topk keeps so many of a million elements
    values: Values = "fp16"  # what topk keeps them as

    def __post_init__(self) -> None:
        if self.family == "topk" and not MIN_MILLIONTHS <= self.millionths <= MAX_MILLIONTHS:
            raise ValueError(
                f"a density of topk lies between {MIN_MILLIONTHS / MILLION:.4f} and {MAX_MILLIONTHS / MILLION}, "
                f"not {self.millionths / MILLION:.6g}"
            )

    def __str__(self) -> str:
        if self.family != "topk":
            return self.family
        density = f"{self.millionths / MILLION:.6f}".rstrip("0")
        return f"topk:{density}" + ("" if self.values == "fp16" else f":{self.values}")

    def kept(self, elements: int) -> int:
        """How many of `elements` topk keeps: at least one, if there are any."""
        return min(elements, max(1, (elements * self.millionths + MILLION // 2) // MILLION))

    def payload_bytes(self, elements: int, itemsize: int) -> int:
        """Payload bytes of a tensor of `elements` floating-point numbers of `itemsize` bytes."""
        dense = elements * itemsize
        return dense if self.is_dense(elements, itemsize) else self._packed_bytes(elements)

    def payload_bytes_at(self, elements: int, itemsize: int) -> int:
        """Payload bytes of the values at positions that both ends know; of all elements where the codec is dense."""
        if self.family != "topk" or self.is_dense(elements, itemsize):
            return self.payload_bytes(elements, itemsize)
        return self._value_bytes(self.kept(elements))

    def is_dense(self, elements: int, itemsize: int) -> bool:
        """Whether the elements are sent as they are: the packed form would not be smaller, or does not support them."""
        if self.family == "none" or itemsize not in (2, 4) or elements > MAX_ELEMENTS:
            return True
        return self._packed_bytes(elements) >= elements * itemsize

    def _packed_bytes(self, elements: int) -> int:
        match self.family:
            case "fp16":
                return half_bytes(elements)
            case "int8":
                return block_bytes(elements, 8)
            case "int4":
                return block_bytes(elements, 4)
            case "topk":
                kept = self.kept(elements)
                return self._value_bytes(kept) + position_bytes(elements, kept)
        return 2 * elements

    def _value_bytes(self, kept: int) -> int:
        return half_bytes(kept) if self.values == "fp16" else block_bytes(kept, 8)


def parse(text: str) -> Spec:
    """The spec of `text`, in any spelling of a density; `str` of it is canonical. ValueError for an unknown codec."""
    for family in PLAIN:
        if text == family:
            return Spec(family=family)
    match = _TOPK.fullmatch(text)
    if match is None:
        raise ValueError(
            f"codec {text[:40]!r} is not known here (known: {', '.join(PLAIN)}, topk:<density>[:fp16|int8])"
        )
    density, values = match.groups()
    kept_as: Values = "int8" if values == "int8" else "fp16"
    return Spec(family="topk", millionths=int(density[2:].ljust(6, "0")), values=kept_as)


def half_bytes(elements: int) -> int:
    return EXPONENT_BYTES + 2 * elements


def block_bytes(elements: int, bits: int) -> int:
    blocks = (elements + BLOCK - 1) // BLOCK
    return SCALE_BYTES * blocks + (bits * elements + 7) // 8
