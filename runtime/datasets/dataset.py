"""Named arrays whose first dimension counts samples: how they are read, checked and held out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fusion.dag.ir.graph import DTYPE_BYTES
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import spread

REPORT_SECONDS = 1.0  # between two reports of progress

Array = npt.NDArray[Any]
ReportLine = Callable[[str], None]
T = TypeVar("T")


class Source(Protocol):
    """A file or folder of samples. JobError, in one line, for what cannot be read."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all arrays."""

    @property
    def classes(self) -> Mapping[str, Sequence[str]]:
        """By array of labels that was read, the class names that its values index."""

    def read(self, names: Sequence[str], limit_bytes: int, report: ReportLine) -> dict[str, Array]:
        """These arrays, all of one length of at least 1, together at most `limit_bytes`."""


@dataclass(frozen=True)
class Dataset:
    train: Mapping[str, Array]
    held_out: Mapping[str, Array] | None

    def example(self) -> dict[str, Array]:
        """Two samples, one of them twice where there are no more."""
        return {name: array[np.arange(2) % len(array)] for name, array in self.train.items()}


def parted(arrays: Mapping[str, Array], held_out: float | Mapping[str, Array], where: str) -> Dataset:
    """`held_out`: a share of the samples, spread over them, or separate samples. JobError where these have other shapes or dtypes."""
    if isinstance(held_out, Mapping):
        for name, array in arrays.items():
            other = held_out[name]
            if (array.dtype, array.shape[1:]) != (other.dtype, other.shape[1:]):
                raise JobError(
                    f"data.held_out: {name} is {other.dtype} {other.shape[1:]} a sample, "
                    f"and in data.path {array.dtype} {array.shape[1:]}"
                )
        return Dataset(arrays, held_out)
    total = len(next(iter(arrays.values())))
    chosen = np.zeros(total, dtype=bool)
    chosen[list(spread(total, held_out))] = True
    if not chosen.any():
        return Dataset(arrays, None)
    if chosen.all():
        raise JobError(f"{where}: every sample is held out, nothing is left to train on")
    return Dataset(
        {name: array[~chosen] for name, array in arrays.items()},
        {name: array[chosen] for name, array in arrays.items()},
    )


def checked(arrays: Mapping[str, Array], where: str) -> dict[str, Array]:
    """As they are trained on: of dtypes that a graph has, in native byte order, float64 as float32, all of one length. JobError where
    there is none, or a number is too large for float32."""
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) == 0:
            raise JobError(f"{where}: {name} has shape {array.shape}; its first dimension must count samples")
        of_64_bits = array.dtype.kind == "f" and array.dtype.itemsize == 8  # in either byte order
        made = in_single(array, name, where) if of_64_bits else array
        if made.dtype.name not in DTYPE_BYTES:
            raise JobError(
                f"{where}: {name} is of dtype {array.dtype}; those that can be trained on: {', '.join(DTYPE_BYTES)}"
            )
        found[name] = np.ascontiguousarray(made, dtype=made.dtype.newbyteorder("="))
    lengths = {len(array) for array in found.values()}
    if len(lengths) > 1:
        counts = ", ".join(f"{name} has {len(array)}" for name, array in found.items())
        raise JobError(f"{where}: the arrays must have as many samples each: {counts}")
    return found


def in_single(array: Array, name: str, where: str, first: int = 0) -> Array:
    """As float32. JobError, naming the sample (the array's first is number `first`), where a finite number does not fit."""
    with np.errstate(over="ignore"):
        made = array.astype(np.float32)
    lost = np.isinf(made) & np.isfinite(array)
    if lost.any():
        at = tuple(np.argwhere(lost)[0])
        raise JobError(
            f"{where}: {name} of sample {first + int(at[0])} (the first is 0) is {float(array[at]):.3g}; "
            f"numbers must be within {float(np.finfo(np.float32).max):.3g} of 0, as float32 is"
        )
    return made


def require_room(needed_bytes: int, limit_bytes: int, where: str) -> None:
    """JobError where it is more than `limit_bytes`, the rest of data.limit_bytes."""
    if needed_bytes > limit_bytes:
        left = f"data.limit_bytes leaves room for {limit_bytes}"
        raise JobError(f"{where}: {needed_bytes} bytes of samples; {left}")


def with_progress(items: Iterable[T], total: int, what: str, report: ReportLine) -> Iterator[T]:
    """`items`; reports now and then how many have been read: "packing the data: 1,200 of 5,000 images"."""
    last = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            report(f"packing the data: {count:,} of {total:,} {what}")
        yield item
