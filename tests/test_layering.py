"""Imports point one way: cli -> runtime -> { swarm | dag | compression }, and in each of them from room to room; heavy
libraries stay in their rooms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from imports import (
    LAYERS,
    MOST_FILES,
    MOST_IMPORTS,
    ROOT,
    circles,
    fan_out,
    file_counts,
    folder_edges,
    imports,
    modules,
    relative,
)
from support.cases import check_all

pytestmark = pytest.mark.program  # a fresh interpreter tells what an import loads

MAY_IMPORT = {
    "cli": {"cli", "runtime", "swarm", "dag", "compression"},
    "runtime": {"runtime", "swarm", "dag", "compression"},
    "swarm": {"swarm"},
    "dag": {"dag"},
    "compression": {"compression"},
}
# The rooms of each layer, from the ground up: a room knows those before it and no other.
ROOMS = {
    "dag": ("ir", "cutting", "rewrites", "rewrites/caches", "placement"),
    "swarm": (
        "",
        "streams",
        "directory",
        "authority",
        "dht",
        "control",
        "thin",
        "claims",
        "blobs",
        "links",
        "memory",
    ),
    "compression": ("",),
    "runtime": (
        *(
            "device",
            "job",
            "belief",
            "planes/kernels",
            "planes/products",
            "planes",
            "planes/cuda",
            "planes/jax_plane",
            "capture/gguf",
            "capture/exporting/decompositions",
            "capture/exporting",
            "capture/lowering",
            "capture",
            "capture/python",
        ),
        *(
            f"serving/{room}"
            for room in (
                "requests",
                "grammar",
                "drafts",
                "ring",
                "answers",
                "graphs",
                "http",
                "http/responses",
                "http/port",
            )
        ),
        *("serving", "datasets", "placing"),
        *(f"training/{room}" for room in ("data", "step", "compute", "streams", "snapshots", "lead")),
        *("training", "launch", "hosting/jobs", "hosting", "peer"),
    ),
    "cli": ("terminal", "local", "asking", "plans", ""),
}
# Which layers may import a library at all, and where it is narrower, which files.
LIBRARY_LAYERS = {
    "torch": {"runtime", "compression"},
    "jax": {"runtime"},
    "safetensors": {"runtime"},
    "tokenizers": {"runtime"},
    "llguidance": {"runtime"},
    "triton": {"runtime"},
    "llvmlite": {"runtime"},
    "transformers": {"runtime"},
    "PIL": {"runtime"},
    "hivemind": {"swarm"},
    "libp2p": {"swarm"},
    "trio": {"swarm"},
    "cryptography": {"swarm"},
    "networkx": {"dag"},
    "typer": {"cli"},
    "rich": {"cli"},
}
LIBRARY_FILES = {
    "hivemind": {
        *("swarm/streams/p2p.py", "swarm/streams/p2pd_control.py", "swarm/streams/peer_ids.py"),
        *("swarm/dht/wire.py", "swarm/dht/calls.py", "swarm/dht/call_server.py"),
    },
    "libp2p": {"swarm/thin/connection.py"},
    "trio": {f"swarm/thin/{name}.py" for name in ("connection", "dialer", "trio_thread")},
    "transformers": {"runtime/capture/huggingface.py"},
    "PIL": {"runtime/datasets/image_folders.py"},
    "jinja2": {"runtime/serving/requests/template_worker.py"},
    "llguidance": {"runtime/serving/grammar/worker.py"},
    "jax": {
        f"runtime/planes/jax_plane/{name}.py"
        for name in (
            *("library", "arrays", "pointwise", "moving", "reducing", "contracting", "windows", "program"),
            *("in_range", "dropped", "residuals", "optimizer", "jax_training", "jax_decoding", "jax_cache"),
        )
    },
    "triton": {f"runtime/planes/kernels/{name}_kernels.py" for name in ("attention", "expert", "quantised")},
    "llvmlite": {"runtime/planes/products/machine_code.py"},
    **{
        library: {f"runtime/serving/http/{name}.py" for name in names}
        for library, names in {
            "fastapi": ("api", "port/app", "body", "chat_page", "embedding", "responses/api"),
            "starlette": ("port/app", "body", "events", "guard"),
            "pydantic": ("generation_fields", "schema", "responses/items", "responses/schema"),
            "uvicorn": ("port/running",),
            "prometheus_client": ("metrics",),
        }.items()
    },
}
HTTP = {"fastapi", "starlette", "uvicorn", "jinja2", "prometheus_client"}  # and what they load
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


def test_imports_point_one_way() -> None:
    check_all(modules(), points_one_way, relative)


def points_one_way(path: Path) -> None:
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


def test_every_folder_is_a_room() -> None:
    rooms = {f"{layer}/{room}".rstrip("/") for layer, known in ROOMS.items() for room in known}
    assert {name for name in file_counts() if has_code(name)} == rooms


def has_code(folder_name: str) -> bool:
    return any(path.name != "__init__.py" for path in (ROOT / folder_name).glob("*.py"))


def test_rooms_are_entered_one_way() -> None:
    check_all(sorted(folder_edges()), is_entered_one_way, " -> ".join)


def is_entered_one_way(edge: tuple[str, str]) -> None:
    before, after = edge
    layer, _, room = before.partition("/")
    other_layer, _, other = after.partition("/")
    if layer == other_layer:
        order = ROOMS[layer]
        assert order.index(other) < order.index(room), f"{before} does not know {after}"


def test_folders_form_no_circle() -> None:
    assert circles() == []


def test_no_folder_is_left_out_of_the_package() -> None:
    import tomllib

    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"fusion." + relative(path.parent).replace("/", ".") for path in modules()}
    assert {"fusion", *found} == declared


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_line_answers_without_heavy_libraries() -> None:
    loaded = loaded_by("from fusion.cli.main import program; program()")
    assert not loaded & {
        "torch",
        "hivemind",
        "transformers",
        "numpy",
        "safetensors",
        "tokenizers",
        "rich",
        "grpc",
        *HTTP,
    }


def test_a_command_that_goes_through_a_running_peer_loads_no_heavy_library() -> None:
    loaded = loaded_by(
        "from fusion.cli.main import program; program()\n"
        "import fusion.cli.client, fusion.runtime.peer.client, fusion.runtime.job.progress\n"
        "import fusion.runtime.serving.requests.client, fusion.runtime.hosting.jobs.server\n"
        "import fusion.runtime.serving.requests.chat_template, fusion.runtime.serving.requests.chat_format"
    )
    heavy = {"torch", "hivemind", "transformers", "numpy", "safetensors", "tokenizers", "rich", "grpc", *HTTP}
    assert not loaded & heavy


# Decisions and values: no tensor, no tokenizer and no file of weights in them, nor in what they import.
PURE = (
    *("dag/", "runtime/training/step/", "swarm/claims/election.py"),
    *("compression/spec.py", "compression/adaptive.py", "runtime/planes/learning_rate.py"),
    *(f"runtime/job/{name}.py" for name in ("manifest", "manifest_wire", "spec", "fields", "progress")),
    *(f"runtime/training/data/{name}.py" for name in ("ledger", "samples")),
    "runtime/training/snapshots/snapshot_period.py",
    *(f"runtime/hosting/{name}.py" for name in ("claim_choice", "vacant_stages", "standby_assignment")),
    *(
        f"runtime/serving/{name}.py"
        for name in (
            "requests/ends",
            "requests/json_schema",
            "requests/request",
            "requests/stop",
            "ring/session",
            "ring/schedule",
            "ring/prefix",
            "ring/retained",
            "ring/guesses",
        )
    ),
    *(f"runtime/serving/answers/{name}.py" for name in ("failover", "slowdown", "route_choice")),
)


def test_pure_modules_load_no_heavy_library() -> None:
    """All of them in one interpreter, which ends at the first that does."""
    statements = []
    for where in PURE:
        files = [name for name in map(relative, modules()) if name.startswith(where)]
        assert files, f"{where} is no module"
        statements += [f"import {name_of(file)}; at_most({where!r})" for file in files]
    loaded_by("\n".join([AT_MOST, *statements]))


AT_MOST = """import sys
def at_most(where):
    heavy = sys.modules.keys() & {"torch", "tokenizers", "safetensors", "transformers", "hivemind"}
    assert not heavy, f"{where} loads {heavy}"
"""


def name_of(file: str) -> str:
    return f"fusion.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"


def test_no_module_knows_too_many_others_and_no_folder_holds_too_many() -> None:
    assert {module: len(others) for module, others in fan_out().items() if len(others) > MOST_IMPORTS} == {}
    assert {folder: count for folder, count in file_counts().items() if count > MOST_FILES} == {}
