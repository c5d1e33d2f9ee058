"""The loss of connectionist temporal classification (Graves et al., 2006), one time step after another.

The gradient is that of the loss itself. torch's own is that of the loss together with the log_softmax before it: the two agree for inputs
that are log_softmax outputs, as torch requires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.job.errors import CaptureError

MOST_STEPS = 512  # each is some nodes of the graph
_LOG_ZERO = -1e30  # the logarithm of probability zero: -inf would make gradients NaN


def ctc_loss(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> Tensor:  # fmt: skip
        _require_sizes(log_probs, targets, input_lengths, target_lengths)
        lengths = target_lengths.to(torch.int64)
        loss = -_log_likelihood(log_probs, targets.to(torch.int64), input_lengths, lengths, blank)
        impossible = loss > -_LOG_ZERO / 2
        loss = torch.where(impossible, 0.0 if zero_infinity else float("inf"), loss)
        if reduction == "mean":
            return (loss / lengths.clamp(min=1)).mean()  # type: ignore[no-any-return]
        return loss.sum() if reduction == "sum" else loss

    return run


def _log_likelihood(log_probs: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """The logarithm of the probability of each target (batch,), summed over its alignments."""
    targets = targets.clamp(min=0)  # padding may be no class
    blanks = torch.full_like(targets, blank)
    # (batch, states): a blank before each label and after the last
    states = torch.cat([torch.stack([blanks, targets], -1).flatten(1), blanks[:, :1]], 1)
    state_count, time = states.shape[1], log_probs.shape[0]
    emission = log_probs.gather(2, states.expand(time, *states.shape))
    may_skip = (states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2])
    log_zero = torch.full_like(emission[0, :, :1], _LOG_ZERO)
    log_zeros = torch.full_like(emission[0], _LOG_ZERO)
    forward = torch.where(torch.arange(state_count) < 2, emission[0], log_zeros)
    for step in range(1, time):
        from_previous = torch.cat([log_zero, forward[:, :-1]], 1)
        from_skipped = torch.cat(
            [log_zero, log_zero, torch.where(may_skip, forward[:, :-2], log_zeros[:, 2:])], 1
        )
        advanced = torch.logsumexp(torch.stack([forward, from_previous, from_skipped]), 0) + emission[step]
        forward = torch.where((step < steps).unsqueeze(1), advanced, forward)
    last = torch.stack([2 * lengths, 2 * lengths - 1], 1)
    ends = torch.where(last < 0, _LOG_ZERO, forward.gather(1, last.clamp(min=0)))
    return torch.logsumexp(ends, 1)


def _require_sizes(log_probs: Tensor, targets: Tensor, *lengths: Any) -> None:
    time = log_probs.shape[0]
    if log_probs.dim() != 3 or targets.dim() != 2 or not all(isinstance(each, Tensor) for each in lengths):
        raise CaptureError(
            f"ctc_loss{line_of_caller()}: give it log_probs (time, batch, classes), targets (batch, labels), filled up to one "
            "length, and tensors (batch) of their lengths"
        )
    if not isinstance(time, int) or time > MOST_STEPS or not isinstance(targets.shape[1], int):
        raise CaptureError(
            f"ctc_loss{line_of_caller()} takes one number of steps, of at most {MOST_STEPS}, not {time}: cut or fill up inputs"
        )
