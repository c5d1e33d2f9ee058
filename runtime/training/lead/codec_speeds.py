"""The speed of this machine at the codecs that a job may use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fusion.compression.adaptive import CodecSpeed
from fusion.compression.codec_speed import measure_families
from fusion.compression.spec import parse
from fusion.runtime.job.manifest import CompressionConfig
from fusion.runtime.placing.codec_choice import WITH_TOPK


def needed_families(compression: CompressionConfig) -> tuple[str, ...]:
    """The codecs that a job may use, in a fixed order."""
    if compression.kind == "none":
        return ()
    if compression.kind == "uniform":
        return tuple({parse(compression.codec).family} - {"none"})
    return tuple(sorted({*compression.families, WITH_TOPK} - {"none"}))


@lru_cache(maxsize=16)
def measured(families: tuple[str, ...]) -> Mapping[str, CodecSpeed]:
    """Measured once per process; this machine stands for all of the job's."""
    return measure_families(families)
