"""An execution plane runs the stages of a model on one device. `fusion.runtime.peer.plane_choice` has the planes by name; the loaders of
stages are given one.

All methods block, and run in the worker thread of the device (`fusion.runtime.job.worker`). Tensors at this boundary are torch
tensors on the CPU or the device; the plane moves its inputs to the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.manifest import OptimizerConfig

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RngKey:
    """The key of dropout masks: a mask is a function of (seed, step, microbatch, node name) and nothing else."""

    seed: int
    step: int
    microbatch: int


class TrainingStage(Protocol):
    """One stage with its parameters, gradients and optimizer state (RAD, FusionLLM section 3.2)."""

    stage: Stage

    def forward(self, microbatch: int, inputs: Tensors, rng: RngKey) -> dict[str, torch.Tensor]:
        """Run the stage. `inputs` by input name; those of `stage.receives` that need a gradient become leaves. Returns, detached, every
        value of `stage.sends` by edge name, and "result/<i>" for output i of the model where it is computed here (the loss). Keeps what
        the backward pass needs until `backward` or `discard`."""

    def backward(self, microbatch: int, gradients: Tensors, loss_scale: float) -> dict[str, torch.Tensor]:
        """`gradients` by edge name, summed over consumers. The gradient of a loss that is computed here is `loss_scale`
        (1 / microbatches). Accumulates the gradients of parameters, frees the activations, and returns the gradient of each received
        edge that needs one, by edge name."""

    def evaluate(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Forward without gradients, dropout off. Same keys as `forward`."""

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Accumulated gradients by variable name (zeros where there are none); None: of all trainable variables. They may share the
        stage's memory."""

    def set_gradients(self, gradients: Tensors) -> None:
        """Replace the accumulated gradients of these variables (tie groups, averaging). The stage owns their memory from now on."""

    def squared_norm(self, skip: frozenset[str] = frozenset()) -> float:
        """The sum of squares of all accumulated gradients except those of `skip`, in float64."""

    def apply(self, learning_rate: float, clip_factor: float) -> None:
        """Scale the gradients by `clip_factor`, update the parameters with the optimizer, zero the gradients."""

    def discard(self) -> None:
        """Drop gradients and stashes; restore buffers to the last committed step."""

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that `load_state` needs, on the CPU: "variable/<name>" and "optimizer/<name>/<slot>". The caller must not write to it;
        the stage does not change it either."""

    def load_state(self, state: Tensors) -> None: ...


@dataclass(frozen=True)
class Piece:
    """Positions [start, start + n) of one session (batch 1). `start` is at most the length of the cache, which is first cut to it. `inputs`
    as in `TrainingStage.forward`. `singly`: each position has the bits of a run by itself; `logit_positions`: how many of the last
    positions to compute logits for. `singly`, and more logits than one, only for stages that run pieces `batched`. In an
    encoder-decoder, the piece [-n, 0) is the whole source, and runs before anything else of the session."""

    session: str
    start: int
    inputs: Tensors
    singly: bool = False
    logit_positions: int = 1

    def slice(self, first: int, count: int, axes: Mapping[str, tuple[int, int]]) -> Piece:
        """Positions [first, first + count) of the piece. `axes`: by input, its sequence dimension and the rows of a position there."""
        inputs = dict(self.inputs)
        for name, (dim, rows) in axes.items():
            inputs[name] = inputs[name].narrow(dim, first * rows, count * rows)
        return replace(self, start=self.start + first, inputs=inputs)


class DecodingStage(Protocol):
    """A decoding stage, with a KV cache for each session. `batched`: whether pieces run as one batch. `chunk_invariant`: whether results
    do not depend on how a prompt is cut into chunks. Attention rounds by the number of positions of a run: in float32 in the last bit,
    which hardly any token depends on; in half precision, where logits are often equal, it may change a token."""

    stage: Stage
    has_cache: bool  # whether it keeps anything between runs; a stage without attention does not
    batched: bool
    chunk_invariant: bool
    compiles: bool  # whether a run may compile first, for seconds

    def open(self, session: str, capacity: int, source: int = 0) -> None:
        """Begin a session of at most `capacity` positions, with a source of `source` positions."""

    def reserve(self, session: str, positions: int) -> bool:
        """Reserve KV memory for the first `positions`, rounded up to blocks; positions in the cache stay. Returns whether `used_bytes` has
        changed. A run reserves what it needs beyond that."""

    def run(self, pieces: Sequence[Piece]) -> list[dict[str, torch.Tensor]]:
        """Run one piece of each of several sessions, batched where the stage supports it. Each result has the bits of a run by itself: the
        values sent, by edge name, and "result/0", the logits (1, logit_positions, vocabulary) of its last positions. Where a piece
        fails none has run, and each may be run again."""

    def close(self, session: str) -> None:
        """Free the session; unknown sessions are ignored."""

    def retain(self, session: str, name: int, positions: int) -> tuple[int, int]:
        """Close the session but retain the cache of its first `positions` under `name`. Returns the positions and bytes retained; (0, 0):
        nothing is."""

    def resume(self, session: str, capacity: int, name: int, positions: int) -> int:
        """Begin a session with the first `positions` of the cache retained under `name`, which is no longer retained then. Returns how many
        positions it has. Nothing is copied."""

    def copy(self, source: int | str, session: str, positions: int) -> int:
        """Copy the first `positions` of `source`, a session or the name of a retained cache, into an empty open session. Returns how many
        positions it has; 0 where there is no such source."""

    def forget(self, name: int) -> None:
        """Free the cache retained under `name`; unknown names are ignored."""

    def clear(self) -> None:
        """Close all sessions and free all retained caches."""

    def used_bytes(self) -> int:
        """KV memory that is reserved for sessions or retained."""

    def retained_bytes(self) -> int:
        """KV memory that is retained."""


class Plane(Protocol):
    """Makes the stages of one device. `variables` holds every variable of the stage's graph by name; JobError for one that is missing or of
    another shape or dtype. `lacks`: operators of the op-set that it does not run. `working_bytes`: memory of a CPU that any stage may
    use beyond its reservation: code, messages in flight, fragmentation."""

    name: str
    lacks: frozenset[str]
    working_bytes: int

    def training(self, stage: Stage, variables: Tensors, optimizer: OptimizerConfig) -> TrainingStage:
        """The stage with a copy of the variables and a new optimizer."""

    def decoding(self, stage: Stage, variables: Tensors) -> DecodingStage:
        """The stage with the variables on the device, without sessions."""
