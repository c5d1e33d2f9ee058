"""A command that is forked for a test is the command that a user starts: the same words, files, signals, end and parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.warm_start import COMMAND, Zygote

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux"),
    pytest.mark.usefixtures("traces"),
]
FUSION_PEER = (sys.executable, *COMMAND)
REAL = ("env", "PYTHONSAFEPATH=", *FUSION_PEER)  # another interpreter's environment: it cannot be a fork


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--version",), 0),
        (("status", "--bootstrap", os.devnull), 1),
        (("start", "--listen", "nonsense"), 2),
        (("start", "--device", "tpu"), 2),
    ],
)
def test_a_short_one_says_the_same_and_ends_the_same(
    zygote: Zygote, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    home = () if words == ("--version",) else ("--home", "home")  # in the folder that it starts in
    said = []
    for command, forks in ((FUSION_PEER, 1), (REAL, 0)):
        before = zygote.forked
        done = subprocess.run([*command, *words, *home], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code and zygote.forked - before == forks
        said.append((done.stdout, done.stderr))
    assert said[0] == said[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_peer_is_our_child_and_ends_by_our_signal(
    zygote: Zygote, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    before = zygote.forked
    words = ("start", "--home", str(tmp_path), "--listen", "/ip4/127.0.0.1/tcp/0", "--bootstrap", os.devnull)
    process: subprocess.Popen[Any] = subprocess.Popen(
        [*FUSION_PEER, *words, "--json", "--stop-with", str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, cwd=tmp_path,
        env={**os.environ, "FUSION_TEST_WORD": "of this one alone"},
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None and json.loads(process.stdout.readline())["event"] == "ready"
            assert zygote.forked == before + 1
            seen = psutil.Process(process.pid)
            assert seen.ppid() == os.getpid() and os.getsid(process.pid) == process.pid
            assert seen.cwd() == str(tmp_path) and seen.cmdline()[1 : 1 + len(COMMAND)] == [*COMMAND]
            assert seen.environ()["FUSION_TEST_WORD"] == "of this one alone"
            files = {os.readlink(f"/proc/{process.pid}/fd/{n}") for n in (0, 1)}
            assert files == {os.devnull, os.readlink(f"/proc/self/fd/{process.stdout.fileno()}")}
            process.send_signal(number)
            process.communicate(timeout=60)
        finally:
            process.kill()  # or we would wait for it
    assert process.returncode == code
