from __future__ import annotations

import errno
import io
import json
import math
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.cli.terminal.output import (
    LastingOutput,
    Output,
    bytes_text,
    flops_text,
    least_width,
    number_text,
    percentile,
    rate_text,
    seconds_text,
    side_by_side,
    spread,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def output(*, as_json: bool = False, terminal: bool = False) -> Output:
    return Output(
        as_json=as_json, stdout=io.StringIO(), stderr=Terminal() if terminal else io.StringIO(), clock=Clock()
    )


def text(stream: object) -> str:
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_json_is_all_there_is_on_stdout() -> None:
    out = output(as_json=True)
    out.print_line("hello")
    out.write("piece")
    out.table("T", ("a",), [("b",)])
    out.status("working")
    out.note("note")
    out.emit({"text": "é\n", "n": 1})
    assert json.loads(text(out.stdout)) == {"text": "é\n", "n": 1}
    assert text(out.stdout).count("\n") == 1
    assert text(out.stderr) == ""


def test_json_holds_every_character_whatever_the_encoding_of_the_output() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="cp1252", errors="replace")
    Output(as_json=True, stdout=stream).emit({"text": "é 語"})
    assert json.loads(written.getvalue().decode("cp1252")) == {"text": "é 語"}


def test_what_is_no_number_is_null_in_json() -> None:
    out = output(as_json=True)
    out.emit(
        {"loss": float("nan"), "losses": [[1, float("inf")], (2, 0.5)], "of": {"x": -float("inf"), "y": 1}}
    )

    def never(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(text(out.stdout), parse_constant=never)
    assert found == {"loss": None, "losses": [[1, None], [2, 0.5]], "of": {"x": None, "y": 1}}


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [([], ""), (["a", "b"], "ab\n"), (["a\n"], "a\n"), (["a\n", ""], "a\n"), (["a", ""], "a\n")],
)
def test_a_line_that_was_begun_is_ended_once(pieces: list[str], whole: str) -> None:
    out = output()
    for piece in pieces:
        out.write(piece)
    out.end_line()
    out.end_line()
    assert text(out.stdout) == whole


def test_text_prints_no_json() -> None:
    out = output()
    out.emit({"a": 1})
    out.print_line("hello")
    assert text(out.stdout) == "hello\n"


def test_status_lines_off_a_terminal_are_few() -> None:
    out = output()
    for step in range(100):
        out.status(f"step {step}")
    assert text(out.stderr) == "step 0\n"
    out.status("handing over", important=True)
    assert text(out.stderr) == "step 0\nhanding over\n"
    assert isinstance(out.clock, Clock)
    out.clock.now += 5.0
    out.status("step 200")
    out.status("step 200")
    assert text(out.stderr).endswith("\nstep 200\n")


def test_a_terminal_shows_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = output(terminal=True)
    out.status("step 1")
    out.status("step 1")
    out.status("step 2")
    assert text(out.stderr) == "\r\x1b[2Kstep 1\r\x1b[2Kstep 2"
    out.print_line("done")
    assert text(out.stderr).endswith("\r\x1b[2K") and text(out.stdout) == "done\n"


def test_a_terminal_that_writes_over_nothing_is_sent_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # as in an editor
    out = output(terminal=True)
    out.status("step 1")
    out.status("step 2")
    out.print_line("done")
    out.status("step 3", important=True)
    out.end_status()
    assert text(out.stderr) == "step 1\nstep 3\n"


def test_tables_show_every_cell_and_no_markup() -> None:
    out = output()
    out.table(
        "Peers",
        ("name", "id"),
        [("[red]otter[/red]", "12D3KooWGrJ5S1hz7HYPzF5bxVqk3R3zQ9o2jQ4n8F2dTq3vEaHs")],
    )
    assert "[red]otter[/red]" in text(out.stdout)
    assert "12D3KooWGrJ5S1hz7HYPzF5bxVqk3R3zQ9o2jQ4n8F2dTq3vEaHs" in text(out.stdout)
    out.table("Jobs", ("name",), [])
    assert text(out.stdout).endswith("Jobs: none\n")


