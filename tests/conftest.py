"""For all tests: which of them run when (docs/testing.md), and which of them run side by side.

A test is fast unless it is marked, by its folder here or by hand: it starts no process, and says so if it tries.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.endings import end_as_if_interrupted
from support.examples import FEWER, examples
from support.turns import TURNS, turn
from support.warm_start import Zygote, warm_start

TESTS = Path(__file__).parent
PROCESSES = (
    "e2e",
    "box",
    "sweeps",
    "worlds",
    "attacks",
)  # folders whose tests start peers, or worlds in a process of their own
# Tests that need no process and yet take seconds each, most to export a model or to simulate a machine: from the gate on.
HEAVY = (
    *("cli/test_plan.py", "dag/rewrites/caches/test_families.py", "runtime/capture/test_exports.py"),
    *("runtime/capture/test_families.py", "runtime/capture/test_huggingface.py", "runtime/launch/"),
    *("runtime/capture/test_gguf_model.py", "runtime/capture/gguf/test_tokenizer.py"),
    *("runtime/placing/test_offline_plan.py", "bench/", "cli/test_start.py"),
    *("runtime/capture/python/test_python_model.py", "runtime/training/test_batch_norm.py"),
    *("runtime/serving/graphs/", "runtime/capture/test_text_encoder.py"),
    *("runtime/training/test_compressed.py", "runtime/training/test_takeover.py"),
    *("runtime/training/test_mixed_precision.py", "runtime/serving/answers/test_settings.py"),
    *("runtime/training/test_training.py", "runtime/serving/answers/test_gateway.py"),
    *("runtime/serving/answers/test_prefix_reuse.py", "families/", "runtime/capture/test_rope.py"),
    *("runtime/serving/test_drafts.py", "runtime/planes/products/", "runtime/planes/jax_plane/"),
    *("runtime/planes/test_batch.py", "runtime/planes/test_retained_families.py"),
    *("runtime/planes/test_torch_plane.py", "runtime/capture/test_capture.py"),
    *("runtime/serving/answers/test_generation.py", "runtime/serving/answers/test_gateway_faults.py"),
    *("runtime/serving/answers/test_early_answers.py", "runtime/serving/ring/test_guesses.py"),
    *("runtime/serving/test_replicas.py", "runtime/serving/test_serving.py"),
    *("runtime/serving/requests/test_client.py", "runtime/serving/answers/test_gateway_shares.py"),
    *("runtime/serving/ring/test_drafting.py", "runtime/serving/ring/test_stage_prefix.py"),
    *("runtime/device/test_share.py", "runtime/placing/test_stage_memory.py"),
    "runtime/placing/test_placed_before.py",
)
# Of those that start processes the longest: first, so that no worker is left with one of them in the end.
LONG = (
    "e2e/test_chaos.py",
    "e2e/test_demo_run.py",
    "e2e/test_releases.py",
    "e2e/test_job_life.py",
    "e2e/test_generation.py",
    "e2e/test_thin_client.py",
    "attacks/",
)
WARM = (
    "e2e",
    "attacks",
    "box",
)  # folders whose tests start so many of our commands that these are forked (`support/warm_start.py`)
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})

# While modules load there is nothing to collect, and what they leave is never to be looked at again.
gc.disable()

# A shell has what runs in its background ignore SIGINT, `nohup` SIGHUP, and whatever those start: tests send both to processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_fast: str | None = None  # the test that runs, if it may start no process


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _fast is not None and event in STARTS:
        raise RuntimeError(f"{_fast} starts a process: it needs the mark `process` or `program`")


sys.addaudithook(_watch)


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        os.environ[FEWER] = "1"
    # No deadline: how long an example takes says how busy the machine is.
    settings.register_profile("busy", deadline=None, max_examples=examples(100))
    settings.load_profile("busy")
    if not hasattr(config, "workerinput"):
        end_as_if_interrupted()  # and clear up
        os.environ[TURNS] = tempfile.mkdtemp(prefix="fusion-turns-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(TURNS), ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file or folder of which no test would be left is not imported; one that is asked for by its name is."""
    left_out, (name, folder) = config.option.markexpr, _place(collection_path)
    heavy = "not heavy" in left_out and name.startswith(HEAVY)
    process = "not process" in left_out and folder in PROCESSES
    return True if heavy or process else None


def pytest_collection(session: pytest.Session) -> None:
    """Each worker imports a part of the files before the others: what one has compiled, the others read."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    asked = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if {path, *path.parents} & {*asked}]
    start = worker * len(files) // workers
    for path in files[start:] + files[:start]:
        if not pytest_ignore_collect(path, session.config):
            import_early(session, path)


def import_early(session: pytest.Session, path: Path) -> None:
    """Import a file of tests. What goes wrong is told when it is collected."""
    try:
        pytest.Module.from_parent(session, path=path).obj  # noqa: B018
    except pytest.Collector.CollectError:
        # What was loaded of it would be taken for all of it, and no test of it be missed.
        for name in [
            name for name, each in sys.modules.items() if getattr(each, "__file__", "") == str(path)
        ]:
            del sys.modules[name]


def pytest_collection_finish() -> None:
    gc.freeze()
    # An export makes millions of objects: looking at them as often as usual takes a twentieth of the time of the tests.
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@functools.cache
def _place(path: Path) -> tuple[str, str]:
    """A file by its path from here, and the folder of ours that it is in."""
    inside = path.relative_to(TESTS)
    return inside.as_posix() + "/" * path.is_dir(), inside.parts[0] if inside.parts else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    orders = {}
    for item in items:
        (name, folder), marks = _place(item.path), {mark.name for mark in item.iter_markers()}
        if folder in PROCESSES or "e2e" in marks:
            item.add_marker("process")
            marks.add("process")
        if name.startswith(HEAVY):
            item.add_marker("heavy")
            marks.add("heavy")
        orders[item] = _order(name, marks)
    items.sort(key=orders.__getitem__)


def _order(name: str, marks: set[str]) -> tuple[int, bool]:
    """Those that must be alone come while all workers are about to begin anyway, then what takes long."""
    first = ("alone", "program", "process", "heavy")
    return next((n for n, mark in enumerate(first) if mark in marks), len(first)), not name.startswith(LONG)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around a whole test, before its time limit begins to count."""
    global _fast
    marked = any(item.get_closest_marker(mark) for mark in ("process", "program"))
    with ExitStack() as stack:
        if "PYTEST_XDIST_WORKER" in os.environ:
            stack.enter_context(turn(Path(os.environ[TURNS]), alone=bool(item.get_closest_marker("alone"))))
        _fast = None if marked else item.nodeid
        try:
            return (yield)
        finally:
            _fast = None


@pytest.fixture(scope="session", autouse=True)
def torch_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch keeps its caches in a folder of this run, with pytest's others."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("torch-cache"))
    yield
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]


@pytest.fixture(scope="session")
def zygote(torch_cache: None) -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def start(request: pytest.FixtureRequest) -> Iterator[None]:
    """How our commands start: forked where a test starts many, unless it is about how the real one does (`cold`)."""
    _, folder = _place(request.path)
    if folder not in WARM or request.node.get_closest_marker("cold"):
        yield
        return
    with warm_start(request.getfixturevalue("zygote")):
        yield
