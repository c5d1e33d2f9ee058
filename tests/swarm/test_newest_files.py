from __future__ import annotations

import os
from pathlib import Path

from fusion.swarm.newest_files import NewestFiles


def test_the_most_recently_used_files_are_kept(tmp_path: Path) -> None:
    files = NewestFiles(tmp_path / "folder", ".x", 2)
    assert files.read("a", 9) is None
    for number, name in enumerate("ab"):
        files.write(name, name.encode() * 4)
        os.utime(tmp_path / "folder" / f"{name}.x", (number, number))
    assert files.read("a", 2) == b"aa"  # used last
    files.write("c", b"c")
    assert [files.read(name, 9) for name in "abc"] == [b"aaaa", None, b"c"]
    files.write("a", b"anew")
    assert files.read("a", 9) == b"anew"
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["a.x", "c.x"]


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").write_bytes(b"")
    files = NewestFiles(tmp_path / "folder", ".x", 2)
    files.write("a", b"a")
    assert files.read("a", 9) is None
