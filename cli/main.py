"""The command `fusion-peer`. Importing this loads neither torch nor hivemind: each command imports what it runs, and of the commands
the one that was asked for is imported alone."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any

import typer

from fusion.cli.terminal import errors, options

PROGRAM = "fusion-peer"
COMMANDS = (
    *("start", "plan", "train", "jobs", "serve", "models", "generate", "run", "chat", "status", "swarm-key"),
    *("demo", "chaos"),
)


def command_named(name: str) -> Callable[..., Any] | typer.Typer:
    """One of COMMANDS; a Typer where it has commands of its own."""
    match name:
        case "start":
            from fusion.cli.start import start

            return start
        case "plan":
            from fusion.cli.plan import plan

            return plan
        case "train":
            from fusion.cli.train import train

            return train
        case "jobs":
            from fusion.cli.jobs import app

            return app
        case "serve":
            from fusion.cli.serve import serve

            return serve
        case "models":
            from fusion.cli.models import models

            return models
        case "generate":
            from fusion.cli.generate import generate

            return generate
        case "run":
            from fusion.cli.run import run

            return run
        case "chat":
            from fusion.cli.chat import chat

            return chat
        case "status":
            from fusion.cli.status import status

            return status
        case "swarm-key":
            from fusion.cli.swarm_key import app

            return app
        case "demo":
            from fusion.cli.demo import demo

            return demo
        case "chaos":
            from fusion.cli.local.chaos import chaos

            return chaos
        case _:
            raise AssertionError(name)


def program(arguments: Sequence[str] = ()) -> typer.Typer:
    """The command line: with the one command that `arguments` begin with, or with all where they begin with none."""
    app = typer.Typer(
        name=PROGRAM,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: 0 done, 1 it did not work, 2 bad input, 130 interrupted.",
    )
    app.callback(invoke_without_command=True)(fusion_peer)
    for name in COMMANDS if not set(arguments[:1]) & set(COMMANDS) else arguments[:1]:
        found = command_named(name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def fusion_peer(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """A swarm of volunteers' computers that trains and serves networks too large for any one of them."""
    if version:
        from importlib.metadata import version as installed

        print(PROGRAM, installed(PROGRAM))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code (see `fusion.cli.terminal.errors`). Nothing a user does ends in a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = options.debug_asked(given)
    return _written(_run(given, debug), debug)


def _run(arguments: list[str], debug: bool) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # a character that its encoding has not is a question mark
    # SIGTERM ends a command as Ctrl-C does: whatever it opened is closed in order.
    signal.signal(signal.SIGTERM, _interrupt)
    # So does a terminal that is closed, unless `nohup` has that ignored. Windows has no such signal.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _hang_up)
    try:
        code = typer.main.get_command(program(arguments)).main(
            args=arguments, prog_name=PROGRAM, standalone_mode=False
        )
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else errors.FAILED
    except (typer.Abort, KeyboardInterrupt):
        return errors.report(KeyboardInterrupt(), debug=debug)
    except (Exception, BaseExceptionGroup) as error:  # the process boundary: one line, never a traceback
        if isinstance(errors.first(error), BrokenPipeError):  # the reader of our output has closed it
            sys.stderr.close()
            return errors.FAILED
        return errors.report(error, debug=debug)
    if code == errors.INTERRUPTED:  # newer versions of typer say so with a code
        return errors.report(KeyboardInterrupt(), debug=debug)
    return code if isinstance(code, int) else errors.DONE


def _written(code: int, debug: bool) -> int:
    """The code, once all that was printed is where it was to go; FAILED where it does not get there. Python would try once more when it
    ends, and say so with an exit code of its own and a traceback."""
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = io.StringIO()
        if code == errors.DONE and not isinstance(error, BrokenPipeError):
            errors.report(error, debug=debug)
        code = code or errors.FAILED
    try:
        if not sys.stderr.closed:
            sys.stderr.flush()
    except OSError:
        sys.stderr = io.StringIO()
    return code


def _hang_up(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # shell and kernel may both send it: it is one request
    _interrupt(number, frame)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell does for what runs in the background
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
