"""Where a long run of a graph rests: between two operators, forward and backward, so that others need not wait for its end.

Nothing is computed otherwise for it. How long a run is before it rests is the worker's to say (`fusion.runtime.job.worker`).
On CUDA the operators of a run are queued in a moment and computed later, and gradients in a thread of the library's, where
there is no rest.
"""

from __future__ import annotations

import torch

from fusion.runtime.job.worker import rest


def preemption_point(made: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """After the operator that made this. Where the run rested, so does the backward pass of it, before it comes here."""
    if not rest():
        return
    for value in (made,) if isinstance(made, torch.Tensor) else made:
        if value.grad_fn is not None:
            value.grad_fn.register_prehook(_before)
            return


def _before(gradients: object) -> None:
    rest()
