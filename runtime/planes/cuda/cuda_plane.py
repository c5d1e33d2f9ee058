"""The torch plane on CUDA: trains as on a CPU, and decodes in batches of a fixed size."""

from __future__ import annotations

from fusion.dag.cutting.stage import Stage
from fusion.runtime.planes.cuda.cuda_decoding import CudaDecodingStage
from fusion.runtime.planes.plane import Tensors
from fusion.runtime.planes.torch_plane import TorchPlane


class CudaPlane(TorchPlane):
    """Implements `fusion.runtime.planes.plane.Plane` on "cuda" or "cuda:<index>"."""

    def decoding(self, stage: Stage, variables: Tensors) -> CudaDecodingStage:
        return CudaDecodingStage(stage, variables, self._device)
