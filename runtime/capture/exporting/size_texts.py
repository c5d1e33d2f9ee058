"""Strings that a model's code makes of a free size: during the export they contain torch's symbol in place of the number, so what the
code looks up or compares by them differs from when it runs."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from fusion.runtime.capture.exporting.model_code import line_of_frame
from fusion.runtime.job.errors import CaptureError

# Calls that only show their arguments, by whatever name they are reached.
_OUTPUT_CALLS = frozenset(
    {"print", "debug", "info", "warning", "warning_once", "warn", "error", "log", "write"}
)


@contextmanager
def no_size_texts() -> Iterator[None]:
    """CaptureError, at the end, where the model's code has made such a string for anything but printing, logging or an error."""
    original, lines = torch.SymInt.__repr__, list[str]()

    def text(size: torch.SymInt) -> str:
        frame = sys._getframe(1)
        if (line := line_of_frame(frame)) and not _is_only_shown(frame):
            lines.append(line)
        representation: str = original(size)  # type: ignore[no-untyped-call]
        return representation

    torch.SymInt.__repr__ = text  # type: ignore[method-assign]
    try:
        yield
    except Exception as error:
        if lines:
            raise _refusal(lines[0]) from error
        raise
    finally:
        torch.SymInt.__repr__ = original  # type: ignore[method-assign]
    if lines:
        raise _refusal(lines[0])


def _refusal(line: str) -> CaptureError:
    return CaptureError(
        f"the model makes a text of a size that is free{line}, and a graph is the same for all sizes: use the size itself"
    )


def _is_only_shown(frame: FrameType) -> bool:
    """Whether the statement that runs only prints, logs or raises the string."""
    enclosing = [
        node
        for node in _statements(frame.f_code.co_filename)
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)
    ]
    innermost = min(enclosing, key=lambda node: (node.end_lineno or node.lineno) - node.lineno, default=None)
    if isinstance(innermost, ast.Expr) and isinstance(innermost.value, ast.Call):
        function = innermost.value.func
        name = function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""  # fmt: skip
        return name in _OUTPUT_CALLS
    return isinstance(innermost, ast.Raise | ast.Assert)


@functools.lru_cache(maxsize=8)
def _statements(file: str) -> tuple[ast.stmt, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.stmt))
