"""The import graph sees what a reader would: packages and modules, imports in functions, circles of folders."""

from __future__ import annotations

from pathlib import Path

import imports
import pytest

FILES = {
    "runtime/__init__.py": "",
    "runtime/job.py": "import os\nfrom fusion.swarm import errors\n",
    "runtime/rooms/__init__.py": "def board() -> None: ...\n",
    "runtime/rooms/hosting.py": "def look() -> None:\n    from fusion.runtime.job import Job\n    from fusion.swarm.errors import SwarmError\n",
    "runtime/peer.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fusion.runtime.rooms import board\n",
    "swarm/errors.py": "from fusion.swarm.errors import itself\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    return tmp_path


def test_the_graph_of_a_small_tree(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert imports.fan_out() == {
        "runtime/__init__.py": set(),
        "runtime/job.py": {"swarm/errors.py"},
        "runtime/peer.py": {"runtime/rooms/__init__.py"},
        "runtime/rooms/__init__.py": set(),
        "runtime/rooms/hosting.py": {"runtime/job.py", "swarm/errors.py"},
        "swarm/errors.py": set(),
    }
    assert imports.folder_edges() == {
        ("runtime", "swarm"): 1,
        ("runtime", "runtime/rooms"): 1,
        ("runtime/rooms", "runtime"): 1,
        ("runtime/rooms", "swarm"): 1,
    }
    assert imports.circles() == [["runtime", "runtime/rooms"]]
    assert imports.main() == 1
    assert (
        "circle of 2 folders: runtime -> runtime/rooms (1), runtime/rooms -> runtime (1)"
        in capsys.readouterr().out
    )


def test_a_peer_in_a_folder_of_its_own_closes_no_circle(tree: Path) -> None:
    (tree / "runtime/peer").mkdir()
    (tree / "runtime/peer.py").rename(tree / "runtime/peer/peer.py")
    assert imports.circles() == []
    assert imports.main() == 0


def test_files_and_modules_that_are_too_large(tree: Path) -> None:
    (tree / "runtime/peer.py").write_text("")
    for number in range(imports.MOST_FILES):
        (tree / f"swarm/frame_{number}.py").write_text("")
    (tree / "runtime/job.py").write_text(
        "".join(f"import fusion.swarm.frame_{number}\n" for number in range(imports.MOST_IMPORTS + 1))
    )
    assert list(imports.complaints()) == [
        "runtime/job.py imports 16 modules, at most 15",
        "swarm holds 21 files, at most 20",
    ]
