"""`pip install fusion-peer` in a fresh environment: light, and enough to ask. And what a client imports, without what only POSIX has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from imports import LAYERS, ROOT
from support.light import HEAVY, closure

BESIDE_THE_CODE = ("bootstrap_peers.txt", "py.typed", "examples", "pyproject.toml", "README.md")
# What a client's commands import, whatever else is installed.
CLIENT = (
    *(
        f"fusion.cli.{name}"
        for name in ("start", "plan", "train", "jobs", "serve", "generate", "chat", "status", "demo")
    ),
    *("fusion.cli.main", "fusion.cli.models", "fusion.cli.terminal.loop", "fusion.runtime.peer.thin_client"),
    *("fusion.runtime.belief.reading", "fusion.runtime.belief.naming", "fusion.runtime.job.manifest_wire"),
    *("fusion.runtime.serving.requests.client", "fusion.runtime.serving.requests.chat_format"),
    *(
        "fusion.runtime.serving.requests.chat_template",
        "fusion.swarm.thin.dialer",
        "fusion.swarm.control.client",
        "fusion.swarm.control.directory",
    ),
)
POSIX = ("fcntl", "resource", "termios", "pwd", "grp", "uvloop")
BLOCKED = """
import sys
blocked, ours = set(sys.argv[1].split(",")), sys.argv[2]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename.startswith("<frozen"):
            frame = frame.f_back
        who = frame.f_code.co_filename if frame else ""
        # Libraries have builds for Windows of their own; what we import we import there as well.
        library, of_ours = name.partition(".")[0], who.startswith(ours) and "site-packages" not in who
        if library in blocked and (library not in POSIX or of_ours):
            raise ModuleNotFoundError(f"{who} imports {name}", name=name)

POSIX = set(sys.argv[3].split(","))
sys.meta_path.insert(0, Blocker())
from fusion.swarm.thin.libp2p import lean_libp2p
with lean_libp2p():
    for name in sys.argv[4:]:
        __import__(name)
print("imported", len(sys.argv) - 4)
"""


@pytest.mark.program
def test_a_client_imports_nothing_heavy_and_nothing_that_only_posix_has() -> None:
    blocked = ",".join((*HEAVY, *POSIX))
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, blocked, str(ROOT), ",".join(POSIX), *CLIENT],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"imported {len(CLIENT)}\n"), done.stderr


def test_the_dependencies_of_the_base_are_light() -> None:
    assert not closure() & set(HEAVY) and "libp2p" in closure()


@pytest.mark.slow
@pytest.mark.process
def test_pip_installs_a_client_that_works(tmp_path: Path) -> None:
    """Needs an index, as `make` does."""
    source, place = tmp_path / "source", tmp_path / "venv"
    source.mkdir()
    for name in (*LAYERS, *BESIDE_THE_CODE):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", str(source)], check=True, timeout=900)
    listed = subprocess.run([*pip, "list"], check=True, capture_output=True, text=True).stdout.lower().split()
    assert "fusion-peer" in listed and not set(listed) & set(HEAVY)
    command = str(place / "bin" / "fusion-peer")
    helped = subprocess.run([command, "--help"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "models" in helped.stdout
    refused = subprocess.run([command, "start"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1) and "[peer]" in refused.stderr
    size = subprocess.run(
        ["du", "-sm", str(place)], check=True, capture_output=True, text=True
    ).stdout.split()[0]
    print(f"a fresh environment with the client and pip: {size} MiB")
    assert int(size) < 400
