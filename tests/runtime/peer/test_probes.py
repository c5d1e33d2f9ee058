import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusion.cli.terminal.errors import BAD_INPUT, Verdict, explain
from fusion.dag.ir import serialise
from fusion.dag.placement.speeds import KINDS, NODES, PRODUCTS, Speeds
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer import capability
from fusion.runtime.peer.capability import Measured
from fusion.runtime.peer.probes import LARGE, SMALL, TYPICAL, Probe, fitted, probes
from fusion.runtime.planes.torch_plane import TorchPlane

TRUE = np.array([1e-11, 1.5e-11, 2e-11, 1e-10, 1.2e-10, 3e-10, 5e-9, 5e-5, 5e-6])


@pytest.mark.parametrize("scale", [SMALL, LARGE])
def test_probes_are_graphs_that_any_peer_would_run_and_show_each_kind_once(scale: int) -> None:
    found = probes(scale)
    assert sorted(probe.kind for probe in found) == list(range(KINDS))
    for probe in found:
        serialise.validate(probe.graph)
        assert probe.work[probe.kind] > 0


def test_figures_come_back_from_the_times_that_they_make() -> None:
    found = [(probe, float(probe.work @ TRUE)) for probe in probes()]
    assert fitted(found).parts[:KINDS] == pytest.approx(tuple(TRUE), rel=0.01)


def test_what_was_not_measured_is_as_much_faster_as_products_are() -> None:
    first = probes()[0]
    twice = fitted([(first, float(first.work @ TYPICAL.seconds) / 2)])
    assert twice.parts == pytest.approx([part / 2 for part in TYPICAL.parts])


def test_a_probe_that_was_disturbed_makes_nothing_free_or_endless() -> None:
    found = [(probe, float(probe.work @ TRUE) * (30 if i % 2 else 1)) for i, probe in enumerate(probes())]
    assert all(0 < part < 1 for part in fitted(found).parts)


def test_a_probe_finds_caches_as_a_step_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run hot, probes promised four models 0.55 to 0.73 of the time that they take."""
    called: list[str] = []
    passed = 0.0

    class Stage:
        def forward(self, *_: object) -> dict[str, float]:
            nonlocal passed
            called.append("forward")
            passed += 0.001
            return {"result/0": 1.0}

    def cool() -> None:
        nonlocal passed
        called.append("cool")
        passed += 1.0

    plane = SimpleNamespace(training=lambda *_: Stage())
    monkeypatch.setattr(capability.time, "perf_counter", lambda: passed)
    seconds = capability._run(plane, probes()[0], clear_caches=cool)  # type: ignore[arg-type]
    assert seconds == pytest.approx(0.001)
    assert called == ["cool", "forward"] * (len(called) // 2) and len(called) >= 2 * capability.RUNS


def test_measuring_again_keeps_the_best_and_goes_on_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "AGAIN_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(capability, "RUNS", 1)
    monkeypatch.setattr(capability, "RUN_SECONDS", 0.0)
    calls = 0

    def idle() -> bool:
        nonlocal calls
        calls += 1
        return calls > 2

    async def run() -> None:
        done: list[int] = []
        async with Worker(1, "cpu") as worker:
            measured = Measured(TorchPlane("cpu"), worker, "cpu")
            await measured.measure()
            first = measured.speeds
            measured._measurements[0] = Speeds.of(
                [1000 * part for part in first.parts]
            )  # beside something else
            task = asyncio.create_task(measured.measure_repeatedly(idle, lambda: done.append(calls)))
            while not done:
                await asyncio.sleep(0.01)
            task.cancel()
            assert calls >= 3 and done[0] >= 3 and len(measured._measurements) >= 2
            assert measured.speeds.seconds[PRODUCTS] < 1000 * first.seconds[PRODUCTS]
            assert measured.speeds.seconds[NODES] < 1000 * first.seconds[NODES]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("plane", "device", "expected", "quick"),
    [
        ("torch", "cpu", KINDS, KINDS - 1),
        ("jax", "cpu", KINDS, KINDS - 1),
        ("torch", "cuda", KINDS, 0),
        ("jax", "cuda", 2, 0),
    ],
)
def test_all_is_measured_before_a_peer_is_announced_but_where_a_gpu_would_compile_it(
    plane: str, device: str, expected: int, quick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is guessed in place of a probe was up to four times off on a CPU; two of them promised half of a step on a GPU."""
    run: list[Probe] = []
    quickly: list[bool] = []

    def probed(_: object, probe: Probe, __: str, briefly: bool) -> float:
        run.append(probe)
        quickly.append(briefly)
        return 1e-3

    async def main() -> None:
        async with Worker() as worker:
            await Measured(SimpleNamespace(name=plane), worker, device).measure_at_start()  # type: ignore[arg-type]

    monkeypatch.setattr(capability, "_run", probed)
    asyncio.run(main())
    assert len({probe.kind for probe in run}) == len(run) == expected
    assert sum(quickly) == quick and not quickly[0]  # how fast products run is what a peer is known by


def test_what_a_few_runs_showed_at_start_is_forgotten_once_more_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few runs can show a kind as too fast: what else a probe asks for is taken off as it was seen."""
    took = iter([1e-3] * KINDS + [2e-3] * KINDS + [3e-3] * KINDS)
    monkeypatch.setattr(capability, "_run", lambda *_: next(took))

    async def main() -> None:
        async with Worker() as worker:
            measured = Measured(SimpleNamespace(name="torch"), worker, "cpu")  # type: ignore[arg-type]
            await measured.measure_at_start()
            at_start = measured.speeds.product_flop
            await measured.measure()
            assert measured.speeds.product_flop == pytest.approx(2 * at_start)
            await measured.measure()
            assert measured.speeds.product_flop == pytest.approx(2 * at_start)  # the best of both

    asyncio.run(main())


FULL = 'device: "cuda:1" has no free memory to compute in; take one that has some, or "cpu"'
BROKEN = 'device: "cuda:1" does not compute (RuntimeError: no kernel image is available); take another one, or "cpu"'


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cuda:1", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), FULL),
        ("cuda:1", RuntimeError("CUDA error: out of memory\nKernel errors may come later"), FULL),
        ("cuda:1", RuntimeError("no kernel image is available"), BROKEN),
        ("cpu", RuntimeError("a mistake of ours"), None),
    ],
)
def test_a_gpu_without_room_is_bad_input_in_one_line(
    device: str, error: RuntimeError, message: str | None
) -> None:
    class Full:
        name = "full"

        def training(self, *_: object) -> None:
            raise error

    async def main() -> None:
        async with Worker() as worker:
            await Measured(Full(), worker, device).measure_at_start()  # type: ignore[arg-type]

    with pytest.raises(RuntimeError if message is None else ValueError) as raised:
        asyncio.run(main())
    assert raised.value is error if message is None else explain(raised.value) == Verdict(message, BAD_INPUT)


@pytest.mark.parametrize(
    ("device", "there", "unused"), [("cpu", True, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_a_gpu_that_is_not_lent_is_seen(
    device: str, there: bool, unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert capability.unused_gpu(device) == unused
