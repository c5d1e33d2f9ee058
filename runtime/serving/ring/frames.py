"""Payloads between two stages of a served model: the plan fixes names, dtypes and shapes, so frames carry only data.

A parcel is the payload of one `chunk` frame: the token ids of its positions where a later stage reads them, then
each edge's tensor in the order of the plan, row-major. Its size follows from the number of positions. The source of an
encoder-decoder goes around the ring in the same way, by a plan of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch

from fusion.dag.cutting.source import SOURCE, SOURCE_INPUTS, halves
from fusion.dag.cutting.stage import Edge, Stage
from fusion.dag.ir.dims import Poly, bind, symbols_of
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DTYPE_BYTES, Input, TensorType
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.serving.requests.header_fields import TOKEN_BYTES, whole
from fusion.swarm.errors import FrameError

KEPT_LAYOUTS = 64  # positions of the longest chunk whose layout is cached


Layout = tuple[Edge, tuple[int, ...], int]  # shape, bytes


@dataclass(frozen=True)
class Parcel:
    """What stage `producer` sends to stage `consumer` for a chunk of positions."""

    producer: int
    consumer: int
    edges: tuple[Edge, ...]
    ids: bool  # the token ids of the chunk, or the source itself, come first
    symbol: str = "sequence"  # the dimension that chunks are pieces of
    id_bytes: int = TOKEN_BYTES  # of the ids, or the source, for each position
    # By the length of a chunk, cached: needed three times for each token.
    _layouts: dict[int, tuple[Layout, ...]] = field(default_factory=dict, compare=False, repr=False)

    def layout(self, length: int) -> tuple[Layout, ...]:
        """Shape and size in bytes of each edge for `length` positions of one sequence."""
        if (cached := self._layouts.get(length)) is not None:
            return cached
        sizes = {"batch": 1, self.symbol: length}
        edges = []
        for edge in self.edges:
            shape = tuple(bind(dim, sizes) for dim in edge.type.shape)
            edges.append((edge, shape, prod(shape) * DTYPE_BYTES[edge.type.dtype]))
        layout = tuple(edges)
        if length <= KEPT_LAYOUTS:
            self._layouts[length] = layout
        return layout

    def size_bytes(self, length: int) -> int:
        return length * self.id_bytes * self.ids + sum(size for _, _, size in self.layout(length))

    def size_of(self, header: Mapping[str, Any]) -> int:
        """Payload bytes of a `chunk` frame with this header. FrameError, JobError where its length is not valid."""
        length = whole(header, "length", 0)
        if length < 1:
            raise FrameError(f"a chunk of {length} positions")
        return self.size_bytes(length)

    def most_bytes(self, serve: ServeConfig) -> int:
        """Bytes of the largest payload."""
        whole_source = 0 if serve.source is None else serve.source.length
        return self.size_bytes(whole_source if self.symbol == SOURCE else serve.max_sequence)

    def pack(self, outputs: Mapping[str, torch.Tensor], ids: memoryview) -> list[memoryview]:
        """Buffers of the payload; `ids`: bytes of the chunk's token ids. Copies only tensors that are not contiguous on the CPU."""
        buffers = [ids] if self.ids else []
        for edge in self.edges:
            value = outputs[edge.name]
            if not value.is_cpu or value.requires_grad:
                value = value.detach().cpu()
            buffers.append(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        return buffers

    def unpack(self, payload: memoryview, length: int, inputs: dict[str, torch.Tensor]) -> memoryview | None:
        """Put the tensors, which share the payload's memory, into `inputs` by edge name. Returns the bytes of the token ids where the
        parcel has them. The payload's size must have been checked."""
        offset = length * self.id_bytes if self.ids else 0
        for edge, shape, size in self.layout(length):
            if size:
                part = payload[offset : offset + size]
                inputs[edge.name] = torch.frombuffer(part, dtype=TORCH_DTYPES[edge.type.dtype]).view(shape)
            else:
                inputs[edge.name] = torch.empty(shape, dtype=TORCH_DTYPES[edge.type.dtype])
            offset += size
        return payload[: length * self.id_bytes] if self.ids else None


def unpack_source(type_: TensorType, data: memoryview, length: int) -> torch.Tensor:
    """The source of one session as the model's input: ids (1, length), or features (1, channels, length). The size of `data` must have
    been checked."""
    buffer = bytearray(data)
    if type_.dtype == "int64":
        return torch.frombuffer(buffer, dtype=torch.int64).unsqueeze(0)
    return torch.frombuffer(buffer, dtype=torch.float32).view(1, -1, length).to(TORCH_DTYPES[type_.dtype])


@dataclass(frozen=True)
class RingPlan:
    """One stage's part in the ring: what it receives and sends, and which model inputs it makes itself."""

    index: int
    stages: int
    incoming: tuple[Parcel, ...]  # by producer, ascending; the stage before is always among them
    outgoing: tuple[Parcel, ...]  # by consumer, ascending; the stage after is always among them
    reads_ids: bool
    reads_positions: bool
    source: Input | None = (
        None  # the model's source input, where this stage reads it; in the plan of the source
    )
    encode: RingPlan | None = None  # the plan of the source, which is run before the first position

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    def of(self, start: int) -> RingPlan:
        """The plan for a chunk that starts there: below 0 it is of the source. FrameError where the model reads none."""
        if start >= 0:
            return self
        if self.encode is None:
            raise FrameError("the model reads no source")
        return self.encode

    def incoming_by(self, sender: int) -> list[Parcel]:
        """The parcels that a stage sends to this one."""
        plans = [self] if self.encode is None else [self, self.encode]
        return [parcel for plan in plans for parcel in plan.incoming if parcel.producer == sender]

    @property
    def consumers(self) -> tuple[int, ...]:
        """The stages that this one feeds."""
        plans = [self] if self.encode is None else [self, self.encode]
        return tuple(sorted({parcel.consumer for plan in plans for parcel in plan.outgoing}))


def hop_bytes(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Bytes that cross each cut for one position, first cut first. JobError as in `plan_ring`."""
    last = last_reader(stages).ids
    changes = [0] * (len(stages) + 1)  # from one cut to the next
    for stage in stages:
        both = halves(stage)
        for parcel in _incoming(stage if both is None else both.decode, last):
            size = parcel.size_bytes(1)
            changes[parcel.producer + 1] += size
            changes[parcel.consumer + 1] -= size
    return tuple(accumulate(changes[1:-1]))


@dataclass(frozen=True)
class LastReader:
    """The last stage that reads token ids, which are passed along the chain as far as that, and the last one that reads the source; -1:
    none does. `source_bytes`: of an id or a frame of the source."""

    ids: int = -1
    source: int = -1
    source_bytes: int = TOKEN_BYTES


def plan_ring(stages: Sequence[Stage], index: int, last: LastReader | None = None) -> RingPlan:
    """The ring as stage `index` sees it. `last`: the result of `last_reader`, which is the same for all stages and takes time in
    proportion to their number. JobError for a model that cannot be served this way.

    Consecutive stages always exchange a frame, even where no value crosses, as a frame is what makes a stage run. Values of skip edges
    are sent directly to each stage that reads them.
    """
    last = last_reader(stages) if last is None else last
    own, encode = stages[index], None
    halves_found = halves(own)
    if halves_found is not None:
        own, early = halves_found.decode, halves_found.encode
        source_plan = (SOURCE, last.source_bytes)
        encode = RingPlan(
            index=index,
            stages=len(stages),
            incoming=tuple(
                replace(p, symbol=source_plan[0], id_bytes=source_plan[1])
                for p in _incoming(early, last.source)
            ),
            outgoing=tuple(
                replace(p, symbol=source_plan[0], id_bytes=source_plan[1])
                for p in _outgoing(early, len(stages), last.source)
            ),
            reads_ids=False,
            reads_positions=False,
            source=next((i for i in early.graph.inputs if i.name in SOURCE_INPUTS), None),
        )
    return RingPlan(
        index=index,
        stages=len(stages),
        incoming=_incoming(own, last.ids),
        outgoing=_outgoing(own, len(stages), last.ids),
        reads_ids=_reads(own, "input_ids"),
        reads_positions=_reads(own, "position_ids"),
        encode=encode,
    )


def last_reader(stages: Sequence[Stage]) -> LastReader:
    """JobError for a model that cannot be served in a ring."""
    found = LastReader()
    for stage in stages:
        _check(stage, last=stage.index == len(stages) - 1)
        if _reads(stage, "input_ids"):
            found = replace(found, ids=stage.index)
        for given in stage.graph.inputs:
            if given.name in SOURCE_INPUTS:
                found = replace(found, source=stage.index, source_bytes=_source_bytes(given))
    return found


def _source_bytes(given: Input) -> int:
    """Bytes of an id, or of a frame of features, which are sent in float32. JobError for an input of another shape."""
    match given.name, given.type.shape, given.type.dtype:
        case "source_ids", (_, Poly()), "int64":
            return TOKEN_BYTES
        case "source_features", (_, int() as channels, int()), _ if "float" in given.type.dtype:
            return 4 * channels
    raise JobError(f"serving: the model's input {given.name} is {given.type}")


def _incoming(stage: Stage, last_reader: int) -> tuple[Parcel, ...]:
    before = stage.index - 1
    edges: dict[int, list[Edge]] = {before: []} if stage.index else {}
    for edge in stage.receives:
        edges.setdefault(edge.producer, []).append(edge)
    return tuple(
        Parcel(producer, stage.index, tuple(received), producer == before and stage.index <= last_reader)
        for producer, received in sorted(edges.items())
    )


def _outgoing(stage: Stage, stages: int, last_reader: int) -> tuple[Parcel, ...]:
    after = stage.index + 1
    edges: dict[int, list[Edge]] = {after: []} if after < stages else {}
    for edge in stage.sends:
        for consumer in edge.consumers:
            edges.setdefault(consumer, []).append(edge)
    return tuple(
        Parcel(stage.index, consumer, tuple(sent), consumer == after and after <= last_reader)
        for consumer, sent in sorted(edges.items())
    )


def _reads(stage: Stage, name: str) -> bool:
    return name in stage.graph.input_names


def _check(stage: Stage, last: bool) -> None:
    received = {edge.name for edge in stage.receives}
    for given in stage.graph.inputs:
        if given.name not in received and given.name not in ("input_ids", "position_ids", *SOURCE_INPUTS):
            raise JobError(f"serving: the model's input {given.name} is neither input_ids nor position_ids")
    if bool(stage.results) != last or (last and 0 not in stage.results):
        raise JobError("serving: the logits must be made by the last stage")
    try:
        halves(stage)
    except GraphError as error:
        raise JobError(f"serving: {error}") from None
    for edge in stage.receives:
        known = {"batch", SOURCE if edge.of_source else "sequence"}
        unknown = {s for dim in edge.type.shape for s in symbols_of(dim)} - known
        if unknown or edge.type.dtype not in TORCH_DTYPES:
            raise JobError(f"serving: edge {edge.name} of type {edge.type} cannot be sent")
