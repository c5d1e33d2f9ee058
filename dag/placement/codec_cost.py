"""The cost of a codec on an edge: bytes on the wire and seconds of work, so that placement needs no codec."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.dag.ir.graph import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """The cost of one tensor in one direction. Seconds are those of one core of the peer that encodes, or decodes."""

    name: str
    bytes_per_element: float
    fixed_bytes: float = 0.0
    encode_seconds_per_element: float = 0.0
    decode_seconds_per_element: float = 0.0

    def __post_init__(self) -> None:
        numbers = (
            self.bytes_per_element,
            self.fixed_bytes,
            self.encode_seconds_per_element,
            self.decode_seconds_per_element,
        )
        if not all(n >= 0 for n in numbers):
            raise ValueError(f"wire cost {self.name}: no number may be below zero")

    def bytes(self, elements: int) -> float:
        return self.fixed_bytes + self.bytes_per_element * elements


# By dtype: the tensor as it is in memory, at no cost in time.
DENSE = {dtype: CodecCost(name="none", bytes_per_element=size) for dtype, size in DTYPE_BYTES.items()}
