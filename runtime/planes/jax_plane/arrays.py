"""Torch tensors, which cross the boundary of a plane, as JAX arrays and back. Values are copied, never shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import SingleDeviceSharding

from fusion.dag.ir.graph import DTYPE_BYTES

JAX_DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(jnp.bool_ if name == "bool" else getattr(jnp, name)) for name in DTYPE_BYTES
}


def array(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    value = tensor.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:  # numpy has none
        numbers = value.view(torch.int16).numpy().view(JAX_DTYPES["bfloat16"])
    else:
        numbers = value.numpy()
    # jnp.array would compile a program for each shape.
    return jax.device_put(numbers, device, may_alias=False)


def shapes_of(values: Any, device: jax.Device) -> Any:
    """The same tree with the shape and dtype of each array, placed on the device: the arguments to compile a function for."""
    place = SingleDeviceSharding(device)
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place), values)


def tensor(value: jax.Array) -> torch.Tensor:
    numbers = np.array(value)
    if numbers.dtype == JAX_DTYPES["bfloat16"]:
        return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(numbers)
