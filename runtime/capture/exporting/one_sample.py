"""Whether a model's code does the same with one sample as with several, where no gradient is taken, and while it is exported: torch.export takes a size that is free for two
or more, and would leave the branch for one out of the graph, which is run with one all the same; and some code asks what it is given (`isinstance(x.shape[0], int)`), or who runs it.

Which functions of torch the code calls, and with which numbers, is what tells: two numbers of samples are compared, so that what follows from
their number is not taken for a difference.
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

_SEVERAL = (2, 64)


def require_same_of_one(wrapped: nn.Module, example: Sequence[Tensor], exported: Calls | None = None) -> None:
    """CaptureError where the module, of whose tensors only the shapes are known, calls other functions with a single sample than with
    several, or than when it was `exported`. What cannot be run with so many says nothing."""
    few, many, one, plain = Calls(), Calls(), Calls(), Calls()
    try:
        with fake_mode(wrapped):
            for calls, rows in zip((few, many), _SEVERAL, strict=True):
                _run(wrapped, example, calls, rows)
            if exported is not None and (line := exported.first_left_out(few)) is not None:
                raise CaptureError(
                    f"the model does otherwise while it is captured than when it runs{line}: ask no size for its type, and not who runs the code"
                )
            plain.expected = few.calls
            with torch.no_grad():
                _run(wrapped, example, plain, _SEVERAL[0])
            if (line := plain.first_unlike(few)) is not None:
                raise CaptureError(
                    f"the model does otherwise where no gradient is taken (torch.is_grad_enabled){line}, and a graph is the same in both: "
                    "ask self.training"
                )
            if [name for name, _ in few.calls] != [name for name, _ in many.calls]:
                return
            one.expected = [
                (name, [a if a == b else None for a, b in zip(numbers, others, strict=False)])
                for (name, numbers), (_, others) in zip(few.calls, many.calls, strict=True)
            ]
            _run(wrapped, example, one, 1)
    except CaptureError:
        raise
    except Exception:  # a batch of so many is none for the model
        return
    if (line := one.first_unlike(few)) is not None:
        raise CaptureError(
            f"the model does otherwise with a batch of one sample than with several{line}, and a graph is the same for all sizes"
        )


def _run(wrapped: nn.Module, example: Sequence[Tensor], calls: Calls, rows: int) -> None:
    given = [torch.empty(rows, *each.shape[1:], dtype=each.dtype) for each in example]
    with calls:
        wrapped(*given)


class Calls(TorchFunctionMode):
    """The functions of torch that make tensors, as they are called, with their numbers. `expected`: those of the runs before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, list[Any]]] = []
        self.lines: list[str] = []
        self.own: list[tuple[str, str]] = []  # each line of the model's, and what it calls itself
        self.expected: Sequence[tuple[str, list[Any]]] | None = None
        self.found: str | None = None  # the line that calls something else

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.found is None and any(isinstance(each, Tensor) for each in tree_leaves(made)):
            leaves = tree_leaves((args, kwargs or {}))
            numbers = [each for each in leaves if isinstance(each, (bool, int, float))]
            self.calls.append((resolve_name(func) or str(func), numbers))
            self.lines.append(line_of_caller())
            # In the place of one of torch's
            ours = str(getattr(func, "__module__", "")).startswith("fusion.")
            by_model = None if ours else is_called_by_model()
            called = self.lines[-1], self.calls[-1][0] if by_model else ""
            if by_model is not None and self.own[-1:] != [called]:
                self.own.append(called)
            if self.expected is not None and not self._as_expected(self.expected):
                self.found = self.lines[-1]
        return made

    def forget(self) -> None:
        """What an earlier run has called."""
        for each in (self.calls, self.lines, self.own):
            each.clear()

    def first_left_out(self, other: Calls) -> str | None:
        """The first line of the run `other` that calls what this one does not call there. What this one alone calls may be made once,
        for all later runs."""
        known = set(self.own)
        return next((line for line, name in other.own if (line, name) not in known), None)

    def first_unlike(self, before: Calls) -> str | None:
        """The line that calls something else than the run `before`, or that calls nothing more there."""
        if self.found is None and len(self.calls) < len(before.calls):
            return before.lines[len(self.calls)]
        return self.found

    def _as_expected(self, expected: Sequence[tuple[str, list[Any]]]) -> bool:
        at = len(self.calls) - 1
        if at >= len(expected) or expected[at][0] != self.calls[at][0]:
            return False
        wanted, numbers = expected[at][1], self.calls[at][1]
        return all(a is None or a == b for a, b in zip(wanted, numbers, strict=False))
