"""AdamW and SGD as torch has them (`fusion.runtime.planes.optimizer`), with the same state under the same names, in JAX."""

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
    """What the optimizer keeps of each parameter: nothing before its first gradient."""

    def __init__(self, config: OptimizerConfig, device: jax.Device) -> None:
        if config.kind not in SLOTS:
            raise JobError(f'optimizer.kind: "adamw" or "sgd", not "{config.kind}"')
        self._config = config
        self._device = device
        self._slots: Slots = {}
        # Said to be on the device as all else is: what only looks at shapes is not, and what takes it would be compiled again.
        self._first = jax.jit(self._slots_of, out_shardings=SingleDeviceSharding(device))
        update = self._adamw if config.kind == "adamw" else self._sgd
        # The memory of the gradients and of the slots is taken for what comes out.
        self._update = jax.jit(update, donate_argnums=(1, 2))

    def step(
        self, parameters: Mapping[str, Array], gradients: Arrays, rate: float, clip_factor: float
    ) -> Arrays:
        """Those of the parameters that have a gradient, after it; others stay as they are, as in torch."""
        if not gradients:
            return {}
        before = {name: parameters[name] for name in gradients}
        new = {name: value for name, value in before.items() if name not in self._slots}
        slots = {**self._slots, **self._first(new)} if new else self._slots
        slots = {name: slots[name] for name in gradients}
        after: Arrays
        after, slots = self._update(before, gradients, slots, rate, clip_factor)
        self._slots.update(slots)
        return after

    def compile(self, parameters: Arrays) -> None:
        """Compile what `step` runs where each of the parameters has a gradient: of shapes alone, nothing is set aside. In any other
        case `step` compiles it when it is called."""
        self._first.lower(parameters).compile()
        gradients, slots = shapes_of((parameters, self._first.eval_shape(parameters)), self._device)
        self._update.lower(parameters, gradients, slots, 0.0, 1.0).compile()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies by "<name>/<slot>"."""
        return {
            f"{name}/{slot}": tensor(value)
            for name, slots in self._slots.items()
            for slot, value in slots.items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor], parameters: Mapping[str, Array]) -> None:
        """Replace the state by copies of `state`. JobError names a slot that fits none of the parameters, or a
        parameter that lacks one."""
        found: Slots = {}
        for key, value in state.items():
            name, _, slot = key.rpartition("/")
            parameter = parameters.get(name)
            if parameter is None or slot not in SLOTS[self._config.kind]:
                raise JobError(f"optimizer state: {key} belongs to no parameter of this stage")
            made = array(value, self._device)
            shape, dtype = ((), jnp.float32) if slot == "step" else (parameter.shape, parameter.dtype)
            if made.shape != shape or made.dtype != dtype:
                raise JobError(
                    f"optimizer state: {key} is {made.dtype}{list(made.shape)}, not {jnp.dtype(dtype)}{list(shape)}"
                )
            found.setdefault(name, {})[slot] = made
        require_complete(found, self._config.kind)
        self._slots = found

    def _slots_of(self, parameters: Arrays) -> Slots:
        """Before the first update."""
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
        after, kept = {}, {}
        for name, parameter in parameters.items():
            dtype = parameter.dtype
            gradient = gradients[name] * clip.astype(dtype)
            step = slots[name]["step"] + 1
            average = slots[name]["exp_avg"] * beta1 + gradient * (1 - beta1)
            squares = slots[name]["exp_avg_sq"] * beta2 + gradient * gradient * (1 - beta2)
            # As torch does, in double precision what is one number for all elements.
            count = step.astype(jnp.float64)
            size = (rate / (1 - beta1**count)).astype(dtype)
            root = jnp.sqrt(1 - beta2**count).astype(dtype)
            kept[name] = {"step": step, "exp_avg": average, "exp_avg_sq": squares}
            parameter = parameter * (1 - rate * decay).astype(dtype)
            after[name] = parameter - size * average / (jnp.sqrt(squares) / root + eps)
        return after, kept

    def _sgd(
        self, parameters: Arrays, gradients: Arrays, slots: Slots, rate: Array, clip: Array
    ) -> tuple[Arrays, Slots]:
        config = self._config
        after, kept = {}, {}
        for name, parameter in parameters.items():
            gradient = gradients[name] * clip.astype(parameter.dtype)
            gradient = gradient + config.weight_decay * parameter
            if config.momentum:
                gradient = config.momentum * slots[name]["momentum_buffer"] + gradient
                kept[name] = {"momentum_buffer": gradient}
            after[name] = parameter - rate.astype(parameter.dtype) * gradient
        return after, kept
