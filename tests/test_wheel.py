"""The wheel holds all that a peer needs: every module, where peers look for the swarm, the examples, the type marker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from imports import LAYERS, ROOT, modules, relative

pytestmark = pytest.mark.process

BESIDE_THE_CODE = ("bootstrap_peers.txt", "py.typed", "examples")
BUILD = "import sys\nfrom setuptools import build_meta\nbuild_meta.build_wheel(sys.argv[1])"
ELSEWHERE = """
from pathlib import Path
from fusion.cli.terminal import options
assert options.bootstrap_addresses(None) == ()
print(next(path for path in options._default_files() if path.is_file()))
for name in ("stdlib-gpt.toml", "swarm.toml"):
    print(options.job_file(Path("examples", name)).resolve(strict=True))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is unpacked. It is built of a copy, as building leaves files behind."""
    source, place = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in (*LAYERS, *BESIDE_THE_CODE, "pyproject.toml", "README.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(place)], cwd=source, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = place.glob("fusion_peer-*.whl")
    zipfile.ZipFile(wheel).extractall(place)
    return place


def test_a_wheel_has_every_module_and_what_lies_beside_the_code(installed: Path) -> None:
    package = installed / "fusion"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    examples = {relative(p) for end in ("toml", "py") for p in (ROOT / "examples").rglob(f"*.{end}")}
    pages = {relative(path) for path in (ROOT / "runtime/serving/http/page").iterdir()}
    assert len(pages) == 3
    assert found == {
        *map(relative, modules()),
        "bootstrap_peers.txt",
        "py.typed",
        "runtime/placing/devices.toml",
        *examples,
        *pages,
    }


def test_the_command_line_finds_them_from_any_folder(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [
        installed / "fusion" / name
        for name in ("bootstrap_peers.txt", "examples/stdlib-gpt.toml", "examples/swarm.toml")
    ]
    assert done.stdout.split() == [str(path) for path in files]
