"""A pipeline as arrays, by stage and by hop: the input of `fusion.dag.placement.step_model`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion.dag.placement.network import Link, Network
from fusion.dag.placement.pipeline import Pipeline

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

LOOPBACK = Link(alpha_seconds=0.0, bytes_per_second=inf)  # between two stages of one peer


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfers:
    """Transfers of one microbatch in one direction, by hop, in the alpha-beta model."""

    used: npt.NDArray[np.bool_]  # whether anything is sent
    bytes: Floats
    encode_seconds: Floats
    decode_seconds: Floats
    alpha_seconds: Floats
    bytes_per_second: Floats  # of the link, without the limits of lines
    sent_seconds: Floats  # core time on the sender's machine, to carry it
    received_seconds: Floats  # the same on the receiver's


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineArrays:
    """A pipeline as arrays: by stage, and by hop, which sums all flows from one stage to another."""

    forward_seconds: Floats
    backward_seconds: Floats
    update_seconds: Floats
    start_seconds: Floats  # from the last commit until the stage may begin, the update included
    ready_seconds: Floats  # from the end of its last pass until the lead has its `ready`; in serving, until stage 0 has the answer
    owner: Indices  # the peer, by number
    machine: Indices  # the machine, by number
    cores: Floats  # of the machine; inf: not shared
    up: Floats  # bytes a second of the stage's owner
    down: Floats
    producer: Indices  # by hop, ascending
    consumer: Indices  # ascending where the producer is the same
    forward_transfers: Transfers
    backward_transfers: Transfers
    training: bool

    @cached_property
    def transfer_seconds(self) -> tuple[Floats, Floats]:
        """Seconds from the end of one stage's pass to the start of the other's, over each hop, forward and backward."""
        order = np.argsort(self.consumer, kind="stable")
        inverse = np.argsort(order)
        return (
            self._direction_seconds(
                self.forward_transfers, self.producer, self.consumer, slice(None), slice(None)
            ),
            self._direction_seconds(self.backward_transfers, self.consumer, self.producer, order, inverse),
        )

    def _direction_seconds(
        self, transfers: Transfers, sender: Indices, receiver: Indices, order: Any, inverse: Any
    ) -> Floats:
        # A stage sends to one neighbour after the other: a hop waits in the uplink for those before it.
        grouped = sender[order]
        starts = np.searchsorted(grouped, grouped)
        sent, encoded = (
            (np.cumsum(v[order]) - np.concatenate(([0.0], np.cumsum(v[order])))[starts])[inverse]
            for v in (transfers.bytes, transfers.encode_seconds)
        )
        wire = np.maximum(transfers.bytes / transfers.bytes_per_second, sent / self.up[sender])
        wire = np.maximum(wire, transfers.bytes / self.down[receiver])
        seconds: Floats = encoded + transfers.alpha_seconds + wire + transfers.decode_seconds
        return seconds


def pipeline_arrays(pipeline: Pipeline) -> PipelineArrays:
    network, owners = pipeline.network, pipeline.owners
    devices = [network.device(owner) for owner in owners]
    number = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    pairs, sums, returns = _hops(pipeline)
    ends = [(owners[a], owners[b]) for a, b in pairs]
    stages = [(s.forward_seconds, s.backward_seconds, s.update_seconds) for s in pipeline.stages]
    forward, backward, update = np.array(stages).reshape(len(owners), 3).T
    start, ready = handshake_seconds(
        np.array([_link(network, owners[0], owner).alpha_seconds for owner in owners]),
        np.array([_link(network, owner, owners[0]).alpha_seconds for owner in owners]),
        pipeline.training,
    )
    return PipelineArrays(
        forward_seconds=forward,
        backward_seconds=backward,
        update_seconds=update,
        start_seconds=start + update,
        ready_seconds=ready,
        owner=np.array([number[owner] for owner in owners], dtype=np.int64),
        machine=network.machines[[network.index[owner] for owner in owners]],
        cores=np.array([d.machine.cores for d in devices]),
        up=np.array([d.up_bytes_per_second for d in devices]),
        down=np.array([d.down_bytes_per_second for d in devices]),
        producer=pairs[:, 0],
        consumer=pairs[:, 1],
        forward_transfers=_transfers(network, ends, sums[0], np.ones(len(ends), dtype=bool)),
        backward_transfers=_transfers(network, [end[::-1] for end in ends], sums[1], returns),
        training=pipeline.training,
    )


def handshake_seconds(from_lead: Floats, to_lead: Floats, training: bool) -> tuple[Floats, Floats]:
    """`start_seconds` without the update, and `ready_seconds`, from the latencies between the lead, which owns stage 0, and each stage."""
    if training:
        return from_lead, to_lead
    return np.zeros_like(from_lead), np.where(np.arange(len(to_lead)) == len(to_lead) - 1, to_lead, 0.0)


def _hops(pipeline: Pipeline) -> tuple[Indices, Floats, npt.NDArray[np.bool_]]:
    """(hops, 2) producer and consumer; (2, 4, hops) bytes, seconds to encode, seconds to decode and messages of one microbatch,
    forward and backward; (hops,) whether gradients are sent back."""
    sums: dict[tuple[int, int], Floats] = {}
    returns: set[tuple[int, int]] = set()
    for flow in sorted(pipeline.flows, key=lambda f: (f.producer, f.consumer)):
        hop = flow.producer, flow.consumer
        sent = sums.setdefault(hop, np.zeros((2, 4)))
        local = pipeline.owners[flow.producer] == pipeline.owners[flow.consumer]
        for direction, cost in enumerate((flow.forward, flow.backward)):
            if cost is not None and not local:
                encode, decode = cost.encode_seconds_per_element, cost.decode_seconds_per_element
                sent[direction] += (
                    cost.bytes(flow.elements),
                    encode * flow.elements,
                    decode * flow.elements,
                    1,
                )
        if flow.backward is not None:
            returns.add(hop)
    pairs = np.array(list(sums), dtype=np.int64).reshape(-1, 2)
    table = np.array(list(sums.values())).reshape(-1, 2, 4).transpose(1, 2, 0)
    return pairs, table, np.array([hop in returns for hop in sums], dtype=bool)


def _transfers(
    network: Network, ends: Sequence[tuple[str, str]], sums: Floats, used: npt.NDArray[np.bool_]
) -> Transfers:
    """`ends`: sender and receiver over each hop; `sums`: a row of `_hops`."""
    bytes_, encode, decode, messages = sums
    links = [_link(network, a, b) for a, b in ends]
    rates = [network.rate(a, b) if a != b else inf for a, b in ends]

    def carried(peers: Iterable[str]) -> Floats:
        # As in `fusion.dag.placement.simulate`: half at either end.
        costs = zip(peers, bytes_, rates, messages, strict=True)
        return np.array([network.device(p).machine.carry_seconds(b, rate, m) / 2 for p, b, rate, m in costs])

    return Transfers(
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
    return network.link(a, b) if a != b else LOOPBACK
