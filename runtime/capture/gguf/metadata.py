"""The metadata of a GGUF file, key by key: whoever understands a value takes it, and what nobody took refuses the file."""

from __future__ import annotations

import math
from typing import Any

from fusion.runtime.capture.gguf.header import GGUFHeader, Value, shown
from fusion.runtime.job.errors import JobError

TOKENS = "tokenizer.ggml.tokens"
LEAST = 1e-3  # of a number that others are divided by


class Metadata:
    """The file's values, each to be taken by whoever understands it."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        kind = header.values.get("general.type", "model")
        if kind != "model":
            raise JobError(f"{header.path}: not a model but {shown(str(kind))}")
        architecture = header.values.get("general.architecture")
        if not isinstance(architecture, str):
            raise JobError(f"{header.path} does not say of what kind its model is (general.architecture)")
        self.architecture = architecture
        self._prefix = f"{self.architecture}."
        self._left = {key for key in header.values if key.startswith(self._prefix)}

    def whole(self, key: str, default: int | None = None) -> int:
        found = self._same(key, default)
        if type(found) is not int or not 0 <= found < 1 << 32:
            raise self.bad(key, found, "a whole number")
        return found

    def size(self, key: str, default: int | None = None) -> int:
        found = self.whole(key, default)
        if not found:
            raise self.bad(key, found, "at least 1")
        return found

    def real(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        found = self._same(key, default)
        if type(found) not in (int, float) or not math.isfinite(found):
            raise self.bad(key, found, "a number")
        if found < least:
            raise self.bad(key, found, f"at least {least:g}")
        return float(found)

    def text(self, key: str, default: str | None = None) -> str:
        found = self._same(key, default)
        if not isinstance(found, str):
            raise self.bad(key, found, "a text")
        return found

    def flag(self, key: str, default: bool | None = None) -> bool:
        found = self._same(key, default)
        if not isinstance(found, bool):
            raise self.bad(key, found, "true or false")
        return found

    def each(self, key: str, layers: int) -> list[int]:
        """A whole number for each layer: a list, or the one that all have."""
        found = self.header.values.get(self._prefix + key)
        if not isinstance(found, tuple):
            return [self.whole(key)] * layers
        self._left.discard(self._prefix + key)
        numbers = [n for n in found if isinstance(n, int) and 0 <= n < 1 << 32]
        if not len(numbers) == len(found) == layers:
            raise self.bad(key, found, f"a whole number for each of {layers} layers")
        return [int(n) for n in numbers]

    def reals(self, key: str, layers: int, *, shared: bool = False) -> list[float]:
        """A number for each layer, which may be none that is finite. `shared`: under a name that all architectures have it by."""
        found = self.header.values.get(key if shared else self._prefix + key)
        self._left.discard(self._prefix + key)
        numbers = [n for n in found if isinstance(n, float)] if isinstance(found, tuple) else []
        if len(numbers) != layers or not isinstance(found, tuple) or len(found) != layers:
            raise self.bad(key, found, f"a number for each of {layers} layers")
        return numbers

    def any(self, key: str) -> None:
        """For a value that changes nothing of what is computed."""
        self._left.discard(self._prefix + key)

    def must_be(self, key: str, *wanted: Value) -> None:
        """For a value that is only known as one of these, if it is there at all."""
        found = self._same(key, wanted[0])
        if found not in wanted:
            raise self.bad(key, found, " or ".join(map(str, wanted)))

    def tensor(self, name: str, *shape: int) -> None:
        """JobError unless the file has this tensor, in this shape."""
        found = self.header.tensors.get(name)
        if found is None:
            raise JobError(f"{self.header.path}: no tensor {name}")
        if found.shape != shape:
            raise JobError(
                f"{self.header.path}: {name} has the shape {found.shape}, and its values say {shape}"
            )

    def has(self, name: str) -> bool:
        return name in self.header.tensors

    def all_taken(self) -> None:
        for key in sorted(self._left):
            raise JobError(
                f"{self.header.path} says {shown(key)} = {_brief(self.header.values[key])}, which is not understood"
            )

    def bad(self, key: str, found: object, wanted: str) -> JobError:
        what = "does not say" if found is None else "says"
        value = "" if found is None else f" = {_brief(found)}"
        return JobError(f"{self.header.path} {what} {self._prefix}{key}{value}: {wanted}")

    def _same(self, key: str, default: Any) -> Any:
        """A value, or the one that a list repeats for each layer."""
        self._left.discard(self._prefix + key)
        found = self.header.values.get(self._prefix + key, default)
        if not isinstance(found, tuple):
            return found
        if not found or any(each != found[0] for each in found):
            raise JobError(
                f"{self.header.path} says another {self._prefix}{key} for each layer, which is not supported"
            )
        return found[0]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
