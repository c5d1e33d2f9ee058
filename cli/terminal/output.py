"""Output of commands: text for people or JSON for programs, and one status line that is rewritten as work goes on.

Text goes to stdout; so does JSON, one object a line. The status line goes to stderr and is rewritten in place on a
terminal that can do that; elsewhere each line is a log line, and equal or too frequent ones are left out. Text from other peers is
printed here, too: control characters are replaced (`fusion.swarm.printable`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from fusion.swarm.printable import printable

QUIET_SECONDS = 5.0  # between two status lines where they cannot be rewritten in place
PIPE_COLUMNS = 200  # a pipe has no width: breaking cells at 80 there would lose what a script looks for
MOST_WHOLE = 64  # characters of a cell that is not broken: peer ids and names have fewer
MOST_WORD = 20  # of a word in a longer cell that is not broken
LEAST_TEXT = 16  # of a cell of several words
MOST_PARTS = 3  # of a table; above, rows are easier to read below each other


@dataclass
class Output:
    """`as_json`: only `emit` prints to stdout, and `print_line` and `status` print nothing."""

    as_json: bool = False
    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    _shown: str = ""
    _shown_at: float = float("-inf")
    _within_line: bool = False  # that `write` has begun

    def print_line(self, text: str = "") -> None:
        if not self.as_json:
            self._clear()
            print(printable(text, "\n"), file=self.stdout, flush=True)

    def note(self, text: str) -> None:
        """A lasting line on stderr, for people only."""
        if not self.as_json:
            self._clear()
            print(printable(text, "\n"), file=self.stderr, flush=True)

    def emit(self, record: dict[str, Any]) -> None:
        """One JSON object per line; nothing in text mode. NaN and infinities become null, which JSON lacks."""
        if self.as_json:
            record = _with_numbers(record)
            line = json.dumps(record, ensure_ascii=False, default=str)
            if (self.stdout.isatty() and not line.isprintable()) or not _encodable(line, self.stdout):
                line = json.dumps(record, default=str)
            print(line, file=self.stdout, flush=True)

    def write(self, text: str) -> None:
        """A piece of text without a line break, such as a generated token. Control characters are replaced on a terminal only."""
        if not self.as_json:
            self._clear()
            self._within_line = not text.endswith("\n") if text else self._within_line
            self.stdout.write(printable(text, "\n\t") if self.stdout.isatty() else text)
            self.stdout.flush()

    def end_line(self) -> None:
        """End the line that `write` has begun, if any."""
        if self._within_line:
            self.write("\n")

    def status(self, text: str, *, important: bool = False) -> None:
        """Show the current status. `important`: also where status lines would be too frequent."""
        text = printable(text)
        if self.as_json or text == self._shown:
            return
        if self._rewrites:
            width = shutil.get_terminal_size().columns - 1
            self.stderr.write("\r\x1b[2K" + text[:width])
        elif important or self.clock() - self._shown_at >= QUIET_SECONDS:
            self.stderr.write(text + "\n")
            self._shown_at = self.clock()
        else:
            return
        self.stderr.flush()
        self._shown = text

    def end_status(self) -> None:
        """Keep the last status line on the screen and continue below it."""
        if self._shown and not self.as_json and self._rewrites:
            self.stderr.write("\n")
            self.stderr.flush()
        self._shown = ""

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table for people; a line saying so where there are no rows. What others may copy (ids, names) stays in one piece: where
        the columns have no room side by side they stand in several tables, which begin with the same column, or below each other."""
        if self.as_json:
            return
        from rich import box
        from rich.cells import cell_len
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        found = [[printable(cell, "\n") for cell in row] for row in rows]
        if not found:
            self.print_line(f"{title}: none")
            return
        self._clear()
        console = Console(
            file=self.stdout, width=None if self.stdout.isatty() else PIPE_COLUMNS, highlight=False
        )
        below = list(zip(columns, *found, strict=True))  # the cells of each column
        parts = side_by_side([least_width(cells, cell_len) for cells in below], console.width)
        if not 0 < len(parts) <= MOST_PARTS or (len(parts) > 1 and len(set(below[0])) < len(below[0])):
            label = max(map(cell_len, columns))
            self.print_line(title)
            for row in found:  # the terminal breaks what is too long, and copies it in one piece
                lines = (
                    f"{name:<{label}}  {' '.join(cell.split())}"
                    for name, cell in zip(columns, row, strict=True)
                    if cell
                )
                self.print_line("\n" + "\n".join(f" {line}" for line in lines))
            self.print_line()
            return
        for part in parts:
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            most = [max(cell_len(line) for cell in below[at] for line in cell.split("\n")) for at in part]
            widths = spread([least_width(below[at], cell_len) for at in part], most, console.width)
            for at, width in zip(part, widths, strict=True):
                table.add_column(columns[at], overflow="fold", width=width)
            for row in found:
                table.add_row(*(escape(row[at]) for at in part))
            console.print(table)

    @property
    def _rewrites(self) -> bool:
        """Whether the status line can be rewritten in place: an editor's shell would show the control characters."""
        return self.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    def _clear(self) -> None:
        if self._shown and self._rewrites:
            self.stderr.write("\r\x1b[2K")
            self.stderr.flush()
        self._shown = ""


