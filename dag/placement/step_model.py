"""How long a step of a pipeline takes, in closed form: THE model, by which placements are compared.

    seconds = fill + (microbatches - 1) * period

`fill` is the first microbatch alone, from commit to commit: the lead's `commit`, each stage's update, both passes over
every stage and link, and each stage's `ready` to the lead, along the critical path. `period` is the time that
the busiest of these needs for one microbatch: a stage's compute; a link; a peer's uplink or downlink, shared by all its
flows in both passes (FusionLLM, arXiv 2410.12707); its codec thread; its share of the cores of its machine, which compute,
code and carry messages (an even share: a stage that took more would delay the others). Latency adds a term where few
microbatches are in flight: 1F1B admits in_flight(s) - in_flight(t) + 1 microbatches into the loop that runs forward from stage s
to t >= s and back (t runs the backward pass of an earlier microbatch next), and the next ones wait for these to return.
GPipe runs all forward passes, then all backward passes: each has a period of its own, and no loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from fusion.dag.placement.pipeline import Pipeline
from fusion.dag.placement.pipeline_arrays import Floats, Indices, PipelineArrays, Transfers, pipeline_arrays
from fusion.dag.placement.schedule import Schedule, in_flight

_BLOCK = 512  # stages whose loops are computed at once: a matrix for 10 000 would not fit into memory


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted step; busy seconds are those of a whole step."""

    seconds: float
    bound_seconds: float  # the busy seconds of the busiest resource: no schedule of this placement is faster
    bottleneck: str  # what sets the period, for people
    fill_seconds: float
    period_seconds: float  # from one microbatch to the next, on average
    stage_busy_seconds: tuple[float, ...]
    link_busy_seconds: Mapping[tuple[str, str], float]
    uplink_busy_seconds: Mapping[str, float]
    downlink_busy_seconds: Mapping[str, float]
    codec_busy_seconds: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class BusySeconds:
    """Busy seconds of each resource for one microbatch; row 0 is the forward pass, row 1 the backward pass."""

    stages: Floats  # (2, stages)
    links: Floats  # (2, hops): the link from producer to consumer, and the link back
    uplinks: Floats  # (2, stages), by the stage's owner, as are the following
    downlinks: Floats
    codecs: Floats
    machines: Floats  # an even share of the cores of the owner's machine: computing, coding and carrying

    def tables(self) -> tuple[Floats, ...]:
        return self.stages, self.links, self.uplinks, self.downlinks, self.codecs, self.machines


def step_seconds(pipeline: Pipeline) -> Prediction:
    arrays, count, m = pipeline_arrays(pipeline), len(pipeline.stages), pipeline.microbatches
    busy = busy_seconds(arrays)
    fill = fill_seconds(arrays, busy)
    period, bottleneck = _bottleneck(pipeline, arrays, busy)
    if pipeline.training and pipeline.schedule == "1f1b" and m > 1:
        held = in_flight_by_stage(count, m, pipeline.depth)
        loop, first, last = slowest_loop(loops(arrays, _stages_that_hold_all(held, m)), held, m, period)
        if loop > period * (1 + 1e-9):
            period = loop
            bottleneck = (
                f"latency between stages {first} and {last}, with {held[first]} microbatches in flight"
            )
    names = [pipeline.owners[s] for s in range(count)]
    stage_busy = m * busy.stages.sum(axis=0) + arrays.update_seconds
    links: dict[tuple[str, str], float] = {}
    for h, (a, b) in enumerate(zip(arrays.producer, arrays.consumer, strict=True)):
        for direction, pair in enumerate(((names[a], names[b]), (names[b], names[a]))):
            if busy.links[direction, h]:
                links[pair] = links.get(pair, 0.0) + m * float(busy.links[direction, h])
    uplinks, downlinks, codecs = (
        {names[s]: m * float(row[s]) for s in range(count) if row[s]}
        for row in (table.sum(axis=0) for table in (busy.uplinks, busy.downlinks, busy.codecs))
    )
    every = (*links.values(), *uplinks.values(), *downlinks.values(), *codecs.values())
    least = compute_bound_seconds(arrays, busy, m)
    return Prediction(
        seconds=max(fill + (m - 1) * period, least),
        bound_seconds=max((least, *every)),
        bottleneck=bottleneck,
        fill_seconds=fill,
        period_seconds=period,
        stage_busy_seconds=tuple(float(s) for s in stage_busy),
        link_busy_seconds=links,
        uplink_busy_seconds=uplinks,
        downlink_busy_seconds=downlinks,
        codec_busy_seconds=codecs,
    )


