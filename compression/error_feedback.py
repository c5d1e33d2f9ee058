"""Error feedback: what a codec left out of one tensor is added to the next (Seide et al., Interspeech 2014; for
sparsified gradients Stich et al., arXiv 1809.07599; Karimireddy et al., arXiv 1901.09847).

It belongs to streams of tensors whose sum matters, such as gradients chosen anew each time; the gradient at the positions of a
forward pass (`Sparse.encode_at`) leaves nothing out and needs none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion.compression.dense import NONE
from fusion.compression.encoding import NAMES, Codec, Encoded
from fusion.compression.values import in_dtype


class ErrorFeedback:
    """One residual, float32 in the tensor's shape, for each key (an edge, a direction, a microbatch: the caller's choice).

    What a step leaves out becomes state when the step is committed and is forgotten when it is discarded, so that a
    step that runs again sends the same bytes again.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor | None] = {}  # None: nothing is left of what there was

    def encode(self, key: str, codec: Codec, tensor: torch.Tensor) -> Encoded:
        """`tensor` and what is left over under `key`, encoded. ValueError where that had another shape. A codec that sends the
        tensor whole pays what others have left out, and leaves nothing out but what the tensor's dtype rounds."""
        dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        whole = codec.cost(tensor.numel(), dtype) == NONE.cost(tensor.numel(), dtype)
        left = self._pending[key] if key in self._pending else self._residuals.get(key)
        if whole and left is None:
            return codec.encode(tensor)
        corrected = tensor.detach().to(torch.float32)
        if left is not None:
            if left.shape != corrected.shape:
                raise ValueError(f"the residual {key[:80]!r} is {list(left.shape)}, the tensor {list(shape)}")
            corrected = corrected + left
        sent = in_dtype(corrected.reshape(-1), tensor.dtype).reshape(shape)
        encoded = codec.encode(sent)
        if not whole:
            sent = codec.decode(memoryview(bytearray().join(encoded.buffers)), shape, dtype)
        # A NaN goes to the receiver, whose gates refuse the step; kept here, it would never leave again.
        residual = (corrected - sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._pending[key] = None if whole and not bool(residual.any()) else residual
        return encoded

    def has(self, key: str) -> bool:
        """Whether what goes out under `key` may have something added to it. It errs on that side while a step is under way, so
        that the answer does not depend on how far another thread has encoded it."""
        return key in self._residuals or key in self._pending

    def commit(self) -> None:
        for key, residual in self._pending.items():
            if residual is None:
                self._residuals.pop(key, None)
            else:
                self._residuals[key] = residual
        self._pending.clear()

    def discard(self) -> None:
        self._pending.clear()

    def rescale(self, factor: float) -> None:
        """What is kept, as if every tensor so far had been `factor` times as large; between two steps."""
        self._residuals = {key: residual * factor for key, residual in self._residuals.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """The committed residuals by key: part of a stage's state."""
        return dict(self._residuals)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a `state`; what was kept before is forgotten. The tensors are the caller's to check."""
        self._pending.clear()
        self._residuals = {key: tensor.to(torch.float32) for key, tensor in state.items()}
