"""Runs torch.export with our replacements of torch functions, and turns its failures into one line each."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import warnings
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as _dynamo_config
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram
from torch.fx.experimental import _config as _symbolic
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fusion.runtime.capture.exporting.model_code import every_line, first_line, fixed_size, line_of_error
from fusion.runtime.capture.exporting.recurrences import recurrences_as_operator
from fusion.runtime.capture.exporting.state import no_state_in_buffers, require_fixed_tables
from fusion.runtime.capture.exporting.torch_calls import patched_torch
from fusion.runtime.job.errors import CaptureError

# Errors that torch raises for a model that it cannot export.
EXPORT_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, SpecViolationError)

_MIN_SAMPLES = 3  # one less is still not a single one
_SIZE_REMEDY = "no loop over it there, and no number made of it"
_BATCH_REMEDY = "no loop over it there, no pieces of which there may be more or fewer (split, max(1, n // 4)), and no number of it that whole numbers do not give (int(0.7 * n): write 7 * n // 10)"


class SizeFixedError(CaptureError):
    """A size that should be free is fixed. `certain`: whether the line of the model's code that fixes it is known."""

    def __init__(self, message: str, *, certain: bool) -> None:
        super().__init__(message)
        self.certain = certain


def export(
    wrapped: nn.Module, example: tuple[torch.Tensor, ...], dims: tuple[dict[int, Any], ...]
) -> ExportedProgram:
    """The module exported by torch. `dims`: the free dimensions of each tensor of `example`. CaptureError names the line of the model's code."""
    require_fixed_tables(wrapped)
    try:
        return _export_once(wrapped, example, dims)
    except SizeFixedError as error:
        only_batch = wrapped.training or all(where.keys() == {0} for where in dims)
        too_few = only_batch and example[0].shape[0] < _MIN_SAMPLES
        if error.certain or too_few or not hasattr(_symbolic, "backed_size_oblivious"):
            raise
        # For the rest of a sequence, as `x[:, 1:]`, torch adds a guard that it is not one position, which excludes texts of two. With
        # this option it assumes so without a guard, as it does for all free sizes.
        with _symbolic.patch(backed_size_oblivious=True), contextlib.suppress(CaptureError):
            return _export_once(wrapped, example, dims)
        raise


def _export_once(
    wrapped: nn.Module, example: tuple[torch.Tensor, ...], dims: tuple[dict[int, Any], ...]
) -> ExportedProgram:
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        patched_torch(wrapped),
        every_line(),
        recurrences_as_operator(wrapped),
        no_state_in_buffers(wrapped),
        _dynamo_config.patch(
            fake_tensor_cache_enabled=False
        ),  # of free sizes torch finds next to nothing there
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
            line = line_of_error(error)
            raise CaptureError(
                f"the model's code decides by values of tensors{line}: use torch.where or a mask there{_any_rows_remedy(line)}"
            ) from error
        except EXPORT_ERRORS as error:
            if "fake tensor in the exported program constant" in str(error):
                raise CaptureError(
                    "the model reads a tensor that an earlier run has made and that is kept outside of it (functools.lru_cache, a global "
                    "variable), or in a tuple or list of it: make it anew each time, register it as a buffer, or read it from its layer"
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
            violated = re.match(
                r"Constraints violated \((\w+)|Cannot create Dim with inconsistent", str(error)
            )
            if violated:
                size = f"the size of {violated[1]}" if violated[1] else "a size"
                raise SizeFixedError(
                    f"the model does not leave {size} free{fixed.line}: {_BATCH_REMEDY if violated[1] == 'batch' else _SIZE_REMEDY}",
                    certain=fixed.certain,
                ) from error
            message = first_line(error)
            if all(where.keys() == {0} for where in dims):  # only the batch is free
                message = re.sub(r"\bs\d+\b", "batch", message)
            raise CaptureError(
                f"torch.export cannot capture the model{line_of_error(error)}: {message}"
            ) from error
    return exported


def _any_rows_remedy(line: str) -> str:
    """The remedy for a test of whether any rows are chosen, if the line of the model's code, ", at FILE:LINE", has one; else empty."""
    place = re.search(r"at (.+):(\d+)$", line)
    test = re.compile(r"\bif\b.*(\.(any|numel|sum|size)\(|\blen\(|\.shape\[0\])")
    if place is None or not test.search(linecache.getline(place[1], int(place[2]))):
        return ""
    return "; a test of whether any rows are chosen can be left out, as masked_fill, torch.where and layers of none change nothing"
