"""Where the files of a Hugging Face directory hold each tensor of a module: under its own name, under another one, or in
pieces that transformers joins when it loads them, as it does with experts that files hold one by one.

What it would do with the whole model, its own operations do here with the tensors that are asked for, one after the other.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from fusion.dag.ir.graph import Variable
from fusion.dag.rewrites.expert_groups import Part, part_of
from fusion.dag.rewrites.quantise import Layout, Source, Use
from fusion.runtime.capture.model_dtype import spelled_dtypes, stored_shapes
from fusion.runtime.capture.packed_weights import PackedWeight, packed_weights
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import INDEX_FILE, WEIGHTS_FILE, indexed_files
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.swarm.printable import one_line

_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})  # as the format spells dtypes
Made = TypeVar("Made")
ReadPart = Callable[[str, Part | None], torch.Tensor]  # of the files, or some of its first dimension
_OF_OLDER_VERSIONS = (r"rotary_emb\.inv_freq", r"(?:^|\.)position_ids$")  # tables that a module computes


@dataclass(frozen=True)
class Loading:
    """How transformers loads a module. `order`: sorts the names of tensors, experts by their numbers; `target`: the tensor of the
    module that a stored one is for, and the pattern of the converter that it fits, if any; `converters`: by pattern."""

    order: Callable[[str], Any]
    target: Callable[[str], tuple[str, str | None]]
    converters: Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """What makes a tensor of the module. `pieces`: names in the files, each with the pattern of the converter that it fits;
    `converter`: transformers' own, or None for a single piece that is the tensor; `first`: the first tensor that it makes."""

    pieces: tuple[tuple[str, str], ...]
    converter: Any = None
    first: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.pieces)

    @property
    def merges_experts(self) -> bool:
        """Whether the pieces are those of experts, one by one, of which the first dimension of the tensor is made."""
        if self.converter is None:
            return False
        first, *rest = self.converter.operations
        return (
            type(first).__name__ == "MergeModulelist" and first.dim == 0 and all(map(_within_experts, rest))
        )

    @property
    def joins_rows(self) -> bool:
        """Whether the pieces are matrices of experts, one by one, of whose rows the tensor is made: their columns stay what they are."""
        return self.merges_experts and all(map(_of_rows, self.converter.operations[1:]))

    def part(self, part: Part | None) -> Stored | None:
        """What makes some of the experts alone, where the files hold these one by one; None where they do not."""
        if part is None or not self.merges_experts:
            return None
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, name in self.pieces:
            by_pattern.setdefault(pattern, []).append((pattern, name))
        kept = (piece for pieces in by_pattern.values() for piece in pieces[part.start : part.stop])
        return replace(self, pieces=tuple(kept))


def _within_experts(operation: Any) -> bool:
    """Whether it does to some experts what it does to all."""
    given = (getattr(operation, name, None) for name in ("dim", "dim0", "dim1"))
    dims = [dim for dim in given if isinstance(dim, int)]
    plain = type(operation).__name__ in ("Concatenate", "Chunk", "Transpose", "Interleave")
    # One that looks at the shape of the whole would take a part for the other way round.
    return plain and bool(dims) and all(d > 0 for d in dims) and not getattr(operation, "check_dims", False)


def _of_rows(operation: Any) -> bool:
    """Of one that is `_within_experts`, whether it leaves each row of a matrix as it is."""
    return type(operation).__name__ != "Transpose" and operation.dim == 1


def _absent_expert(stored: Stored, count: int) -> str:
    """The name of one of `count` experts' pieces that the files lack, as far as the others' names tell; else empty."""
    sorts: dict[str, list[str]] = {}
    for pattern, piece in stored.pieces:
        sorts.setdefault(pattern, []).append(piece)
    for pieces in sorts.values():
        parts = re.split(r"(\d+)", pieces[0])
        for place in range(1, len(parts), 2) if 1 < len(pieces) < count else ():
            numbered = ("".join((*parts[:place], str(i), *parts[place + 1 :])) for i in range(count))
            names = dict.fromkeys(numbered)
            if names.keys() >= set(pieces):
                return next(name for name in names if name not in pieces)
    return ""


