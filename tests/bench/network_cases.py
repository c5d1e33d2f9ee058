"""The networks, schedulers, codecs and models that `make bench-network` compares, fixed before anything is measured.

Peers compute on cores that they share here, much less than volunteers' graphics cards do, so what has to be as it is
for them is the time a payload takes against the time its stage computes: `measurable` takes the widest model for which
that is `LEAST_RATIO` on the slowest link of the baseline.

A case is a network, a scheduler and a codec; it is placed as the launcher would, which knows the network from its file
and the codec. Predictions take the same placement, with what was measured on this machine meanwhile: the stages'
seconds of computing, the codecs' speeds, and what TCP gets of a link's rate.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

from bench.network_machine import Machine
from box.network_file import NETWORKS

from fusion.compression.adaptive import CodecSpeed
from fusion.compression.reference_speeds import REFERENCE
from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.memory import MemoryConfig
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.machine import SEPARATE_MACHINE, packet_bytes
from fusion.dag.placement.network import Network
from fusion.dag.placement.pipeline import EdgeCosts, Flow, Pipeline, pipeline
from fusion.dag.placement.place import Scheduler
from fusion.dag.placement.simulate import simulate
from fusion.dag.placement.step_model import step_seconds
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.capture.sources import LanguageModel
from fusion.runtime.job.manifest import CompressionConfig
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.placing.codec_choice import codec_costs, edges_of
from fusion.runtime.placing.codec_placement import CodecPlacement, place_with_codecs
from fusion.runtime.placing.swarm_file import load

# Chosen for what the codecs do, not for these networks: dense, the two uniform ones, the default, and the paper's.
CODECS: Mapping[str, CompressionConfig] = {
    name: replace(compression, live=False)  # what was placed stays
    for name, compression in {
        "dense": CompressionConfig(),
        "int8": CompressionConfig(kind="uniform", codec="int8"),
        "int4": CompressionConfig(kind="uniform", codec="int4"),
        "adaptive": CompressionConfig(kind="adaptive"),
        "AdaTopK 10": CompressionConfig(kind="adaptive", ratio=10.0, families=("topk",)),
        "AdaTopK 100": CompressionConfig(kind="adaptive", ratio=100.0, families=("topk",)),
    }.items()
}
# (scheduler, stages; None: as many as help). A model that needs the memory of every peer is what the third stands for.
SCHEDULERS: Mapping[str, tuple[Scheduler, int | None]] = {
    "equal-ops": ("equal-ops", 6),
    "op-fence": ("op-fence", None),
    "op-fence, 6": ("op-fence", 6),
}
BASELINE = ("equal-ops", "dense")
LEAST_RATIO = 15.0
# (width, sequence, microbatch size), widest first; what crosses a cut is as large in each.
SHAPES = ((128, 128, 2), (64, 64, 8), (32, 64, 16))
MODULES = ("argparse", "ast", "datetime", "inspect", "pathlib", "pickle", "subprocess", "tarfile", "typing")
HELD_OUT = ("socket", "threading")


@dataclass(frozen=True, kw_only=True)
class Case:
    network: str
    scheduler: str
    codec: str

    @property
    def name(self) -> str:
        return f"{self.network} / {self.scheduler} / {self.codec}"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One network and the durations of its jobs.

    The first `warm_up_seconds` of a job, in which peers also begin to stand by for each other, do not count. Then
    `timed_seconds` count. Each part has at least `least` steps. `curve_steps` is the length of the dense job whose loss the
    others have to reach.
    """

    name: str
    path: Path  # of the network's file
    # A head of its own: no gradient is exchanged at the end of the step, which the simulator does not know of.
    model: GPTConfig
    microbatches: int = 24
    microbatch_size: int
    warm_up_seconds: float = 12.0
    timed_seconds: float = 12.0
    least: tuple[int, int] = (2, 4)
    curve_steps: int = 30
    evaluate_every: int = 3
    evaluate_batches: int = 8
    alone_steps: int = 100  # of one microbatch
    schedulers: Mapping[str, tuple[Scheduler, int | None]] = field(default_factory=lambda: SCHEDULERS)
    codecs: Sequence[str] = tuple(CODECS)
    seed: int = 0
    placements: dict[Case, CodecPlacement] = field(default_factory=dict, compare=False, repr=False)

    @property
    def sizes(self) -> dict[str, int]:
        return {"batch": self.microbatch_size, "sequence": self.model.sequence}

    @property
    def baseline(self) -> Case:
        return Case(network=self.name, scheduler=BASELINE[0], codec=BASELINE[1])

    @cached_property
    def network(self) -> Network:
        return load(self.path).network()

    @cached_property
    def language_model(self) -> LanguageModel:
        return sources.builtin(self.model, self.seed, byte_level=True, tokenizer=None)

    @cached_property
    def graph(self) -> Graph:
        assert self.language_model.training is not None
        return clean(self.language_model.training)

    def cases(self) -> tuple[Case, ...]:
        """All cases, in the order in which each round runs them; the baseline is the first."""
        return tuple(
            Case(network=self.name, scheduler=s, codec=c) for s in self.schedulers for c in self.codecs
        )

    def steps(self, seconds: float) -> tuple[int, int]:
        """The steps of the warm-up and of the whole job, if a step takes so long."""
        warm_up = max(self.least[0], math.ceil(self.warm_up_seconds / seconds))
        return warm_up, warm_up + max(self.least[1], math.ceil(self.timed_seconds / seconds))

    def to_json(self) -> dict[str, Any]:
        """The settings that results in one table must share."""
        return {
            "model": asdict(self.model),
            "microbatches": self.microbatches,
            "microbatch_size": self.microbatch_size,
            "curve_steps": self.curve_steps,
        }


