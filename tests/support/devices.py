"""The devices that tests run on: a GPU if there is one. Triton runs programs of the machine to find its libraries."""

from __future__ import annotations

import pytest
import torch

from fusion.dag.cutting.stage import Stage
from fusion.runtime.peer.plane_choice import TORCH, choose
from fusion.runtime.planes.plane import Tensors
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

NEEDS_GPU = [pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.program]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def decoding(stage: Stage, variables: Tensors, device: str) -> TorchDecodingStage:
    """A decoding stage as a peer on that device has it."""
    decoding = choose(TORCH, device, 1).decoding(stage, variables)
    assert isinstance(decoding, TorchDecodingStage)
    return decoding
