"""A module through torch.export, with what torch runs otherwise meanwhile, and why it cannot be in one line."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from typing import Any

import torch
from torch import nn
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram
from torch.fx.experimental import _config as _symbolic
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fusion.runtime.capture.exporting.model_code import every_line, first_line, fixed_size, line_of_error
from fusion.runtime.capture.exporting.recurrences import one_operator
from fusion.runtime.capture.exporting.state import no_state_in_buffers
from fusion.runtime.capture.exporting.torch_calls import as_exported
from fusion.runtime.job.errors import CaptureError

# What torch raises of a model that it cannot export.
OF_TORCH = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, SpecViolationError)

_SEVERAL = 3  # samples, of which one less is not a single one
_OF_A_SIZE = "no loop over it there, and no number made of it"
_OF_SAMPLES = "no loop over it there, no number made of it (int, round), and no part of it (n // 2: give each part as an array of the data)"


class SizeFixedError(CaptureError):
    """A size that is to be free, and that is not. `certain`: whether a line of the model's code is seen to fix it."""

    def __init__(self, message: str, *, certain: bool) -> None:
        super().__init__(message)
        self.certain = certain


def export(
    wrapped: nn.Module, example: tuple[torch.Tensor, ...], dims: tuple[dict[int, Any], ...]
) -> ExportedProgram:
    """`dims`: of each of `example`, the dimensions that are free. CaptureError names the line of the model's code."""
    try:
        return _exported(wrapped, example, dims)
    except SizeFixedError as error:
        alone = wrapped.training or all(where.keys() == {0} for where in dims)
        few = alone and example[0].shape[0] < _SEVERAL
        if error.certain or few or not hasattr(_symbolic, "backed_size_oblivious"):
            raise
        # Of what is left of a sequence, as of `x[:, 1:]`, torch asks whether it is one position, and then is for no text of two. It
        # assumes that it is not, as it does of all sizes that are free, if it is told to.
        with _symbolic.patch(backed_size_oblivious=True), contextlib.suppress(CaptureError):
            return _exported(wrapped, example, dims)
        raise


def _exported(
    wrapped: nn.Module, example: tuple[torch.Tensor, ...], dims: tuple[dict[int, Any], ...]
) -> ExportedProgram:
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        as_exported(wrapped),
        every_line(),
        one_operator(wrapped),
        no_state_in_buffers(wrapped),
        fixed_size() as fixed,
    ):
        warnings.simplefilter("ignore")
        try:
            exported: ExportedProgram = torch.export.export(
                wrapped, example, dynamic_shapes=(dims,), strict=False
            )
        except CaptureError:
            raise
        except GuardOnDataDependentSymNode as error:
            raise CaptureError(
                f"the model's code decides by values of tensors{line_of_error(error)}: use torch.where or a mask there"
            ) from error
        except OF_TORCH as error:
            if "fake tensor in the exported program constant" in str(error):
                raise CaptureError(
                    "the model reads a tensor that an earlier run has made and that is kept outside of it (functools.lru_cache, a global "
                    "variable): make it anew each time, or register it as a buffer"
                ) from error
            if "non-nested SymInt" in str(error):
                raise CaptureError(
                    f"the model looks something up by a size that is free{line_of_error(error)}, and a graph is the same for all sizes"
                ) from error
            if re.search("function sym_(max|min)", str(error)):
                raise CaptureError(
                    f"the model takes the larger or the smaller of sizes, of which one is free{fixed.line}: a size is a sum of products of others"
                ) from error
            if "_apply(): Couldn't swap" in str(error):
                raise CaptureError(
                    f"the model converts parameters of its own while it runs{line_of_error(error)}: convert them when it is made"
                ) from error
            held = re.match(r"Constraints violated \((\w+)|Cannot create Dim with inconsistent", str(error))
            if held:
                what = f"the size of {held[1]}" if held[1] else "a size"
                raise SizeFixedError(
                    f"the model does not leave {what} free{fixed.line}: {_OF_SAMPLES if held[1] == 'batch' else _OF_A_SIZE}",
                    certain=fixed.certain,
                ) from error
            raise CaptureError(
                f"torch.export cannot capture the model{line_of_error(error)}: {first_line(error)}"
            ) from error
    return exported
