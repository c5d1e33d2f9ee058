"""Which line of a model's code a message is about, for whoever has to change it.

torch.export runs the model's forward: an error that it meets has that line on its traceback, an operator of the exported
graph remembers it, and a size that turned out not to be free was fixed while it ran.
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

# Code that runs a model, or between it and torch, and that nobody would have to change.
_TORCH = str(Path(torch.__file__).parent)
_OF_SHAPES = tuple(
    str(Path(_TORCH, name)) for name in ("_decomp", "_refs", "_prims", "_subclasses", "_meta_registrations")
)
_LAYERS = str(Path(_TORCH, "nn", "modules"))
_OURS = str(Path(__file__).parents[1])
_STANDARD = str(Path(logging.__file__).parents[1])
_TRACED = re.compile(r'File "([^"]+)", line (\d+)')
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_FAKES = "torch._subclasses.fake_tensor"  # writes a traceback of an operator that cannot be run, and raises it as well


def line_of_node(node: fx.Node) -> str:
    """ ", at FILE:LINE", where the model calls the operator; empty where that is not known."""
    return _last([(file, int(number)) for file, number in _TRACED.findall(node.stack_trace or "")])


def taken_from(node: fx.Node) -> list[str]:
    """The names of the nodes that `node` is what is left of after others were taken apart, from the model's own; last its own."""
    names, sources = [node.name], node.meta.get("from_node")
    while sources:
        names.append(sources[-1].name)
        sources = sources[-1].from_node
    return names[::-1]


def line_of_error(error: BaseException) -> str:
    """ ", at FILE:LINE", of the innermost line of the model's code on the traceback; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return _last([(frame.filename, frame.lineno or 0) for frame in frames])


def line_of_caller() -> str:
    """ ", at FILE:LINE", of the model's code that runs now: for a function of ours in the place of one of torch's."""
    return _last(_running())


def is_called_by_model() -> bool | None:
    """Whether the model's code itself, and no layer of torch's, calls the function of torch that runs in the caller's frame. None for
    a function of ours, and for what torch calls to find out the shape of a result."""
    frame = sys._getframe(1).f_back
    while frame is not None and _is_of_python(file := frame.f_code.co_filename):
        if file.startswith(_LAYERS):
            return False
        if file.startswith(_OF_SHAPES):
            return None
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(_OURS) else True


def line_of_frame(frame: FrameType) -> str:
    """ ", at FILE:LINE", that the frame runs; empty where that is no line of the model's."""
    return _last([(frame.f_code.co_filename, frame.f_lineno)])


def first_line(error: BaseException) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


class FixedSize(logging.Filter):
    """`line`: where the model's code first fixed a size that was to be free, or else first asked how often a number goes into one,
    or else last asked something of one. Lets no record of torch through: what it would write beside our one line is the graph it has
    so far."""

    def __init__(self) -> None:
        super().__init__()
        self.line = ""
        self._fixed = self._divided = False

    @property
    def certain(self) -> bool:
        """Whether the line is one of the first two."""
        return self._fixed or self._divided

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._fixed and "[guard added]" in str(record.msg) and isinstance(record.args, tuple):
            asked, line = str(record.args[1]), _last(_running())
            self._fixed = re.fullmatch(r"Eq\(\w+, \d+\)", asked) is not None
            if line and (self._fixed or not self._divided):
                self.line, self._divided = line, "//" in asked
        return False


@contextmanager
def every_line() -> Iterator[None]:
    """While open, an operator remembers where it is called in functions of all names. torch keeps those named forward, and
    with them no line of a loss."""
    plain = getattr(fx.proxy.TracerBase, "_filter_traceback_frames", None)

    def of_model(_: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([f for f in frames if not f.filename.startswith(_TORCH)])

    if plain is None:  # a torch before 2.9
        yield
        return
    fx.proxy.TracerBase._filter_traceback_frames = of_model  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        fx.proxy.TracerBase._filter_traceback_frames = plain  # type: ignore[method-assign]


@contextmanager
def fixed_size() -> Iterator[FixedSize]:
    """Watch torch while it exports a model."""
    log, watch = logging.getLogger(_SHAPES), FixedSize()
    logs, level = (log, logging.getLogger(_FAKES)), log.level
    log.setLevel(logging.INFO)
    for each in logs:
        each.addFilter(watch)
    try:
        yield watch
    finally:
        for each in logs:
            each.removeFilter(watch)
        log.setLevel(level)


def _running() -> list[tuple[str, int]]:
    """The lines that run now, from the outermost, less those of this module."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def _last(lines: list[tuple[str, int]]) -> str:
    """The innermost one that lies within the run of the model: behind our own code that runs it, and neither torch's nor Python's,
    nor ours in the place of torch's."""
    lines = list(lines)
    while lines and (lines[-1][0].startswith(_OURS) or _is_of_python(lines[-1][0])):
        lines.pop()
    ours = max((i for i, (file, _) in enumerate(lines) if file.startswith(_OURS)), default=-1)
    for file, number in reversed(lines[ours + 1 :]):
        if not _is_of_python(file):
            return f", at {file.rpartition('site-packages/')[2]}:{number}"
    return ""


def _is_of_python(file: str) -> bool:
    """Whether it is torch's, or comes with Python."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return standard or file.startswith((_TORCH, "<"))
