"""How fast a device runs operators: one cost for each kind of work, and how much of each kind a node has.

    seconds = FLOPs of products, attention and convolutions, each at a rate of its own
            + bytes that products read and write, that norms do, and that all other operators do
            + elements of masks of dropout + calls of convolutions + nodes, by what one takes

Each cost is measured with the others subtracted, so that the sum is a time
(`fusion.runtime.peer.probes`); FusionLLM (arXiv 2410.12707, section 3.4) times every operator on every device instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fusion.dag.cutting.costs import NodeCost

Rows = npt.NDArray[np.float64]
BACKWARD_MOVES = 2.0  # times the bytes of the forward pass, and the nodes
BACKWARD_CALLS = 2.5  # convolution calls for each of the forward pass: two, with operands in another layout
# Times weights, gradients and optimizer state that an update reads or writes: AdamW 7 of these four, the gradients' norm in
# float64 5, clipping 2.
UPDATE_TOUCHES = 14 / 4
UPDATE_NODES = 3.0  # operator calls for each tensor: its norm, the sum of norms, a share of the optimizer's
SLOWEST = 1e6  # seconds for one of anything


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds for one unit of each kind of work, all finite and not negative, those of a FLOP positive. `demands` counts the first KINDS."""

    product_flop: float
    attention_flop: float
    convolution_flop: float
    # Of weights and activations that products, attention and convolutions read and write
    streamed_byte: float
    touched_byte: float  # that all other operators read and write
    normed_byte: float  # that norms do
    drawn_element: float = 0.0  # of a mask of dropout
    convolution: float = 0.0  # to call one
    node: float = 0.0  # to call any operator
    # Of weights, gradients and optimizer state, for each time that an update reads or writes it
    updated_byte: float

    def __post_init__(self) -> None:
        flops = (self.product_flop, self.attention_flop, self.convolution_flop)
        if not (all(0 <= part <= SLOWEST for part in self.parts) and min(flops) > 0):
            raise ValueError("speeds must not be below zero, nor without an end")

    @classmethod
    def uniform(cls, flops_per_second: float, bytes_per_second: float) -> Speeds:
        """The speeds of a device of which no more is known."""
        flop, byte = 1 / flops_per_second, 1 / bytes_per_second
        return cls(
            product_flop=flop, attention_flop=flop, convolution_flop=flop,
            streamed_byte=byte, touched_byte=byte, normed_byte=byte, updated_byte=byte,
        )  # fmt: skip

    @classmethod
    def of(cls, parts: Sequence[float]) -> Speeds:
        """The inverse of `parts`; further parts, of a later release, are ignored. ValueError for fewer."""
        names = [each.name for each in fields(cls)]
        return cls(**dict(zip(names, parts[: len(names)], strict=True)))

    def best(self, other: Speeds) -> Speeds:
        """The lower of each cost: other load on a machine only ever makes a measurement slower."""
        return Speeds.of([min(pair) for pair in zip(self.parts, other.parts, strict=True)])

    @cached_property
    def parts(self) -> tuple[float, ...]:
        """The fields in order, as a record carries them."""
        return tuple(getattr(self, each.name) for each in fields(self))

    @cached_property
    def seconds(self) -> Rows:
        """(KINDS,) seconds for one unit of each kind that `demands` counts."""
        return np.array(self.parts[:KINDS])


KINDS = len(fields(Speeds)) - 1  # of work that a node has
(PRODUCTS, ATTENTION, CONVOLUTIONS, STREAMED, TOUCHED, NORMED, DRAWN, CALLS, NODES) = range(KINDS)
_FLOPS = {"attention": ATTENTION, "convolution": CONVOLUTIONS}  # else products
_BYTES = {"contraction": STREAMED, "attention": STREAMED, "convolution": STREAMED, "norm": NORMED}


def demands(costs: Sequence[NodeCost]) -> tuple[Rows, Rows]:
    """(KINDS, nodes) units of work of the forward pass and of the backward pass."""
    forward, backward = np.zeros((KINDS, len(costs))), np.zeros((KINDS, len(costs)))
    for at, cost in enumerate(costs):
        flops, moved = _FLOPS.get(cost.family, PRODUCTS), _BYTES.get(cost.family, TOUCHED)
        forward[flops, at], backward[flops, at] = cost.forward_flops, cost.backward_flops
        forward[moved, at], backward[moved, at] = cost.moved_bytes, BACKWARD_MOVES * cost.moved_bytes
        forward[DRAWN, at] = cost.drawn_elements
        forward[NODES, at], backward[NODES, at] = 1, BACKWARD_MOVES
        if cost.family == "convolution":
            forward[CALLS, at], backward[CALLS, at] = 1, BACKWARD_CALLS
    return forward, backward