def measurable(name: str) -> Bench:
    """The benchmark of A, B or C, or of the network in a file of that name, with the model that fits it."""
    known = NETWORKS / f"{name.lower()}.toml"
    path = known if known.exists() else Path(name)
    peers = len(load(path).peers)
    schedulers = {key: (how, count and min(count, peers)) for key, (how, count) in SCHEDULERS.items()}
    for width, sequence, size in SHAPES:
        model = GPTConfig(blocks=4, width=width, heads=4, sequence=sequence, tied=False)
        bench = Bench(
            name=name if path is known else path.stem,
            path=path,
            model=model,
            microbatch_size=size,
            schedulers=schedulers,
        )
        if predicted(bench, bench.baseline).slowest_ratio >= LEAST_RATIO:
            break
    return bench


def placed(bench: Bench, case: Case) -> CodecPlacement:
    """The placement that the launcher would choose from the network's file and the reference's codecs. Cached."""
    found = bench.placements.get(case)
    if found is None:
        scheduler, stages = bench.schedulers[case.scheduler]
        found = bench.placements[case] = place_with_codecs(
            bench.graph, bench.network, bench.sizes, bench.microbatches, CODECS[case.codec],
            REFERENCE, MemoryConfig(), requested="1f1b", stages=stages, scheduler=scheduler,
        )  # fmt: skip
    return found


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Predicted seconds of a step. `slowest_ratio`: the time of the busiest link or line over its stage's compute time, without
    compression."""

    model_seconds: float
    simulated_seconds: float
    bound_seconds: float
    bottleneck: str
    slowest_ratio: float
    computing_seconds: float  # of all stages together
    messages: int
    packets: float


def predicted(
    bench: Bench,
    case: Case,
    stage_seconds: Sequence[float] | None = None,
    speeds: Mapping[str, CodecSpeed] = REFERENCE,
    machine: Machine | None = None,
) -> Predicted:
    """Predict a case. `stage_seconds`: the measured compute time of each stage in a step of one microbatch; None: computed from
    the file's speeds. The bound assumes the network's full rates. `machine` None: every peer has a machine of its own."""
    found, network = placed(bench, case), bench.network
    edges = edges_of(split(bench.graph, found.placement.cuts))
    costs = codec_costs(found.codecs, edges, bench.sizes, speeds, CODECS[case.codec].reuse_mask)

    def line(of: Network, edge_costs: EdgeCosts | None) -> Pipeline:
        return _calibrated(pipeline(bench.graph, found.placement, of, bench.sizes, edge_costs), stage_seconds)

    goodput, shared = (machine.goodput, machine.shared) if machine else (1.0, SEPARATE_MACHINE)
    whole, real = line(network, costs), line(_slower(network, found.placement.owners, goodput), costs)
    dense = step_seconds(line(network, None))
    busiest = max(
        (seconds, peer)
        for table in (
            {pair[0]: s for pair, s in dense.link_busy_seconds.items()},
            dense.uplink_busy_seconds,
            dense.downlink_busy_seconds,
        )
        for peer, seconds in (table or {"": 0.0}).items()
    )
    computing = dict(zip(found.placement.owners, dense.stage_busy_seconds, strict=True))
    bound = step_seconds(whole)
    played = simulate(real, shared)
    return Predicted(
        model_seconds=step_seconds(real).seconds,
        simulated_seconds=played.step_seconds,
        bound_seconds=bound.bound_seconds,
        bottleneck=bound.bottleneck,
        slowest_ratio=busiest[0] / computing[busiest[1]] if busiest[1] else 0.0,
        computing_seconds=sum(dense.stage_busy_seconds),
        messages=bench.microbatches
        * sum(1 + (flow.backward is not None) for flow in whole.flows if _crosses(whole, flow)),
        packets=sum(load.bytes / packet_bytes(network.rate(*pair)) for pair, load in played.links.items()),
    )


def _crosses(line: Pipeline, flow: Flow) -> bool:
    return line.owners[flow.producer] != line.owners[flow.consumer]


def busiest_pairs(bench: Bench, case: Case) -> tuple[tuple[str, str], ...]:
    """The neighbours at the busiest link or line of a placement, without compression."""
    placement = placed(bench, case).placement
    dense = step_seconds(pipeline(bench.graph, placement, bench.network, bench.sizes, None))
    pairs = tuple(pairwise(placement.owners))
    over = [
        (seconds, tuple(each for each in pairs if peer in each))
        for table in (dense.uplink_busy_seconds, dense.downlink_busy_seconds)
        for peer, seconds in table.items()
    ]
    over += [
        (seconds, tuple(each for each in pairs if set(each) == set(pair)))
        for pair, seconds in dense.link_busy_seconds.items()
    ]
    return max((seconds, found) for seconds, found in over if found)[1]


def seconds_of(network: Network, pairs: Sequence[tuple[str, str]], bytes_: float) -> float:
    """The seconds that so many bytes take both ways between each of these pairs, at the network's full rates."""
    each = [bytes_ / network.rate(*ends) for pair in pairs for ends in (pair, pair[::-1])]
    for peer in {peer for pair in pairs for peer in pair}:
        device, count = network.device(peer), sum(peer in pair for pair in pairs)
        each += [count * bytes_ / device.up_bytes_per_second, count * bytes_ / device.down_bytes_per_second]
    return max(each)


