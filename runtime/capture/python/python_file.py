"""A Python file of whoever launches a job, run on their own machine as `python FILE` would run it, and what goes wrong in it as
one line that names the file and the line.

Nothing else in the product runs code that is not its own, and nothing that came from another peer gets here: the path is one
that the user wrote into a job file.
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

MODULE = "fusion_job_file"  # what the file is called while it runs


class PythonFile:
    """Runs the file. JobError where it cannot be run to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        spec = importlib.util.spec_from_file_location(f"{MODULE}_{path.stem}", self.path)
        if spec is None or spec.loader is None:
            raise JobError(f"{path} is not a Python file: its name must end in .py")
        self._module = importlib.util.module_from_spec(spec)
        with self.running():
            sys.modules[spec.name] = self._module  # dataclasses of the file look there for their module
            spec.loader.exec_module(self._module)
        self._count_samples()

    def function(self, name: str) -> Callable[..., Any]:
        """The function or class of this name. JobError where the file has none."""
        found = getattr(self._module, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        own = [
            key
            for key, value in vars(self._module).items()
            if getattr(value, "__module__", "") == self._module.__name__
        ]
        raise JobError(f"{self.path} has no function {name} (it has: {', '.join(own) or 'none'})")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around everything that runs code of the file: what lies beside it can be imported, what it prints goes to the error
        output, and what it raises becomes a JobError."""
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
            if folder in sys.path:  # the file may have taken it out
                sys.path.remove(folder)

    def _count_samples(self) -> None:
        """len() of a tensor, in the file and in what it has imported from beside it, is a size that may be left free, as `x.shape[0]` is: Python's
        own gives numbers alone."""
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


def _length(of: Any) -> Any:
    free = isinstance(of, torch.Tensor) and of.dim() > 0 and isinstance(of.shape[0], torch.SymInt)
    return of.shape[0] if free else len(of)


def _error_text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}"
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