def busy_seconds(arrays: PipelineArrays) -> BusySeconds:
    """The seconds that one microbatch keeps each resource busy."""
    count = int(arrays.owner.max()) + 1

    def by_owner(stage: Indices, seconds: Floats) -> Floats:
        return group_sums(arrays.owner[stage], seconds, count)[arrays.owner]

    every_stage = np.arange(len(arrays.owner))
    pairs, up, down, codecs, machines = [], [], [], [], []
    for transfers, sender, receiver, compute in (
        (arrays.forward_transfers, arrays.producer, arrays.consumer, arrays.forward_seconds),
        (arrays.backward_transfers, arrays.consumer, arrays.producer, arrays.backward_seconds),
    ):
        pairs.append(_link_seconds(arrays, transfers, sender, receiver))
        up.append(by_owner(sender, transfers.bytes / arrays.up[sender]))
        down.append(by_owner(receiver, transfers.bytes / arrays.down[receiver]))
        codecs.append(
            by_owner(sender, transfers.encode_seconds) + by_owner(receiver, transfers.decode_seconds)
        )
        spent = compute + group_sums(sender, transfers.sent_seconds + transfers.encode_seconds, len(compute))
        spent += group_sums(receiver, transfers.received_seconds + transfers.decode_seconds, len(compute))
        machines.append(spent / _cores_per_stage(arrays))
    stages = [by_owner(every_stage, arrays.forward_seconds), by_owner(every_stage, arrays.backward_seconds)]
    return BusySeconds(*(np.stack(rows) for rows in (stages, pairs, up, down, codecs, machines)))


def compute_bound_seconds(arrays: PipelineArrays, busy: BusySeconds, microbatches: int) -> float:
    """A lower bound for a step: the work of its busiest stage, or machine, without any wait."""
    stages = microbatches * busy.stages.sum(axis=0) + arrays.update_seconds
    machines = (
        microbatches * busy.machines.sum(axis=0) + arrays.update_seconds / _cores_per_stage(arrays)
    ) / _stages_on_machine(arrays)
    return float(max(stages.max(), group_sums(arrays.machine, machines, len(machines)).max()))


def period_seconds(busy: BusySeconds, schedule: Schedule) -> float:
    """The period that the busiest resource allows, without the latency of loops."""
    if schedule == "gpipe":
        return sum(max(float(t[direction].max(initial=0.0)) for t in busy.tables()) for direction in (0, 1))
    return max(float(t.sum(axis=0).max(initial=0.0)) for t in _shared_by_both_passes(busy))


def fill_seconds(arrays: PipelineArrays, busy: BusySeconds) -> float:
    """The time of a step with one microbatch, from commit to commit."""
    count = len(arrays.forward_seconds)
    forward, backward, start = (
        arrays.forward_seconds.tolist(),
        arrays.backward_seconds.tolist(),
        arrays.start_seconds.tolist(),
    )
    forward_transfer, backward_transfer = (t.tolist() for t in arrays.transfer_seconds)
    into: list[list[int]] = [[] for _ in range(count)]
    out: list[list[int]] = [[] for _ in range(count)]
    producer, consumer, returns = (
        arrays.producer.tolist(),
        arrays.consumer.tolist(),
        arrays.backward_transfers.used.tolist(),
    )
    for h in range(len(producer)):
        into[consumer[h]].append(h)
        if returns[h]:
            out[producer[h]].append(h)
    done = [0.0] * count
    for s in range(count):
        done[s] = max([start[s], *(done[producer[h]] + forward_transfer[h] for h in into[s])]) + forward[s]
    end = done
    if arrays.training:
        end = done.copy()
        for s in reversed(range(count)):
            end[s] = max([done[s], *(end[consumer[h]] + backward_transfer[h] for h in out[s])]) + backward[s]
    fill: float = max(e + r for e, r in zip(end, arrays.ready_seconds.tolist(), strict=True))
    return max(fill, *(float(t.sum(axis=0).max(initial=0.0)) for t in _shared_by_both_passes(busy)))


