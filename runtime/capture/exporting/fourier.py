"""Discrete Fourier transforms over a known size, as products with the DFT matrix.

Each function takes the original of torch.fft (or torch) that it is named after and returns its replacement, which calls the original where
the size is free or large. The op-set has no complex numbers; `fusion.runtime.capture.lowering.complex_numbers` turns them into pairs of
real ones. A product takes n / log n times as many operations as a fast transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_MAX_SIZE = 4096  # its table of angles takes 64 MiB
_Function = Callable[..., Any]


def fft(*, inverse: bool = False) -> Callable[[_Function], _Function]:
    """fft, or ifft with `inverse`."""

    def patch(original: _Function) -> _Function:
        def run(input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **more: Any) -> Tensor:  # fmt: skip
            size = input.shape[dim] if n is None else n
            if more or not _is_small(input, size, dim):
                return original(input, n, dim, norm, **more)  # type: ignore[no-any-return]
            real, imaginary = _real_and_imaginary(_resized(input, size, dim), dim)
            cosines, sines = _dft_matrix(size, size, _scale(size, norm, inverse), real.dtype)
            sines = -sines if inverse else sines
            along, across = real @ cosines, real @ sines
            if imaginary is not None:
                along, across = along - imaginary @ sines, across + imaginary @ cosines
            return torch.complex(along, across).movedim(-1, dim)

        return run

    return patch


def rfft(original: _Function) -> _Function:
    def run(
        input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **more: Any
    ) -> Tensor:
        size = input.shape[dim] if n is None else n
        if more or not _is_small(input, size, dim):
            return original(input, n, dim, norm, **more)  # type: ignore[no-any-return]
        real, _ = _real_and_imaginary(_resized(input, size, dim), dim)
        cosines, sines = _dft_matrix(size, size // 2 + 1, _scale(size, norm, False), real.dtype)
        return torch.complex(real @ cosines, real @ sines).movedim(-1, dim)

    return run


def irfft(original: _Function) -> _Function:
    def run(
        input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **more: Any
    ) -> Tensor:
        size = 2 * (input.shape[dim] - 1) if n is None else n
        if more or not _is_small(input, size, dim):
            return original(input, n, dim, norm, **more)  # type: ignore[no-any-return]
        kept = size // 2 + 1
        real, imaginary = _real_and_imaginary(_resized(input, kept, dim), dim)
        cosines, sines = _dft_matrix(size, kept, _scale(size, norm, True), real.dtype)
        # Each frequency stands for its mirror image too, but for the first, and the middle one of an even size.
        frequencies = torch.arange(kept)
        unpaired = (frequencies == 0) | (2 * frequencies == size)
        weight = 2.0 - unpaired.to(real.dtype)
        result = real @ (cosines * weight).T
        if imaginary is not None:
            result = result + imaginary @ (sines * weight).T
        return result.movedim(-1, dim)

    return run


def fftn(last: str, others: str, dims: Sequence[int] | None, *, last_first: bool = True) -> Callable[[_Function], _Function]:  # fmt: skip
    """Transforms over several dimensions, one by one: the last by torch.fft's `last`, the others by its `others`."""

    def patch(original: _Function) -> _Function:
        def run(
            input: Tensor, s: Any = None, dim: Any = dims, norm: str | None = None, **more: Any
        ) -> Tensor:
            if more:
                return original(input, s, dim, norm, **more)  # type: ignore[no-any-return]
            if dim is None:
                dim = range(-input.dim() if s is None else -len(s), 0)
            sizes = [None] * len(dim) if s is None else [None if each == -1 else each for each in s]
            *rest, final = zip(dim, sizes, strict=True)
            order = [(last, *final), *((others, *each) for each in reversed(rest))]
            for name, axis, size in order if last_first else order[::-1]:
                input = getattr(torch.fft, name)(input, size, axis, norm)
            return input

        return run

    return patch


