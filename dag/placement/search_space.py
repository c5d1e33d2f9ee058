"""The search space of placements: devices and bounds by number, and the step model's estimate for a choice of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fusion.dag.cutting.crossing import Crossing, crossing
from fusion.dag.cutting.cuts import candidate_cuts
from fusion.dag.cutting.memory import MemoryConfig
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.codec_cost import DENSE, CodecCost
from fusion.dag.placement.machine import carry_seconds
from fusion.dag.placement.network import Network
from fusion.dag.placement.pipeline_arrays import PipelineArrays, Transfers, handshake_seconds
from fusion.dag.placement.schedule import Schedule
from fusion.dag.placement.segments import Segments, measure
from fusion.dag.placement.speeds import NODES
from fusion.dag.placement.step_model import (
    busy_seconds,
    compute_bound_seconds,
    fill_seconds,
    group_sums,
    in_flight_by_stage,
    loops,
    period_seconds,
    slowest_loop,
)

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

MIN_CUTS, MAX_CUTS = 128, 2048  # cuts that are considered: 4 a device, within these limits
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MIN_GAIN = 1e-3  # a deeper schedule must make the step faster by this share


@dataclass(frozen=True, order=True)
class Choice:
    """Stage s is the segment [bounds[s], bounds[s + 1]) on device order[s]; both by number in the space."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted step of a choice, with the best schedule that memory allows."""

    seconds: float  # inf: not allowed
    schedule: Schedule = "1f1b"
    depth: int = 1


_INFEASIBLE = Estimate(seconds=np.inf)


@dataclass(frozen=True, eq=False, kw_only=True)
class Space:
    segments: Segments
    network: Network
    microbatches: int
    training: bool
    stages: int | None  # None: as many as help
    # Whether the job will run GPipe, where each stage holds all microbatches at once
    gpipe: bool
    table: Crossing  # only values that cross some bound
    costs: (
        Floats  # (6, values): bytes, seconds to encode and to decode, of the forward and of the backward pass
    )

    @property
    def devices(self) -> int:
        return len(self.network.devices)

    @property
    def most_stages(self) -> int:
        return min(self.devices, len(self.segments.bounds) - 1)

    @cached_property
    def flops(self) -> Floats:
        return np.array([d.flops_per_second for d in self.network.devices])

    @cached_property
    def seconds(self) -> Floats:
        """(KINDS, devices) seconds for one unit of each kind of work."""
        return np.stack([d.speeds.seconds for d in self.network.devices], axis=1)

    @cached_property
    def updated_byte_seconds(self) -> Floats:
        return np.array([d.speeds.updated_byte for d in self.network.devices])

    @cached_property
    def memory(self) -> Floats:
        return np.array([d.memory_bytes for d in self.network.devices], dtype=np.float64)

    @cached_property
    def up(self) -> Floats:
        return np.array([d.up_bytes_per_second for d in self.network.devices])

    @cached_property
    def down(self) -> Floats:
        return np.array([d.down_bytes_per_second for d in self.network.devices])

    @cached_property
    def cores(self) -> Floats:
        return np.array([d.machine.cores for d in self.network.devices])

    @cached_property
    def _carry_costs(self) -> Floats:
        """(3, devices) seconds for a message, a byte and a packet."""
        machines = [d.machine for d in self.network.devices]
        return np.array([(s.message_seconds, s.byte_seconds, s.packet_seconds) for s in machines]).T

    @cached_property
    def crossing_costs(self) -> Floats:
        """(6, bounds) sums of `costs` over the values that cross each bound, each value once."""
        nodes = np.array(self.segments.bounds)
        produced = np.searchsorted(nodes, self.table.producer, side="right")
        last_reader = np.zeros(len(self.table.names), dtype=np.int64)
        np.maximum.at(last_reader, self.table.value, self.table.reader)
        last_read = np.searchsorted(nodes, last_reader, side="right")
        changes = np.zeros((6, len(nodes) + 1))
        for row, cost in zip(changes, self.costs, strict=True):
            np.add.at(row, produced, cost)
            np.subtract.at(row, last_read, cost)
        costs: Floats = np.cumsum(changes, axis=1)[:, :-1]
        return costs

    def min_in_flight(self, count: int) -> Indices:
        """(count,) microbatches in flight in each of `count` stages, with the schedule that needs least memory."""
        if not self.training:
            return np.ones(count, dtype=np.int64)
        if self.gpipe:
            return np.full(count, self.microbatches, dtype=np.int64)
        return in_flight_by_stage(count, self.microbatches, 1)

    def allowed(self, order: tuple[int, ...]) -> bool:
        return self.stages is None or len(order) == self.stages

    def arrays(self, choice: Choice) -> PipelineArrays:
        at, order = np.array(choice.bounds), np.array(choice.order)
        first, last, count = at[:-1], at[1:], len(order)
        forward, backward = self.segments.passes(first, last, self.seconds[:, order])
        value, producers, consumers = self.table.edges(np.array(self.segments.bounds)[at[1:-1]])
        keys, hop = np.unique(producers * count + consumers, return_inverse=True)
        producer, consumer = keys // count, keys % count
        sums = [group_sums(hop, row[value], len(keys)) for row in self.costs]
        gradients = group_sums(hop, self.table.gradient[value].astype(np.float64), len(keys)) * self.training
        ends = order[producer], order[consumer]
        forward_transfers, backward_transfers = (
            Transfers(
                used=used,
                bytes=bytes_,
                encode_seconds=encode,
                decode_seconds=decode,
                alpha_seconds=self.network.alphas[pair],
                bytes_per_second=self.network.pair_rates[pair],
                sent_seconds=self._carry_seconds(pair[0], pair, bytes_, messages),
                received_seconds=self._carry_seconds(pair[1], pair, bytes_, messages),
            )
            for pair, used, (bytes_, encode, decode), messages in (
                (
                    ends,
                    np.ones(len(keys), dtype=bool),
                    sums[:3],
                    group_sums(hop, np.ones(len(hop)), len(keys)),
                ),
                (ends[::-1], gradients > 0, sums[3:], gradients),
            )
        )
        update = self.segments.updates(
            first, last, self.updated_byte_seconds[order], self.seconds[NODES, order]
        )
        # A device has no latency to itself.
        from_lead, to_lead = (
            np.where(order == order[0], 0.0, a)
            for a in (self.network.alphas[order[0], order], self.network.alphas[order, order[0]])
        )
        start, ready = handshake_seconds(from_lead, to_lead, self.training)
        return PipelineArrays(
            forward_seconds=forward,
            backward_seconds=backward,
            update_seconds=update,
            start_seconds=start + update,
            ready_seconds=ready,
            owner=np.arange(count),
            machine=self.network.machines[order],
            cores=self.cores[order],
            up=self.up[order],
            down=self.down[order],
            producer=producer,
            consumer=consumer,
            forward_transfers=forward_transfers,
            backward_transfers=backward_transfers,
            training=self.training,
        )

    def _carry_seconds(
        self, end: Indices, pair: tuple[Indices, Indices], bytes_: Floats, messages: Floats
    ) -> Floats:
        """Seconds of the cores of device `end` to carry its half of the messages of each pair."""
        if not self._carry_costs.any():
            return np.zeros(len(end))
        both_ends: Floats = carry_seconds(
            self._carry_costs[:, end], messages, bytes_, self.network.rates[pair]
        )
        return both_ends / 2

    def estimate(self, choice: Choice) -> Estimate:
        """The step time with the shallowest schedule that is as fast as any that fits into memory."""
        if not self.allowed(choice.order):
            return _INFEASIBLE
        bounds, order = np.array(choice.bounds), np.array(choice.order)
        first, last, count, m = bounds[:-1], bounds[1:], len(order), self.microbatches
        memory_limits = self.memory[order]

        def fits(held: Indices | int) -> bool:
            return bool((self.segments.memory(first, last, held) <= memory_limits).all())

        if not fits(self.min_in_flight(count)):
            return _INFEASIBLE
        arrays = self.arrays(choice)
        busy = busy_seconds(arrays)
        fill = fill_seconds(arrays, busy)
        least = compute_bound_seconds(arrays, busy, m)
        period = period_seconds(busy, "1f1b")
        best = Estimate(seconds=max(fill + (m - 1) * period, least))
        # The shortest loop of a 1F1B pipeline holds two microbatches, and none takes longer than the fill.
        if not self.training or m == 1 or count == 1 or fill <= 2 * period:
            return best
        feedback, best = loops(arrays), _INFEASIBLE
        for depth in DEPTHS:
            held = in_flight_by_stage(count, m, depth)
            if not fits(held):
                break
            loop_period = max(period, slowest_loop(feedback, held, m, period)[0])
            seconds = max(fill + (m - 1) * loop_period, least)
            if seconds < best.seconds * (1 - _MIN_GAIN):
                best = Estimate(seconds=seconds, depth=depth)
            if loop_period <= period * (1 + _MIN_GAIN):
                break
        if fits(m):
            seconds = max(fill + (m - 1) * period_seconds(busy, "gpipe"), least)
            if seconds < best.seconds * (1 - _MIN_GAIN):
                best = Estimate(seconds=seconds, schedule="gpipe")
        return best


