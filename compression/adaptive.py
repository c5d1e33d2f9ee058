"""AdaTopK: how much each link of a job is compressed (FusionLLM, arXiv 2410.12707). Pure arithmetic, no torch.

The paper sparsifies edge e by r_e = max(1, c * r * R_e / max R): R_e is the edge's dense time, r the ratio that the user
allows the slowest, c the overhead of its codec. That brings every slow link down to max R / r and does not touch
fast ones. Here c is no constant: the payload of each density is known to the byte (`spec.py`), so the density is chosen so that
the link is busy for max R / r, to within one per cent.

Where we deviate:
* A time is that of a busy link, bytes over rate. Its latency is the same with every codec, and microbatches overlap it.
* No link is brought below `compute_seconds`, the compute time of the busiest stage: that would cost accuracy and gain no time.
* A link that an element-wise codec (fp16, int8, ...) of those offered brings under the target takes that codec.
* Backward through a sparse edge is the gradient at the forward positions by default, which needs no positions. Both
  directions then have one density, and the slower of them meets the target.
* A link that the codec would slow down stays dense.
* An edge that several peers read is encoded once: one codec for all of them, that of the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fusion.compression.spec import MAX_MILLIONTHS, MIN_MILLIONTHS, Family, Spec, Values

Direction = Literal["forward", "backward"]
Choice = dict[tuple[str, Direction], str]  # (edge, direction) -> spec

DENSE = Spec(family="none")
ELEMENT_WISE: tuple[Family, ...] = ("bf16", "fp16", "int8", "int4")  # by their error, least first


@dataclass(frozen=True, kw_only=True)
class EdgeUse:
    """One tensor of every microbatch from one peer to another: an edge to one consumer, in one direction."""

    edge: str
    direction: Direction
    elements: int
    itemsize: int  # bytes, of floating-point elements; edges of integers are not for a codec
    bytes_per_second: float  # of the link, this way
    # Its share of the uplink: its dense bytes over those of all uses of it.
    uplink_share: float = 1.0

    def __post_init__(self) -> None:
        if self.elements < 0 or self.itemsize < 1:
            raise ValueError(f"edge {self.edge[:80]!r}: {self.elements} elements of {self.itemsize} bytes")
        if not self.bytes_per_second > 0 or not 0 < self.uplink_share <= 1:
            raise ValueError(
                f"edge {self.edge[:80]!r}: bytes_per_second must be over 0 and uplink_share in (0, 1], "
                f"not {self.bytes_per_second} and {self.uplink_share}"
            )

    @property
    def dense_bytes(self) -> int:
        return self.elements * self.itemsize

    def busy_seconds(self, payload_bytes: int) -> float:
        return payload_bytes / (self.bytes_per_second * self.uplink_share)


@dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """Measured speeds of a peer, in dense bytes a second."""

    encode_bytes_per_second: float
    decode_bytes_per_second: float

    def seconds(self, dense_bytes: int) -> float:
        return dense_bytes / self.encode_bytes_per_second + dense_bytes / self.decode_bytes_per_second


def choose(
    uses: Sequence[EdgeUse],
    ratio: float,
    codecs: Mapping[str, CodecSpeed],
    compute_seconds: float = 0.0,
    *,
    reuse_mask: bool = True,
    values: Values = "fp16",
) -> Choice:
    """A spec for every use. `ratio` is the compression of the slowest link (1: none), `codecs` the families that may be
    chosen, with their speeds ("topk" alone is the paper's), `compute_seconds` the time of the busiest stage for a
    microbatch. With `reuse_mask`, backward through a "topk" edge sends the values at the forward positions; without, it
    chooses its own."""
    target = target_seconds(uses, ratio, compute_seconds)
    chosen: Choice = {}
    for group in _groups(uses, reuse_mask):
        specs = _choose_group(group, target, codecs, values, reuse_mask)
        chosen.update({(use.edge, use.direction): str(spec) for use, spec in zip(group, specs, strict=True)})
    return chosen


def target_seconds(uses: Iterable[EdgeUse], ratio: float, compute_seconds: float = 0.0) -> float:
    """How long a link may be busy with a microbatch: the slowest link's dense time over `ratio`, or `compute_seconds`."""
    if not (math.isfinite(ratio) and ratio >= 1):
        raise ValueError(f"ratio must be a number from 1, not {ratio}")
    return max(max((use.busy_seconds(use.dense_bytes) for use in uses), default=0.0) / ratio, compute_seconds)


def least_lossy(uses: Sequence[EdgeUse], target: float, codecs: Mapping[str, CodecSpeed]) -> Spec:
    """The element-wise codec of least error with which every use meets the target, else the fastest one. `uses` must all have
    one codec."""
    options = [DENSE, *(Spec(family=family) for family in ELEMENT_WISE if family in codecs)]

    def seconds(spec: Spec) -> float:
        return sum(_seconds(use, spec, codecs, False) for use in uses)

    for spec in options:
        if all(_meets(use, spec, target) for use in uses) and seconds(spec) <= seconds(DENSE):
            return spec
    return min(options, key=seconds)


def payload_bytes(use: EdgeUse, spec: Spec, *, reuse_mask: bool = True) -> int:
    """Bytes that `use` sends with `spec`."""
    if reuse_mask and use.direction == "backward":
        return spec.payload_bytes_at(use.elements, use.itemsize)
    return spec.payload_bytes(use.elements, use.itemsize)


def _groups(uses: Sequence[EdgeUse], reuse_mask: bool) -> Iterable[list[EdgeUse]]:
    """Uses that must have one density: those of an edge to all consumers, in one direction; with `reuse_mask` in both."""
    groups: dict[tuple[str, str], list[EdgeUse]] = {}
    for use in uses:
        groups.setdefault((use.edge, "" if reuse_mask else use.direction), []).append(use)
    return groups.values()


def _choose_group(
    group: Sequence[EdgeUse],
    target: float,
    codecs: Mapping[str, CodecSpeed],
    values: Values,
    reuse_mask: bool,
) -> list[Spec]:
    directions = {use.direction for use in group}
    by_direction = {
        direction: least_lossy([u for u in group if u.direction == direction], target, codecs)
        for direction in directions
    }
    element_wise = [by_direction[use.direction] for use in group]
    if "topk" not in codecs or all(_meets(u, s, target) for u, s in zip(group, element_wise, strict=True)):
        return element_wise
    masked = reuse_mask and "forward" in directions
    sparse = _topk_spec(group, target, values, masked)

    def seconds(specs: Sequence[Spec]) -> float:
        return sum(_seconds(use, spec, codecs, masked) for use, spec in zip(group, specs, strict=True))

    return min((element_wise, [sparse] * len(group)), key=seconds)


def _topk_spec(group: Sequence[EdgeUse], target: float, values: Values, masked: bool) -> Spec:
    """The largest density, to three digits, with which every use of the group meets the target."""
    low, high = MIN_MILLIONTHS, MAX_MILLIONTHS
    while low < high:
        middle = (low + high + 1) // 2
        spec = Spec(family="topk", millionths=middle, values=values)
        if all(use.busy_seconds(payload_bytes(use, spec, reuse_mask=masked)) <= target for use in group):
            low = middle
        else:
            high = middle - 1
    digits = 10 ** max(0, len(str(low)) - 3)
    return Spec(family="topk", millionths=low // digits * digits, values=values)


def _meets(use: EdgeUse, spec: Spec, target: float) -> bool:
    return use.busy_seconds(payload_bytes(use, spec, reuse_mask=False)) <= target


def _seconds(use: EdgeUse, spec: Spec, codecs: Mapping[str, CodecSpeed], masked: bool) -> float:
    """Seconds to encode, send and decode the tensor, without latency."""
    busy = use.busy_seconds(payload_bytes(use, spec, reuse_mask=masked))
    if spec.is_dense(use.elements, use.itemsize):
        return busy
    return busy + codecs[spec.family].seconds(use.dense_bytes)