def stft(original: _Function) -> _Function:
    """The replacement applies to signals of known length."""

    def run(
        input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
        center: bool = True, pad_mode: str = "reflect", normalized: bool = False, onesided: bool | None = None,
        return_complex: bool | None = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        hop, length = hop_length or n_fft // 4, win_length or n_fft
        onesided = not input.is_complex() if onesided is None else onesided
        # Without `return_complex`, torch raises its own error.
        if more or input.is_complex() or return_complex is None or not isinstance(input.shape[-1], int):
            return original(  # type: ignore[no-any-return]
                input, n_fft, hop_length, win_length, window, center, pad_mode, normalized, onesided, return_complex, **more
            )  # fmt: skip
        if center:
            side = n_fft // 2
            flat = input.reshape(1, -1, input.shape[-1])
            padded = functional.pad(flat, (side, side), mode=pad_mode)
            input = padded.reshape(*input.shape[:-1], padded.shape[-1])
        frames = input.unfold(-1, n_fft, hop)
        if window is not None or length < n_fft:
            padded_window, before = torch.ones(length) if window is None else window, (n_fft - length) // 2
            frames = frames * functional.pad(padded_window, (before, n_fft - length - before))
        norm = "ortho" if normalized else None
        spectrum = (torch.fft.rfft if onesided else torch.fft.fft)(frames, norm=norm).transpose(-1, -2)
        return spectrum if return_complex else torch.view_as_real(spectrum)

    return run


def istft(original: _Function) -> _Function:
    """The replacement applies to a known number of frames."""

    def run(
        input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
        center: bool = True, normalized: bool = False, onesided: bool | None = None, length: int | None = None,
        return_complex: bool = False,
    ) -> Tensor:  # fmt: skip
        hop, window_length, count = hop_length or n_fft // 4, win_length or n_fft, input.shape[-1]
        if onesided is False or return_complex or not isinstance(count, int):
            return original(  # type: ignore[no-any-return]
                input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex
            )  # fmt: skip
        padded_window, before = (
            torch.ones(window_length) if window is None else window,
            (n_fft - window_length) // 2,
        )
        padded_window = functional.pad(padded_window, (before, n_fft - window_length - before))
        batched = input if input.dim() == 3 else input.unsqueeze(0)  # (batch, frequencies, frames)
        frames = (
            torch.fft.irfft(batched.transpose(-1, -2), n_fft, norm="ortho" if normalized else None)
            * padded_window
        )
        start = n_fft // 2 if center else 0
        padded_length = n_fft + hop * (count - 1)
        end = padded_length - start if length is None else min(start + length, padded_length)
        signal, weight = (
            _overlap_added(part, padded_length, hop)[:, start:end]
            for part in (frames, (padded_window * padded_window).expand(1, count, n_fft))
        )
        signal = signal / weight
        if length is not None:
            signal = functional.pad(signal, (0, start + length - end))
        return signal if input.dim() == 3 else signal.squeeze(0)

    return run


def _overlap_added(frames: Tensor, size: int, hop: int) -> Tensor:
    """Frames (batch, frames, length) as signals (batch, size): overlapping values are summed."""
    length = frames.shape[-1]
    folded = functional.fold(frames.transpose(-1, -2), (1, size), (1, length), stride=(1, hop))
    return folded[:, 0, 0]


def _is_small(input: Tensor, size: Any, dim: int) -> bool:
    return isinstance(size, int) and isinstance(input.shape[dim], int) and 0 < size <= _MAX_SIZE


def _resized(input: Tensor, size: int, dim: int) -> Tensor:
    """The input cut to `size` along the dimension, or filled up with zeros."""
    length = input.shape[dim]
    if length >= size:
        return input.narrow(dim, 0, size)
    padding = [0, 0] * (-dim if dim < 0 else input.dim() - dim)
    padding[-1] = size - length
    if not input.is_complex():
        return functional.pad(input, padding)
    return torch.complex(functional.pad(input.real, padding), functional.pad(input.imag, padding))


def _real_and_imaginary(input: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """The real part and, of a complex input, the imaginary part, with the dimension last."""
    if input.is_complex():
        return input.real.movedim(dim, -1), input.imag.movedim(dim, -1)
    return (input if input.is_floating_point() else input.to(torch.get_default_dtype())).movedim(
        dim, -1
    ), None


def _dft_matrix(size: int, kept: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of the first `kept` columns of the DFT matrix, times `scale`. The sine of half a turn is exactly zero, and
    negative: the sign of a zero decides between an angle of pi and -pi."""
    steps = torch.arange(size).unsqueeze(1) * torch.arange(kept) % size
    angle = steps.to(dtype) * (-2 * pi / size)
    sines = torch.where(2 * steps % size == 0, -0.0, angle.sin())
    return angle.cos() * scale, sines * scale


def _scale(size: int, norm: str | None, inverse: bool) -> float:
    if norm == "ortho":
        return 1 / sqrt(size)
    return 1 / size if (norm == "forward") != inverse else 1.0
