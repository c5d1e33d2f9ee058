"""Texts that a model's code makes of a size that is free: while the model is exported they have torch's symbol in the place of the number,
so that what the code looks up or compares by them is another one than when it runs."""

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

# Calls that give nothing back to the code, however they are reached.
_SAY = frozenset({"print", "debug", "info", "warning", "warning_once", "warn", "error", "log", "write"})


@contextmanager
def no_size_texts() -> Iterator[None]:
    """CaptureError, at the end, where the model's code has made such a text, but to print or log it or for an error."""
    plain, found = torch.SymInt.__repr__, list[str]()

    def text(size: torch.SymInt) -> str:
        frame = sys._getframe(1)
        if (line := line_of_frame(frame)) and not _is_said(frame):
            found.append(line)
        made: str = plain(size)  # type: ignore[no-untyped-call]
        return made

    torch.SymInt.__repr__ = text  # type: ignore[method-assign]
    try:
        yield
    except Exception as error:
        if found:
            raise _refusal(found[0]) from error
        raise
    finally:
        torch.SymInt.__repr__ = plain  # type: ignore[method-assign]
    if found:
        raise _refusal(found[0])


def _refusal(line: str) -> CaptureError:
    return CaptureError(
        f"the model makes a text of a size that is free{line}, and a graph is the same for all sizes: use the size itself"
    )


def _is_said(frame: FrameType) -> bool:
    """Whether the statement that runs is one that shows the text to whoever looks on."""
    around = [
        node
        for node in _statements(frame.f_code.co_filename)
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)
    ]
    innermost = min(around, key=lambda node: (node.end_lineno or node.lineno) - node.lineno, default=None)
    if isinstance(innermost, ast.Expr) and isinstance(innermost.value, ast.Call):
        called = innermost.value.func
        name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""  # fmt: skip
        return name in _SAY
    return isinstance(innermost, ast.Raise | ast.Assert)


@functools.lru_cache(maxsize=8)
def _statements(file: str) -> tuple[ast.stmt, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.stmt))
