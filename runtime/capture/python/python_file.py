"""Runs a Python file of whoever launches a job on their own machine, as `python FILE` would, and reports an error in it in one line with the file
and the line.

Nothing else in the product runs foreign code, and nothing from another peer gets here: the path is one that the user wrote into a job file.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from fusion.runtime.job.errors import JobError

MODULE = "fusion_job_file"  # prefix of the module's name


class PythonFile:
    """A file that has been run. JobError if it cannot be run to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        spec = importlib.util.spec_from_file_location(f"{MODULE}_{path.stem}", self.path)
        if spec is None or spec.loader is None:
            raise JobError(f"{path} is not a Python file: its name must end in .py")
        self._module = importlib.util.module_from_spec(spec)
        with self.running():
            sys.modules[spec.name] = self._module  # dataclasses look up their module there
            spec.loader.exec_module(self._module)
        self._patch_len()

    def function(self, name: str) -> Callable[..., Any]:
        """The function or class of this name. JobError where the file has none."""
        function = getattr(self._module, name, None)
        if callable(function):
            return function  # type: ignore[no-any-return]
        names = [
            key
            for key, value in vars(self._module).items()
            if getattr(value, "__module__", "") == self._module.__name__
        ]
        raise JobError(f"{self.path} has no function {name} (it has: {', '.join(names) or 'none'})")

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for running code of the file: modules next to it can be imported, its output goes to stderr, and what it raises becomes a JobError."""
        folder = str(self.path.parent)
        sys.path.insert(0, folder)
        try:
            with redirect_stdout(sys.stderr):
                yield
        except JobError:
            raise
        except (Exception, SystemExit) as error:
            raise JobError(f"{self._where(error)}: {_error_text(error)}") from error
        finally:
            if folder in sys.path:  # the file may have removed it
                sys.path.remove(folder)

    def _patch_len(self) -> None:
        """Let len() of a tensor return a free size, as `x.shape[0]` does, in the file and in the modules next to it: Python's own returns numbers only."""
        for module in list(sys.modules.values()):
            if Path(getattr(module, "__file__", None) or "").parent == self.path.parent:
                vars(module).setdefault("len", _length)

    def _where(self, error: BaseException) -> str:
        """FILE:LINE of the innermost line of the user's own code."""
        if isinstance(error, SyntaxError) and error.filename is not None:
            return f"{error.filename}:{error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        folder = self.path.parent
        for frame in reversed(frames):
            if Path(frame.filename).is_relative_to(folder) and "site-packages" not in frame.filename:
                return f"{frame.filename}:{frame.lineno}"
        return str(self.path)


def _length(value: Any) -> Any:
    free = isinstance(value, torch.Tensor) and value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)
    return value.shape[0] if free else len(value)


def _error_text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}"
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
