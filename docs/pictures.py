"""The pictures in docs/pictures: what the commands print, drawn from real runs on this machine. `make pictures` runs it.

    demo.svg     `fusion-peer demo`, from its first line to its last
    status.svg   `fusion-peer status` of the demo's peers while they train
    chaos.svg    `fusion-peer chaos` for a minute

Each command runs on a pseudo-terminal. A line that is rewritten in place is drawn as it stood at last; one that is too
long is broken between words, or cut where it ends in an address or a peer id; nothing else is changed. It takes about
ten minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent / "pictures"
CHAOS = ("chaos", "--peers", "5", "--standbys", "2", "--kill-every", "20s", "--seed", "21")
COMMAND = (sys.executable, "-m", "fusion.cli.main")
WIDTH = 100
STATUS_WIDTH, STATUS_DRAWN = 170, 128  # its widest table ends with whole peer ids
WATCH = re.compile(rb"step +\d+ +loss on held-out")  # the demo trains, and has for a while
ADDRESS = re.compile(rb"/ip4/\S+/p2p/\w+")
INDENTED = re.compile(r'x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>((?:&#160;)+)([^<]+)<')
REWRITTEN = re.compile(r".*\r\x1b\[2K")  # what a status line replaced

Heard = Callable[[bytes], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("demo", "chaos"), help="draw that run alone")
    parser.add_argument("--steps", type=int, default=600, help="of the demo's training")
    parser.add_argument("--minutes", type=float, default=1.0, help="of chaos")
    options = parser.parse_args()
    HERE.mkdir(exist_ok=True)
    if options.only != "chaos":
        demo(options.steps)
    if options.only != "demo":
        words = (*CHAOS, "--minutes", f"{options.minutes:g}")
        draw("chaos", words, run(*words, "--stop-with", str(os.getpid())))
    return 0


def demo(steps: int) -> None:
    """The demo, and a look at its peers from beside it."""
    said, looking = bytearray(), threading.Event()
    looks: list[threading.Thread] = []

    def look() -> None:
        address = ADDRESS.findall(bytes(said))[0].decode()
        with tempfile.TemporaryDirectory() as home:
            shown = run("status", "--peer", address, "--home", home, columns=STATUS_WIDTH)
        draw("status", ("status",), shown, STATUS_DRAWN)

    def receive(data: bytes) -> None:
        said.extend(data)
        if WATCH.search(said) and not looking.is_set():
            looking.set()
            looks.append(threading.Thread(target=look))
            looks[0].start()

    steps_asked = () if steps == 600 else ("--steps", str(steps))
    shown = run("demo", *steps_asked, "--stop-with", str(os.getpid()), heard=receive)
    for thread in looks:
        thread.join()
    draw("demo", ("demo", *steps_asked), shown)


def run(*arguments: str, columns: int = WIDTH, heard: Heard = lambda data: None) -> str:
    """What `fusion-peer ARGUMENTS` shows on a terminal. Raises CalledProcessError where it fails, with all of it on
    stderr."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=its, stderr=its,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(its)
    shown = bytearray()
    try:
        while data := _read(ours):
            shown += data
            heard(data)
    finally:
        os.close(ours)
        code = process.wait()
    text = shown.decode("utf-8", "replace").replace("\r\n", "\n")
    if code:
        sys.stderr.write(text)
        raise subprocess.CalledProcessError(code, arguments)
    return "\n".join(REWRITTEN.sub("", line) for line in text.split("\n"))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux says that the other end has closed it
        return b""


def draw(name: str, words: tuple[str, ...], shown: str, columns: int = WIDTH) -> None:
    console = Console(
        record=True, width=columns + 2, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    lines = [Text.from_ansi(line) for line in shown.rstrip().split("\n")]
    console.print(Text.assemble(("$ ", "green"), (" ".join(("fusion-peer", *words)), "bold")))
    for line in lines:
        line.rstrip()
        # An address, or what else ends without a space, is cut.
        between_words = " " in line.plain[columns - 1 :] and not ADDRESS.search(line.plain.encode())
        console.print(line, no_wrap=not between_words, overflow="ellipsis", width=columns)
    picture = console.export_svg(title=f"fusion-peer {words[0]}", unique_id=f"fusion-{name}")
    # The reader's own fonts will do: a picture loads nothing.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    picture = INDENTED.sub(_moved, picture)
    (HERE / f"{name}.svg").write_text(picture, "utf-8")
    print(f"{HERE / name}.svg: {len(lines)} lines")


def _moved(text: re.Match[str]) -> str:
    """The text without the spaces in front of it, further to the right: some readers drop these."""
    x, y, length, rest, spaces, words = text.groups()
    front, characters = spaces.count(";"), len(html.unescape(words))
    width = float(length) / (front + characters)
    return f'x="{float(x) + front * width:g}" y="{y}" textLength="{characters * width:g}"{rest}>{words}<'


if __name__ == "__main__":
    sys.exit(main())
