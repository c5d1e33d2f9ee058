"""Commands go through the peer that runs with their home, and join by themselves where none does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.families import build, config, greedy

pytestmark = pytest.mark.e2e

PROMPT = [1, 2, 3, 4, 5]
# What the command printed, and then which of the libraries that joining takes it has loaded.
LEAN = (
    "import sys\n"
    "from fusion.cli import main\n"
    "code = main.main(sys.argv[1:])\n"
    "print(*{'torch', 'hivemind', 'grpc'} & set(sys.modules))\n"
    "sys.exit(code)\n"
)


def command(*words: str) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout (the last one names what was loaded) and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", LEAN, *words], capture_output=True, text=True, check=False, timeout=300
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_commands_use_the_running_peer_and_do_without_it(peers: Any, tmp_path: Path) -> None:
    first, second = peers.swarm(2)
    home = str(first.home)
    model = build(config("llama"))
    model.save_pretrained(tmp_path / "model")
    peers.run("serve", str(tmp_path / "model"), "--name", "toy", "--stages", "2", "--home", home)
    socket = Path(json.loads((first.home / "peer.json").read_text())["control"])
    assert socket.is_socket()

    code, lines, errors = command("status", "--json", "--home", home)
    assert (code, lines[1:]) == (0, [""]), errors
    status = json.loads(lines[0])
    assert {peer["peer"] for peer in status["peers"]} == {first.peer_id, second.peer_id}
    assert {link["from"] for link in status["links"]} == {first.peer_id, second.peer_id}
    code, lines, errors = command("jobs", "--json", "--home", home)
    assert (code, lines[1:]) == (0, [""]), errors
    assert [job["name"] for job in json.loads(lines[0])["jobs"]] == ["toy"]
    asked = ["--prompt-ids", ",".join(map(str, PROMPT)), "--max-tokens", "8", "--json", "--home", home]
    wanted, _ = greedy(model, PROMPT, 8)
    code, lines, errors = command("generate", "--model", "toy", *asked)
    assert (code, lines[1:]) == (0, [""]), errors
    assert json.loads(lines[0])["tokens"] == wanted
    # What the gateway refuses is explained as it always was.
    code, lines, errors = command("generate", "--model", "tay", *asked)
    assert (code, lines, errors) == (2, [""], "fusion-peer: --model: 'tay' is not served (models: toy)\n")

    peers.stop(first, signal.SIGKILL)
    assert (first.home / "peer.json").exists()  # it could not clear up; its socket goes with p2pd
    code, lines, errors = command("status", "--json", "--home", home, "--bootstrap", second.address)
    assert code == 0 and "hivemind" in lines[1], errors
    assert second.peer_id in {peer["peer"] for peer in json.loads(lines[0])["peers"]}
    assert not socket.exists()
