"""The speeds of this machine that a peer announces, measured quickly at start and again while the peer is idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import chain, repeat

import torch

from fusion.dag.ir.dims import bind
from fusion.dag.ir.graph import TensorType
from fusion.dag.placement.speeds import Speeds
from fusion.runtime.device.real_pace import RealPace
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer.free_memory import free_bytes
from fusion.runtime.peer.probes import LARGE, SMALL, Probe, fitted, probes
from fusion.runtime.planes.plane import Plane, RngKey
from fusion.swarm.machine import usable_cores
from fusion.swarm.printable import error_line

log = logging.getLogger(__name__)

# Of each probe: on a busy machine, one of so many runs is not interrupted.
RUNS, RUN_SECONDS = 8, 0.06
# Of each probe but the first, before the peer is announced: accurate to some per cent; more runs follow once the peer is idle. All
# kinds are measured, as a guess is up to four times off, and a job may arrive at once.
RUNS_AT_START, RUN_SECONDS_AT_START = 4, 0.02
# Probes, from the first on, before the peer is announced on a GPU whose plane compiles each.
AT_START_COMPILED_CUDA = 2
# Written before each run, to clear the caches: in a step, hundreds of operators run between two of one kind, so their inputs are not in
# a cache near the core, as those of a repeated probe would be.
SWEPT_BYTES = 8 << 20
WARM_UP = 2  # runs, in which libraries initialize and code is compiled
# Of the free memory, by default: the machine stays usable.
LENT_SHARE = 0.5
OPTIMIZER = OptimizerConfig()
# Measured again while nothing runs here: a measurement beside other work would otherwise stay for good.
AGAIN_SECONDS = (10.0, 120.0, 1800.0)  # between measurements; then always the last
REMEMBERED = 4  # measurements, of which the best counts


@dataclass(frozen=True)
class Capability:
    device: str  # "cpu: 2 threads" or "cuda: NVIDIA ..."
    speeds: Speeds
    memory_bytes: int
    cores: float  # of this machine, for each that stages compute with; 0 where a GPU computes

    @property
    def flops_per_second(self) -> float:
        """Achieved on float32 matrix products of a transformer's size: lambda * peak."""
        return 1 / self.speeds.product_flop


class Measured:
    """The measured speeds of a plane on its device, in the thread of its worker."""

    def __init__(self, plane: Plane, worker: Worker, device: str) -> None:
        self._plane, self._worker = plane, worker
        cuda = device.startswith("cuda")
        self._device = device
        self._scale = LARGE if cuda else SMALL
        self._quick = not cuda  # at start; the clock of a GPU rises only while it computes
        self._at_start = AT_START_COMPILED_CUDA if cuda and plane.name != "torch" else None
        # Inputs of probes are on the device, as a stage's weights are: moving them is no part of a step.
        self._input_device = device if cuda and plane.name == "torch" else "cpu"
        self._measurements: deque[Speeds] = deque(maxlen=REMEMBERED)
        self._thorough = False  # whether the last measurement ran all probes often enough
        # On a CPU, PyTorch computes in the calling thread: its CPU time excludes other work of the machine.
        alone = plane.name == "torch" and not cuda
        self.pace = RealPace(
            self._best_probed, time.thread_time if alone else time.perf_counter, time.monotonic
        )

    @property
    def working_bytes(self) -> int:
        """`working_bytes` of the plane."""
        return self._plane.working_bytes

    @property
    def speeds(self) -> Speeds:
        """The speeds corrected by steps; at first, those of the probes."""
        return self.pace.speeds

    def _best_probed(self) -> Speeds:
        """The best of the last few measurements."""
        return reduce(Speeds.best, self._measurements)

    async def measure(self, *, at_start: bool = False) -> None:
        """Run the probes, each in a call of up to a tenth of a second, longer where code is compiled; `at_start`, fewer probes or runs."""
        all_probes = probes(self._scale)
        times = list[tuple[Probe, float]]()
        for probe in all_probes[: self._at_start] if at_start else all_probes:
            quick = at_start and self._quick and bool(times)
            times.append((probe, await self._worker.run(_run, self._plane, probe, self._input_device, quick)))
        if not self._thorough:  # replaces the quick one
            self._measurements.clear()
        self._thorough = not at_start
        self._measurements.append(fitted(times))

    async def measure_at_start(self) -> None:
        """`measure` at the start of a peer. ValueError, in one line, where other processes have filled the GPU, or it runs nothing."""
        try:
            await self.measure(at_start=True)
        except RuntimeError as error:
            if not self._device.startswith("cuda"):
                raise
            full = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
            wrong = (
                "has no free memory to compute in; take one that has some"
                if full
                else f"does not compute ({error_line(error)}); take another one"
            )
            raise ValueError(f'device: "{self._device}" {wrong}, or "cpu"') from error

    async def measure_repeatedly(self, idle: Callable[[], bool], then: Callable[[], object]) -> None:
        """Measure again at intervals while the peer runs, if it is `idle`, and then call `then`."""
        for pause in chain(AGAIN_SECONDS, repeat(AGAIN_SECONDS[-1])):
            await asyncio.sleep(pause)
            if idle():
                try:
                    await self.measure()
                except RuntimeError as error:  # other processes have filled the device
                    log.warning("this machine could not be measured again: %s", error_line(error))
                then()


