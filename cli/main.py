"""The command `fusion-peer`. Importing this loads neither torch nor hivemind: each command imports what it runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

from fusion.cli import jobs, swarm_key
from fusion.cli.chaos import chaos
from fusion.cli.chat import chat
from fusion.cli.demo import demo
from fusion.cli.generate import generate
from fusion.cli.plan import plan
from fusion.cli.serve import serve
from fusion.cli.start import start
from fusion.cli.status import status
from fusion.cli.terminal import errors, options
from fusion.cli.train import train

PROGRAM = "fusion-peer"

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 it did not work, 2 bad input, 130 interrupted.",
)
app.command()(start)
app.command()(plan)
app.command()(train)
app.add_typer(jobs.app, name="jobs")
app.command()(serve)
app.command()(generate)
app.command()(chat)
app.command()(status)
app.add_typer(swarm_key.app, name="swarm-key")
app.command()(demo)
app.command()(chaos)


@app.callback(invoke_without_command=True)
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
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = options.debug_asked(words)
    # SIGTERM ends a command as Ctrl-C does: whatever it opened is closed in order.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = typer.main.get_command(app).main(args=words, prog_name=PROGRAM, standalone_mode=False)
    except BrokenPipeError:  # whoever read our output has had enough
        sys.stderr.close()
        return errors.FAILED
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else errors.FAILED
    except (typer.Abort, KeyboardInterrupt):
        return errors.report(KeyboardInterrupt(), debug=debug)
    except (Exception, BaseExceptionGroup) as error:  # the process boundary: one line, never a traceback
        return errors.report(error, debug=debug)
    if code == errors.INTERRUPTED:  # newer versions of typer say so with a code
        return errors.report(KeyboardInterrupt(), debug=debug)
    return code if isinstance(code, int) else errors.DONE


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell does for what runs in the background
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
