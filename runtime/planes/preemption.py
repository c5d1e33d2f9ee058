"""Preemption points of a long run: between two operators, forward and backward, other work may run on the device.

The results are the same. The worker decides how long a run may take before it is preempted (`fusion.runtime.job.worker`). On CUDA
the kernels of a run are queued in a moment, and gradients are computed in a thread of the library, so there are none.
"""

from __future__ import annotations

import torch

from fusion.runtime.job.worker import rest


def preemption_point(output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """After the operator with this output. Where the run was preempted here, its backward pass may be too, before this operator."""
    if not rest():
        return
    for value in (output,) if isinstance(output, torch.Tensor) else output:
        if value.grad_fn is not None:
            value.grad_fn.register_prehook(_before)
            return


def _before(gradients: object) -> None:
    rest()
