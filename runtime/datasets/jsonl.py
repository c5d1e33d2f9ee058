"""Samples in a file of JSON lines: an object each, all with the fields that are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fusion.runtime.datasets.dataset import Array, Say, checked, require_room, told
from fusion.runtime.job.errors import JobError

MASK = "_mask"  # what the mask of a text adds to its name
PADDING = 0  # the id behind a text that is shorter than a sample

Encode = Callable[[str], Sequence[int]]


class JsonLines:
    """`classes`: fields whose texts are the names of classes; `encode`: a text as token ids, of which a sample has `sequence`;
    `known`: what the labels of these fields are the places of, if that is known. Reads the file whole."""

    def __init__(
        self,
        path: Path,
        classes: Sequence[str],
        encode: Encode,
        sequence: int,
        known: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._path = path
        self._classes = tuple(classes)
        self.classes = dict(known or {})
        self._encode = encode
        self._sequence = sequence
        self._lines = _lines(path)
        if not self._lines:
            raise JobError(f"{path} holds no line")
        _, first = self._lines[0]
        for name in self._classes:
            if name not in first:
                raise JobError(f"data.classes: {path} has no field {name!r:.80} (it has: {', '.join(first)})")
        self._texts = tuple(k for k, v in first.items() if isinstance(v, str) and k not in self._classes)
        self.names = (*first, *(name + MASK for name in self._texts))

    def __len__(self) -> int:
        return len(self._lines)

    def texts(self, field: str) -> Iterator[str]:
        """This field of each line. JobError where it is no text."""
        for i in range(len(self._lines)):
            yield self._text(i, field)

    def read(self, names: Sequence[str], limit_bytes: int, say: Say) -> dict[str, Array]:
        """See `Source`."""
        found: dict[str, Array] = {}
        fields = dict.fromkeys(self._masks.get(name, name) for name in names)
        for field in fields:
            if field in self._classes:
                found[field] = self._labels(field)
            elif field in self._texts:
                require_room(9 * self._sequence * len(self), limit_bytes, str(self._path))
                found[field], found[field + MASK] = self._tokens(field, say)
            else:
                found[field] = self._numbers(field)
        require_room(sum(array.nbytes for array in found.values()), limit_bytes, str(self._path))
        return checked({name: found[name] for name in names}, str(self._path))

    @cached_property
    def _masks(self) -> dict[str, str]:
        return {name + MASK: name for name in self._texts}

    def _labels(self, field: str) -> Array:
        texts = list(self.texts(field))
        names = self.classes.setdefault(field, sorted(set(texts)))
        places = {name: i for i, name in enumerate(names)}
        for i, text in enumerate(texts):
            if text not in places:
                raise JobError(
                    f"{self._path}:{self._number(i)}: {field!r:.80} is {text!r:.80}, a class that is not trained on"
                )
        return np.array([places[text] for text in texts], dtype=np.int64)

    def _tokens(self, field: str, say: Say) -> tuple[Array, Array]:
        if self._sequence < 1:
            raise JobError(
                f"train.sequence must be at least 1: as many tokens of {field!r:.80} make a sample"
            )
        total = len(self)
        ids = np.full((total, self._sequence), PADDING, dtype=np.int64)
        mask = np.zeros((total, self._sequence), dtype=bool)
        for i, text in enumerate(told(self.texts(field), total, "lines", say)):
            row = list(self._encode(text))[: self._sequence]
            ids[i, : len(row)], mask[i, : len(row)] = row, True
        return ids, mask

    def _numbers(self, field: str) -> Array:
        values = [self._field(i, field) for i in range(len(self))]
        try:
            made = np.array(values)
        except (ValueError, OverflowError):
            made = np.array(None, dtype=object)
        if made.dtype.kind not in "bif":
            raise JobError(
                f"{self._path}: {field!r:.80} must be numbers, or lists of them of one shape, in every line; or a text, "
                "and a class if data.classes names it"
            )
        return made.astype(np.float32) if made.dtype.kind == "f" else made

    def _text(self, index: int, field: str) -> str:
        value = self._field(index, field)
        if not isinstance(value, str):
            raise JobError(f"{self._path}:{self._number(index)}: {field!r:.80} is no text")
        if not _is_whole(value):
            raise JobError(
                f"{self._path}:{self._number(index)}: {field!r:.80} holds half of a character (\\ud800 to \\udfff)"
            )
        return value

    def _field(self, index: int, field: str) -> Any:
        _, found = self._lines[index]
        if field not in found:
            raise JobError(
                f"{self._path}:{self._number(index)}: no field {field!r:.80} (it has: {', '.join(found)})"
            )
        return found[field]

    def _number(self, index: int) -> int:
        return self._lines[index][0]


def _is_whole(text: str) -> bool:
    """Whether UTF-8 can say it: JSON can name each half of a pair that stands for one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Those with something in them, by number from 1."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise JobError(f"{path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold other ends of lines
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise JobError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(value, dict):
                raise JobError(f"{path}:{number}: a line must be an object, {{...}}")
            found.append((number, value))
    return found
