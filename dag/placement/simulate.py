"""One training step of a pipeline as a discrete-event simulation, to check the closed form of `fusion.dag.placement.step_model`.

Every stage runs the actions of `fusion.dag.placement.schedule` in order, each once its input values have arrived. A peer
computes one action at a time and has one codec worker, which encodes before a send and decodes after a receive
while the peer computes. Between two peers values are sent one after the other; pairs that share an uplink or a downlink
share its rate. A value arrives `alpha_seconds` after its last byte was sent. A step lasts from one commit to the next:
stage 0, which leads, commits, each stage applies the update and begins at once, and each reports when it is done.

Peers on one machine (`Machine`) share its cores for computing, coding and sending.

Not modelled: the ramp-up of a transport after idling, frame headers, tie-group gradients, held-out batches and
snapshots. Sharing is max-min fair among the pairs of one uplink, and among those of one
downlink, and a pair sends at the lower of the two: the share of the other that it leaves unused is not redistributed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from fusion.dag.placement.codec_cost import CodecCost
from fusion.dag.placement.machine import Machine
from fusion.dag.placement.pipeline import Pipeline
from fusion.dag.placement.schedule import Action


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """Traffic of one step over a link; `busy_seconds`: the time it takes at the full rate, 0 without a limit."""

    bytes: float
    busy_seconds: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    step_seconds: float
    stage_busy_seconds: tuple[float, ...]  # computing, the update included
    codec_busy_seconds: Mapping[str, float]  # by peer
    # By (from, to), both passes; busy at `Network.rate` of the pair
    links: Mapping[tuple[str, str], LinkLoad]
    uplinks: Mapping[str, LinkLoad]  # by peer that sends anything
    downlinks: Mapping[str, LinkLoad]
    events: int  # that were simulated


def simulate(pipeline: Pipeline, one_machine: Machine | None = None) -> Trace:
    """Simulate one step of `pipeline`, on the machines of its network, or with all peers on `one_machine`. Deterministic.
    Time and memory are O(microbatches x (stages + flows)), whatever the number of peers of the network."""
    return _Simulation(pipeline, one_machine).run()


class _Cores:
    """Processor sharing: concurrent tasks share the cores equally, at most one core each."""

    def __init__(self, cores: float, simulation: _Simulation) -> None:
        self.limited = cores < inf
        self.simulation = simulation
        self._cores = cores
        # Heap of (value of `_served` at which the task ends, tie-break, worker)
        self._tasks: list[tuple[float, int, _Worker]] = []
        self._started = 0
        self._served = 0.0  # seconds of work that a task running since the start would have received
        self._since = 0.0
        self._version = 0  # of the event that says when the first task ends

    def run(self, seconds: float, worker: _Worker) -> None:
        """Call `worker.done()` after `seconds` of work."""
        self._advance_service()
        self._started += 1
        heapq.heappush(self._tasks, (self._served + seconds, self._started, worker))
        self._schedule_end()

    def _advance_service(self) -> None:
        self._served += (self.simulation.now - self._since) * self._rate()
        self._since = self.simulation.now

    def _rate(self) -> float:
        return min(1.0, self._cores / max(1, len(self._tasks)))

    def _schedule_end(self) -> None:
        self._version += 1
        if self._tasks:
            remaining = max(0.0, self._tasks[0][0] - self._served)
            self.simulation.call_at(
                self.simulation.now + remaining / self._rate(), self._ended, self._version
            )

    def _ended(self, version: int) -> None:
        if version != self._version:  # stale: tasks have started since
            return
        self._advance_service()
        self._served, _, worker = heapq.heappop(self._tasks)
        self._schedule_end()
        worker.done()


@dataclass(eq=False, slots=True)
class _Worker:
    """A thread with a queue of tasks."""

    cores: _Cores
    busy: float = 0.0
    free_at: float = 0.0  # where the cores are not limited
    waiting: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = field(default_factory=deque)

    def submit(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        """Queue a task of `seconds`; `callback(*args)` when it has ended."""
        self.busy += seconds
        if not self.cores.limited:
            self.free_at = max(self.cores.simulation.now, self.free_at) + seconds
            self.cores.simulation.call_at(self.free_at, callback, *args)
            return
        self.waiting.append((seconds, callback, args))
        if len(self.waiting) == 1:
            self.cores.run(seconds, self)

    def done(self) -> None:
        _, callback, args = self.waiting.popleft()
        if self.waiting:
            self.cores.run(self.waiting[0][0], self)
        callback(*args)


@dataclass(eq=False, slots=True)
class _Line:
    """An uplink or a downlink, and the pairs that are sending over it."""

    bytes_per_second: float
    active: list[_Pipe] = field(default_factory=list)
    bytes: float = 0.0

    def shares(self) -> list[float]:
        """Max-min fair rates of `active`."""
        limits = [pipe.limit for pipe in self.active]
        if sum(limits) <= self.bytes_per_second:
            return limits
        remaining, shares = self.bytes_per_second, list(limits)
        for done, i in enumerate(sorted(range(len(limits)), key=limits.__getitem__)):
            shares[i] = min(limits[i], remaining / (len(limits) - done))
            remaining -= shares[i]
        return shares

    def load(self) -> LinkLoad:
        return LinkLoad(bytes=self.bytes, busy_seconds=self.bytes / self.bytes_per_second)


@dataclass(eq=False, slots=True)
class _Pipe:
    """The send queue from one peer to another; the first of `queue` is being sent."""

    limit: float  # bytes a second if it were alone
    alpha_seconds: float
    up: _Line
    down: _Line
    queue: deque[tuple[_Hop, int]] = field(default_factory=deque)
    up_share: float = 0.0
    down_share: float = 0.0
    rate: float = 0.0
    remaining: float = 0.0  # bytes of the first, at `since`
    since: float = 0.0
    version: int = 0  # of the event that says when the first has been sent
    bytes: float = 0.0


@dataclass(eq=False, slots=True)
class _Hop:
    """One direction of a flow. `awaited` counts the values that the reader still waits for."""

    reader: _Stage
    awaited: list[int]  # by microbatch
    bytes: float
    encode_seconds: float
    decode_seconds: float
    send_seconds: float  # core time of the sender to carry it
    receive_seconds: float  # of the reader's
    encoder: _Worker
    decoder: _Worker
    sender: _Worker
    receiver: _Worker
    pipe: _Pipe | None  # None: the same peer reads it


@dataclass(eq=False, slots=True)
class _Stage:
    actions: Sequence[Action]
    worker: _Worker
    lead_alphas: tuple[float, float]  # seconds from the lead to here, and from here to the lead
    update_seconds: float
    forward_seconds: float
    backward_seconds: float
    awaited_forward: list[int]  # values still missing, by microbatch
    awaited_backward: list[int]
    forward_hops: list[_Hop] = field(default_factory=list)
    backward_hops: list[_Hop] = field(default_factory=list)
    at: int = 0  # in actions
    busy: bool = True  # until the update of the step before is applied


class _Simulation:
    def __init__(self, pipeline: Pipeline, one_machine: Machine | None) -> None:
        self.pipeline = pipeline
        self.now = 0.0
        self.events = 0
        self.committed = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        owners = dict.fromkeys(pipeline.owners)
        devices = {d.peer: d for d in pipeline.network.devices if d.peer in owners}
        self.machines = {peer: one_machine or devices[peer].machine for peer in owners}
        limits: dict[str, float] = {}  # peers with more threads count fewer cores of the same machine
        for machine in self.machines.values():
            limits[machine.name] = min(machine.cores, limits.get(machine.name, inf))
        pools = {name: _Cores(limit, self) for name, limit in limits.items()}
        cores = {peer: pools[machine.name] for peer, machine in self.machines.items()}
        self.codecs = {peer: _Worker(cores[peer]) for peer in owners}
        self.transports = {peer: _Worker(cores[peer]) for peer in owners}
        self.ups = {peer: _Line(devices[peer].up_bytes_per_second) for peer in owners}
        self.downs = {peer: _Line(devices[peer].down_bytes_per_second) for peer in owners}
        self.pipes: dict[tuple[str, str], _Pipe] = {}
        self.stages = self._stages({peer: _Worker(cores[peer]) for peer in owners})
        for flow in pipeline.flows:
            self._add_hop(flow.producer, flow.consumer, flow.elements, flow.forward, forward=True)
            if flow.backward is not None:
                self._add_hop(flow.consumer, flow.producer, flow.elements, flow.backward, forward=False)

    def run(self) -> Trace:
        for stage in self.stages:
            self.call_at(stage.lead_alphas[0], self._commit, stage)
        while self._heap:
            self.now, _, handler, args = heapq.heappop(self._heap)
            self.events += 1
            handler(*args)
        assert all(stage.at == len(stage.actions) for stage in self.stages), "the schedule cannot end"
        loads, microbatches = self.pipeline.stages, self.pipeline.microbatches
        return Trace(
            step_seconds=self.committed,
            stage_busy_seconds=tuple(
                microbatches * (s.forward_seconds + s.backward_seconds) + s.update_seconds for s in loads
            ),
            codec_busy_seconds={peer: codec.busy for peer, codec in self.codecs.items()},
            links={
                pair: LinkLoad(bytes=pipe.bytes, busy_seconds=pipe.bytes / pipe.limit)
                for pair, pipe in self.pipes.items()
            },
            uplinks={peer: line.load() for peer, line in self.ups.items() if line.bytes},
            downlinks={peer: line.load() for peer, line in self.downs.items() if line.bytes},
            events=self.events,
        )

    def _stages(self, workers: Mapping[str, _Worker]) -> list[_Stage]:
        network, owners = self.pipeline.network, self.pipeline.owners
        microbatches, lead = self.pipeline.microbatches, owners[0]
        by_in_flight: dict[int, Sequence[Action]] = {}  # equal numbers in flight, equal actions
        stages = []
        for s, (load, owner) in enumerate(zip(self.pipeline.stages, owners, strict=True)):
            held = self.pipeline.in_flight(s)
            if held not in by_in_flight:
                by_in_flight[held] = self.pipeline.actions(s)
            to, back = network.link(lead, owner).alpha_seconds, network.link(owner, lead).alpha_seconds
            stages.append(
                _Stage(
                    actions=by_in_flight[held],
                    worker=workers[owner],
                    lead_alphas=(0.0, 0.0)
                    if owner == lead
                    else (to if self.pipeline.training else 0.0, back),
                    update_seconds=load.update_seconds,
                    forward_seconds=load.forward_seconds,
                    backward_seconds=load.backward_seconds,
                    awaited_forward=[0] * microbatches,
                    awaited_backward=[0] * microbatches,
                )
            )
        return stages

    def _add_hop(self, writer: int, reader: int, elements: int, codec: CodecCost, *, forward: bool) -> None:
        """One direction of a flow, from stage `writer` to stage `reader`."""
        a, b = self.pipeline.owners[writer], self.pipeline.owners[reader]
        stage, bytes_ = self.stages[reader], codec.bytes(elements)
        rate = inf if a == b else self.pipeline.network.rate(a, b)
        send, receive = (
            0.0 if a == b else self.machines[peer].carry_seconds(bytes_, rate) / 2 for peer in (a, b)
        )
        awaited = stage.awaited_forward if forward else stage.awaited_backward
        awaited[:] = [count + 1 for count in awaited]
        hop = _Hop(
            reader=stage,
            awaited=awaited,
            bytes=bytes_,
            encode_seconds=codec.encode_seconds_per_element * elements,
            decode_seconds=codec.decode_seconds_per_element * elements,
            send_seconds=send,
            receive_seconds=receive,
            encoder=self.codecs[a],
            decoder=self.codecs[b],
            sender=self.transports[a],
            receiver=self.transports[b],
            pipe=None if a == b else self._pipe(a, b),
        )
        source = self.stages[writer]
        (source.forward_hops if forward else source.backward_hops).append(hop)

    def _pipe(self, a: str, b: str) -> _Pipe:
        pipe = self.pipes.get((a, b))
        if pipe is None:
            network = self.pipeline.network
            pipe = self.pipes[a, b] = _Pipe(
                limit=network.rate(a, b),
                alpha_seconds=network.link(a, b).alpha_seconds,
                up=self.ups[a],
                down=self.downs[b],
            )
        return pipe

    # --- events and their handlers

    def call_at(self, time: float, handler: Callable[..., None], *args: Any) -> None:
        self._scheduled += 1  # tie-break: events at one time run in the order they were scheduled
        heapq.heappush(self._heap, (time, self._scheduled, handler, args))

    def _commit(self, stage: _Stage) -> None:
        stage.worker.submit(stage.update_seconds, self._idle, stage)

    def _idle(self, stage: _Stage) -> None:
        stage.busy = False
        self._advance(stage)

    def _advance(self, stage: _Stage) -> None:
        """Begin the stage's next action if its inputs have arrived."""
        if stage.busy or stage.at == len(stage.actions):
            return
        action = stage.actions[stage.at]
        if action.kind == "forward":
            awaited, seconds = stage.awaited_forward, stage.forward_seconds
        else:
            awaited, seconds = stage.awaited_backward, stage.backward_seconds
        if not awaited[action.microbatch]:
            stage.busy = True
            stage.worker.submit(seconds, self._computed, stage, action)

    def _computed(self, stage: _Stage, action: Action) -> None:
        stage.at += 1
        for hop in stage.forward_hops if action.kind == "forward" else stage.backward_hops:
            if hop.pipe is None:
                self._arrived(hop, action.microbatch)
            elif hop.encode_seconds:
                hop.encoder.submit(hop.encode_seconds, self._encoded, hop, action.microbatch)
            else:
                self._encoded(hop, action.microbatch)
        if stage.at == len(stage.actions):
            self.committed = max(self.committed, self.now + stage.lead_alphas[1])
        self._idle(stage)

    def _encoded(self, hop: _Hop, microbatch: int) -> None:
        if hop.send_seconds:
            hop.sender.submit(hop.send_seconds, self._queued, hop, microbatch)
        else:
            self._queued(hop, microbatch)

    def _queued(self, hop: _Hop, microbatch: int) -> None:
        pipe = hop.pipe
        assert pipe is not None
        pipe.bytes += hop.bytes
        pipe.up.bytes += hop.bytes
        pipe.down.bytes += hop.bytes
        pipe.queue.append((hop, microbatch))
        if len(pipe.queue) == 1:
            pipe.remaining, pipe.since, pipe.rate = hop.bytes, self.now, 0.0
            pipe.up.active.append(pipe)
            pipe.down.active.append(pipe)
            self._share(pipe)

    def _share(self, changed: _Pipe) -> None:
        """New rates for all pairs that share a line with `changed`, which has started or stopped sending."""
        for pipe, share in zip(changed.up.active, changed.up.shares(), strict=True):
            pipe.up_share = share
        for pipe, share in zip(changed.down.active, changed.down.shares(), strict=True):
            pipe.down_share = share
        for pipe in (*changed.up.active, *changed.down.active):
            rate = min(pipe.up_share, pipe.down_share)
            if rate != pipe.rate:
                if pipe.rate < inf:
                    pipe.remaining -= pipe.rate * (self.now - pipe.since)
                pipe.since, pipe.rate = self.now, rate
                self._schedule_sent(pipe)

    def _schedule_sent(self, pipe: _Pipe) -> None:
        pipe.version += 1
        self.call_at(self.now + max(0.0, pipe.remaining) / pipe.rate, self._sent, pipe, pipe.version)

    def _sent(self, pipe: _Pipe, version: int) -> None:
        if version != pipe.version:  # stale: the rate has changed since
            return
        hop, microbatch = pipe.queue.popleft()
        if pipe.queue:
            pipe.remaining, pipe.since = pipe.queue[0][0].bytes, self.now
            self._schedule_sent(pipe)
        else:
            pipe.up.active.remove(pipe)
            pipe.down.active.remove(pipe)
            self._share(pipe)
        self.call_at(self.now + pipe.alpha_seconds, self._delivered, hop, microbatch)

    def _delivered(self, hop: _Hop, microbatch: int) -> None:
        if hop.receive_seconds:
            hop.receiver.submit(hop.receive_seconds, self._received, hop, microbatch)
        else:
            self._received(hop, microbatch)

    def _received(self, hop: _Hop, microbatch: int) -> None:
        if hop.decode_seconds:
            hop.decoder.submit(hop.decode_seconds, self._arrived, hop, microbatch)
        else:
            self._arrived(hop, microbatch)

    def _arrived(self, hop: _Hop, microbatch: int) -> None:
        hop.awaited[microbatch] -= 1
        self._advance(hop.reader)
