"""Samples in a file of JSON lines: an object each, all with the requested fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fusion.runtime.datasets.dataset import Array, ReportLine, checked, in_single, require_room, with_progress
from fusion.runtime.job.errors import JobError

MASK = "_mask"  # suffix of the name of a text's mask
BLOCK_LINES = 4096  # that are Python objects at once: these take several times the bytes of an array
PADDING = 0  # the id after a text that is shorter than a sample

Encode = Callable[[str], Sequence[int]]


class JsonLines:
    """`classes`: fields whose texts are the names of classes; `encode`: a text as token ids, of which a sample has `sequence`;
    `known`: what the labels of these fields are the places of, if that is known. The file is read a line at a time, once here and
    once for each field."""

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
        # All, also those that the first line lacks: a line that lacks a requested field must be an error.
        texts, self._count = dict[str, bool](), 0
        for _, line in _lines(path):
            self._count += 1
            for name, value in line.items():
                if name not in texts:
                    texts[name] = isinstance(value, str)
        if not self._count:
            raise JobError(f"{path} holds no line")
        for name in self._classes:
            if name not in texts:
                raise JobError(f"data.classes: {path} has no field {name!r:.80} (it has: {', '.join(texts)})")
        self._texts = tuple(name for name, text in texts.items() if text and name not in self._classes)
        # A field of the file with the name of a mask goes before the mask.
        self._masks = {name + MASK: name for name in self._texts if name + MASK not in texts}
        self.names = (*texts, *self._masks)

    def __len__(self) -> int:
        return self._count

    def texts(self, field: str) -> Iterator[str]:
        """This field of each line. JobError where it is not a text."""
        for number, value in self._values(field):
            yield self._text(number, field, value)

    def read(self, names: Sequence[str], limit_bytes: int, report: ReportLine) -> dict[str, Array]:
        """See `Source`."""
        found: dict[str, Array] = {}
        fields = dict.fromkeys(self._masks.get(name, name) for name in names)
        for field in fields:
            if field in self._classes:
                found[field] = self._labels(field)
            elif field in self._texts:
                require_room(9 * self._sequence * len(self), limit_bytes, str(self._path))
                found[field], mask = self._tokens(field, report)
                if field + MASK in self._masks:
                    found[field + MASK] = mask
            else:
                found[field] = self._numbers(field)
        require_room(sum(array.nbytes for array in found.values()), limit_bytes, str(self._path))
        return checked({name: found[name] for name in names}, str(self._path))

    def _labels(self, field: str) -> Array:
        if field not in self.classes:
            self.classes[field] = sorted(set(self.texts(field)))
        places = {name: i for i, name in enumerate(self.classes[field])}
        made = np.empty(len(self), dtype=np.int64)
        for i, (number, value) in enumerate(self._values(field)):
            text = self._text(number, field, value)
            if text not in places:
                raise JobError(
                    f"{self._path}:{number}: {field!r:.80} is {text!r:.80}, a class that is not trained on"
                )
            made[i] = places[text]
        return made

    def _tokens(self, field: str, report: ReportLine) -> tuple[Array, Array]:
        if self._sequence < 1:
            raise JobError(
                f"train.sequence must be at least 1: as many tokens of {field!r:.80} make a sample"
            )
        total = len(self)
        ids = np.full((total, self._sequence), PADDING, dtype=np.int64)
        mask = np.zeros((total, self._sequence), dtype=bool)
        for i, text in enumerate(with_progress(self.texts(field), total, "lines", report)):
            row = list(self._encode(text))[: self._sequence]
            ids[i, : len(row)], mask[i, : len(row)] = row, True
        return ids, mask

    def _numbers(self, field: str) -> Array:
        values, blocks = (value for _, value in self._values(field)), list[Array]()
        try:
            while block := list(islice(values, BLOCK_LINES)):
                first = BLOCK_LINES * len(blocks)
                blocks.append(self._floats(np.array(block), field, first))
                if blocks[-1].dtype.kind not in "bif":
                    raise ValueError("no numbers")
            return self._floats(np.concatenate(blocks), field)
        except JobError:
            raise
        except (ValueError, OverflowError):
            raise JobError(
                f"{self._path}: {field!r:.80} must be numbers, or lists of them of one shape, in every line; or a text, "
                "and a class if data.classes names it"
            ) from None

    def _floats(self, array: Array, field: str, first: int = 0) -> Array:
        """In single precision where it has fractions; `first`: the number of its first sample."""
        if array.dtype.kind != "f":
            return array
        # Not valid JSON: NaN, and 1e400, which Python reads as infinite
        if not np.isfinite(array).all():
            sample = first + int(np.argwhere(~np.isfinite(array))[0][0])
            raise JobError(
                f"{self._path}: {field!r:.80} of sample {sample} (the first is 0) must be finite numbers"
            )
        return in_single(array, f"{field!r:.80}", str(self._path), first)

    def _text(self, number: int, field: str, value: Any) -> str:
        if not isinstance(value, str):
            raise JobError(f"{self._path}:{number}: {field!r:.80} is no text")
        if not _is_whole(value):
            raise JobError(
                f"{self._path}:{number}: {field!r:.80} holds half of a character (\\ud800 to \\udfff)"
            )
        return value

    def _values(self, field: str) -> Iterator[tuple[int, Any]]:
        """This field of each line, with the line's number."""
        count = 0
        for number, found in _lines(self._path):
            count += 1
            if count > self._count:
                break
            if field not in found:
                raise JobError(f"{self._path}:{number}: no field {field!r:.80} (it has: {', '.join(found)})")
            yield number, found[field]
        if count != self._count:
            raise JobError(f"{self._path} changed while it was read")


def _is_whole(text: str) -> bool:
    """Whether UTF-8 can encode it: JSON can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Non-empty lines, with their numbers from 1."""
    for number, line in enumerate(_read(path), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise JobError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(value, dict):
                raise JobError(f"{path}:{number}: a line must be an object, {{...}}")
            yield number, value


def _read(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:  # a text may hold other ends of lines
            yield from file
    except (OSError, UnicodeError) as error:
        raise JobError(f"{path} cannot be read: {error}") from None
