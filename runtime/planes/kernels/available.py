"""Where the kernels in Triton are, if there are any: Triton comes with torch for CUDA on Linux, and needs a C compiler."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

logger = logging.getLogger(__name__)


@cache
def attention() -> ModuleType | None:
    """`fusion.runtime.planes.kernels.attention_kernels`."""
    try:
        from fusion.runtime.planes.kernels import attention_kernels
    except ImportError as error:
        logger.info("without Triton each session's attention runs by itself: %s", error)
        return None
    return attention_kernels


@cache
def quantised() -> ModuleType | None:
    """`fusion.runtime.planes.kernels.quantised_kernels`."""
    try:
        from fusion.runtime.planes.kernels import quantised_kernels
    except ImportError as error:
        logger.info("without Triton stored matrices become float32 as they are read: %s", error)
        return None
    return quantised_kernels
