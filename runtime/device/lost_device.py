"""Errors after which a device may compute no more. CUDA keeps some of them (an illegal address, a failed assertion) for as long as the
process lives: every call raises them again, whoever makes it. Pure."""

from __future__ import annotations

_SAID = ("CUDA error", "CUDA_ERROR", "CUDA driver error")  # by PyTorch, by JAX


class DeviceLost(RuntimeError):
    """The device computes nothing more in this process."""


def is_device_error(error: BaseException) -> bool:
    """Whether the device itself says so, for another reason than that its memory is full. It may go on all the same."""
    text = str(error)
    full = "out of memory" in text.lower() or "OUT_OF_MEMORY" in text
    return isinstance(error, RuntimeError) and not full and any(said in text for said in _SAID)
