"""The space of a search for placements: devices by number, bounds by number, and the model's prediction for each choice."""

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
from fusion.dag.placement.network import Network
from fusion.dag.placement.schedule import Schedule
from fusion.dag.placement.segments import Segments, measure
from fusion.dag.placement.shared import carry_seconds
from fusion.dag.placement.speeds import NODES
from fusion.dag.placement.step_model import (
    Passage,
    Work,
    busy,
    fill_seconds,
    handshake,
    held_by,
    least_seconds,
    loops,
    period_seconds,
    total,
    worst_loop,
)

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

FEWEST, MOST = 128, 2048  # cuts that are considered; more devices than a quarter of them make it more
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_WORTH = 1e-3  # more microbatches in flight are worth their memory if the step is faster by this share


@dataclass(frozen=True, order=True)
class Choice:
    """Stage s is the segment [bounds[s], bounds[s + 1]) on device order[s]; both by number in the space."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The prediction for a choice, with the best schedule that its memory allows."""

    seconds: float  # inf: not allowed
    schedule: Schedule = "1f1b"
    depth: int = 1


_NEVER = Outlook(seconds=np.inf)


@dataclass(frozen=True, eq=False, kw_only=True)
class Space:
    segments: Segments
    network: Network
    microbatches: int
    training: bool
    stages: int | None  # as many as asked for, or as help
    # Whether the job runs GPipe, whatever is faster: each stage then holds all microbatches at once
    gpipe: bool
    table: Crossing  # only what crosses some bound
    costs: Floats  # (6, values): bytes, seconds to encode and to decode, there and back

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
        """(KINDS, devices) for one of each thing that a node asks for."""
        return np.stack([d.speeds.seconds for d in self.network.devices], axis=1)

    @cached_property
    def updated(self) -> Floats:
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
        return np.array([d.shared.cores for d in self.network.devices])

    @cached_property
    def _carrying(self) -> Floats:
        """(3, devices) for a message, a byte and a packet."""
        shared = [d.shared for d in self.network.devices]
        return np.array([(s.message_seconds, s.byte_seconds, s.packet_seconds) for s in shared]).T

    @cached_property
    def crossed(self) -> Floats:
        """(6, bounds): `costs` of everything that crosses each bound, each value once."""
        nodes = np.array(self.segments.bounds)
        made = np.searchsorted(nodes, self.table.producer, side="right")
        last = np.zeros(len(self.table.names), dtype=np.int64)
        np.maximum.at(last, self.table.value, self.table.reader)
        gone = np.searchsorted(nodes, last, side="right")
        marks = np.zeros((6, len(nodes) + 1))
        for row, cost in zip(marks, self.costs, strict=True):
            np.add.at(row, made, cost)
            np.subtract.at(row, gone, cost)
        found: Floats = np.cumsum(marks, axis=1)[:, :-1]
        return found

    def least_held(self, count: int) -> Indices:
        """Microbatches that each of so many stages holds at once, with the schedule that needs least memory."""
        if not self.training:
            return np.ones(count, dtype=np.int64)
        if self.gpipe:
            return np.full(count, self.microbatches, dtype=np.int64)
        return held_by(count, self.microbatches, 1)

    def allowed(self, order: tuple[int, ...]) -> bool:
        return self.stages is None or len(order) == self.stages

    def work(self, choice: Choice) -> Work:
        at, order = np.array(choice.bounds), np.array(choice.order)
        first, last, count = at[:-1], at[1:], len(order)
        forward, backward = self.segments.passes(first, last, self.seconds[:, order])
        value, made, read = self.table.edges(np.array(self.segments.bounds)[at[1:-1]])
        keys, hop = np.unique(made * count + read, return_inverse=True)
        producer, consumer = keys // count, keys % count
        sums = [total(hop, row[value], len(keys)) for row in self.costs]
        gradients = total(hop, self.table.gradient[value].astype(np.float64), len(keys)) * self.training
        ends = order[producer], order[consumer]
        there, back = (
            Passage(
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
                (ends, np.ones(len(keys), dtype=bool), sums[:3], total(hop, np.ones(len(hop)), len(keys))),
                (ends[::-1], gradients > 0, sums[3:], gradients),
            )
        )
        update = self.segments.updates(first, last, self.updated[order], self.seconds[NODES, order])
        # A device hears from itself at once.
        from_lead, to_lead = (
            np.where(order == order[0], 0.0, a)
            for a in (self.network.alphas[order[0], order], self.network.alphas[order, order[0]])
        )
        begin, ready = handshake(from_lead, to_lead, self.training)
        return Work(
            forward=forward,
            backward=backward,
            update=update,
            begin=begin + update,
            ready=ready,
            owner=np.arange(count),
            machine=self.network.machines[order],
            cores=self.cores[order],
            up=self.up[order],
            down=self.down[order],
            producer=producer,
            consumer=consumer,
            there=there,
            back=back,
            training=self.training,
        )

    def _carry_seconds(
        self, end: Indices, pair: tuple[Indices, Indices], bytes_: Floats, messages: Floats
    ) -> Floats:
        """Of the cores of one `end` of each pair of devices."""
        if not self._carrying.any():
            return np.zeros(len(end))
        whole: Floats = carry_seconds(self._carrying[:, end], messages, bytes_, self.network.rates[pair])
        return whole / 2

    def outlook(self, choice: Choice) -> Outlook:
        """The model's prediction with the shallowest schedule that is as fast as any that fits."""
        if not self.allowed(choice.order):
            return _NEVER
        at, order = np.array(choice.bounds), np.array(choice.order)
        first, last, count, m = at[:-1], at[1:], len(order), self.microbatches
        room = self.memory[order]

        def fits(held: Indices | int) -> bool:
            return bool((self.segments.memory(first, last, held) <= room).all())

        if not fits(self.least_held(count)):
            return _NEVER
        work = self.work(choice)
        load = busy(work)
        fill = fill_seconds(work, load)
        least = least_seconds(work, load, m)
        period = period_seconds(load, "1f1b")
        best = Outlook(seconds=max(fill + (m - 1) * period, least))
        # The shortest loop of a 1F1B pipeline holds two microbatches, and none takes longer than the fill.
        if not self.training or m == 1 or count == 1 or fill <= 2 * period:
            return best
        found, best = loops(work), _NEVER
        for depth in DEPTHS:
            held = held_by(count, m, depth)
            if not fits(held):
                break
            pace = max(period, worst_loop(found, held, m, period)[0])
            seconds = max(fill + (m - 1) * pace, least)
            if seconds < best.seconds * (1 - _WORTH):
                best = Outlook(seconds=seconds, depth=depth)
            if pace <= period * (1 + _WORTH):
                break
        if fits(m):
            seconds = max(fill + (m - 1) * period_seconds(load, "gpipe"), least)
            if seconds < best.seconds * (1 - _WORTH):
                best = Outlook(seconds=seconds, schedule="gpipe")
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
    """`wire` is what every floating value costs to send, dense where it is None; `gpipe`: the job will run that
    schedule."""
    limit = int(np.clip(4 * len(network.devices), FEWEST, MOST))
    segments = measure(graph, candidate_cuts(graph, sizes, limit), sizes, training, memory)
    table = _crossing_some(crossing(graph, sizes), segments.bounds)
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


def _crossing_some(table: Crossing, bounds: tuple[int, ...]) -> Crossing:
    nodes = np.array(bounds)
    made = np.searchsorted(nodes, table.producer, side="right")[table.value]
    crosses = made < np.searchsorted(nodes, table.reader, side="right")
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
        each = (
            cost.bytes(elements),
            cost.encode_seconds_per_element * elements,
            cost.decode_seconds_per_element * elements,
        )
        rows[:3, v] = each
        if training and table.gradient[v]:
            rows[3:, v] = each
    return rows
