"""Whether a model's code does the same with one sample as with several, without gradients, and during the export. torch.export takes a free
size to be two or more and leaves a branch for one out of the graph, which runs with one all the same; and some code checks what it is given
(`isinstance(x.shape[0], int)`), or who runs it.

Runs are compared by the functions of torch that they call and the numbers that they pass. Where one sample differs from several, a run with
another number of them tells which numbers follow from the batch size: these are no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from fusion.runtime.capture.exporting.model_code import is_called_by_model, line_of_caller
from fusion.runtime.capture.exporting.tensors import fake_mode
from fusion.runtime.job.errors import CaptureError

_FEW, _MANY = 2, 64  # samples, besides those of the example: the one that is further from them
_CODE_REMEDY = "ask no size for its type, and not who runs the code"
# For code of transformers, whose attention other than the eager one makes a mask during an export only.
_TRANSFORMERS_REMEDY = "make it with attn_implementation='eager'"


def require_same_of_one(wrapped: nn.Module, example: Sequence[Tensor], exported: Calls | None = None) -> None:
    """CaptureError where the module, on fake tensors, calls other functions with one sample than with several, without gradients than with
    them, or in a run than when it was `exported`. Says nothing of a module that cannot be run with these batch sizes."""
    few, many, one, no_grad_run = Calls(), Calls(), Calls(), Calls()
    samples = example[0].shape[0]
    try:
        with fake_mode(wrapped):
            _run(wrapped, example, few, samples)
            if exported is not None and (line := exported.first_left_out(few)) is not None:
                remedy = _TRANSFORMERS_REMEDY if line.startswith(", at transformers/") else _CODE_REMEDY
                raise CaptureError(
                    f"the model does otherwise while it is captured than when it runs{line}: {remedy}"
                )
            with torch.no_grad():
                _run(wrapped, example, no_grad_run, samples)
            if (line := no_grad_run.first_unlike(few)) is not None:
                raise CaptureError(
                    f"the model does otherwise where no gradient is taken (torch.is_grad_enabled){line}, and a graph is the same in both: "
                    "ask self.training"
                )
            _run(wrapped, example, one, 1)
            if one.first_unlike(few) is None:
                return
            _run(wrapped, example, many, _MANY if samples <= _MANY // 2 else _FEW)
    except CaptureError:
        raise
    except Exception:  # the model cannot run with such a batch
        return
    if few.names() != many.names():
        return
    if (line := one.first_unlike(few, many)) is not None:
        raise CaptureError(
            f"the model does otherwise with a batch of one sample than with several{line}, and a graph is the same for all sizes"
        )


def _run(wrapped: nn.Module, example: Sequence[Tensor], calls: Calls, batch: int) -> None:
    inputs = [torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype) for tensor in example]
    with calls:
        wrapped(*inputs)


class Calls(TorchFunctionMode):
    """Records the calls of torch functions that return tensors, with the numbers that they are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, list[Any]]] = []
        self.lines: list[str] = []
        self.own_calls: list[tuple[str, str]] = []  # (line of the model's code, function that it calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(each, Tensor) for each in tree_leaves(result)):
            leaves = tree_leaves((args, kwargs or {}))
            numbers = [each for each in leaves if isinstance(each, (bool, int, float))]
            self.calls.append((resolve_name(func) or str(func), numbers))
            self.lines.append(line_of_caller())
            # A function of ours in place of one of torch's.
            is_replacement = str(getattr(func, "__module__", "")).startswith("fusion.")
            by_model = None if is_replacement else is_called_by_model()
            own_call = self.lines[-1], self.calls[-1][0] if by_model else ""
            if by_model is not None and self.own_calls[-1:] != [own_call]:
                self.own_calls.append(own_call)
        return result

    def clear(self) -> None:
        """Drop the calls of earlier runs."""
        for each in (self.calls, self.lines, self.own_calls):
            each.clear()

    def first_left_out(self, other: Calls) -> str | None:
        """The first line of the run `other` whose own call this run lacks. A call that only this run has may compute something once, for all later runs."""
        known = set(self.own_calls)
        return next((line for line, name in other.own_calls if (line, name) not in known), None)

    def names(self) -> list[str]:
        """The functions that are called, in order."""
        return [name for name, _ in self.calls]

    def first_unlike(self, before: Calls, other: Calls | None = None) -> str | None:
        """The first line that calls something else than the run `before`, or at which one of the two ends while the other goes on. `other`: a run
        that calls the same functions as `before`; numbers in which these two differ follow from their sizes, and are not compared."""
        calls = zip(self.calls, self.lines, before.calls, (other or before).calls, strict=False)
        for (name, numbers), line, (expected_name, expected), (_, others) in calls:
            compared = zip(numbers, expected, others, strict=False)
            if name != expected_name or any(a != b and b == c for a, b, c in compared):
                return line
        if len(self.calls) == len(before.calls):
            return None
        longer = self if len(self.calls) > len(before.calls) else before
        return longer.lines[min(len(self.calls), len(before.calls))]
