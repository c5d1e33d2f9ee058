"""Imports point one way: cli -> runtime -> { swarm | dag | compression }; heavy libraries stay in their rooms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from imports import LAYERS, ROOT, imports, modules, relative

MAY_IMPORT = {
    "cli": {"cli", "runtime", "swarm", "dag", "compression"},
    "runtime": {"runtime", "swarm", "dag", "compression"},
    "swarm": {"swarm"},
    "dag": {"dag"},
    "compression": {"compression"},
}
# The rooms of the runtime, and which of the others each may know. What lies in none is for all, but for the peer, which
# puts them together.
ROOMS = {
    "planes": set[str](),
    "serving": {"planes"},
    "launch": {"planes", "serving"},
    "training": {"planes", "launch"},
    "hosting": {"training"},
}
# Which layers may import a library at all, and where it is narrower, which files.
LIBRARY_LAYERS = {
    "torch": {"runtime", "compression"},
    "safetensors": {"runtime"},
    "tokenizers": {"runtime"},
    "transformers": {"runtime"},
    "hivemind": {"swarm"},
    "cryptography": {"swarm"},
    "networkx": {"dag"},
    "typer": {"cli"},
    "rich": {"cli"},
}
LIBRARY_FILES = {
    "hivemind": {"swarm/streams/p2p.py", "swarm/directory/dht.py", "swarm/streams/peer_ids.py"},
    "transformers": {"runtime/capture/huggingface.py"},
}
# dag is arithmetic on frozen values.
EFFECTS = {
    *(
        "asyncio",
        "socket",
        "ssl",
        "select",
        "selectors",
        "subprocess",
        "threading",
        "multiprocessing",
        "concurrent",
    ),
    *(
        "os",
        "pathlib",
        "shutil",
        "tempfile",
        "io",
        "signal",
        "time",
        "random",
        "secrets",
        "logging",
        "urllib",
        "http",
    ),
}


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    for line, name in imports(path):
        parts = name.split(".")
        where = f"{relative(path)}:{line} imports {name}"
        if parts[0] in LAYERS or parts[0] == "tests":
            raise AssertionError(f"{where}: the package is called fusion")
        if parts[0] == "fusion":
            assert parts[1] in MAY_IMPORT[layer], f"{where}: {layer} does not know {parts[1]}"
        if parts[0] in LIBRARY_LAYERS:
            assert layer in LIBRARY_LAYERS[parts[0]], f"{where}: not in {layer}"
        if parts[0] in LIBRARY_FILES:
            assert relative(path) in LIBRARY_FILES[parts[0]], f"{where}: only in {LIBRARY_FILES[parts[0]]}"
        if layer == "dag":
            assert parts[0] not in EFFECTS, f"{where}: dag has no effects"


@pytest.mark.parametrize("path", (ROOT / "runtime").rglob("*.py"), ids=relative)
def test_the_rooms_of_the_runtime_are_entered_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[1]
    for line, name in imports(path):
        parts = name.split(".")
        if parts[:2] != ["fusion", "runtime"] or room == "peer.py" or len(parts) < 3 or parts[2] == room:
            continue
        assert parts[2] not in ROOMS or parts[2] in ROOMS.get(room, set()), (
            f"{relative(path)}:{line} imports {name}"
        )


def test_no_folder_is_left_out_of_the_package() -> None:
    import tomllib

    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"fusion." + relative(path.parent).replace("/", ".") for path in modules()}
    assert found == declared


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_the_command_line_answers_without_heavy_libraries() -> None:
    loaded = loaded_by("import fusion.cli.main")
    assert not loaded & {
        "torch",
        "hivemind",
        "transformers",
        "numpy",
        "safetensors",
        "tokenizers",
        "rich",
        "grpc",
    }


def test_dag_loads_no_heavy_library() -> None:
    names = [".".join(("fusion", *path.relative_to(ROOT).with_suffix("").parts)) for path in modules()]
    statement = "import " + ", ".join(
        name for name in names if name.startswith("fusion.dag.") and "__init__" not in name
    )
    assert not loaded_by(statement) & {"torch", "hivemind", "transformers"}