def in_flight_by_stage(stages: int, microbatches: int, depth: int) -> Indices:
    """(stages,) the most microbatches that each stage of a 1F1B pipeline holds."""
    return np.array([in_flight(s, stages, microbatches, depth) for s in range(stages)], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Loops:
    """Seconds around the loop from stage `first + row` forward to stage `column` and back; -inf where there is none."""

    first: int
    seconds: tuple[Floats, ...]  # in blocks of rows


def loops(arrays: PipelineArrays, first: int = 0) -> Loops:
    """The loops that begin at stage `first` or later."""
    count = len(arrays.forward_seconds)
    forward, backward = arrays.transfer_seconds
    into: list[list[int]] = [[] for _ in range(count)]
    for h, c in enumerate(arrays.consumer.tolist()):
        into[c].append(h)
    producer, returns = arrays.producer.tolist(), arrays.backward_transfers.used.tolist()
    forward_step, backward_step = (
        (forward + arrays.forward_seconds[arrays.producer]).tolist(),
        (backward + arrays.backward_seconds[arrays.producer]).tolist(),
    )
    blocks = []
    for begin in range(first, count, _BLOCK):
        rows = min(_BLOCK, count - begin)
        # (stages, rows): from the start of the row's forward pass to that of the stage's; the same for backward, end to end.
        out = np.full((count, rows), -np.inf)
        back = out.copy()
        for t in range(begin, count):
            if t - begin < rows:
                out[t, t - begin] = back[t, t - begin] = 0.0
            for h in into[t]:
                p = producer[h]
                if p >= begin:
                    np.maximum(out[t], out[p] + forward_step[h], out=out[t])
                    if returns[h]:
                        np.maximum(back[t], back[p] + backward_step[h], out=back[t])
        blocks.append((out + back + (arrays.forward_seconds + arrays.backward_seconds)[:, None]).T)
    return Loops(first, tuple(blocks))


def slowest_loop(feedback: Loops, held: Indices, microbatches: int, period: float) -> tuple[float, int, int]:
    """The longest mean period that the latency of a loop sets, where resources allow `period`, and the first and last stage of
    that loop; 0 where none does. The microbatches in a loop follow each other at `period`, the next ones wait."""
    worst, begin = (0.0, 0, 0), feedback.first
    for block in feedback.seconds:
        skipped = max(0, _stages_that_hold_all(held, microbatches) - begin)
        if skipped < len(block):
            rows = held[begin + skipped : begin + len(block), None]
            rounds, remainder = np.divmod(microbatches - 1, np.maximum(rows - held[None, :] + 1, 1))
            # -inf stays -inf: `rounds` is at least 1 here.
            mean = (rounds * block[skipped:] + remainder * period) / (microbatches - 1)
            row, column = divmod(int(np.argmax(mean)), mean.shape[1])
            if mean[row, column] > worst[0]:
                worst = float(mean[row, column]), begin + skipped + row, column
        begin += len(block)
    return worst


def _stages_that_hold_all(held: Indices, microbatches: int) -> int:
    """The number of leading stages that hold every microbatch of the step: no loop begins at them."""
    return int((held >= microbatches).sum())


def group_sums(group: Indices, values: Floats, groups: int) -> Floats:
    """The sum of the values of each group."""
    sums: Floats = np.bincount(group, weights=values, minlength=groups).astype(np.float64)
    return sums


def _stages_on_machine(arrays: PipelineArrays) -> Floats:
    """(stages,) how many stages run on the same machine."""
    counts: Floats = np.bincount(arrays.machine).astype(np.float64)[arrays.machine]
    return counts


def _cores_per_stage(arrays: PipelineArrays) -> Floats:
    """(stages,) an even share of the machine's cores; inf where they are not shared."""
    cores = np.full(int(arrays.machine.max()) + 1, inf)
    np.minimum.at(
        cores, arrays.machine, arrays.cores
    )  # peers with more threads count fewer of the same machine
    shares: Floats = cores[arrays.machine] / _stages_on_machine(arrays)
    return shares


def _link_seconds(arrays: PipelineArrays, transfers: Transfers, sender: Indices, receiver: Indices) -> Floats:
    """(hops,) busy seconds of each hop's link, summed over the hops between the same two peers."""
    seconds = transfers.bytes / transfers.bytes_per_second
    if int(arrays.owner.max()) + 1 == len(arrays.owner):
        return seconds
    key = arrays.owner[sender] * (int(arrays.owner.max()) + 1) + arrays.owner[receiver]
    _, at = np.unique(key, return_inverse=True)
    return group_sums(at, seconds, len(at))[at]


def _shared_by_both_passes(busy: BusySeconds) -> tuple[Floats, ...]:
    """Tables whose two passes share a resource; links are full duplex, so each direction counts alone."""
    return busy.stages, busy.uplinks, busy.downlinks, busy.codecs, busy.machines, busy.links.reshape(1, -1)


def _bottleneck(pipeline: Pipeline, arrays: PipelineArrays, busy: BusySeconds) -> tuple[float, str]:
    owners = pipeline.owners
    descriptions = {
        "stages": lambda s: f"compute of stage {s} on {owners[s]}",
        "uplinks": lambda s: f"uplink of {owners[s]}",
        "downlinks": lambda s: f"downlink of {owners[s]}",
        "codecs": lambda s: f"codec of {owners[s]}",
        "machines": lambda s: f"cores of the machine of {owners[s]}",
    }
    name, seconds = "", -1.0
    for kind, table in zip(descriptions, _shared_by_both_passes(busy)[:-1], strict=True):
        both = table.sum(axis=0)
        at = int(np.argmax(both))
        if both[at] > seconds:
            name, seconds = descriptions[kind](at), float(both[at])
    if busy.links.size:
        direction, hop = divmod(int(np.argmax(busy.links)), busy.links.shape[1])
        if busy.links[direction, hop] >= seconds:
            ends = (owners[arrays.producer[hop]], owners[arrays.consumer[hop]])
            seconds, name = (
                float(busy.links[direction, hop]),
                "link {} -> {}".format(*(ends, ends[::-1])[direction]),
            )
    return (seconds if pipeline.schedule == "1f1b" or not pipeline.training
            else period_seconds(busy, "gpipe")), name  # fmt: skip
