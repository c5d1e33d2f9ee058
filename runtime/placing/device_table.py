"""Devices that a swarm file may name: peaks, memory and prices as their makers state them, in `devices.toml` beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fusion.runtime.job import toml_files
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import build
from fusion.runtime.job.manifest import Precision
from fusion.runtime.job.size_text import parse_size

TABLE = Path(__file__).with_name("devices.toml")
MAX_TABLE_BYTES = 1 << 20
_OFFERED = 6  # names in a message


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """TFLOPS are peaks, without sparsity. `memory` None: a CPU, whose memory is that of its machine."""

    float32_tflops: float
    bfloat16_tflops: float | None = None
    float16_tflops: float | None = None
    memory: str | None = None
    memory_gb_per_second: float
    price_usd: float
    price_year: int
    source: str
    price_source: str

    def __post_init__(self) -> None:
        for key in (
            "float32_tflops",
            "bfloat16_tflops",
            "float16_tflops",
            "memory_gb_per_second",
            "price_usd",
        ):
            value = getattr(self, key)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{key} must be above 0, not {value:g}")
        if not self.source or not self.price_source:
            raise ValueError("source and price_source must say where the figures are from")
        if self.memory is not None:
            parse_size(self.memory, "memory")

    def peak_flops_per_second(self, precision: Precision = "float32") -> float:
        """That of float32 for a dtype that its matrix units do not have."""
        fast = {"bf16": self.bfloat16_tflops, "fp16": self.float16_tflops}.get(precision)
        return 1e12 * (fast or self.float32_tflops)


@cache
def device_table() -> Mapping[str, DeviceRow]:
    """By name, in the order of the file."""
    table = toml_files.tables(toml_files.read(TABLE, MAX_TABLE_BYTES), "a table of devices")
    return {name: build(DeviceRow, row, name) for name, row in table.items()}


def device_row(name: str) -> DeviceRow:
    """The row of a device by its name. JobError names similar devices."""
    table = device_table()
    if name in table:
        return table[name]
    parts = [part for part in name.lower().replace("_", "-").split("-") if part]
    alike = [known for known in table if any(part in known.split("-") for part in parts)]
    offered = ", ".join((alike or list(table))[:_OFFERED])
    raise JobError(f"device: {name!r:.60} is not in the table of devices (for example: {offered})")
