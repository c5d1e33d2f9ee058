"""Discrete Fourier transforms over a size that is known, as products with the DFT matrix.

Each function takes the place of the one of torch.fft (or torch) that it is named after, which it calls where the size is left free, or large: the
op-set has no complex numbers, but pairs of real ones (`fusion.runtime.capture.lowering.complex_numbers`). A product takes n / log n times as
many operations as a fast transform does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_MOST_PLACES = 4096  # whose table of angles takes 64 MiB
_Plain = Callable[..., Any]


def fft(*, inverse: bool = False) -> Callable[[_Plain], _Plain]:
    """And ifft, the `inverse`."""

    def of(plain: _Plain) -> _Plain:
        def run(input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **more: Any) -> Tensor:  # fmt: skip
            size = input.shape[dim] if n is None else n
            if more or not _known(input, size, dim):
                return plain(input, n, dim, norm, **more)  # type: ignore[no-any-return]
            real, imaginary = _parts(_sized(input, size, dim), dim)
            cosines, sines = _dft_matrix(size, size, _scale(size, norm, inverse), real.dtype)
            sines = -sines if inverse else sines
            along, across = real @ cosines, real @ sines
            if imaginary is not None:
                along, across = along - imaginary @ sines, across + imaginary @ cosines
            return torch.complex(along, across).movedim(-1, dim)

        return run

    return of


def rfft(plain: _Plain) -> _Plain:
    def run(
        input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **more: Any
    ) -> Tensor:
        size = input.shape[dim] if n is None else n
        if more or not _known(input, size, dim):
            return plain(input, n, dim, norm, **more)  # type: ignore[no-any-return]
        real, _ = _parts(_sized(input, size, dim), dim)
        cosines, sines = _dft_matrix(size, size // 2 + 1, _scale(size, norm, False), real.dtype)
        return torch.complex(real @ cosines, real @ sines).movedim(-1, dim)

    return run


def irfft(plain: _Plain) -> _Plain:
    def run(
        input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **more: Any
    ) -> Tensor:
        size = 2 * (input.shape[dim] - 1) if n is None else n
        if more or not _known(input, size, dim):
            return plain(input, n, dim, norm, **more)  # type: ignore[no-any-return]
        kept = size // 2 + 1
        real, imaginary = _parts(_sized(input, kept, dim), dim)
        cosines, sines = _dft_matrix(size, kept, _scale(size, norm, True), real.dtype)
        # What is left out is the mirror of all but the first, and the middle one of an even size.
        places = torch.arange(kept)
        own = (places == 0) | (2 * places == size)
        weight = 2.0 - own.to(real.dtype)
        made = real @ (cosines * weight).T
        if imaginary is not None:
            made = made + imaginary @ (sines * weight).T
        return made.movedim(-1, dim)

    return run


def fftn(last: str, others: str, dims: Sequence[int] | None, *, last_first: bool = True) -> Callable[[_Plain], _Plain]:  # fmt: skip
    """Those over several dimensions, one by one: the last by the function of torch.fft called `last`, the others by `others`."""

    def of(plain: _Plain) -> _Plain:
        def run(
            input: Tensor, s: Any = None, dim: Any = dims, norm: str | None = None, **more: Any
        ) -> Tensor:
            if more:
                return plain(input, s, dim, norm, **more)  # type: ignore[no-any-return]
            if dim is None:
                dim = range(-input.dim() if s is None else -len(s), 0)
            sizes = [None] * len(dim) if s is None else [None if each == -1 else each for each in s]
            *rest, final = zip(dim, sizes, strict=True)
            order = [(last, *final), *((others, *each) for each in reversed(rest))]
            for name, at, size in order if last_first else order[::-1]:
                input = getattr(torch.fft, name)(input, size, at, norm)
            return input

        return run

    return of


def stft(plain: _Plain) -> _Plain:
    """Of a length that is known."""

    def run(
        input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
        center: bool = True, pad_mode: str = "reflect", normalized: bool = False, onesided: bool | None = None,
        return_complex: bool | None = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        hop, length = hop_length or n_fft // 4, win_length or n_fft
        onesided = not input.is_complex() if onesided is None else onesided
        # Without `return_complex` torch says what is to be said.
        if more or input.is_complex() or return_complex is None or not isinstance(input.shape[-1], int):
            return plain(  # type: ignore[no-any-return]
                input, n_fft, hop_length, win_length, window, center, pad_mode, normalized, onesided, return_complex, **more
            )  # fmt: skip
        if center:
            side = n_fft // 2
            lead = input.reshape(1, -1, input.shape[-1])
            padded = functional.pad(lead, (side, side), mode=pad_mode)
            input = padded.reshape(*input.shape[:-1], padded.shape[-1])
        frames = input.unfold(-1, n_fft, hop)
        if window is not None or length < n_fft:
            own, before = torch.ones(length) if window is None else window, (n_fft - length) // 2
            frames = frames * functional.pad(own, (before, n_fft - length - before))
        norm = "ortho" if normalized else None
        made = (torch.fft.rfft if onesided else torch.fft.fft)(frames, norm=norm).transpose(-1, -2)
        return made if return_complex else torch.view_as_real(made)

    return run


def istft(plain: _Plain) -> _Plain:
    """Of a number of frames that is known."""

    def run(
        input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
        center: bool = True, normalized: bool = False, onesided: bool | None = None, length: int | None = None,
        return_complex: bool = False,
    ) -> Tensor:  # fmt: skip
        hop, own_length, count = hop_length or n_fft // 4, win_length or n_fft, input.shape[-1]
        if onesided is False or return_complex or not isinstance(count, int):
            return plain(  # type: ignore[no-any-return]
                input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex
            )  # fmt: skip
        own, before = torch.ones(own_length) if window is None else window, (n_fft - own_length) // 2
        own = functional.pad(own, (before, n_fft - own_length - before))
        lead = input if input.dim() == 3 else input.unsqueeze(0)  # (batch, frequencies, frames)
        frames = torch.fft.irfft(lead.transpose(-1, -2), n_fft, norm="ortho" if normalized else None) * own
        start = n_fft // 2 if center else 0
        whole = n_fft + hop * (count - 1)
        end = whole - start if length is None else min(start + length, whole)
        made, weight = (
            _overlapped(each, whole, hop)[:, start:end]
            for each in (frames, (own * own).expand(1, count, n_fft))
        )
        made = made / weight
        if length is not None:
            made = functional.pad(made, (0, start + length - end))
        return made if input.dim() == 3 else made.squeeze(0)

    return run


def _overlapped(frames: Tensor, size: int, hop: int) -> Tensor:
    """(batch, frames, length) as one row each, (batch, size): what lies at one place is summed."""
    length = frames.shape[-1]
    folded = functional.fold(frames.transpose(-1, -2), (1, size), (1, length), stride=(1, hop))
    return folded[:, 0, 0]


def _known(input: Tensor, size: Any, dim: int) -> bool:
    return isinstance(size, int) and isinstance(input.shape[dim], int) and 0 < size <= _MOST_PLACES


def _sized(input: Tensor, size: int, dim: int) -> Tensor:
    """What is too much is left out, what is lacking is zero."""
    had = input.shape[dim]
    if had >= size:
        return input.narrow(dim, 0, size)
    lacking = [0, 0] * (-dim if dim < 0 else input.dim() - dim)
    lacking[-1] = size - had
    if not input.is_complex():
        return functional.pad(input, lacking)
    return torch.complex(functional.pad(input.real, lacking), functional.pad(input.imag, lacking))


def _parts(input: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """Real and imaginary part, the dimension last."""
    if input.is_complex():
        return input.real.movedim(dim, -1), input.imag.movedim(dim, -1)
    return (input if input.is_floating_point() else input.to(torch.get_default_dtype())).movedim(
        dim, -1
    ), None


def _dft_matrix(size: int, kept: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of the first `kept` columns of the DFT matrix, times `scale`. A half turn has
    no sine at all: the sign of a zero is an angle of half a turn."""
    turns = torch.arange(size).unsqueeze(1) * torch.arange(kept) % size
    angle = turns.to(dtype) * (-2 * pi / size)
    sines = torch.where(2 * turns % size == 0, -0.0, angle.sin())
    return angle.cos() * scale, sines * scale


def _scale(size: int, norm: str | None, inverse: bool) -> float:
    if norm == "ortho":
        return 1 / sqrt(size)
    return 1 / size if (norm == "forward") != inverse else 1.0