PEER_ID = "12D3KooWGrJ5S1hz7HYPzF5bxVqk3R3zQ9o2jQ4n8F2dTq3vEaH"
COLUMNS = ("name", "device", "speed", "memory free/lent", "stages", "stands by for", "peer id")
PEERS = [
    (name, "cuda: NVIDIA GeForce RTX 3080", "117 GFLOP/s", "3.0 GiB / 12.0 GiB", *stages, f"{PEER_ID}{at}")
    for at, (name, *stages) in enumerate([("silver-koala-db", "shakespeare/0", "-"), ("brave-newt-b0", "idle", "gpt/1, gpt/2")])
]  # fmt: skip


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 160, 200])
@pytest.mark.parametrize("key", ["once", "twice"])
def test_what_is_copied_from_a_table_is_whole_at_any_width(
    width: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = Output(stdout=Terminal(), stderr=Terminal())
    rows = [row if key == "once" else ("silver-koala-db", *row[1:]) for row in PEERS]
    out.table("Peers (2)", COLUMNS, rows)
    said = text(out.stdout)
    assert "…" not in said
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines()
    for row in rows:
        for whole in (row[0], row[4], row[6]):
            assert any(whole in line.split() for line in lines), whole
    below = not any("─" in line for line in lines)
    assert below == (width < 80 or (key == "twice" and width < 160))
    assert below or max(map(len, lines)) <= width


def test_columns_stand_side_by_side_as_far_as_there_is_room() -> None:
    assert side_by_side([4, 4, 4], 20) == [[0, 1, 2]]
    assert side_by_side([4, 4, 4], 19) == [[0, 1], [0, 2]]
    assert side_by_side([4, 12, 4], 21) == [[0, 1], [0, 2]] and side_by_side([4, 12, 4], 20) == []
    assert side_by_side([20], 21) == [] and side_by_side([20], 22) == [[0]]
    assert spread([4, 4, 4], [4, 30, 6], 30) == [4, 12, 6] and spread([4, 4], [5, 5], 80) == [5, 5]
    widths = [
        least_width([cell], len)
        for cell in ("", PEER_ID, "x" * 99, "a b", "no room on /a/very/long/path/of/it")
    ]
    assert widths == [1, 51, 64, 3, 20]


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 29, "1.5 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_bytes(count: int, said: str) -> None:
    assert bytes_text(count) == said


def test_speeds() -> None:
    assert flops_text(182.4e9) == "182 GFLOP/s"
    assert flops_text(1.5e12) == "1.5 TFLOP/s"
    assert [number_text(n) for n in (0.01234, 4.56, 99.96, 4140.0)] == ["0.0123", "4.56", "100", "4140"]
    assert number_text(None) == "-"
    assert rate_text(950) == "950" and rate_text(12_345) == "12.3k" and rate_text(5e9) == "5.0G"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.00012, "120 us"), (0.0834, "83.4 ms"), (1.0, "1.00 s"), (99.5, "99.50 s"), (123.4, "123 s")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize("stream", ["a terminal", "a pipe"])
def test_generated_text_is_harmless_on_a_terminal_and_itself_in_a_pipe(stream: str) -> None:
    evil = "def f():\n\treturn 1\x1b]52;c;cm0=\x07\u202e"
    out = Output(stdout=Terminal() if stream == "a terminal" else io.StringIO(), stderr=io.StringIO())
    out.write(evil)
    assert text(out.stdout) == (
        "def f():\n\treturn 1\ufffd]52;c;cm0=\ufffd\ufffd" if stream == "a terminal" else evil
    )


def test_no_line_of_ours_carries_what_paints_over_a_terminal() -> None:
    evil = "\x1b[2J\x9b\u202e"
    out = Output(stdout=Terminal(), stderr=Terminal(), clock=Clock())
    out.print_line(evil)
    out.note(evil)
    out.status(evil)
    out.end_status()
    out.table("title", ("column",), [(evil,)])
    Output(as_json=True, stdout=out.stdout, stderr=out.stderr).emit({"text": evil})
    for stream in (out.stdout, out.stderr):
        said = text(stream)
        assert "[2J" in said
        assert not any(part in said for part in ("\x1b[2J", "\x9b", "\u202e"))


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_percentile_is_one_of_the_values_and_bounds_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    below = sum(value <= found for value in values)
    assert below >= math.floor(share * 1000) / 1000 * len(values) - 1e-9


def test_percentiles_of_little() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([float(i) for i in range(1, 101)], 0.95) == 95.0
    assert percentile([1.0, 2.0], 0.5) == 1.0
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.01, 0.5, 0.95, 1.0)] == [1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("as_json", [False, True])
def test_what_lasts_goes_on_where_its_words_go_nowhere(as_json: bool) -> None:
    """A peer would end with the terminal that it was started from and told to outlive, or with a full disk under its log."""

    class Gone(io.StringIO):
        def __init__(self, error: OSError) -> None:
            super().__init__()
            self.error = error

        def write(self, text: str) -> int:
            raise self.error

    def lasting(error: OSError) -> LastingOutput:
        return LastingOutput(as_json=as_json, stdout=Gone(error), stderr=Gone(error))

    for number in (errno.EIO, errno.ENOSPC):
        out = lasting(OSError(number, os.strerror(number)))
        out.print_line("up")
        out.emit({"event": "ready"})
        out.status("handing over ...", important=True)
    with pytest.raises(BrokenPipeError):  # whoever read it has had enough
        lasting(BrokenPipeError()).emit({}) if as_json else lasting(BrokenPipeError()).print_line("up")