def space(
    graph: Graph,
    network: Network,
    sizes: Mapping[str, int],
    microbatches: int,
    *,
    training: bool = True,
    stages: int | None = None,
    wire: CodecCost | None = None,
    memory: MemoryConfig = MemoryConfig(),  # noqa: B008 - frozen
    gpipe: bool = False,
) -> Space:
    """The search space. `wire` is the codec of every floating-point value, None for dense; `gpipe`: the job will run that
    schedule."""
    limit = int(np.clip(4 * len(network.devices), MIN_CUTS, MAX_CUTS))
    segments = measure(graph, candidate_cuts(graph, sizes, limit), sizes, training, memory)
    table = _only_crossing(crossing(graph, sizes), segments.bounds)
    return Space(
        segments=segments,
        network=network,
        microbatches=microbatches,
        training=training,
        stages=stages,
        gpipe=gpipe,
        table=table,
        costs=_costs(table, training, wire),
    )


def _only_crossing(table: Crossing, bounds: tuple[int, ...]) -> Crossing:
    nodes = np.array(bounds)
    produced = np.searchsorted(nodes, table.producer, side="right")[table.value]
    crosses = produced < np.searchsorted(nodes, table.reader, side="right")
    kept, value = np.unique(table.value[crosses], return_inverse=True)
    return Crossing(
        names=tuple(table.names[v] for v in kept),
        dtypes=tuple(table.dtypes[v] for v in kept),
        elements=table.elements[kept],
        element_bytes=table.element_bytes[kept],
        gradient=table.gradient[kept],
        producer=table.producer[kept],
        value=value.astype(np.int64),
        reader=table.reader[crosses],
    )


def _costs(table: Crossing, training: bool, wire: CodecCost | None) -> Floats:
    rows = np.zeros((6, len(table.names)))
    for v, (dtype, elements) in enumerate(zip(table.dtypes, table.elements.tolist(), strict=True)):
        cost = wire if wire is not None and "float" in dtype else DENSE[dtype]
        of_value = (
            cost.bytes(elements),
            cost.encode_seconds_per_element * elements,
            cost.decode_seconds_per_element * elements,
        )
        rows[:3, v] = of_value
        if training and table.gradient[v]:
            rows[3:, v] = of_value
    return rows
