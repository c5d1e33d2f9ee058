"""A training stage in JAX. Implements `fusion.runtime.planes.plane`.

`jax.vjp` of the stage's program gives the forward pass of a microbatch and the function of its backward pass. Both are compiled once for
each combination of shapes; the residuals are kept between them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.sharding import SingleDeviceSharding

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.dropout import Masks
from fusion.runtime.planes.jax_plane.arrays import array, shapes_of, tensor
from fusion.runtime.planes.jax_plane.attached import attached, with_gradient
from fusion.runtime.planes.jax_plane.dropped import Dropped
from fusion.runtime.planes.jax_plane.optimizer import Arrays, Optimizer
from fusion.runtime.planes.jax_plane.program import Program
from fusion.runtime.planes.jax_plane.residuals import Layout, combine, partition
from fusion.runtime.planes.plane import RngKey, Tensors
from fusion.runtime.planes.stage_values import (
    checked_variable,
    ordered_inputs,
    output_keys,
    stage_state,
    state_parts,
)

# Programs, by shapes: a job has one, and perhaps another in its evaluations.
MAX_COMPILED = 8
_CPU = torch.device("cpu")

Residuals = tuple[list[Array], list[Array]]  # arguments of the forward pass, and values that it returned


class _Passes:
    """The compiled forward and backward pass for one combination of shapes. `program` takes the parameters, the other variables, the inputs
    that need a gradient, the other inputs and the dropout masks. It returns the outputs, those that the backward pass starts from, and
    the variables that it writes."""

    def __init__(self, program: Callable[..., tuple[list[Array], list[Array], Arrays]]) -> None:
        self._program = program
        self._layout: Layout | None = None  # set when the forward pass is traced
        self._forward = jax.jit(self._traced_forward)
        # Accumulated gradients are updated in place.
        self._backward = jax.jit(self._traced_backward, donate_argnums=3)

    def forward(self, *args: Any) -> tuple[list[Array], Arrays, Residuals]:
        outputs, written, returned = self._forward(*args)
        assert self._layout is not None
        flat = jax.tree.leaves(args)
        return outputs, written, ([flat[index] for index in self._layout.held], returned)

    def backward(self, residuals: Residuals, seeds: list[Array], gradients: Arrays) -> tuple[Arrays, Arrays]:
        """Returns `gradients`, one of each parameter, with those of this microbatch added; and the gradients of the inputs that need
        one."""
        gradients_and_leaves: tuple[Arrays, Arrays] = self._backward(*residuals, seeds, gradients)
        return gradients_and_leaves

    def _traced_forward(
        self, parameters: Arrays, fixed: Arrays, leaves: Arrays, inputs: Arrays, masks_kept: Arrays
    ) -> tuple[list[Array], Arrays, list[Array]]:
        def run(parameters: Arrays, leaves: Arrays) -> tuple[list[Array], tuple[list[Array], Arrays]]:
            outputs, roots, written = self._program(parameters, fixed, leaves, inputs, masks_kept)
            return roots, (outputs, written)

        _, vjp, (outputs, written) = jax.vjp(run, parameters, leaves, has_aux=True)
        returned, self._layout = partition(
            vjp, jax.tree.leaves((parameters, fixed, leaves, inputs, masks_kept))
        )
        return outputs, written, returned

    def _traced_backward(
        self, held: list[Array], returned: list[Array], seeds: list[Array], gradients: Arrays
    ) -> tuple[Arrays, Arrays]:
        assert self._layout is not None
        added, leaves = combine(self._layout, held, returned)(seeds)
        return {**gradients, **{name: gradients[name] + value for name, value in added.items()}}, leaves


@dataclass(frozen=True)
class _Stash:
    """The residuals that the backward pass of one microbatch needs."""

    passes: _Passes
    residuals: Residuals
    shapes: tuple[tuple[int, ...], ...]  # of the outputs in `_roots`
    leaves: dict[str, Array]


class JaxTrainingStage:
    """A stage with its parameters, gradients and optimizer state. `variables` holds every variable of the stage's graph, by name; they are
    copied. JobError for one that is missing or of another shape or dtype."""

    def __init__(
        self, stage: Stage, variables: Tensors, optimizer: OptimizerConfig, device: jax.Device
    ) -> None:
        self.stage = stage
        self._device = device
        graph = stage.graph
        self._training = Program(graph, training=True)
        self._evaluation = Program(graph, training=False)
        self._values = {v.name: array(checked_variable(variables, v), device) for v in graph.variables}
        self._trained = tuple(v.name for v in graph.variables if v.kind == "parameter" and v.trainable)
        self._keys = output_keys(stage)
        leaf_names = frozenset(e.name for e in stage.receives if e.needs_gradient)
        self._leaf_inputs = tuple(name for name in self._training.inputs if name in leaf_names)
        attached_values = attached(graph, {*self._trained, *self._leaf_inputs})
        # Outputs that the backward pass starts from: sent values that receive a gradient, and the losses.
        self._roots = tuple(
            i
            for i, ref in enumerate(graph.outputs)
            if ref in attached_values and (i >= len(stage.sends) or stage.sends[i].needs_gradient)
        )
        names_with_gradient = with_gradient(graph, attached_values, {graph.outputs[i] for i in self._roots})
        self._parameters_with_gradient = tuple(name for name in self._trained if name in names_with_gradient)
        self._committed = {name: self._values[name] for name in self._training.written}
        self._optimizer = Optimizer(optimizer, device)
        self._gradients: Arrays = {}
        self._stashes: dict[int, _Stash] = {}
        self._passes: OrderedDict[Any, _Passes] = OrderedDict()
        self._evaluations: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self._squares = jax.jit(_squares)
        self._zeros = jax.jit(_zeros, out_shardings=SingleDeviceSharding(device))
        self._update_compiled = False

    def forward(self, microbatch: int, inputs: Tensors, rng: RngKey) -> dict[str, torch.Tensor]:
        tensors = ordered_inputs(self._training.inputs, inputs, _CPU)
        dimensions = self._training.sizes.dimensions(tensors)
        arrays = {
            name: array(value, self._device)
            for name, value in zip(self._training.inputs, tensors, strict=True)
        }
        leaves = {name: arrays.pop(name) for name in self._leaf_inputs}
        masks = Masks(rng, ())
        masks_kept = {
            name: jax.device_put(masks.kept(name, count, p), self._device)
            for name, count, p in self._training.dropout_masks(dimensions)
        }
        passes = _cached(self._passes, _shapes(tensors), lambda: self._compiled(dimensions))
        outputs, written, residuals = passes.forward(*self._split_variables(), leaves, arrays, masks_kept)
        self._values.update(written)
        shapes = tuple(outputs[i].shape for i in self._roots)
        self._stashes[microbatch] = _Stash(passes, residuals, shapes, leaves)
        return {key: tensor(value) for key, value in zip(self._keys, outputs, strict=True)}

    def backward(self, microbatch: int, gradients: Tensors, loss_scale: float) -> dict[str, torch.Tensor]:
        """ValueError where `forward` was not run for the microbatch, or a gradient is missing or misshapen."""
        stash = self._stashes.pop(microbatch, None)
        if stash is None:
            raise ValueError(f"stage {self.stage.index} holds no activations of microbatch {microbatch}")
        graph, sends = self.stage.graph, self.stage.sends
        seeds = []
        for i, shape in zip(self._roots, stash.shapes, strict=True):
            dtype = self._training.dtype(graph.outputs[i])
            if i < len(sends):
                seeds.append(_seed(gradients, sends[i].name, shape, self._device).astype(dtype))
            else:
                seeds.append(jnp.full(shape, loss_scale, dtype, device=self._device))
        if not seeds:
            return {
                name: torch.zeros(leaf.shape, dtype=tensor(leaf).dtype) for name, leaf in stash.leaves.items()
            }
        if not self._update_compiled:
            self._compile_update()
        results = stash.passes.backward(stash.residuals, seeds, self._accumulated())
        # Dispatch is asynchronous: else the next call, perhaps of another job, would wait for this one.
        self._gradients, leaves = jax.block_until_ready(results)
        return {name: tensor(value) for name, value in leaves.items()}

    def evaluate(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        tensors = ordered_inputs(self._evaluation.inputs, inputs, _CPU)
        dimensions = self._evaluation.sizes.dimensions(tensors)

        def compiled() -> Callable[..., Any]:
            run: Callable[..., Any] = jax.jit(
                lambda values, inputs: self._evaluation.run(inputs, values, dimensions, None)[0]
            )
            return run

        run = _cached(self._evaluations, _shapes(tensors), compiled)
        outputs = run(self._values, [array(value, self._device) for value in tensors])
        return {key: tensor(value) for key, value in zip(self._keys, outputs, strict=True)}

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        return {name: self._gradient(name) for name in (self._trained if names is None else names)}

    def set_gradients(self, gradients: Tensors) -> None:
        for name, value in gradients.items():
            parameter = self._parameter(name)
            if tuple(value.shape) != parameter.shape:
                raise ValueError(
                    f"a gradient of {name} has shape {tuple(value.shape)}, not {parameter.shape}"
                )
            self._gradients[name] = array(value, self._device).astype(parameter.dtype)

    def squared_norm(self, skip: frozenset[str] = frozenset()) -> float:
        squares = jax.device_get(self._squares(self._gradients))
        return float(sum(value for name, value in squares.items() if name not in skip))

    def apply(self, learning_rate: float, clip_factor: float) -> None:
        updated = self._optimizer.step(self._values, self._gradients, learning_rate, clip_factor)
        self._values.update(jax.block_until_ready(updated))
        self._committed = {name: self._values[name] for name in self._training.written}
        self._clear()

    def discard(self) -> None:
        self._values.update(self._committed)
        self._clear()

    def state(self) -> dict[str, torch.Tensor]:
        # The committed values: a forward pass since may have changed running statistics.
        values = {**self._values, **self._committed}
        return stage_state({n: tensor(value) for n, value in values.items()}, self._optimizer.state())

    def load_state(self, state: Tensors) -> None:
        """JobError names what is missing or does not fit; then nothing has changed."""
        variables, slots = state_parts(state)
        values = {v.name: checked_variable(variables, v) for v in self.stage.graph.variables}
        self._optimizer.load_state(slots, {name: self._values[name] for name in self._trained})
        self._values = {name: array(value, self._device) for name, value in values.items()}
        self._committed = {name: self._values[name] for name in self._training.written}
        self._clear()

    def _split_variables(self) -> tuple[Arrays, Arrays]:
        """The parameters that get a gradient, and the other variables."""
        parameters = {name: self._values[name] for name in self._parameters_with_gradient}
        return parameters, {n: value for n, value in self._values.items() if n not in parameters}

    def _compiled(self, dimensions: Sequence[int]) -> _Passes:
        program, roots = self._training, self._roots

        def run(
            parameters: Arrays, fixed: Arrays, leaves: Arrays, inputs: Arrays, masks_kept: Arrays
        ) -> tuple[list[Array], list[Array], Arrays]:
            inputs_by_name = {**inputs, **leaves}
            values = [inputs_by_name[name] for name in program.inputs]
            outputs, written = program.run(values, {**fixed, **parameters}, dimensions, Dropped(masks_kept))
            return outputs, [outputs[i] for i in roots], written

        return _Passes(run)

    def _accumulated(self) -> Arrays:
        """The accumulated gradients; zeros at first, so that the backward pass of every microbatch is the same program."""
        missing = {
            name: self._values[name] for name in self._parameters_with_gradient if name not in self._gradients
        }
        return {**self._gradients, **self._zeros(missing)} if missing else self._gradients

    def _compile_update(self) -> None:
        """Compile the update with the first backward pass; else it would take a second of the second step."""
        self._update_compiled = True
        parameters, _ = self._split_variables()
        if parameters:
            self._squares.lower(shapes_of(parameters, self._device)).compile()
            self._optimizer.compile(parameters)

    def _gradient(self, name: str) -> torch.Tensor:
        parameter = self._parameter(name)
        gradient = self._gradients.get(name)
        return tensor(jnp.zeros_like(parameter) if gradient is None else gradient)

    def _parameter(self, name: str) -> Array:
        if name not in self._trained:
            raise ValueError(f"stage {self.stage.index} trains no parameter {name}")
        return self._values[name]

    def _clear(self) -> None:
        self._stashes.clear()
        self._gradients = {}


def _cached(cache: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The cached value of the key, made where it is missing (LRU)."""
    if key not in cache:
        if len(cache) >= MAX_COMPILED:
            cache.popitem(last=False)
        cache[key] = make()
    cache.move_to_end(key)
    return cache[key]


def _shapes(values: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for value in values)


def _seed(gradients: Tensors, name: str, shape: tuple[int, ...], device: jax.Device) -> Array:
    gradient = gradients.get(name)
    if gradient is None or tuple(gradient.shape) != shape:
        raise ValueError(f"the gradient of {name} is missing or not of shape {shape}")
    return array(gradient, device)


def _squares(gradients: Arrays) -> Arrays:
    """The sum of squares of each gradient, in float64."""
    return {name: jnp.sum(jnp.square(each.astype(jnp.float64))) for name, each in gradients.items()}


def _zeros(values: Arrays) -> Arrays:
    return {name: jnp.zeros_like(value) for name, value in values.items()}
