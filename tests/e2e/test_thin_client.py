"""The client without the peer extra: neither PyTorch, hivemind nor NumPy within its reach, real peers at the other side."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.chat_model import save_model, tokenizer
from support.families import greedy, is_greedy
from support.light import light_environment

from fusion.runtime.peer.thin_client import LOOK_AROUND_SECONDS
from fusion.swarm.identity import Identity
from fusion.swarm.swarm_key import NO_MEMBER

if TYPE_CHECKING:
    from conftest import Peers

pytestmark = pytest.mark.e2e
TOKENS = 12
POSITIONS = 4096  # so that an answer can be stopped in its middle
SECONDS = 240.0


class Thin:
    """`fusion-peer` as `pip install fusion-peer` gives it."""

    def __init__(self, folder: Path) -> None:
        self.command = light_environment(folder)
        self.home = folder / "home"
        self._cwd = folder

    def start(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HOME")}
        return subprocess.Popen(
            [*self.command, *words, "--home", str(self.home)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self._cwd, env=kept, **more,
        )  # fmt: skip

    def run(self, *words: str, said: str = "") -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        process = self.start(*words, stdin=subprocess.PIPE)
        out, err = process.communicate(said.encode(), timeout=SECONDS)
        return process.returncode, out.decode(), err.decode()

    def records(self, *words: str, said: str = "") -> list[dict[str, Any]]:
        code, out, err = self.run(*words, "--json", said=said)
        assert (code, err) == (0, ""), err
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def thin(traces: str, tmp_path: Path) -> Thin:
    return Thin(tmp_path / "thin")


def until(met: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < ends, what
        time.sleep(0.2)


def test_a_thin_client_lists_generates_streams_chats_and_cancels(
    peers: Peers, thin: Thin, tmp_path: Path
) -> None:
    first, second = peers.swarm(2)
    made = tokenizer()
    model = save_model(tmp_path / "model", made, POSITIONS, layers=2)
    peers.run("serve", str(tmp_path / "model"), "--name", "small", "--stages", "2", "--home", str(first.home))
    way = ("--peer", first.address)

    (listed,) = thin.records("models", *way)
    assert [(each["name"], each["ready"], each["stages"]) for each in listed["models"]] == [
        ("small", True, 2)
    ]
    (seen,) = thin.records("status", *way)
    assert {each["peer"] for each in seen["peers"]} == {first.peer_id, second.peer_id}
    assert (
        sorted(each["stage"] for each in seen["stages"]) == [0, 1] and seen["links"] and seen["http"] is None
    )

    # The same tokens as the model's own, through whichever peer, and as text.
    expected = greedy(model, made.encode("def run(").ids, TOKENS)[0]
    for peer in (first, second):
        asked = ("generate", "def run(", "--max-tokens", str(TOKENS), "--peer", peer.address)
        (answer,) = thin.records(*asked)
        assert answer["tokens"] == expected and set(answer["route"]) == {first.peer_id, second.peer_id}
    code, out, err = thin.run(*asked, "--model", "small")
    assert code == 0 and out == f"def run({answer['text']}\n" and "12 tokens in" in err
    listing = tmp_path / "peers.txt"
    listing.write_text(f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}\n{second.address}\n")
    (other,) = thin.records("generate", "def run(", "--max-tokens", str(TOKENS), "--bootstrap", str(listing))
    assert other["tokens"] == expected, "of several addresses the one that answers is taken"

    # A chat, whose template comes from the swarm.
    (turn,) = thin.records("chat", "small", "--max-tokens", str(TOKENS), *way, said="hello\n")
    chat = made.encode(
        "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert turn["tokens"] == greedy(model, chat.ids, TOKENS)[0]

    canceled(thin, way)
    wrong(thin, way)
    # Some seconds of answer, by the speed of the first few tokens, of which the first took longest.
    count = min(POSITIONS - 96, 1200 + int(4.0 * TOKENS / answer["seconds"]))
    outlived(peers, thin, first, second, model, made, count)


def loads(thin: Thin, way: Sequence[str]) -> list[float]:
    """Sessions at the owner of each stage, as they say themselves."""
    (seen,) = thin.records("status", *way)
    return [claim["load"] for claim in seen["stages"]]


def canceled(thin: Thin, way: Sequence[str]) -> None:
    """Tokens are shown as they come; Ctrl-C ends the command, and the session at every stage."""
    process = thin.start("generate", "def run(", "--max-tokens", "3000", *way)
    assert process.stdout is not None
    came = b""
    while len(came) < 40:
        came += os.read(process.stdout.fileno(), 64)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (130, b"fusion-peer: interrupted\n") and came.startswith(b"def run(")
    until(lambda: loads(thin, way) == [0.0, 0.0], "a stage keeps a session that nobody waits for")


def wrong(thin: Thin, way: Sequence[str]) -> None:
    """One line each, and the code that other clients end with."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        dead = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        code, out, err = thin.run("generate", "x", "--peer", dead)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert err.startswith(f"fusion-peer: no peer answers at {dead}: ") and "refused" in err
    stranger = way[1].rpartition("/")[0] + "/" + Identity.generate().peer_id
    code, _, err = thin.run("models", "--peer", stranger)
    assert code == 1 and err.startswith("fusion-peer: no peer answers at") and err.count("\n") == 1
    code, _, err = thin.run("generate", "x", "--model", "none", *way)
    assert code == 2 and "--model: 'none' is not served (models: small)" in err and err.count("\n") == 1
    code, _, err = thin.run("models")
    assert code == 1 and "no peer to join through" in err and err.count("\n") == 1


