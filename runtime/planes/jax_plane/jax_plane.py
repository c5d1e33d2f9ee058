"""The JAX execution plane. Implements `fusion.runtime.planes.plane`."""

from __future__ import annotations

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.jax_plane.jax_decoding import JaxDecodingStage
from fusion.runtime.planes.jax_plane.jax_training import JaxTrainingStage
from fusion.runtime.planes.jax_plane.lacking import LACKING
from fusion.runtime.planes.jax_plane.library import load
from fusion.runtime.planes.plane import Tensors


class JaxPlane:
    """Implements `fusion.runtime.planes.plane.Plane` on "cpu", "cuda" or "cuda:<index>" of JAX, with `threads` on a CPU."""

    name = "jax"
    lacks = LACKING
    working_bytes = 512 << 20  # compiled code, and all temporary values of a call at once

    def __init__(self, device: str = "cpu", threads: int = 1) -> None:
        self._device = load(device, threads)

    def training(self, stage: Stage, variables: Tensors, optimizer: OptimizerConfig) -> JaxTrainingStage:
        return JaxTrainingStage(stage, variables, optimizer, self._device)

    def decoding(self, stage: Stage, variables: Tensors) -> JaxDecodingStage:
        return JaxDecodingStage(stage, variables, self._device)