class LastingOutput(Output):
    """Of what goes on for its own sake, as a peer does: what a full disk under its log does not take, or a terminal that is gone, is
    left out. A reader who has had enough (BrokenPipeError) ends it like any command."""

    def print_line(self, text: str = "") -> None:
        with _as_far_as_it_goes():
            super().print_line(text)

    def emit(self, record: dict[str, Any]) -> None:
        with _as_far_as_it_goes():
            super().emit(record)

    def status(self, text: str, *, important: bool = False) -> None:
        with _as_far_as_it_goes():
            super().status(text, important=important)


@contextmanager
def _as_far_as_it_goes() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


def least_width(cells: Iterable[str], cell_len: Callable[[str], int]) -> int:
    """Characters that a column of these cells takes so that what one copies stays whole; `cell_len` says how wide a text is."""
    return max((_least_of(cell, cell_len) for cell in cells), default=1)


def _least_of(cell: str, cell_len: Callable[[str], int]) -> int:
    whole, words = cell_len(cell), cell.split()
    if len(words) < 2:
        return max(1, min(whole, MOST_WHOLE))
    return max(min(whole, LEAST_TEXT), *(min(cell_len(word), MOST_WORD) for word in words))


def side_by_side(least: Sequence[int], room: int) -> list[list[int]]:
    """Which columns stand beside each other where a table has `room` characters: all, or several tables that each begin with
    column 0. Nothing where another has no room beside that one. `least`: characters that each column takes."""
    parts = [[0]]
    for at in range(1, len(least)):
        if _framed([least[each] for each in (*parts[-1], at)]) > room:
            parts.append([0])
        parts[-1].append(at)
    fits = all(_framed([least[at] for at in part]) <= room for part in parts)
    return parts if fits else []


def spread(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """The width of each column: what is left of the `room` goes to those that have something to fill it with."""
    widths = list(least)
    while _framed(widths) < room and (narrow := [at for at, width in enumerate(widths) if width < most[at]]):
        for at in narrow[: room - _framed(widths)]:
            widths[at] += 1
    return widths


def _framed(widths: Sequence[int]) -> int:
    return sum(widths) + 3 * len(widths) - 1  # with what lies between and beside them


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_numbers(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _encodable(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def bytes_text(count: float) -> str:
    """ "1.5 GiB"; "0 B"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def flops_text(flops_per_second: float) -> str:
    """ "182 GFLOP/s"."""
    for unit in ("FLOP/s", "KFLOP/s", "MFLOP/s", "GFLOP/s"):
        if flops_per_second < 1000:
            return f"{flops_per_second:.3g} {unit}"
        flops_per_second /= 1000
    return f"{flops_per_second:.3g} TFLOP/s"


def number_text(value: float | None) -> str:
    """ "0.0123", "4.56", "4140"; "-" for one that is not known."""
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def rate_text(per_second: float) -> str:
    """ "950", "12.3k", "1.2M": a count a second, for a line with little room."""
    for unit in ("", "k", "M"):
        if per_second < 1000:
            return f"{per_second:.0f}" if not unit else f"{per_second:.1f}{unit}"
        per_second /= 1000
    return f"{per_second:.1f}G"


def seconds_text(seconds: float) -> str:
    """ "2.41 s", "83 ms", "120 us"."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} us"


def busy_text(shares: Iterable[float]) -> str:
    """Busy share of each stage: "81% 79% 84%"."""
    return " ".join(f"{100 * share:.0f}%" for share in shares)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The least of `values` that so large a share of them does not exceed (nearest rank); None of nothing."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1] if ordered else None
