"""Files of a folder of which only the most recently used ones are kept."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class NewestFiles:
    """At most `most` files NAME`suffix` in the folder, which is made when it is needed."""

    def __init__(self, folder: Path, suffix: str, most: int) -> None:
        self._folder, self._suffix, self._most = folder, suffix, most

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """The content, of which `max_bytes` at most; None where it cannot be read."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                data = file.read(max_bytes)
        except OSError:
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Replace the file, and delete the oldest ones. Does nothing where the folder cannot be written to."""
        path = self._path(name)
        scratch = path.with_suffix(".tmp")
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(data)
            scratch.replace(path)
            files = sorted(self._folder.glob(f"*{self._suffix}"), key=lambda file: file.stat().st_mtime)
            for old in files[: -self._most]:
                old.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{self._suffix}"
