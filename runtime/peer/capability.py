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

# Of each probe: on a busy machine one run that nothing interrupts is among so many.
RUNS, RUN_SECONDS = 8, 0.06
# Of each but the first, before the peer is announced: within some per cent of what more runs show, which follow once the peer is
# idle. All kinds are measured, as a guess is up to four times off, and a job may arrive at once.
RUNS_AT_START, RUN_SECONDS_AT_START = 4, 0.02
# Probes that are run before the peer is announced where each has to be compiled first and a GPU computes: the first ones.
AT_START_COMPILED_CUDA = 2
# Written before each run, to clear the caches: in a step hundreds of operators run between two of one kind, so that their inputs are
# not in a cache near the core, as those of a repeated probe would be.
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
    """What a plane reaches on its device, in the thread of its worker."""

    def __init__(self, plane: Plane, worker: Worker, device: str) -> None:
        self._plane, self._worker = plane, worker
        cuda = device.startswith("cuda")
        self._device = device
        self._scale = LARGE if cuda else SMALL
        self._quick = not cuda  # at start; the clock of a GPU rises only while it computes
        self._at_start = AT_START_COMPILED_CUDA if cuda and plane.name != "torch" else None
        # Where what a probe reads lies: a stage's weights are on its device, and to move them there is no part of a step.
        self._place = device if cuda and plane.name == "torch" else "cpu"
        self._found: deque[Speeds] = deque(maxlen=REMEMBERED)
        self._thorough = False  # whether all probes were run as often as they should be, the last time
        # PyTorch computes in the thread that calls it, on a CPU: what else the machine does meanwhile is no part of that.
        alone = plane.name == "torch" and not cuda
        self.pace = RealPace(self._at_best, time.thread_time if alone else time.perf_counter, time.monotonic)

    @property
    def working_bytes(self) -> int:
        """The plane's."""
        return self._plane.working_bytes

    @property
    def speeds(self) -> Speeds:
        """As corrected by steps; at first, those of the probes."""
        return self.pace.speeds

    def _at_best(self) -> Speeds:
        """The best of the last few measurements."""
        return reduce(Speeds.best, self._found)

    async def look(self, *, at_start: bool = False) -> None:
        """Measure now, each probe in a call of up to a tenth of a second, longer where code is compiled: some of them, or a few
        times each, `at_start`."""
        every = probes(self._scale)
        found = list[tuple[Probe, float]]()
        for probe in every[: self._at_start] if at_start else every:
            quick = at_start and self._quick and bool(found)
            found.append((probe, await self._worker.run(_run, self._plane, probe, self._place, quick)))
        if not self._thorough:  # replaces the quick one
            self._found.clear()
        self._thorough = not at_start
        self._found.append(fitted(found))

    async def first_look(self) -> None:
        """`look` at the start of a peer. ValueError, in one line, where other processes have filled the GPU, or it runs nothing."""
        try:
            await self.look(at_start=True)
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

    async def keep_looking(self, idle: Callable[[], bool], then: Callable[[], object]) -> None:
        """For as long as the peer runs: measure again now and then, if it is `idle`, and call `then` after that."""
        for pause in chain(AGAIN_SECONDS, repeat(AGAIN_SECONDS[-1])):
            await asyncio.sleep(pause)
            if idle():
                try:
                    await self.look()
                except RuntimeError as error:  # a device that other processes have filled
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
    """The default of what a volunteer lends. In the worker's thread."""
    cuda = device.startswith("cuda")
    free = torch.cuda.mem_get_info(device)[0] if cuda else free_bytes()
    return int(free * LENT_SHARE)


def cores_of(device: str, threads: int) -> float:
    """As `Capability.cores`, of the cores that this process may run on."""
    if device.startswith("cuda"):
        return 0.0
    return max(1.0, usable_cores() / threads)


def _cooler() -> Callable[[], object]:
    """A function that clears caches as a step does."""
    swept = torch.zeros(SWEPT_BYTES, dtype=torch.uint8)
    return lambda: swept.add_(1)


def _run(
    plane: Plane,
    probe: Probe,
    place: str = "cpu",
    quick: bool = False,
    cool: Callable[[], object] | None = None,
) -> float:
    """In the worker's thread: seconds of the fastest of some runs, of fewer if `quick`, with inputs on the device `place`, and `cool`
    called before each."""
    cool = cool or _cooler()
    graph, draw = probe.graph, torch.Generator().manual_seed(0)

    def some(type_: TensorType) -> torch.Tensor:
        return (torch.randn([bind(dim, {}) for dim in type_.shape], generator=draw) * 0.1).to(place)

    inputs = {given.name: some(given.type) for given in graph.inputs}
    stage = plane.training(probe.stage, {v.name: some(v.type) for v in graph.variables}, OPTIMIZER)

    def once() -> float:
        cool()
        began = time.perf_counter()
        made = stage.forward(0, inputs, RngKey(0, 0, 0))
        float(made["result/0"])  # until the device has done it
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        once()
    runs, lasting = (RUNS_AT_START, RUN_SECONDS_AT_START) if quick else (RUNS, RUN_SECONDS)
    seconds, until = list[float](), time.perf_counter() + lasting
    while len(seconds) < runs or time.perf_counter() < until:
        seconds.append(once())
    return min(seconds)
