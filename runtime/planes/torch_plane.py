"""The torch execution plane: stages as generated code on CPU or CUDA. Implements `fusion.runtime.planes.plane`.

A training stage keeps one autograd graph for each microbatch in flight: received values are its leaves, and `backward` runs from the
values sent (RAD, FusionLLM section 3.2). Decoding: `fusion.runtime.planes.torch_decoding`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion.dag.cutting.costs import cast_once
from fusion.dag.cutting.positional import written_buffers
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Graph, Ref, Variable
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.dropout import Masks
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.optimizer import Optimizer, squared_norms
from fusion.runtime.planes.plane import RngKey, Tensors
from fusion.runtime.planes.stage_values import (
    checked_variable,
    ordered_inputs,
    output_keys,
    stage_state,
    state_parts,
)
from fusion.runtime.planes.torch_decoding import TorchDecodingStage


@dataclass(frozen=True)
class _Stash:
    """The activations that the backward pass of one microbatch needs."""

    leaves: dict[str, torch.Tensor]  # received values that need a gradient, by edge name
    outputs: tuple[torch.Tensor, ...]  # of the program, not detached


class _Seeded(torch.autograd.Function):
    """A scalar whose backward pass gives these gradients to values. torch.autograd.backward takes gradients too, but loads symbolic shapes
    to compare sizes: 33 MiB, and half a second in which nothing else runs on the device."""

    @staticmethod
    def forward(ctx: Any, seeds: Sequence[torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        ctx.seeds = seeds
        return values[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.seeds)


class TorchTrainingStage:
    """A stage with its parameters, gradients and optimizer state. `variables` holds every variable of the stage's graph, by name; they are
    copied. JobError for one that is missing or of another shape or dtype.

    On a CPU, `state` returns the stage's own memory, as a copy for each snapshot would take as much again. It is copied only if a caller
    still holds it at the next commit (copy on write)."""

    def __init__(
        self, stage: Stage, variables: Tensors, optimizer: OptimizerConfig, device: str = "cpu"
    ) -> None:
        self.stage = stage
        self.device = torch.device(device)
        graph = stage.graph
        # A weight is cast to half precision once a step. A cast in each microbatch would be kept for its backward pass.
        self._cast, program = _without_casts(graph)
        self._cast_weights: tuple[torch.Tensor, ...] | None = None
        self._training = compile_graph(program, self.device, training=True, library_half=False)
        self._evaluation = compile_graph(program, self.device, training=False, library_half=False)
        self._values = {v.name: _copied(variables, v, self.device) for v in graph.variables}
        self._parameters = {
            v.name: self._values[v.name] for v in graph.variables if v.kind == "parameter" and v.trainable
        }
        for parameter in self._parameters.values():
            parameter.requires_grad_()
        # Running statistics change in every forward pass, but only a commit keeps the change.
        self._written = {ref.name: self._values[ref.name] for ref in written_buffers(graph)}
        self._committed = {name: value.clone() for name, value in self._written.items()}
        self._optimizer = Optimizer(optimizer, self._parameters)
        self._keys = output_keys(stage)
        self._needs_gradient = frozenset(e.name for e in stage.receives if e.needs_gradient)
        self._stashes: dict[int, _Stash] = {}
        self._returned_state: list[weakref.ref[torch.Tensor]] = []  # tensors that `state` returned

    def forward(self, microbatch: int, inputs: Tensors, rng: RngKey) -> dict[str, torch.Tensor]:
        leaves: dict[str, torch.Tensor] = {}
        program_inputs = []
        for name, value in zip(
            self._training.inputs, ordered_inputs(self._training.inputs, inputs, self.device), strict=True
        ):
            if name in self._needs_gradient:
                value = leaves[name] = value.detach().requires_grad_()
            program_inputs.append(value)
        masks = Masks(rng, self._training.stateful)
        with torch.enable_grad():
            results = self._training.run(program_inputs, self._program_variables(), masks)
        outputs = results[: len(self._keys)]
        self._store_updated(results[len(self._keys) :])
        self._stashes[microbatch] = _Stash(leaves, outputs)
        return {key: value.detach() for key, value in zip(self._keys, outputs, strict=True)}

    def backward(self, microbatch: int, gradients: Tensors, loss_scale: float) -> dict[str, torch.Tensor]:
        """ValueError where `forward` was not run for the microbatch, or a gradient is missing or misshapen."""
        stash = self._stashes.pop(microbatch, None)
        if stash is None:
            raise ValueError(f"stage {self.stage.index} holds no activations of microbatch {microbatch}")
        sends = self.stage.sends
        roots, seeds = [], []
        for edge, value in zip(sends, stash.outputs, strict=False):
            if edge.needs_gradient and value.requires_grad:
                roots.append(value)
                seeds.append(_seed(gradients, edge.name, value))
        for value in stash.outputs[len(sends) :]:
            if value.requires_grad:
                roots.append(value)
                seeds.append(torch.full_like(value, loss_scale))
        if roots:
            _Seeded.apply(seeds, *roots).backward()  # type: ignore[no-untyped-call]
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in stash.leaves.items()
        }

    def evaluate(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            outputs = self._evaluation.run(
                ordered_inputs(self._evaluation.inputs, inputs, self.device), self._program_variables(), None
            )
        return dict(zip(self._keys, outputs, strict=True))

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        parameters = self._parameters if names is None else {name: self._parameter(name) for name in names}
        return {
            name: torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad
            for name, p in parameters.items()
        }

    def set_gradients(self, gradients: Tensors) -> None:
        for name, value in gradients.items():
            parameter = self._parameter(name)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"a gradient of {name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}"
                )
            parameter.grad = value.detach().to(parameter.device, parameter.dtype)

    def squared_norm(self, skip: frozenset[str] = frozenset()) -> float:
        return squared_norms(
            [p.grad for name, p in self._parameters.items() if p.grad is not None and name not in skip]
        )

    def apply(self, learning_rate: float, clip_factor: float) -> None:
        self._detach_returned_state()
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if clip_factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, clip_factor)
        self._optimizer.step(learning_rate)
        self._committed = {name: value.clone() for name, value in self._written.items()}
        self._clear()

    def discard(self) -> None:
        for name, value in self._written.items():
            value.copy_(self._committed[name])
        self._clear()

    def state(self) -> dict[str, torch.Tensor]:
        # The committed values: a forward pass since may have changed running statistics.
        values = {**self._values, **self._committed}
        state = stage_state({n: value.detach() for n, value in values.items()}, self._optimizer.state())
        if self.device.type != "cpu":
            return {key: value.to("cpu", copy=True) for key, value in state.items()}
        self._returned_state = [each for each in self._returned_state if each() is not None]
        self._returned_state += map(weakref.ref, state.values())
        return state

    def _detach_returned_state(self) -> None:
        """Called before the state changes: where a caller still holds tensors that `state` returned, continue in a copy."""
        if any(each() is not None for each in self._returned_state):
            for value in self._values.values():
                value.data = value.detach().clone()
            self._optimizer.detach_state()
        self._returned_state.clear()

    def load_state(self, state: Tensors) -> None:
        """JobError names what is missing or does not fit; then nothing has changed."""
        variables, slots = state_parts(state)
        values = {v.name: checked_variable(variables, v) for v in self.stage.graph.variables}
        self._detach_returned_state()
        self._optimizer.load_state(slots)
        with torch.no_grad():
            for name, value in values.items():
                self._values[name].copy_(value)
        self._committed = {name: value.clone() for name, value in self._written.items()}
        self._clear()

    def _program_variables(self) -> tuple[torch.Tensor, ...]:
        """The variables of the programs: those of the stage, and weights that are cast."""
        if self._cast_weights is None:
            with torch.enable_grad():
                self._cast_weights = tuple(self._values[name].to(dtype) for name, dtype in self._cast)
        return (*(self._values[v.name] for v in self.stage.graph.variables), *self._cast_weights)

    def _store_updated(self, values: Sequence[torch.Tensor]) -> None:
        """Store the new values of updated variables in new tensors: the backward pass of this run still reads the old ones."""
        for name, value in zip(self._training.updated, values, strict=True):
            self._values[name] = self._written[name] = value.detach().clone(
                memory_format=torch.contiguous_format
            )

    def _parameter(self, name: str) -> torch.Tensor:
        try:
            return self._parameters[name]
        except KeyError:
            raise ValueError(f"stage {self.stage.index} trains no parameter {name}") from None

    def _clear(self) -> None:
        self._stashes.clear()
        self._cast_weights = None
        for parameter in self._parameters.values():
            parameter.grad = None


class TorchPlane:
    """Implements `fusion.runtime.planes.plane.Plane` on "cpu", "cuda" or "cuda:<index>"."""

    name = "torch"
    lacks: frozenset[str] = frozenset()
    working_bytes = 256 << 20

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def training(self, stage: Stage, variables: Tensors, optimizer: OptimizerConfig) -> TorchTrainingStage:
        return TorchTrainingStage(stage, variables, optimizer, self._device)

    def decoding(self, stage: Stage, variables: Tensors) -> TorchDecodingStage:
        return TorchDecodingStage(stage, variables, self._device)


def _copied(variables: Mapping[str, torch.Tensor], variable: Variable, device: torch.device) -> torch.Tensor:
    return (
        checked_variable(variables, variable)
        .detach()
        .to(device, copy=True, memory_format=torch.contiguous_format)
    )


def _without_casts(graph: Graph) -> tuple[tuple[tuple[str, torch.dtype], ...], Graph]:
    """The parameters that are cast, and their dtypes, in order; and the graph with the results as variables."""
    once = cast_once(graph)
    if not once:
        return (), graph
    casts = [node for node in graph.nodes if Ref(node.name) in once]
    program = replace(
        graph,
        variables=(*graph.variables, *(Variable(n.name, n.results[0], trainable=False) for n in casts)),
        nodes=tuple(node for node in graph.nodes if Ref(node.name) not in once),
    )
    names = [next(node.refs()).name for node in casts]
    return tuple(
        (name, TORCH_DTYPES[n.results[0].dtype]) for name, n in zip(names, casts, strict=True)
    ), program


def _seed(gradients: Tensors, name: str, value: torch.Tensor) -> torch.Tensor:
    gradient = gradients.get(name)
    if gradient is None or gradient.shape != value.shape:
        raise ValueError(f"the gradient of {name} is missing or not of shape {tuple(value.shape)}")
    return gradient.to(value.device, value.dtype)
