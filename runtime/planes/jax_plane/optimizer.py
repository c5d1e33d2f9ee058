"""AdamW and SGD as in torch (`fusion.runtime.planes.optimizer`), with the same state under the same names, in JAX."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.sharding import SingleDeviceSharding

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.jax_plane.arrays import array, shapes_of, tensor
from fusion.runtime.planes.optimizer import SLOTS, require_complete

Arrays = dict[str, Array]
Slots = dict[str, Arrays]  # by the name of the parameter, then of the slot


class Optimizer:
    """The optimizer and its state: no slots of a parameter before its first gradient."""

    def __init__(self, config: OptimizerConfig, device: jax.Device) -> None:
        if config.kind not in SLOTS:
            raise JobError(f'optimizer.kind: "adamw" or "sgd", not "{config.kind}"')
        self._config = config
        self._device = device
        self._slots: Slots = {}
        # Committed to the device, like all else: arrays that depend on shapes alone are not, and `_update` would be compiled again.
        self._initial_slots = jax.jit(self._zero_slots, out_shardings=SingleDeviceSharding(device))
        update = self._adamw if config.kind == "adamw" else self._sgd
        # Gradients and slots are updated in place.
        self._update = jax.jit(update, donate_argnums=(1, 2))

    def step(
        self, parameters: Mapping[str, Array], gradients: Arrays, rate: float, clip_factor: float
    ) -> Arrays:
        """The new values of parameters that have a gradient; others are skipped, as in torch."""
        if not gradients:
            return {}
        current = {name: parameters[name] for name in gradients}
        new = {name: value for name, value in current.items() if name not in self._slots}
        slots = {**self._slots, **self._initial_slots(new)} if new else self._slots
        slots = {name: slots[name] for name in gradients}
        updated: Arrays
        updated, slots = self._update(current, gradients, slots, rate, clip_factor)
        self._slots.update(slots)
        return updated

    def compile(self, parameters: Arrays) -> None:
        """Compile what `step` runs where every parameter has a gradient, from shapes alone, without allocating. In other cases `step`
        compiles when it is called."""
        self._initial_slots.lower(parameters).compile()
        gradients, slots = shapes_of((parameters, self._initial_slots.eval_shape(parameters)), self._device)
        self._update.lower(parameters, gradients, slots, 0.0, 1.0).compile()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies by "<name>/<slot>"."""
        return {
            f"{name}/{slot}": tensor(value)
            for name, slots in self._slots.items()
            for slot, value in slots.items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor], parameters: Mapping[str, Array]) -> None:
        """Replace the state by copies of `state`. JobError names a slot of no parameter, or a parameter that lacks one."""
        loaded: Slots = {}
        for key, value in state.items():
            name, _, slot = key.rpartition("/")
            parameter = parameters.get(name)
            if parameter is None or slot not in SLOTS[self._config.kind]:
                raise JobError(f"optimizer state: {key} belongs to no parameter of this stage")
            slot_value = array(value, self._device)
            shape, dtype = ((), jnp.float32) if slot == "step" else (parameter.shape, parameter.dtype)
            if slot_value.shape != shape or slot_value.dtype != dtype:
                raise JobError(
                    f"optimizer state: {key} is {slot_value.dtype}{list(slot_value.shape)}, not {jnp.dtype(dtype)}{list(shape)}"
                )
            loaded.setdefault(name, {})[slot] = slot_value
        require_complete(loaded, self._config.kind)
        self._slots = loaded

    def _zero_slots(self, parameters: Arrays) -> Slots:
        """The slots before the first update."""
        if self._config.kind == "sgd":
            if not self._config.momentum:
                return {name: {} for name in parameters}
            return {name: {"momentum_buffer": jnp.zeros_like(value)} for name, value in parameters.items()}
        return {
            name: {
                "step": jnp.zeros((), jnp.float32),
                "exp_avg": jnp.zeros_like(value),
                "exp_avg_sq": jnp.zeros_like(value),
            }
            for name, value in parameters.items()
        }

    def _adamw(
        self, parameters: Arrays, gradients: Arrays, slots: Slots, rate: Array, clip: Array
    ) -> tuple[Arrays, Slots]:
        config = self._config
        (beta1, beta2), eps, decay = config.betas, config.eps, config.weight_decay
        updated, new_slots = {}, {}
        for name, parameter in parameters.items():
            dtype = parameter.dtype
            gradient = gradients[name] * clip.astype(dtype)
            step = slots[name]["step"] + 1
            average = slots[name]["exp_avg"] * beta1 + gradient * (1 - beta1)
            squares = slots[name]["exp_avg_sq"] * beta2 + gradient * gradient * (1 - beta2)
            # Scalars in double precision, as in torch.
            count = step.astype(jnp.float64)
            step_size = (rate / (1 - beta1**count)).astype(dtype)
            correction = jnp.sqrt(1 - beta2**count).astype(dtype)
            new_slots[name] = {"step": step, "exp_avg": average, "exp_avg_sq": squares}
            parameter = parameter * (1 - rate * decay).astype(dtype)
            updated[name] = parameter - step_size * average / (jnp.sqrt(squares) / correction + eps)
        return updated, new_slots

    def _sgd(
        self, parameters: Arrays, gradients: Arrays, slots: Slots, rate: Array, clip: Array
    ) -> tuple[Arrays, Slots]:
        config = self._config
        updated, new_slots = {}, {}
        for name, parameter in parameters.items():
            gradient = gradients[name] * clip.astype(parameter.dtype)
            gradient = gradient + config.weight_decay * parameter
            if config.momentum:
                gradient = config.momentum * slots[name]["momentum_buffer"] + gradient
                new_slots[name] = {"momentum_buffer": gradient}
            updated[name] = parameter - rate.astype(parameter.dtype) * gradient
        return updated, new_slots
