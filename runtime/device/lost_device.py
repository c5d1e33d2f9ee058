"""Errors after which a device may compute no more. CUDA keeps some of them (an illegal address, a failed assertion) for as long as the
process lives: every call of every job raises them again. Pure."""

from __future__ import annotations

_MESSAGES = ("CUDA error", "CUDA_ERROR", "CUDA driver error")  # of PyTorch, of JAX


class DeviceLost(RuntimeError):
    """The device computes nothing more in this process."""


def is_device_error(error: BaseException) -> bool:
    """Whether the device itself raised it, other than for lack of memory. The device may compute again all the same."""
    text = str(error)
    full = "out of memory" in text.lower() or "OUT_OF_MEMORY" in text
    return isinstance(error, RuntimeError) and not full and any(message in text for message in _MESSAGES)