def device_name(device: str, threads: int) -> str:
    if device.startswith("cuda"):
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"cpu: {threads} thread{'s'[: threads > 1]}"


def unused_gpu(device: str) -> bool:
    """Whether there is a GPU where a CPU computes."""
    return not device.startswith("cuda") and torch.cuda.is_available()


def lent_bytes(device: str) -> int:
    """The memory that a volunteer lends by default. Runs in the worker's thread."""
    cuda = device.startswith("cuda")
    free = torch.cuda.mem_get_info(device)[0] if cuda else free_bytes()
    return int(free * LENT_SHARE)


def cores_of(device: str, threads: int) -> float:
    """`Capability.cores` of the cores that this process may run on."""
    if device.startswith("cuda"):
        return 0.0
    return max(1.0, usable_cores() / threads)


def _cache_clearer() -> Callable[[], object]:
    """A function that clears caches as a step does."""
    swept = torch.zeros(SWEPT_BYTES, dtype=torch.uint8)
    return lambda: swept.add_(1)


def _run(
    plane: Plane,
    probe: Probe,
    input_device: str = "cpu",
    quick: bool = False,
    clear_caches: Callable[[], object] | None = None,
) -> float:
    """The seconds of the fastest of some runs, of fewer if `quick`, with inputs on `input_device`, and `clear_caches` called before each.
    Runs in the worker's thread."""
    clear_caches = clear_caches or _cache_clearer()
    graph, draw = probe.graph, torch.Generator().manual_seed(0)

    def random(type_: TensorType) -> torch.Tensor:
        return (torch.randn([bind(dim, {}) for dim in type_.shape], generator=draw) * 0.1).to(input_device)

    inputs = {input_.name: random(input_.type) for input_ in graph.inputs}
    stage = plane.training(probe.stage, {v.name: random(v.type) for v in graph.variables}, OPTIMIZER)

    def timed_run() -> float:
        clear_caches()
        began = time.perf_counter()
        outputs = stage.forward(0, inputs, RngKey(0, 0, 0))
        float(outputs["result/0"])  # waits for the device
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        timed_run()
    runs, duration = (RUNS_AT_START, RUN_SECONDS_AT_START) if quick else (RUNS, RUN_SECONDS)
    seconds, deadline = list[float](), time.perf_counter() + duration
    while len(seconds) < runs or time.perf_counter() < deadline:
        seconds.append(timed_run())
    return min(seconds)
