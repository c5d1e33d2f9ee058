"""An execution plane: what runs the stages of the DAG on one device. `fusion.runtime.peer.plane_choice` knows those that
there are by name, and whoever loads stages is given one.

All methods are blocking and run in the device's one worker thread (`fusion.runtime.job.worker`). Tensors at this
boundary are torch CPU or device tensors; the plane moves what it is given to its device.
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
    """Where dropout draws from: a mask is a function of (seed, step, microbatch, node name) and of nothing else."""

    seed: int
    step: int
    microbatch: int


class TrainingStage(Protocol):
    """One stage with its parameters, gradients and optimizer state (RAD, FusionLLM section 3.2)."""

    stage: Stage

    def forward(self, microbatch: int, inputs: Tensors, rng: RngKey) -> dict[str, torch.Tensor]:
        """Run the stage. `inputs` by input name; those of `stage.receives` that need a gradient become leaves.
        Returns, detached, every value of `stage.sends` by edge name, and "result/<i>" for model output i made
        here (the loss). Keeps what backward needs until `backward` or `discard`."""

    def backward(self, microbatch: int, gradients: Tensors, loss_scale: float) -> dict[str, torch.Tensor]:
        """`gradients` by edge name, already summed over consumers; if the loss is made here its gradient is
        `loss_scale` (1 / microbatches). Adds to the parameters' gradients, frees the stash, returns the gradient
        of each received edge that needs one, by edge name."""

    def evaluate(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Forward without gradients, dropout off. Same keys as `forward`."""

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Accumulated gradients by variable name (a zero tensor where none arrived); None = all trainable. They may be the
        stage's own memory."""

    def set_gradients(self, gradients: Tensors) -> None:
        """Replace the accumulated gradients of the variables named (tie groups, averaging). Their memory is the stage's own
        from now on."""

    def squared_norm(self, skip: frozenset[str] = frozenset()) -> float:
        """Sum of squares of all accumulated gradients but those of `skip`, accumulated in float64."""

    def apply(self, learning_rate: float, clip_factor: float) -> None:
        """Scale the gradients by `clip_factor`, update the parameters with the optimizer, zero the gradients."""

    def discard(self) -> None:
        """Drop gradients and stashes; restore buffers to the last committed step."""

    def state(self) -> dict[str, torch.Tensor]:
        """Everything `load_state` needs, on the CPU: "variable/<name>" and "optimizer/<name>/<slot>". Not to be written to; it
        stays as it is whatever the stage does."""

    def load_state(self, state: Tensors) -> None: ...


@dataclass(frozen=True)
class Piece:
    """Positions [start, start + n) of one session (batch 1). `start` must equal what the cache holds, or be less: the cache
    is then cut back to `start` first. `inputs` as in `TrainingStage.forward`. `singly`: each position as if it were run alone,
    bit for bit; only where pieces run `together`. `shown`: of how many of the last positions the logits are wanted; more than one
    only where pieces run `together`. Of an encoder-decoder, a piece [-n, 0) is the source, all of it, which runs before anything
    else of the session."""

    session: str
    start: int
    inputs: Tensors
    singly: bool = False
    shown: int = 1

    def part(self, first: int, count: int, along: Mapping[str, tuple[int, int]]) -> Piece:
        """Positions [first, first + count) of it. `along`: the dimension along the sequence of each input, and how many rows a
        position has there."""
        found = dict(self.inputs)
        for name, (axis, each) in along.items():
            found[name] = found[name].narrow(axis, first * each, count * each)
        return replace(self, start=self.start + first, inputs=found)


class DecodingStage(Protocol):
    """One stage of a model being served, with a KV cache per session. `together`: whether pieces run as one. `chunks_agree`:
    whether a prompt may be cut anywhere. Attention rounds by how many positions run in one piece: in float32 in the last bit, of
    which hardly any token depends; in half precision, where logits are often equal, a token may."""

    stage: Stage
    caches: bool  # whether it keeps anything between runs: one without attention needs nothing
    together: bool
    chunks_agree: bool
    compiles: bool  # whether a run may have to compile first what it runs, for seconds

    def open(self, session: str, capacity: int, source: int = 0) -> None:
        """Begin a session of at most `capacity` positions, with a source of so many."""

    def reserve(self, session: str, positions: int) -> bool:
        """Set KV memory aside for the first so many positions, rounded up to blocks; what holds positions already stays.
        Whether `used_bytes` is another now. What was not set aside is when it is run."""

    def run(self, pieces: Sequence[Piece]) -> list[dict[str, torch.Tensor]]:
        """Run a piece each of several sessions, together where the stage allows it. Each gets what it would get alone, bit
        for bit: values sent by edge name, and "result/0", the logits (1, shown, vocabulary) of its last positions. Where one of them fails none
        has run, and each may be run again."""

    def close(self, session: str) -> None:
        """Free the session; unknown sessions are ignored."""

    def retain(self, session: str, name: int, positions: int) -> tuple[int, int]:
        """Close the session, but keep what it holds of its first so many positions, under `name`: how many these are, and
        their bytes. 0: nothing is kept."""

    def resume(self, session: str, capacity: int, name: int, positions: int) -> int:
        """Begin a session with the first so many positions of what is kept under `name`, which is its own then: how many
        it has. Nothing is copied."""

    def copy(self, source: int | str, session: str, positions: int) -> int:
        """Let an open session that holds nothing have the first so many positions of `source`, another session or the name
        of what is kept: how many it has. 0 where `source` is not there."""

    def forget(self, name: int) -> None:
        """Free what is kept under `name`; unknown names are ignored."""

    def clear(self) -> None:
        """Close all sessions, and keep nothing."""

    def used_bytes(self) -> int:
        """Of KV memory, set aside for sessions and kept."""

    def retained_bytes(self) -> int:
        """Of these, kept."""


class Plane(Protocol):
    """What makes the stages of one device. `variables` holds every variable of the stage's graph by name; JobError for
    one that is missing or of another shape or dtype. `lacks`: operators of the op-set that it does not run. `working_bytes`: that any
    stage may take on a CPU, out of what is lent, whatever was set aside for it: the code that runs it, messages on their way, holes
    in the allocator's heaps."""

    name: str
    lacks: frozenset[str]
    working_bytes: int

    def training(self, stage: Stage, variables: Tensors, optimizer: OptimizerConfig) -> TrainingStage:
        """The stage with a copy of the variables and an optimizer that has not begun."""

    def decoding(self, stage: Stage, variables: Tensors) -> DecodingStage:
        """The stage with the variables on the device, and no session."""