class StoredWeights:
    """`files`: the file of each stored tensor; `stored`: what makes each tensor of the module; `packed`: what the files hold quantised, by
    the name that it has among `files`."""

    def __init__(
        self,
        module: Any,
        files: Mapping[str, Path],
        stored: Mapping[str, Stored],
        packed: Mapping[str, PackedWeight],
    ) -> None:
        self.files = files
        self._module = module
        self._stored = stored
        self.packed = packed

    def name_of(self, variable: Variable) -> str | None:
        """The one of the variable's names under which the files have it; None where they do not."""
        part = part_of(variable.name)
        names = (variable.name, *variable.aliases) if part is None else (part.name,)
        return next((name for name in names if name in self._stored), None)

    def unread(self) -> tuple[str, ...]:
        """Names of stored tensors that no tensor of the module is made of, apart from those that transformers ignores silently."""
        own = self._module.state_dict()
        ignored = getattr(self._module, "_keys_to_ignore_on_load_unexpected", None) or ()
        passed = re.compile("|".join(f"(?:{pattern})" for pattern in (*ignored, *_OF_OLDER_VERSIONS)))
        others = (
            stored for name, stored in self._stored.items() if name not in own and not passed.search(name)
        )
        return tuple(dict.fromkeys(piece for stored in others for _, piece in stored.pieces))

    def tied_apart(self) -> tuple[str, str] | None:
        """Two names of one parameter of the module under which the files hold unlike tensors."""
        names: dict[int, list[str]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if name in self._stored and self._stored[name].converter is None:
                names.setdefault(id(parameter), []).append(name)
        for first, *others in names.values():
            dtype = self._module.get_parameter(first).dtype
            for other in others:
                if not torch.equal(self._single(first, dtype), self._single(other, dtype)):
                    return first, other
        return None

    def _single(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        with self._opened() as read:
            return self._value(read, self._stored[name].pieces[0][1]).to(dtype)

    def layout(self, variable: Variable, uses: frozenset[Use]) -> Layout | None:
        """The layout of a quantised matrix, or of experts' matrices, that our operators can read as it is; else None."""
        name, columns = self.name_of(variable), variable.type.shape[-1]
        wanted = {"linear"} if len(variable.type.shape) == 2 else {"expert_linear"}
        if name is None or uses != wanted or not isinstance(columns, int):
            return None
        stored = self._stored[name]
        methods = {self.packed[each].method if each in self.packed else None for each in stored.names}
        method = methods.pop() if len(methods) == 1 else None
        if method is None or not (stored.converter is None or stored.joins_rows):
            return None
        return method.layout(columns)

    def read_stored(self, source: Source) -> tuple[torch.Tensor, ...]:
        """The parts of a matrix that has a `layout`, as they are in the files. JobError as of `read`."""
        variable, part = source.variable, part_of(source.variable.name)
        name = self.name_of(variable)
        assert name is not None
        stored = self._stored[name]
        with self._opened() as read:
            if stored.converter is None:
                parts = self._parts(lambda piece: read(piece, part), stored.names[0])
            else:
                assert not source.transposed
                parts = self._joined_parts(lambda piece: read(piece, None), stored.part(part) or stored, name)
        path, first = self.files[stored.names[0]], stored.names[0]
        for value, made in zip(parts, source.variables, strict=True):
            _check_shape(tuple(value.shape), made, path, first, "" if stored.converter is None else made.name)
        return parts

    def _parts(self, read: Callable[[str], torch.Tensor], name: str) -> tuple[torch.Tensor, ...]:
        packed = self.packed[name]
        return self._unpacked(packed, lambda: packed.parts(read))

    def _joined_parts(
        self, read: Callable[[str], torch.Tensor], stored: Stored, name: str
    ) -> tuple[torch.Tensor, ...]:
        """Of experts whose rows are joined: numbers, scales and minimums, each as the weights themselves would be."""
        pieces = {piece: self._parts(read, piece) for piece in stored.names}
        count = min(map(len, pieces.values()))
        return tuple(
            self._converted(stored, name, lambda piece, at=at: pieces[piece][at])[name] for at in range(count)
        )

    def _unpacked(self, packed: PackedWeight, made: Callable[[], Made]) -> Made:
        try:
            return made()
        except (ValueError, IndexError, RuntimeError, TypeError) as error:
            pieces = [*packed.pieces.values()]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise JobError(
                f"{self.files[pieces[0]]}: {pieces[0]} and {', '.join(pieces[1:])} are no quantised matrix: {reason}"
            ) from error

    def _value(self, read: ReadPart, name: str, part: Part | None = None) -> torch.Tensor:
        """A tensor of the files, or some of its first dimension, as what it stands for."""
        packed = self.packed.get(name)
        if packed is None:
            return read(name, part)
        return self._unpacked(packed, lambda: packed.dense(lambda piece: read(piece, part)))

    @contextmanager
    def _opened(self) -> Iterator[ReadPart]:
        """Reads a tensor of the files, or some of its first dimension, as it is there."""
        with ExitStack() as opened:
            handles: dict[Path, Any] = {}

            def read(name: str, part: Part | None) -> torch.Tensor:
                path = self.files[name]
                try:
                    if path not in handles:
                        handles[path] = opened.enter_context(safe_open(path, framework="pt"))
                    stored = handles[path]
                    value: torch.Tensor = (
                        stored.get_tensor(name)
                        if part is None
                        else stored.get_slice(name)[part.start : part.stop]
                    )
                except (SafetensorError, OSError) as error:
                    raise JobError(f"{path} cannot be read: {one_line(str(error))}") from error
                return value

            yield read

    def read(self, wanted: Iterable[tuple[Variable, str]]) -> dict[str, torch.Tensor]:
        """The values of variables, each with its name here, in the dtype of the graph. JobError, in one line, for one of
        another shape, or that cannot be read or put together."""
        found: dict[str, torch.Tensor] = {}
        # All that a converter made at last: what it made beside may be asked for next
        made: dict[str, torch.Tensor] = {}
        with self._opened() as read:
            for variable, name in wanted:
                part, stored = part_of(variable.name), self._stored[name]
                if stored.converter is None:
                    value = self._value(read, stored.pieces[0][1], part)
                elif (fewer := stored.part(part)) is not None:
                    value = self._converted(fewer, name, partial(self._value, read))[name]
                else:
                    if name not in made:
                        made = self._converted(stored, name, partial(self._value, read))
                    value = made[name] if part is None else made[name][part.start : part.stop].clone()
                where = stored.pieces[0][1]
                made_of = "" if stored.converter is None else name
                _check_shape(tuple(value.shape), variable, self.files[where], where, made_of)
                found[variable.name] = value.to(TORCH_DTYPES[variable.type.dtype])
        return found

    def check(self, wanted: Iterable[tuple[Variable, str]]) -> None:
        """As `read`, of the headers of the files alone: JobError for a tensor that its file lacks, or of another shape, and for pieces
        that do not make one."""
        shapes: dict[Path, dict[str, tuple[int, ...]]] = {}
        whole: dict[str, tuple[int, ...]] = {}  # of what is put together, by its name here

        def shape_of(piece: str) -> tuple[int, ...]:
            path = self.files[piece]
            if path not in shapes:
                shapes[path] = stored_shapes(path)
            if piece not in shapes[path]:
                raise JobError(f"{path} has no {piece}, which {INDEX_FILE} says is there")
            return shapes[path][piece]

        for variable, name in wanted:
            stored = self._stored[name]
            quantised = [self.packed[piece] for _, piece in stored.pieces if piece in self.packed]
            for piece in (*(p for q in quantised for p in q.pieces.values()), *(p for _, p in stored.pieces)):
                if piece not in self.packed:
                    shape_of(piece)
            if stored.merges_experts:
                self._check_experts(stored, name)
            if quantised:
                continue  # what shape they make is known when they are read
            where = stored.pieces[0][1]
            if stored.converter is not None:
                if name not in whole:
                    whole |= self._shapes_made(stored, name, shape_of)
                if name in whole and part_of(variable.name) is None:
                    _check_shape(whole[name], variable, self.files[where], where, name)
            elif part_of(variable.name) is None:
                _check_shape(shape_of(where), variable, self.files[where], where)

    def _shapes_made(
        self, stored: Stored, name: str, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of what the pieces make, of experts that files hold one by one; of others, nothing is known before they are read.
        JobError where they make nothing."""
        if not stored.merges_experts:
            return {}
        made = self._converted(stored, name, lambda piece: torch.empty(shape_of(piece), device="meta"))
        return {key: tuple(value.shape) for key, value in made.items()}

    def _check_experts(self, stored: Stored, name: str) -> None:
        """JobError where the files lack an expert's piece of this tensor."""
        count = self._module.state_dict()[name].shape[0]
        if absent := _absent_expert(stored, count):
            raise JobError(
                f"{self.files[stored.pieces[0][1]].parent}: no safetensors file has the weight {absent}"
            )

    def _converted(self, stored: Stored, name: str, read: Any) -> dict[str, torch.Tensor]:
        """What transformers makes of the pieces, by the names of the module."""
        converter = copy.deepcopy(stored.converter)
        for pattern, piece in stored.pieces:
            converter.add_tensor(stored.first, piece, pattern, read(piece))
        try:
            made = converter.convert(stored.first, model=self._module, config=self._module.config)
            found = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
            if name not in found:
                raise ValueError(f"they make {', '.join(found)}")
            return found
        except (ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
            path, piece = self.files[stored.pieces[0][1]], stored.pieces[0][1]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise JobError(f"{path}: {piece} and others cannot be made into {name}: {reason}") from error


def _check_shape(
    shape: tuple[int, ...], variable: Variable, path: Path, piece: str, made_of: str = ""
) -> None:
    """JobError for another shape than the variable's. `made_of`: what this piece and others make, if they do."""
    if shape == variable.type.shape:
        return
    has = f"and others make {shape} of {made_of}, not" if made_of else f"has shape {shape}, not"
    raise JobError(f"{path}: {piece} {has} {variable.type.shape}")


def stored_weights(
    files: Mapping[str, Path], module: Any, loading: Loading, directory: Path, quantization: Any = None
) -> StoredWeights:
    """The weights of `module` in `files`, as from `weights_files`. `quantization`: quantization_config of config.json. Raises JobError for
    weights that are neither floating-point nor quantised by a known method."""
    spelled = {} if quantization is None else _spelled(files)
    packed = packed_weights(quantization, spelled, str(directory))
    parts = {piece for each in packed.values() for piece in each.pieces.values()}
    held = {name: path for name, path in files.items() if name not in parts}
    held.update({name: files[next(iter(each.pieces.values()))] for name, each in packed.items()})
    stored = _stored(module, held, loading)
    _check_plain(module, held, stored, packed)
    return StoredWeights(module, {**files, **held}, stored, packed)


def _spelled(files: Mapping[str, Path]) -> dict[str, str]:
    """The dtype of each tensor, as the format spells it."""
    dtypes = {path: spelled_dtypes(path) for path in set(files.values())}
    return {name: dtypes[path][name] for name, path in files.items() if name in dtypes[path]}


def _check_plain(
    module: Any, files: Mapping[str, Path], stored: Mapping[str, Stored], packed: Mapping[str, PackedWeight]
) -> None:
    """Integers and 8-bit floats are weights only with scales beside them, whatever config.json says: refuse others."""
    wanted = {name for name, value in module.state_dict().items() if value.is_floating_point()}
    pieces = {piece for name in wanted & stored.keys() for _, piece in stored[name].pieces} - packed.keys()
    for path in sorted(set(files.values())):
        for name, spelled in spelled_dtypes(path).items():
            if name in pieces and files[name] == path and spelled not in _PLAIN:
                raise JobError(
                    f"{path}: {name:.100} is stored as {spelled:.20}, as quantised weights are, which are not read; serve the "
                    "model in full precision, with --quantization int8 or int4"
                )


def no_weights(module: Any) -> StoredWeights:
    """For a module without files."""
    return StoredWeights(module, {}, {}, {})


def weights_files(directory: Path) -> dict[str, Path]:
    """Tensor -> its file, in the one weights file, or those that the index names; other files are ignored. As in transformers the
    files' headers decide which file has a tensor. Raises JobError for a file that is not safetensors."""
    indexed, whole = indexed_files(directory), directory / WEIGHTS_FILE
    if indexed is not None:
        paths = sorted(set(indexed.values()))
    else:
        paths = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    files = dict(indexed or {})  # a tensor that no file has is reported when it is read
    for path in paths:
        files.update(dict.fromkeys(spelled_dtypes(path), path))
    return files


def _stored(module: Any, files: Iterable[str], loading: Loading) -> dict[str, Stored]:
    own = module.state_dict()
    stored: dict[str, Stored] = {}
    for name in sorted(files, key=loading.order):
        new, pattern = loading.target(name)
        if pattern is None or new not in own:
            stored[new] = Stored((("", name),))
            continue
        converter = loading.converters[pattern]
        before = stored.get(new)
        pieces = before.pieces if before is not None and before.converter is not None else ()
        found = Stored((*pieces, (pattern, name)), converter, new)
        targets = converter.target_patterns
        stored.update({new.replace(targets[0], target): found for target in targets})
    return stored


def left_out(module: Any, name: str) -> bool:
    """Whether the model's class lists this tensor as absent from files."""
    lists = ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
    patterns = [pattern for each in lists for pattern in getattr(module, each, None) or ()]
    return any(re.search(pattern, name) for pattern in patterns)


def computed(module: Any, name: str) -> torch.Tensor | None:
    """A parameter that files leave out because the model's own code computes it, as Marian's table of positions; None where
    the model's class names no such, or what its code makes is drawn at random."""
    if not left_out(module, name) or not hasattr(module, "_init_weights"):
        return None
    one, other = (_initialised(module, name, seed) for seed in (0, 1))
    return one if torch.equal(one, other) else None  # numbers that were not set are NaN, and so not equal


def _initialised(module: Any, name: str, seed: int) -> torch.Tensor:
    """The parameter of this name as transformers sets it in a module that is loaded without it."""
    place, _, own = name.rpartition(".")
    holder = copy.copy(module.get_submodule(place))
    holder._parameters = {
        key: None if value is None else torch.nn.Parameter(torch.full_like(value, torch.nan, device="cpu"))
        for key, value in holder._parameters.items()
    }
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module._init_weights(holder)
    found: torch.Tensor = getattr(holder, own).detach()
    return found
