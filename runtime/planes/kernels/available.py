"""The Triton kernels, where they run: Triton comes with torch for CUDA on Linux, and needs a C compiler."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from fusion.swarm.printable import error_line

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """Modules of this folder."""

    attention: ModuleType
    experts: ModuleType
    quantised: ModuleType


@cache
def kernels() -> Kernels | None:
    """The kernels; None, with one line in the log, where Triton is not installed or a test kernel fails. Runs in the worker's thread."""
    try:
        from fusion.runtime.planes.kernels import attention_kernels, expert_kernels, quantised_kernels

        _test(expert_kernels)
    except Exception as error:  # Triton's, the compiler's or the driver's errors: there is no list of them
        logger.warning("no kernel of Triton runs on this GPU, so it decodes slowly: %s", error_line(error))
        return None
    return Kernels(attention_kernels, expert_kernels, quantised_kernels)


def _test(kernels: ModuleType) -> None:
    """Raises RuntimeError where a product is wrong."""
    rows, matrices = torch.ones(1, 16, device="cuda"), torch.ones(1, 16, 16, device="cuda")
    product = kernels.expert_linear(rows, rows.new_zeros(1, dtype=torch.int64), matrices, None, 0, 1, False)
    if product.tolist() != [[16.0] * 16]:
        raise RuntimeError("a product of ones is not their sum")
