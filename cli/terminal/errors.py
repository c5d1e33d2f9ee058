"""Maps exceptions to what a user sees: one line on stderr and an exit code, never a traceback.

0    done
1    it was asked correctly and did not work: no peer answers, a job failed, or a mistake of ours
2    bad input: an option, a file or a value, named in the line
130  interrupted with Ctrl-C
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import typer

from fusion.swarm.printable import one_line

# The root of what typer raises for a wrong command line; its module has moved between versions, its public leaf has not.
USAGE_ERROR: Any = typer.BadParameter.__base__

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
LINE_CHARACTERS = 500
# typer says "'x' is not a valid int range" of what is no number at all.
_NUMBERS = re.compile(r"is not a valid (int|float)(?:eger)?(?: range)?\.\Z")
_NUMBER_OF = {"int": "is not a whole number.", "float": "is not a number."}


@dataclass(frozen=True)
class Verdict:
    message: str  # one line
    code: int


def first(error: BaseException) -> BaseException:
    """The first leaf of an exception group; else the error itself."""
    return first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def explain(error: BaseException) -> Verdict:
    """The line and exit code for `error`. Errors of our own (known by their module, so that nothing heavy is imported here) and of
    the operating system are shown as they are; anything else is a bug, and the line says how to see its details."""
    error = first(error)
    if isinstance(error, KeyboardInterrupt):
        return Verdict("interrupted", INTERRUPTED)
    if isinstance(error, USAGE_ERROR):
        text = _NUMBERS.sub(lambda kind: _NUMBER_OF[kind[1]], error.format_message())
        return Verdict(f"{one_line(text, LINE_CHARACTERS)} (fusion-peer COMMAND --help)", BAD_INPUT)
    line = one_line(str(error), LINE_CHARACTERS)
    if isinstance(error, UnicodeError):
        return Verdict(f"not a text file in UTF-8: {line}", BAD_INPUT)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        line = one_line(text, LINE_CHARACTERS)
        if not error.filename and error.errno == errno.ENOENT and _folder_is_gone():
            line = f"the working folder is gone: {line}"
        kinds = FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError
        if isinstance(error, kinds) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return Verdict(line, BAD_INPUT)
    own = type(error).__module__.startswith("fusion.")
    if isinstance(error, ValueError) and (own or type(error) is ValueError) and line:
        return Verdict(line, BAD_INPUT)
    if (own or isinstance(error, OSError | TimeoutError | MemoryError)) and line:
        return Verdict(line, FAILED)
    kind = type(error).__name__
    detail = f"{kind}: {line}" if line else kind
    return Verdict(f"{detail} (a mistake of ours; run it again with --debug for the details)", FAILED)


def _folder_is_gone() -> bool:
    """Whether the working folder has been removed: errors by it name no file."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def report(error: BaseException, *, debug: bool) -> int:
    """Print the line (and, with --debug, the traceback before it) to stderr; returns the exit code."""
    verdict = explain(error)
    with suppress(OSError):  # stderr is closed
        if debug and not isinstance(error, KeyboardInterrupt):
            traceback.print_exception(error, file=sys.stderr)
        print(f"fusion-peer: {verdict.message}", file=sys.stderr, flush=True)
    return verdict.code
