"""`fusion-peer chat` with real peers: turns through the model's own template, Ctrl-C, a terminal, and what goes wrong."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.chat_model import save_model, tokenizer
from support.families import greedy

from fusion.swarm.identity import friendly_name

pytestmark = pytest.mark.e2e

FIRST, SECOND = "class Socket:", "def close(self):"
TOKENS = 16
POSITIONS = 4096  # so that an answer can be stopped in its middle
WAIT_SECONDS = 120.0
CHAT = (sys.executable, "-m", "fusion.cli.main", "chat")


def chat(*words: str, said: Sequence[str] = ()) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, where each of `said` is a line of stdin."""
    done = subprocess.run(
        [*CHAT, *words],
        input="".join(f"{line}\n" for line in said).encode(),
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.slow
def test_a_conversation_through_any_peer(peers: Any, tmp_path: Path) -> None:
    first, second = peers.swarm(2)
    home, made = str(first.home), tokenizer()
    model = save_model(tmp_path / "model", made, POSITIONS)
    peers.run("serve", str(tmp_path / "model"), "--name", "small", "--stages", "2", "--home", home)

    def answer(*turns: str, count: int = TOKENS) -> list[int]:
        """Greedy tokens after these turns of user and assistant."""
        roles = ("user", "assistant")
        said = "".join(f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))
        ids = made.encode(f"<s>{said}<|im_start|>assistant\n", add_special_tokens=False).ids
        return greedy(model, ids, count)[0]

    # Turns; the second depends on the first, and after /new the first is as it was.
    lines = (FIRST, "/route", "", SECOND, "/new", FIRST)
    code, out, err = chat("small", "--max-tokens", str(TOKENS), "--json", "--home", home, said=lines)
    assert (code, err) == (0, "")
    one, route, two, again = map(json.loads, out.splitlines())
    assert one["tokens"] == answer(FIRST) == again["tokens"]
    assert two["tokens"] == answer(FIRST, one["text"], SECOND) != answer(SECOND)
    assert set(route["route"]) == {first.peer_id, second.peer_id} and len(route["round_trip_seconds"]) == 2
    assert route["first_token_seconds"] > 0

    # Joined for as long as it takes, as text; no name is needed where one model is served.
    asked = ("--max-tokens", str(TOKENS), "--peer", second.address)
    code, out, err = chat(*asked, said=(FIRST, "/route"))
    assert (code, err) == (0, "") and out.startswith(one["text"] + "\n")
    told = out.removeprefix(one["text"] + "\n").splitlines()
    assert [line.split("  ")[:2] for line in told[:2]] == [
        [f"stage {i}", friendly_name(peer)] for i, peer in enumerate(route["route"])
    ]
    assert told[2].startswith("the first token came after")

    interrupted(home, made, answer)
    on_a_terminal(home, one["text"])
    traced(first, made)
    wrong(home)


def interrupted(home: str, made: Any, answer: Any) -> None:
    """Ctrl-C stops an answer; what came of it is part of what the model is told next."""
    process = subprocess.Popen(
        [*CHAT, "small", "--max-tokens", str(POSITIONS), "--home", home],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write(f"{FIRST}\n".encode())
        process.stdin.flush()
        out = read(process.stdout.fileno(), 8)
        process.send_signal(signal.SIGINT)
        process.stdin.write(f"/route\n{SECOND}\n".encode())
        process.stdin.flush()
        mark = b"\na route is known once an answer has come to its end\n"
        while mark not in out:
            out += read(process.stdout.fileno(), 1)
        came, _, rest = out.partition(mark)
        while len(rest) < 40:
            rest += read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, err) == (130, b"stopped\nfusion-peer: interrupted\n")
    expected = made.decode(answer(FIRST, came.decode(), SECOND, count=40)).encode()
    size = min(len(expected), len(rest))
    assert came and size >= 20 and rest[:size] == expected[:size]


def on_a_terminal(home: str, text: str) -> None:
    """A line is edited, Ctrl-C at the prompt drops it, what goes wrong ends nothing, Ctrl-D does."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*CHAT, "small", "--max-tokens", str(TOKENS), "--home", home],
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its terminal: Ctrl-C reaches it
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        for typed in (b"drop this\x03", b"/frobnicate\n", FIRST.encode() + b"x\x7f\n", b"\x04"):
            shown = until_prompt(ours)
            os.write(ours, typed)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert process.returncode == 0, err
    assert b"small: /help lists commands" in err and b"/frobnicate is no command" in err
    assert "".join(text.split()) in "".join(shown.decode().split())


def until_prompt(terminal: int) -> bytes:
    shown = b""
    while not shown.rstrip(b" ").endswith(b"\n>") and shown[-2:] != b"> ":
        shown += read(terminal, 1)
    return shown


def traced(peer: Any, made: Any) -> None:
    asked = ("generate", FIRST, "--model", "small", "--max-tokens", "8", "--trace", "--home", str(peer.home))
    done = subprocess.run(
        [*CHAT[:-1], *asked], capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
    )
    rows = done.stderr.splitlines()
    assert [row[:22].strip() for row in rows] == [
        *("time to first token", "tokens a second", "between tokens", "tokens", "route", ""),
    ]
    assert rows[3].endswith(f"8 after a prompt of {len(made.encode(FIRST).ids)}")
    assert friendly_name(peer.peer_id) in "".join(rows[4:])


def wrong(home: str) -> None:
    for words, said, code, named in (
        (("small",), ("/frobnicate", FIRST), 2, "/frobnicate is no command"),
        (("small",), ("/model tall",), 2, "/model: 'tall' is not served (models: small)"),
        (("tall",), (FIRST,), 2, "NAME: 'tall' is not served (models: small)"),
    ):
        found, out, err = chat(*words, "--home", home, said=said)
        assert (found, out, err.count("\n")) == (code, "", 1) and named in err, err


def read(file: int, least: int) -> bytes:
    """At least so many bytes, as soon as they are there."""
    found, until = b"", time.monotonic() + WAIT_SECONDS
    while len(found) < least:
        ready, _, _ = select.select([file], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"it says no more after {found!r}"
        part = os.read(file, 65536)
        assert part, f"it ended after {found!r}"
        found += part
    return found
