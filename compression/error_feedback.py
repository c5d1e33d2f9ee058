"""Error feedback: the part of a tensor that a codec leaves out is added to the next one (Seide et al., Interspeech 2014; for
sparsified gradients Stich et al., arXiv 1809.07599; Karimireddy et al., arXiv 1901.09847).

It is for streams of tensors whose sum matters, such as gradients whose positions are chosen anew each time; the gradient at the
positions of a forward pass (`Sparse.encode_at`) leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion.compression.dense import NONE
from fusion.compression.encoding import NAMES, Codec, Encoded
from fusion.compression.values import in_dtype


class ErrorFeedback:
    """One residual, float32 in the tensor's shape, for each key (an edge, a direction, a microbatch: the caller's choice).

    The residuals of a step become state when the step is committed and are dropped when it is discarded, so that a step
    that is retried sends the same bytes.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor | None] = {}  # None: the residual is zero

    def encode(self, key: str, codec: Codec, tensor: torch.Tensor) -> Encoded:
        """Encode `tensor` plus the residual of `key`. ValueError if that has another shape. A codec that sends the tensor dense
        sends the residual of earlier codecs too, and leaves only the rounding to the tensor's dtype."""
        dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        dense = codec.cost(tensor.numel(), dtype) == NONE.cost(tensor.numel(), dtype)
        previous = self._pending[key] if key in self._pending else self._residuals.get(key)
        if dense and previous is None:
            return codec.encode(tensor)
        corrected = tensor.detach().to(torch.float32)
        if previous is not None:
            if previous.shape != corrected.shape:
                raise ValueError(
                    f"the residual {key[:80]!r} is {list(previous.shape)}, the tensor {list(shape)}"
                )
            corrected = corrected + previous
        sent = in_dtype(corrected.reshape(-1), tensor.dtype).reshape(shape)
        encoded = codec.encode(sent)
        if not dense:
            sent = codec.decode(memoryview(bytearray().join(encoded.buffers)), shape, dtype)
        # The receiver gets the NaN, and its gates refuse the step; in the residual it would never go away.
        residual = (corrected - sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._pending[key] = None if dense and not bool(residual.any()) else residual
        return encoded

    def has(self, key: str) -> bool:
        """Whether `key` may have a residual. True in doubt while a step runs, so that the answer does not depend on how far
        another thread has encoded."""
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
        """Scale the residuals, as if every tensor so far had been `factor` times as large; between two steps."""
        self._residuals = {key: residual * factor for key, residual in self._residuals.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """The committed residuals by key: part of a stage's state."""
        return dict(self._residuals)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the residuals by a `state`, which the caller has checked."""
        self._pending.clear()
        self._residuals = {key: tensor.to(torch.float32) for key, tensor in state.items()}
