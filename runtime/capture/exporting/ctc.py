"""The loss of connectionist temporal classification (Graves et al., 2006), a step of the input at a time.

Its gradient is that of the loss. torch's own is that of the loss and of the log_softmax before it: the two are the same for an
input that one has made, as torch asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.job.errors import CaptureError

MOST_STEPS = 512  # each is some nodes of the graph
_NEVER = -1e30  # the logarithm of no probability: with -inf, gradients would not be numbers


def ctc_loss(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> Tensor:  # fmt: skip
        _require_sizes(log_probs, targets, input_lengths, target_lengths)
        lengths = target_lengths.to(torch.int64)
        loss = -_likelihood(log_probs, targets.to(torch.int64), input_lengths, lengths, blank)
        impossible = loss > -_NEVER / 2
        loss = torch.where(impossible, 0.0 if zero_infinity else float("inf"), loss)
        if reduction == "mean":
            return (loss / lengths.clamp(min=1)).mean()  # type: ignore[no-any-return]
        return loss.sum() if reduction == "sum" else loss

    return run


def _likelihood(log_probs: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """The logarithm of the probability of each target (batch,), over all its alignments."""
    targets = targets.clamp(min=0)  # what they are filled up with may be no class
    blanks = torch.full_like(targets, blank)
    # (batch, places): a blank before each label and behind the last
    places = torch.cat([torch.stack([blanks, targets], -1).flatten(1), blanks[:, :1]], 1)
    count, time = places.shape[1], log_probs.shape[0]
    emitted = log_probs.gather(2, places.expand(time, *places.shape))
    may_skip = (places[:, 2:] != blank) & (places[:, 2:] != places[:, :-2])
    never = torch.full_like(emitted[0, :, :1], _NEVER)
    none = torch.full_like(emitted[0], _NEVER)
    sum_to_here = torch.where(torch.arange(count) < 2, emitted[0], none)
    for step in range(1, time):
        one = torch.cat([never, sum_to_here[:, :-1]], 1)
        two = torch.cat([never, never, torch.where(may_skip, sum_to_here[:, :-2], none[:, 2:])], 1)
        on = torch.logsumexp(torch.stack([sum_to_here, one, two]), 0) + emitted[step]
        sum_to_here = torch.where((step < steps).unsqueeze(1), on, sum_to_here)
    last = torch.stack([2 * lengths, 2 * lengths - 1], 1)
    ends = torch.where(last < 0, _NEVER, sum_to_here.gather(1, last.clamp(min=0)))
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