def outlived(peers: Peers, thin: Thin, first: Any, second: Any, model: Any, made: Any, count: int) -> None:
    """The peer that was asked is killed in the middle of an answer: another goes on with the same tokens."""
    process = thin.start(
        "generate", "def run(", "--max-tokens", str(count), "--json", "--peer", first.address
    )
    until(lambda: loads(thin, ("--peer", second.address)) == [1.0, 1.0], "no answer is under way")
    time.sleep(1.5 * LOOK_AROUND_SECONDS)  # by then a client has looked for other peers
    assert process.poll() is None, "the answer is over"
    first.process.kill()
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    tokens = json.loads(out)["tokens"]
    assert len(tokens) == count and is_greedy(model, made.encode("def run(").ids, tokens)


@pytest.mark.slow
def test_a_peer_that_is_frozen_in_the_middle_of_an_answer_is_left_for_another(
    peers: Peers, thin: Thin, tmp_path: Path
) -> None:
    swarm = peers.swarm(3)
    made = tokenizer()
    model = save_model(tmp_path / "model", made, POSITIONS)
    peers.run(
        *("serve", str(tmp_path / "model"), "--name", "small", "--stages", "2", "--home", str(swarm[0].home))
    )
    (seen,) = thin.records("status", "--peer", swarm[0].address)
    owners = {stage["peer"] for stage in seen["stages"]}
    gateway = next(peer for peer in swarm if peer.peer_id not in owners)
    asked = ("generate", "def run(", "--max-tokens", "3000")
    (whole,) = thin.records(*asked, "--peer", swarm[0].address)
    assert whole["tokens"] == greedy(model, made.encode("def run(").ids, 3000)[0]
    process = thin.start(*asked, "--peer", gateway.address)
    assert process.stdout is not None
    came = b""
    while len(came) < 40:
        came += os.read(process.stdout.fileno(), 64)
    time.sleep(2.0)  # by then a client has looked for other peers
    gateway.process.send_signal(signal.SIGSTOP)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        gateway.process.send_signal(signal.SIGCONT)
    assert (process.returncode, (came + out).decode()) == (0, f"def run({whole['text']}\n"), err


def test_what_needs_the_extra_says_so(thin: Thin, tmp_path: Path) -> None:
    for words in (
        ("start",), ("train", "job.toml"), ("plan", "job.toml", "--swarm", "s.toml"), ("demo",), ("chaos",),
        ("serve", str(tmp_path), "--name", "x"), ("jobs", "export", "x", str(tmp_path / "there")),
    ):  # fmt: skip
        process = subprocess.run(
            [*thin.command, *words], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        name = "jobs export" if words[0] == "jobs" else words[0]
        line = f"fusion-peer: fusion-peer {name} needs the peer extra: pip install 'fusion-peer[peer]'\n"
        assert (process.returncode, process.stdout, process.stderr) == (2, "", line)


@pytest.mark.slow
def test_a_closed_swarm_and_a_model_that_is_not_for_everybody(
    peers: Peers, thin: Thin, tmp_path: Path
) -> None:
    """Members are answered; an invite that the home's key accepted lets its commands ask."""
    key = tmp_path / "ours.key"
    assert thin.run("swarm-key", "new", str(key))[0] in (0, 2)  # it takes no --home
    if not key.exists():
        subprocess.run([*thin.command, "swarm-key", "new", str(key)], check=True, capture_output=True)
    first = peers.start("first", "--swarm-key", str(key))
    save_model(tmp_path / "model", tokenizer(), POSITIONS)
    ours = ("--home", str(tmp_path / "laptop"), "--peer", first.address, "--swarm-key", str(key))
    peers.run(
        "serve",
        str(tmp_path / "model"),
        "--name",
        "hers",
        "--admission",
        "granted",
        "--admit",
        first.peer_id,
        *ours,
    )
    way = ("--peer", first.address)
    ask = ("generate", "def", "--max-tokens", "4", "--model", "hers", *way)
    code, _, err = thin.run(*ask)
    assert (code, err) == (2, f"fusion-peer: {NO_MEMBER}\n")
    member = (*ask, "--swarm-key", str(key))
    code, _, err = thin.run(*member)
    assert code == 1 and "not for everybody" in err and err.count("\n") == 1
    mine = Identity.load_or_create(thin.home / "identity").peer_id
    invite = peers.run("jobs", "invite", "hers", mine, "--final", *ours)[-1]["invite"]
    code, _, err = thin.run("jobs", "accept", invite)
    assert code == 0, err
    (answer,) = thin.records(*member)
    assert len(answer["tokens"]) == 4
