"""The metadata of a GGUF file. Every key has to be read by code that understands it; an unread key refuses the file."""

from __future__ import annotations

import math
from typing import Any

from fusion.runtime.capture.gguf.header import GGUFHeader, Value, quoted
from fusion.runtime.job.errors import JobError

TOKENS = "tokenizer.ggml.tokens"
MIN_DIVISOR = 1e-3  # the least number that others may be divided by


class Metadata:
    """The values under the architecture's name. Getters mark a key as read and raise JobError for a value of another type."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        kind = header.values.get("general.type", "model")
        if kind != "model":
            raise JobError(f"{header.path}: not a model but {quoted(str(kind))}")
        architecture = header.values.get("general.architecture")
        if not isinstance(architecture, str):
            raise JobError(f"{header.path} does not say of what kind its model is (general.architecture)")
        self.architecture = architecture
        self._prefix = f"{self.architecture}."
        self._unread = {key for key in header.values if key.startswith(self._prefix)}

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._single(key, default)
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise self.error(key, value, "a whole number")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if not value:
            raise self.error(key, value, "at least 1")
        return value

    def real(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        value = self._single(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(key, value, "a number")
        if value < least:
            raise self.error(key, value, f"at least {least:g}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._single(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a text")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._single(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def per_layer(self, key: str, layers: int) -> list[int]:
        """An integer for each layer: a list, or one value for all."""
        value = self.header.values.get(self._prefix + key)
        if not isinstance(value, tuple):
            return [self.integer(key)] * layers
        self._unread.discard(self._prefix + key)
        numbers = [n for n in value if isinstance(n, int) and 0 <= n < 1 << 32]
        if not len(numbers) == len(value) == layers:
            raise self.error(key, value, f"a whole number for each of {layers} layers")
        return [int(n) for n in numbers]

    def reals_per_layer(self, key: str, layers: int, *, shared: bool = False) -> list[float]:
        """A number for each layer, perhaps not finite. `shared`: `key` is not under the architecture's name."""
        value = self.header.values.get(key if shared else self._prefix + key)
        self._unread.discard(self._prefix + key)
        numbers = [n for n in value if isinstance(n, float)] if isinstance(value, tuple) else []
        if len(numbers) != layers or not isinstance(value, tuple) or len(value) != layers:
            raise self.error(key, value, f"a number for each of {layers} layers")
        return numbers

    def ignore(self, key: str) -> None:
        """Mark a key as read whose value changes nothing that is computed."""
        self._unread.discard(self._prefix + key)

    def require(self, key: str, *allowed: Value) -> None:
        """Mark a key as read. JobError if it is present with a value other than these; the first is the default."""
        value = self._single(key, allowed[0])
        if value not in allowed:
            raise self.error(key, value, " or ".join(map(str, allowed)))

    def require_tensor(self, name: str, *shape: int) -> None:
        """JobError unless the file has this tensor, in this shape."""
        value = self.header.tensors.get(name)
        if value is None:
            raise JobError(f"{self.header.path}: no tensor {name}")
        if value.shape != shape:
            raise JobError(
                f"{self.header.path}: {name} has the shape {value.shape}, and its values say {shape}"
            )

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    def require_all_read(self) -> None:
        """JobError for the first key that was not read."""
        for key in sorted(self._unread):
            raise JobError(
                f"{self.header.path} says {quoted(key)} = {_brief(self.header.values[key])}, which is not understood"
            )

    def error(self, key: str, value: object, expected: str) -> JobError:
        verb = "does not say" if value is None else "says"
        shown_value = "" if value is None else f" = {_brief(value)}"
        return JobError(f"{self.header.path} {verb} {self._prefix}{key}{shown_value}: {expected}")

    def _single(self, key: str, default: Any) -> Any:
        """A value, or the value that a list has for every layer."""
        self._unread.discard(self._prefix + key)
        value = self.header.values.get(self._prefix + key, default)
        if not isinstance(value, tuple):
            return value
        if not value or any(each != value[0] for each in value):
            raise JobError(
                f"{self.header.path} says another {self._prefix}{key} for each layer, which is not supported"
            )
        return value[0]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
