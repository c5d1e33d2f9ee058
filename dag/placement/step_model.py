"""How long a step of a pipeline takes, in closed form: THE model, by which placements are compared.

    seconds = fill + (microbatches - 1) * period

`fill` is the first microbatch alone, from commit to commit: the lead's `commit`, each stage's update, every stage
and link once, both passes, and each stage's `ready` to the lead, along the longest path. `period` is what
the busiest of these needs for one microbatch: a stage's compute; a link; a peer's uplink or downlink, shared by all its
flows in both passes (FusionLLM, arXiv 2410.12707); its codec thread; its share of the cores of its machine, which compute,
code and carry messages (an even share: stages that left it to others would keep these waiting). Latency adds a term where a
schedule holds few microbatches: stages s <= t of 1F1B let held(s) - held(t) + 1 microbatches into the loop that runs forward from s to t
and back (t runs the backward pass of an earlier microbatch next); when they are through, the next ones go round.
GPipe runs its passes one after the other: each has a period of its own, and no loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion.dag.placement.network import Link, Network
from fusion.dag.placement.pipeline import Pipeline
from fusion.dag.placement.schedule import Schedule, in_flight

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

HERE = Link(alpha_seconds=0.0, bytes_per_second=inf)  # between two stages on one machine
_BLOCK = 512  # stages whose loops are measured at once: a square of 10 000 would not fit


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Busy seconds are those of a whole step."""

    seconds: float
    bound_seconds: float  # the busiest of all, busy all the time: nothing with this placement can be faster
    bottleneck: str  # what sets the period, for people
    fill_seconds: float
    period_seconds: float  # from one microbatch to the next, on average
    stage_busy_seconds: tuple[float, ...]
    link_busy_seconds: Mapping[tuple[str, str], float]
    uplink_busy_seconds: Mapping[str, float]
    downlink_busy_seconds: Mapping[str, float]
    codec_busy_seconds: Mapping[str, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Passage:
    """One way over each hop: what one microbatch sends, and over what."""

    used: npt.NDArray[np.bool_]
    bytes: Floats
    encode_seconds: Floats
    decode_seconds: Floats
    alpha_seconds: Floats
    bytes_per_second: Floats  # the pair's own limit
    sent_seconds: Floats  # of the cores of the sender's machine, to carry it
    received_seconds: Floats  # of those of the reader's


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """A pipeline as arrays: by stage, and by hop, which is all flows from one stage to another."""

    forward: Floats
    backward: Floats
    update: Floats
    begin: Floats  # from the last commit until the stage may begin
    ready: Floats  # from the end of its last pass until the lead knows; in serving, until the first stage has the answer
    owner: Indices  # equal numbers, equal peers
    machine: Indices  # equal numbers, equal cores
    cores: Floats  # of the machine of the stage's owner; inf: not shared
    up: Floats  # bytes a second of the stage's owner
    down: Floats
    producer: Indices  # by hop, ascending
    consumer: Indices  # ascending where the producer is the same
    there: Passage
    back: Passage
    training: bool

    @cached_property
    def transits(self) -> tuple[Floats, Floats]:
        """Seconds from the end of one stage's pass to the start of the other's, over each hop, there and back."""
        order = np.argsort(self.consumer, kind="stable")
        again = np.argsort(order)
        return (
            self._transit(self.there, self.producer, self.consumer, slice(None), slice(None)),
            self._transit(self.back, self.consumer, self.producer, order, again),
        )

    def _transit(self, way: Passage, sender: Indices, receiver: Indices, order: Any, again: Any) -> Floats:
        # A stage sends to one neighbour after the other; its uplink is through with a hop after all before it.
        grouped = sender[order]
        starts = np.searchsorted(grouped, grouped)
        sent, encoded = (
            (np.cumsum(v[order]) - np.concatenate(([0.0], np.cumsum(v[order])))[starts])[again]
            for v in (way.bytes, way.encode_seconds)
        )
        wire = np.maximum(way.bytes / way.bytes_per_second, sent / self.up[sender])
        wire = np.maximum(wire, way.bytes / self.down[receiver])
        found: Floats = encoded + way.alpha_seconds + wire + way.decode_seconds
        return found


@dataclass(frozen=True, eq=False)
class Busy:
    """Seconds a microbatch, forward and backward passes in the two rows."""

    stages: Floats  # (2, stages)
    pairs: Floats  # (2, hops): on the link from producer to consumer, and on the link back
    uplinks: Floats  # (2, stages): of the stage's owner, as all of the following
    downlinks: Floats
    codecs: Floats
    machines: Floats  # of an even share of the cores of the owner's machine: computing, coding and carrying

    def most(self) -> tuple[Floats, ...]:
        return self.stages, self.pairs, self.uplinks, self.downlinks, self.codecs, self.machines


def step_seconds(pipeline: Pipeline) -> Prediction:
    work, count, m = work_of(pipeline), len(pipeline.stages), pipeline.microbatches
    load = busy(work)
    fill = fill_seconds(work, load)
    period, where = _busiest(pipeline, work, load)
    if pipeline.training and pipeline.schedule == "1f1b" and m > 1:
        held = held_by(count, m, pipeline.depth)
        loop, first, last = worst_loop(loops(work, _outside(held, m)), held, m, period)
        if loop > period * (1 + 1e-9):
            period = loop
            where = f"latency between stages {first} and {last}, with {held[first]} microbatches in flight"
    names = [pipeline.owners[s] for s in range(count)]
    stage_busy = m * load.stages.sum(axis=0) + work.update
    links: dict[tuple[str, str], float] = {}
    for h, (a, b) in enumerate(zip(work.producer, work.consumer, strict=True)):
        for way, pair in enumerate(((names[a], names[b]), (names[b], names[a]))):
            if load.pairs[way, h]:
                links[pair] = links.get(pair, 0.0) + m * float(load.pairs[way, h])
    uplinks, downlinks, codecs = (
        {names[s]: m * float(row[s]) for s in range(count) if row[s]}
        for row in (table.sum(axis=0) for table in (load.uplinks, load.downlinks, load.codecs))
    )
    every = (*links.values(), *uplinks.values(), *downlinks.values(), *codecs.values())
    least = least_seconds(work, load, m)
    return Prediction(
        seconds=max(fill + (m - 1) * period, least),
        bound_seconds=max((least, *every)),
        bottleneck=where,
        fill_seconds=fill,
        period_seconds=period,
        stage_busy_seconds=tuple(float(s) for s in stage_busy),
        link_busy_seconds=links,
        uplink_busy_seconds=uplinks,
        downlink_busy_seconds=downlinks,
        codec_busy_seconds=codecs,
    )


def busy(work: Work) -> Busy:
    """What one microbatch takes of everything that it uses."""
    count = int(work.owner.max()) + 1

    def by_owner(stage: Indices, seconds: Floats) -> Floats:
        return total(work.owner[stage], seconds, count)[work.owner]

    everywhere = np.arange(len(work.owner))
    pairs, up, down, codecs, machines = [], [], [], [], []
    for passage, sender, receiver, compute in (
        (work.there, work.producer, work.consumer, work.forward),
        (work.back, work.consumer, work.producer, work.backward),
    ):
        pairs.append(_by_pair(work, passage, sender, receiver))
        up.append(by_owner(sender, passage.bytes / work.up[sender]))
        down.append(by_owner(receiver, passage.bytes / work.down[receiver]))
        codecs.append(by_owner(sender, passage.encode_seconds) + by_owner(receiver, passage.decode_seconds))
        spent = compute + total(sender, passage.sent_seconds + passage.encode_seconds, len(compute))
        spent += total(receiver, passage.received_seconds + passage.decode_seconds, len(compute))
        machines.append(spent / _even_shares(work))
    stages = [by_owner(everywhere, work.forward), by_owner(everywhere, work.backward)]
    return Busy(*(np.stack(rows) for rows in (stages, pairs, up, down, codecs, machines)))


def least_seconds(work: Work, load: Busy, microbatches: int) -> float:
    """Of a step: what computes is busy for so long, however well microbatches follow each other, and stages share cores."""
    stages = microbatches * load.stages.sum(axis=0) + work.update
    machines = (microbatches * load.machines.sum(axis=0) + work.update / _even_shares(work)) / _beside(work)
    return float(max(stages.max(), total(work.machine, machines, len(machines)).max()))


def period_seconds(load: Busy, schedule: Schedule) -> float:
    """Of the busiest; loops are not in it."""
    if schedule == "gpipe":
        return sum(max(float(t[way].max(initial=0.0)) for t in load.most()) for way in (0, 1))
    return max(float(t.sum(axis=0).max(initial=0.0)) for t in _shared(load))


def fill_seconds(work: Work, load: Busy) -> float:
    """A step of one microbatch, from commit to commit."""
    count = len(work.forward)
    forward, backward, begin = work.forward.tolist(), work.backward.tolist(), work.begin.tolist()
    there, back = (t.tolist() for t in work.transits)
    into: list[list[int]] = [[] for _ in range(count)]
    out: list[list[int]] = [[] for _ in range(count)]
    producer, consumer, returns = work.producer.tolist(), work.consumer.tolist(), work.back.used.tolist()
    for h in range(len(producer)):
        into[consumer[h]].append(h)
        if returns[h]:
            out[producer[h]].append(h)
    done = [0.0] * count
    for s in range(count):
        done[s] = max([begin[s], *(done[producer[h]] + there[h] for h in into[s])]) + forward[s]
    end = done
    if work.training:
        end = done.copy()
        for s in reversed(range(count)):
            end[s] = max([done[s], *(end[consumer[h]] + back[h] for h in out[s])]) + backward[s]
    whole: float = max(e + r for e, r in zip(end, work.ready.tolist(), strict=True))
    return max(whole, *(float(t.sum(axis=0).max(initial=0.0)) for t in _shared(load)))


def held_by(stages: int, microbatches: int, depth: int) -> Indices:
    """Microbatches that each stage of a 1F1B pipeline holds at most."""
    return np.array([in_flight(s, stages, microbatches, depth) for s in range(stages)], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Loops:
    """Seconds around the loop from stage `first + row` forward to stage `column` and back; -inf where none runs."""

    first: int
    seconds: tuple[Floats, ...]  # in blocks of rows


def loops(work: Work, first: int = 0) -> Loops:
    """Of all stages from `first` on."""
    count = len(work.forward)
    there, back = work.transits
    into: list[list[int]] = [[] for _ in range(count)]
    for h, c in enumerate(work.consumer.tolist()):
        into[c].append(h)
    producer, returns = work.producer.tolist(), work.back.used.tolist()
    on, again = (there + work.forward[work.producer]).tolist(), (back + work.backward[work.producer]).tolist()
    blocks = []
    for begin in range(first, count, _BLOCK):
        rows = min(_BLOCK, count - begin)
        # (stages, rows): from the start of a row's forward to that of the stage's; and of backward, end to end.
        out = np.full((count, rows), -np.inf)
        home = out.copy()
        for t in range(begin, count):
            if t - begin < rows:
                out[t, t - begin] = home[t, t - begin] = 0.0
            for h in into[t]:
                p = producer[h]
                if p >= begin:
                    np.maximum(out[t], out[p] + on[h], out=out[t])
                    if returns[h]:
                        np.maximum(home[t], home[p] + again[h], out=home[t])
        blocks.append((out + home + (work.forward + work.backward)[:, None]).T)
    return Loops(first, tuple(blocks))


def worst_loop(found: Loops, held: Indices, microbatches: int, period: float) -> tuple[float, int, int]:
    """The mean period that latency allows where all else allows `period`, and the first and last stage of the loop that
    sets it; 0 where none does. The microbatches that a loop holds follow each other at `period`, the next ones wait."""
    worst, begin = (0.0, 0, 0), found.first
    for block in found.seconds:
        skipped = max(0, _outside(held, microbatches) - begin)
        if skipped < len(block):
            rows = held[begin + skipped : begin + len(block), None]
            rounds, rest = np.divmod(microbatches - 1, np.maximum(rows - held[None, :] + 1, 1))
            # Where no loop runs, -inf stays -inf: every loop that is looked at goes round once or more.
            mean = (rounds * block[skipped:] + rest * period) / (microbatches - 1)
            row, column = divmod(int(np.argmax(mean)), mean.shape[1])
            if mean[row, column] > worst[0]:
                worst = float(mean[row, column]), begin + skipped + row, column
        begin += len(block)
    return worst


def _outside(held: Indices, microbatches: int) -> int:
    """How many stages, from the first, hold every microbatch of the step, so that no loop begins at them."""
    return int((held >= microbatches).sum())


def handshake(from_lead: Floats, to_lead: Floats, training: bool) -> tuple[Floats, Floats]:
    """`begin` without the update, and `ready`, from the latencies between the owner of stage 0, which leads, and each."""
    if training:
        return from_lead, to_lead
    return np.zeros_like(from_lead), np.where(np.arange(len(to_lead)) == len(to_lead) - 1, to_lead, 0.0)


def work_of(pipeline: Pipeline) -> Work:
    network, owners = pipeline.network, pipeline.owners
    devices = [network.device(owner) for owner in owners]
    number = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    pairs, sums, returns = _hops(pipeline)
    ends = [(owners[a], owners[b]) for a, b in pairs]
    stages = [(s.forward_seconds, s.backward_seconds, s.update_seconds) for s in pipeline.stages]
    forward, backward, update = np.array(stages).reshape(len(owners), 3).T
    begin, ready = handshake(
        np.array([_link(network, owners[0], owner).alpha_seconds for owner in owners]),
        np.array([_link(network, owner, owners[0]).alpha_seconds for owner in owners]),
        pipeline.training,
    )
    return Work(
        forward=forward,
        backward=backward,
        update=update,
        begin=begin + update,
        ready=ready,
        owner=np.array([number[owner] for owner in owners], dtype=np.int64),
        machine=network.machines[[network.index[owner] for owner in owners]],
        cores=np.array([d.shared.cores for d in devices]),
        up=np.array([d.up_bytes_per_second for d in devices]),
        down=np.array([d.down_bytes_per_second for d in devices]),
        producer=pairs[:, 0],
        consumer=pairs[:, 1],
        there=_passage(network, ends, sums[0], np.ones(len(ends), dtype=bool)),
        back=_passage(network, [end[::-1] for end in ends], sums[1], returns),
        training=pipeline.training,
    )


def _hops(pipeline: Pipeline) -> tuple[Indices, Floats, npt.NDArray[np.bool_]]:
    """(hops, 2) producer and consumer; (2, 4, hops) what one microbatch sends there and back: bytes, seconds to encode, seconds to
    decode, messages; and over which hops gradients come back."""
    sums: dict[tuple[int, int], Floats] = {}
    returns: set[tuple[int, int]] = set()
    for flow in sorted(pipeline.flows, key=lambda f: (f.producer, f.consumer)):
        hop = flow.producer, flow.consumer
        sent = sums.setdefault(hop, np.zeros((2, 4)))
        here = pipeline.owners[flow.producer] == pipeline.owners[flow.consumer]
        for way, cost in enumerate((flow.forward, flow.backward)):
            if cost is not None and not here:
                encode, decode = cost.encode_seconds_per_element, cost.decode_seconds_per_element
                sent[way] += (cost.bytes(flow.elements), encode * flow.elements, decode * flow.elements, 1)
        if flow.backward is not None:
            returns.add(hop)
    pairs = np.array(list(sums), dtype=np.int64).reshape(-1, 2)
    table = np.array(list(sums.values())).reshape(-1, 2, 4).transpose(1, 2, 0)
    return pairs, table, np.array([hop in returns for hop in sums], dtype=bool)


def _passage(
    network: Network, ends: Sequence[tuple[str, str]], sums: Floats, used: npt.NDArray[np.bool_]
) -> Passage:
    """`ends`: sender and receiver over each hop; `sums`: a row of `_hops`."""
    bytes_, encode, decode, messages = sums
    links = [_link(network, a, b) for a, b in ends]
    rates = [network.rate(a, b) if a != b else inf for a, b in ends]

    def carried(peers: Iterable[str]) -> Floats:
        # As `fusion.dag.placement.simulate` has it: half by either end.
        costs = zip(peers, bytes_, rates, messages, strict=True)
        return np.array([network.device(p).shared.carry_seconds(b, rate, m) / 2 for p, b, rate, m in costs])

    return Passage(
        used=used,
        bytes=bytes_,
        encode_seconds=encode,
        decode_seconds=decode,
        alpha_seconds=np.array([link.alpha_seconds for link in links]),
        bytes_per_second=np.array([link.bytes_per_second for link in links]),
        sent_seconds=carried(a for a, _ in ends),
        received_seconds=carried(b for _, b in ends),
    )


def _link(network: Network, a: str, b: str) -> Link:
    return network.link(a, b) if a != b else HERE


def total(group: Indices, values: Floats, groups: int) -> Floats:
    """The sum of the values of each group."""
    found: Floats = np.bincount(group, weights=values, minlength=groups).astype(np.float64)
    return found


def _beside(work: Work) -> Floats:
    """How many stages the machine of each stage's owner runs."""
    found: Floats = np.bincount(work.machine).astype(np.float64)[work.machine]
    return found


def _even_shares(work: Work) -> Floats:
    """Cores for each stage; inf where they are not shared."""
    cores = np.full(int(work.machine.max()) + 1, inf)
    np.minimum.at(cores, work.machine, work.cores)  # peers with more threads count fewer of the same machine
    found: Floats = cores[work.machine] / _beside(work)
    return found


def _by_pair(work: Work, passage: Passage, sender: Indices, receiver: Indices) -> Floats:
    """Busy seconds of each hop's link, which other hops of the same two machines share."""
    seconds = passage.bytes / passage.bytes_per_second
    if int(work.owner.max()) + 1 == len(work.owner):
        return seconds
    key = work.owner[sender] * (int(work.owner.max()) + 1) + work.owner[receiver]
    _, at = np.unique(key, return_inverse=True)
    return total(at, seconds, len(at))[at]


def _shared(load: Busy) -> tuple[Floats, ...]:
    """Tables whose two passes use the same thing; a link has one side for each."""
    return load.stages, load.uplinks, load.downlinks, load.codecs, load.machines, load.pairs.reshape(1, -1)


def _busiest(pipeline: Pipeline, work: Work, load: Busy) -> tuple[float, str]:
    owners = pipeline.owners
    names = {
        "stages": lambda s: f"compute of stage {s} on {owners[s]}",
        "uplinks": lambda s: f"uplink of {owners[s]}",
        "downlinks": lambda s: f"downlink of {owners[s]}",
        "codecs": lambda s: f"codec of {owners[s]}",
        "machines": lambda s: f"cores of the machine of {owners[s]}",
    }
    where, most = "", -1.0
    for kind, table in zip(names, _shared(load)[:-1], strict=True):
        total = table.sum(axis=0)
        at = int(np.argmax(total))
        if total[at] > most:
            where, most = names[kind](at), float(total[at])
    if load.pairs.size:
        way, hop = divmod(int(np.argmax(load.pairs)), load.pairs.shape[1])
        if load.pairs[way, hop] >= most:
            ends = (owners[work.producer[hop]], owners[work.consumer[hop]])
            most, where = float(load.pairs[way, hop]), "link {} -> {}".format(*(ends, ends[::-1])[way])
    return (most if pipeline.schedule == "1f1b" or not pipeline.training
            else period_seconds(load, "gpipe")), where  # fmt: skip