def _slower(network: Network, owners: Sequence[str], share: float) -> Network:
    devices = tuple(
        replace(
            device,
            up_bytes_per_second=device.up_bytes_per_second * share,
            down_bytes_per_second=device.down_bytes_per_second * share,
        )
        for device in network.devices
    )
    links = {
        pair: replace(network.link(*pair), bytes_per_second=network.link(*pair).bytes_per_second * share)
        for pair in permutations(owners, 2)
    }
    return Network(devices=devices, links=links)


def _calibrated(line: Pipeline, stage_seconds: Sequence[float] | None) -> Pipeline:
    """Scale each stage's work to the time that was measured with one microbatch, all its parts by the same factor."""
    if stage_seconds is None:
        return line
    stages = []
    for stage, seconds in zip(line.stages, stage_seconds, strict=True):
        modelled = stage.forward_seconds + stage.backward_seconds + stage.update_seconds
        factor = seconds / modelled if modelled > 0 else 1.0
        stages.append(
            replace(
                stage,
                forward_seconds=stage.forward_seconds * factor,
                backward_seconds=stage.backward_seconds * factor,
                update_seconds=stage.update_seconds * factor,
            )
        )
    return replace(line, stages=tuple(stages))


def text_files() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Training and held-out modules of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    training, held_out = ([library / f"{name}.py" for name in names] for names in (MODULES, HELD_OUT))
    return tuple(training), tuple(held_out)
