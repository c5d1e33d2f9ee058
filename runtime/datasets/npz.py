"""Arrays in an .npz file (`np.savez`), a zip of .npy files. Numpy's reader refuses arrays of objects, which are pickles."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np

from fusion.runtime.datasets.dataset import Array, ReportLine, checked, require_room
from fusion.runtime.job.errors import JobError

SUFFIX = ".npy"
BLOCK_BYTES = 1 << 24  # of an array that are checked at once


class Npz:
    """Reads only the names at first."""

    classes: Mapping[str, Sequence[str]] = {}  # its labels are numbers already

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._opened() as archive:
            self.names = tuple(
                name.removesuffix(SUFFIX) for name in archive.namelist() if name.endswith(SUFFIX)
            )
        if not self.names:
            raise JobError(f"{path} holds no arrays: np.savez(path, name=array, ...) writes such a file")

    def read(self, names: Sequence[str], limit_bytes: int, report: ReportLine) -> dict[str, Array]:
        """See `Source`."""
        found: dict[str, Array] = {}
        left = limit_bytes
        with self._opened() as archive:
            for name in names:
                report(f"reading {name} of {self._path.name}")
                require_room(_size(archive, name), left, str(self._path))
                with archive.open(name + SUFFIX) as file:
                    found[name] = np.lib.format.read_array(file, allow_pickle=False)
                left -= found[name].nbytes
        made = checked(found, str(self._path))
        for name, array in made.items():
            _refuse_nan(array, name, str(self._path))
        return made

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self._path) as archive:
                yield archive
        except OSError as error:
            raise JobError(f"{self._path}: {error.strerror or error}") from None
        except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError) as error:
            raise JobError(f"{self._path} is not an .npz file: {error}") from None
        except JobError:
            raise
        except (zlib.error, tokenize.TokenError, KeyError, TypeError, OverflowError) as error:
            raise JobError(f"{self._path} is damaged: {error}") from None
        except (ValueError, RuntimeError) as error:
            # Encrypted, or compressed by a method that zipfile does not support.
            raise JobError(f"{self._path}: {error}") from None


def _refuse_nan(array: Array, name: str, where: str) -> None:
    """JobError, naming the first sample, where there is a NaN: a single one makes all weights NaN. Infinities are allowed: a mask may
    have them."""
    if array.dtype.kind != "f":
        return
    step = max(1, BLOCK_BYTES * len(array) // max(1, array.nbytes))
    for first in range(0, len(array), step):
        lost = np.isnan(array[first : first + step])
        if lost.any():
            sample = first + int(np.argwhere(lost)[0][0])
            raise JobError(
                f"{where}: {name} of sample {sample} (the first is 0) has a NaN, which is no number"
            )


def _size(archive: zipfile.ZipFile, name: str) -> int:
    """Of an array, by its header: checked before it is read."""
    with archive.open(name + SUFFIX) as file:
        version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
        header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = header(file)  # type: ignore[no-untyped-call]
    return prod(shape) * int(dtype.itemsize)
