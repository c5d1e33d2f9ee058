"""Finds the line of a model's code that a message is about.

torch.export runs the model's forward: an error has the line on its traceback, an operator of the exported graph records it, and a size
that turns out not to be free was fixed while it ran.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

# Code that is not the model's: what runs it, and what lies between it and torch.
_TORCH = str(Path(torch.__file__).parent)
_SHAPE_CODE = tuple(
    str(Path(_TORCH, name)) for name in ("_decomp", "_refs", "_prims", "_subclasses", "_meta_registrations")
)
_SIZE_CODE = tuple(
    str(Path(_TORCH, name)) for name in ("__init__.py", "fx", "utils", "_export", "overrides.py")
)
_LAYERS = str(Path(_TORCH, "nn", "modules"))
_CAPTURE = str(Path(__file__).parents[1])
_EXPORT = str(Path(__file__).with_name("export.py"))
_BLOCKS = str(Path(__file__).with_name("blocks.py"))  # asks in place of torch while it follows the batch
_STDLIB = str(Path(logging.__file__).parents[1])
_TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_SHAPES_LOGGER = "torch.fx.experimental.symbolic_shapes"
_FAKES_LOGGER = (
    "torch._subclasses.fake_tensor"  # logs the traceback of an operator that fails, and raises it as well
)


def line_of_node(node: fx.Node) -> str:
    """ ", at FILE:LINE" where the model calls the operator; empty if unknown."""
    return _innermost([(file, int(number)) for file, number in _TRACE_LINE.findall(node.stack_trace or "")])


def names_before_decomposition(node: fx.Node) -> list[str]:
    """The names of the nodes that `node` was decomposed from, the model's own operator first, `node` itself last."""
    names, sources = [node.name], node.meta.get("from_node")
    while sources:
        names.append(sources[-1].name)
        sources = sources[-1].from_node
    return names[::-1]


def line_of_error(error: BaseException) -> str:
    """ ", at FILE:LINE" of the innermost line of the model's code on the traceback; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost([(frame.filename, frame.lineno or 0) for frame in frames])


def line_of_caller() -> str:
    """ ", at FILE:LINE" of the model's code that runs now: for a function of ours that replaces one of torch's."""
    return _innermost(_stack_lines())


def is_called_by_model() -> bool | None:
    """Whether the model's code, rather than a layer of torch, calls the function of torch that runs in the caller's frame. None for a function
    of ours, and for calls by which torch infers the shape of a result."""
    frame = sys._getframe(1).f_back
    while frame is not None and _is_library(file := frame.f_code.co_filename):
        if file.startswith(_LAYERS):
            return False
        if file.startswith(_SHAPE_CODE):
            return None
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(_CAPTURE) else True


def is_asked_by_model(*, past_capture: bool = False) -> bool:
    """Whether a line of the model's code, rather than an operator that it calls, asks the question about sizes that torch answers in the caller's
    frame. `past_capture`: also through functions of ours that replace those of torch."""
    between = (*_SIZE_CODE, _CAPTURE) if past_capture else _SIZE_CODE
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    return frame is not None and is_model_code(frame.f_code.co_filename)


def is_model_code(file: str) -> bool:
    """Whether the file is neither torch's, Python's nor ours."""
    return not _is_library(file) and not file.startswith(_CAPTURE)


def line_of_frame(frame: FrameType) -> str:
    """ ", at FILE:LINE" that the frame runs; empty if that is not the model's code."""
    return _innermost([(frame.f_code.co_filename, frame.f_lineno)])


def first_line(error: BaseException) -> str:
    """The first non-empty line of the error's text, at most 300 characters; its type's name if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


class FixedSize(logging.Filter):
    """`line`: where the model's code first fixed a size that was to be free; else where it first asked for a division of one; else where it
    last compared one. Lets no log record of torch through: torch would print the graph so far beside our one line."""

    def __init__(self) -> None:
        super().__init__()
        self.line = ""
        self._fixed = self._divided = False

    @property
    def certain(self) -> bool:
        """Whether `line` is one of the first two."""
        return self._fixed or self._divided

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._fixed and "[guard added]" in str(record.msg) and isinstance(record.args, tuple):
            guard, frames = str(record.args[1]), _stack_lines()
            own = (file for file, _ in reversed(frames) if file.startswith(_CAPTURE) and file != _BLOCKS)
            runner = next(own, "")
            line = "" if runner == _EXPORT else _innermost(frames)  # torch itself asks after the model's run
            self._fixed = re.fullmatch(r"Eq\(\w+, \d+\)", guard) is not None
            if line and (self._fixed or not self._divided):
                self.line, self._divided = line, "//" in guard
        return False


@contextmanager
def every_line() -> Iterator[None]:
    """While open, operators record their line in functions of any name. torch keeps the lines of functions named forward only, and so none
    of a loss."""
    original = getattr(fx.proxy.TracerBase, "_filter_traceback_frames", None)

    def outside_torch(_: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([f for f in frames if not f.filename.startswith(_TORCH)])

    if original is None:  # a torch before 2.9
        yield
        return
    fx.proxy.TracerBase._filter_traceback_frames = outside_torch  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        fx.proxy.TracerBase._filter_traceback_frames = original  # type: ignore[method-assign]


@contextmanager
def fixed_size() -> Iterator[FixedSize]:
    """Follows torch's log of shape guards during an export."""
    log, watch = logging.getLogger(_SHAPES_LOGGER), FixedSize()
    logs, level = (log, logging.getLogger(_FAKES_LOGGER)), log.level
    log.setLevel(logging.INFO)
    for each in logs:
        each.addFilter(watch)
    try:
        yield watch
    finally:
        for each in logs:
            each.removeFilter(watch)
        log.setLevel(level)


def _stack_lines() -> list[tuple[str, int]]:
    """(file, line) of the running frames, outermost first, without those of this module."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def _innermost(lines: list[tuple[str, int]]) -> str:
    """ ", at FILE:LINE" of the innermost line of the model's code: inside our code that runs the model, and neither torch's, Python's, nor ours
    in place of torch's."""
    lines = list(lines)
    while lines and (lines[-1][0].startswith(_CAPTURE) or _is_library(lines[-1][0])):
        lines.pop()
    runner = max((i for i, (file, _) in enumerate(lines) if file.startswith(_CAPTURE)), default=-1)
    for file, number in reversed(lines[runner + 1 :]):
        if not _is_library(file):
            return f", at {file.rpartition('site-packages/')[2]}:{number}"
    return ""


def _is_library(file: str) -> bool:
    """Whether the file is torch's or Python's own."""
    standard = file.startswith(_STDLIB) and "site-packages" not in file
    return standard or file.startswith((_TORCH, "<"))
