"""Which tensors of a Hugging Face directory's files make each tensor of a module: one of the same or another name, or several that transformers
joins when it loads them, such as experts that files hold one by one.

transformers converts the whole model; here its operations are applied to the requested tensors only, one after the other.
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
from fusion.runtime.capture.model_dtype import safetensors_dtypes, stored_shapes
from fusion.runtime.capture.packed_weights import PackedWeight, packed_weights
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import INDEX_FILE, WEIGHTS_FILE, indexed_files
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.swarm.printable import one_line

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # dtype codes of safetensors
Unpacked = TypeVar("Unpacked")
ReadPart = Callable[[str, Part | None], torch.Tensor]  # a tensor of the files, or part of its first dimension
_OBSOLETE_TABLES = (r"rotary_emb\.inv_freq", r"(?:^|\.)position_ids$")  # tables that modules compute


@dataclass(frozen=True)
class LoadingRules:
    """How transformers loads a module. `order`: sort key of tensor names, experts by number; `target`: stored name -> the module's tensor and the
    pattern of the converter that applies, if any; `converters`: by pattern."""

    order: Callable[[str], Any]
    target: Callable[[str], tuple[str, str | None]]
    converters: Mapping[str, Any]


@dataclass(frozen=True)
class StoredTensor:
    """The pieces that make a tensor of the module. `pieces`: (pattern of the converter that applies, name in the files); `converter`: that of
    transformers, or None for a single piece that is the tensor; `first`: the first tensor that the converter makes."""

    pieces: tuple[tuple[str, str], ...]
    converter: Any = None
    first: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.pieces)

    @property
    def merges_experts(self) -> bool:
        """Whether each piece is of one expert, and the experts are stacked along the first dimension."""
        if self.converter is None:
            return False
        first, *rest = self.converter.operations
        return type(first).__name__ == "MergeModulelist" and first.dim == 0 and all(map(_is_per_expert, rest))

    @property
    def joins_rows(self) -> bool:
        """Whether the pieces are matrices of single experts that are joined by rows, with the same columns."""
        return self.merges_experts and all(map(_keeps_rows, self.converter.operations[1:]))

    def part(self, part: Part | None) -> StoredTensor | None:
        """The pieces of some of the experts, if files hold these one by one; else None."""
        if part is None or not self.merges_experts:
            return None
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, name in self.pieces:
            by_pattern.setdefault(pattern, []).append((pattern, name))
        kept = (piece for pieces in by_pattern.values() for piece in pieces[part.start : part.stop])
        return replace(self, pieces=tuple(kept))


def _is_per_expert(operation: Any) -> bool:
    """Whether the operation treats each expert by itself."""
    values = (getattr(operation, name, None) for name in ("dim", "dim0", "dim1"))
    dims = [dim for dim in values if isinstance(dim, int)]
    is_known = type(operation).__name__ in ("Concatenate", "Chunk", "Transpose", "Interleave")
    # With `check_dims`, it compares shapes, and could take a part for a transposed matrix.
    return (
        is_known and bool(dims) and all(d > 0 for d in dims) and not getattr(operation, "check_dims", False)
    )


def _keeps_rows(operation: Any) -> bool:
    """Whether an operation that `_is_per_expert` leaves the rows of matrices as they are."""
    return type(operation).__name__ != "Transpose" and operation.dim == 1


def _missing_expert(stored: StoredTensor, count: int) -> str:
    """The name of a piece of one of `count` experts that the files lack, inferred from the other names; else empty."""
    names_by_pattern: dict[str, list[str]] = {}
    for pattern, piece in stored.pieces:
        names_by_pattern.setdefault(pattern, []).append(piece)
    for pieces in names_by_pattern.values():
        parts = re.split(r"(\d+)", pieces[0])
        for index in range(1, len(parts), 2) if 1 < len(pieces) < count else ():
            numbered = ("".join((*parts[:index], str(i), *parts[index + 1 :])) for i in range(count))
            names = dict.fromkeys(numbered)
            if names.keys() >= set(pieces):
                return next(name for name in names if name not in pieces)
    return ""


class StoredWeights:
    """`files`: the file of each stored tensor; `stored`: the pieces of each tensor of the module; `packed`: quantised weights, by their name in
    `files`."""

    def __init__(
        self,
        module: Any,
        files: Mapping[str, Path],
        stored: Mapping[str, StoredTensor],
        packed: Mapping[str, PackedWeight],
    ) -> None:
        self.files = files
        self._module = module
        self._stored = stored
        self.packed = packed

    def name_of(self, variable: Variable) -> str | None:
        """The variable's name or alias under which the files have it; None if they do not."""
        part = part_of(variable.name)
        names = (variable.name, *variable.aliases) if part is None else (part.name,)
        return next((name for name in names if name in self._stored), None)

    def unread(self) -> tuple[str, ...]:
        """Names of stored tensors that the module does not use, except those that transformers ignores silently."""
        state = self._module.state_dict()
        ignored = getattr(self._module, "_keys_to_ignore_on_load_unexpected", None) or ()
        is_ignored = re.compile("|".join(f"(?:{pattern})" for pattern in (*ignored, *_OBSOLETE_TABLES)))
        others = (
            stored
            for name, stored in self._stored.items()
            if name not in state and not is_ignored.search(name)
        )
        return tuple(dict.fromkeys(piece for stored in others for _, piece in stored.pieces))

    def differing_ties(self) -> tuple[str, str] | None:
        """Two names of one parameter of the module under which the files hold different tensors; None if there are none."""
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
        allowed_uses = {"linear"} if len(variable.type.shape) == 2 else {"expert_linear"}
        if name is None or uses != allowed_uses or not isinstance(columns, int):
            return None
        stored = self._stored[name]
        methods = {self.packed[each].method if each in self.packed else None for each in stored.names}
        method = methods.pop() if len(methods) == 1 else None
        if method is None or not (stored.converter is None or stored.joins_rows):
            return None
        return method.layout(columns)

    def read_stored(self, source: Source) -> tuple[torch.Tensor, ...]:
        """The tensors of a matrix that has a `layout`, as they are in the files. JobError as in `read`."""
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
        for value, variable_of_part in zip(parts, source.variables, strict=True):
            _check_shape(
                tuple(value.shape),
                variable_of_part,
                path,
                first,
                "" if stored.converter is None else variable_of_part.name,
            )
        return parts

    def _parts(self, read: Callable[[str], torch.Tensor], name: str) -> tuple[torch.Tensor, ...]:
        packed = self.packed[name]
        return self._unpacked(packed, lambda: packed.parts(read))

    def _joined_parts(
        self, read: Callable[[str], torch.Tensor], stored: StoredTensor, name: str
    ) -> tuple[torch.Tensor, ...]:
        """Numbers, scales and minimums of experts that are joined by rows, each joined as the weights would be."""
        pieces = {piece: self._parts(read, piece) for piece in stored.names}
        count = min(map(len, pieces.values()))
        return tuple(
            self._converted(stored, name, lambda piece, index=index: pieces[piece][index])[name]
            for index in range(count)
        )

    def _unpacked(self, packed: PackedWeight, unpack: Callable[[], Unpacked]) -> Unpacked:
        try:
            return unpack()
        except (ValueError, IndexError, RuntimeError, TypeError) as error:
            pieces = [*packed.pieces.values()]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise JobError(
                f"{self.files[pieces[0]]}: {pieces[0]} and {', '.join(pieces[1:])} are no quantised matrix: {reason}"
            ) from error

    def _value(self, read: ReadPart, name: str, part: Part | None = None) -> torch.Tensor:
        """A tensor of the files, or some of its first dimension, dequantised."""
        packed = self.packed.get(name)
        if packed is None:
            return read(name, part)
        return self._unpacked(packed, lambda: packed.dense(lambda piece: read(piece, part)))

    @contextmanager
    def _opened(self) -> Iterator[ReadPart]:
        """Opens files on demand; reads a tensor, or some of its first dimension, as it is stored."""
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

    def read(self, requested: Iterable[tuple[Variable, str]]) -> dict[str, torch.Tensor]:
        """The values of variables, each given with its name here, in the dtype of the graph. JobError, in one line, for one of another shape, or
        that cannot be read or joined."""
        values: dict[str, torch.Tensor] = {}
        # The results of the last converter: another one may be requested next
        joined: dict[str, torch.Tensor] = {}
        with self._opened() as read:
            for variable, name in requested:
                part, stored = part_of(variable.name), self._stored[name]
                if stored.converter is None:
                    value = self._value(read, stored.pieces[0][1], part)
                elif (part_only := stored.part(part)) is not None:
                    value = self._converted(part_only, name, partial(self._value, read))[name]
                else:
                    if name not in joined:
                        joined = self._converted(stored, name, partial(self._value, read))
                    value = joined[name] if part is None else joined[name][part.start : part.stop].clone()
                first_piece = stored.pieces[0][1]
                joined_name = "" if stored.converter is None else name
                _check_shape(tuple(value.shape), variable, self.files[first_piece], first_piece, joined_name)
                values[variable.name] = value.to(TORCH_DTYPES[variable.type.dtype])
        return values

    def check(self, requested: Iterable[tuple[Variable, str]]) -> None:
        """Check what `read` would, from the headers of the files alone: JobError for a tensor that its file lacks, or of another shape, and for pieces
        that cannot be joined."""
        shapes: dict[Path, dict[str, tuple[int, ...]]] = {}
        joined_shapes: dict[str, tuple[int, ...]] = {}  # of joined tensors, by their name in the module

        def shape_of(piece: str) -> tuple[int, ...]:
            path = self.files[piece]
            if path not in shapes:
                shapes[path] = stored_shapes(path)
            if piece not in shapes[path]:
                raise JobError(f"{path} has no {piece}, which {INDEX_FILE} says is there")
            return shapes[path][piece]

        for variable, name in requested:
            stored = self._stored[name]
            quantised = [self.packed[piece] for _, piece in stored.pieces if piece in self.packed]
            for piece in (*(p for q in quantised for p in q.pieces.values()), *(p for _, p in stored.pieces)):
                if piece not in self.packed:
                    shape_of(piece)
            if stored.merges_experts:
                self._check_experts(stored, name)
            if quantised:
                continue  # their shape is known only when they are read
            first_piece = stored.pieces[0][1]
            if stored.converter is not None:
                if name not in joined_shapes:
                    joined_shapes |= self._joined_shapes(stored, name, shape_of)
                if name in joined_shapes and part_of(variable.name) is None:
                    _check_shape(joined_shapes[name], variable, self.files[first_piece], first_piece, name)
            elif part_of(variable.name) is None:
                _check_shape(shape_of(first_piece), variable, self.files[first_piece], first_piece)

    def _joined_shapes(
        self, stored: StoredTensor, name: str, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """The shapes that the pieces of single experts make; empty for other pieces, whose shapes are not known before they are read. JobError where
        they cannot be joined."""
        if not stored.merges_experts:
            return {}
        joined = self._converted(stored, name, lambda piece: torch.empty(shape_of(piece), device="meta"))
        return {key: tuple(value.shape) for key, value in joined.items()}

    def _check_experts(self, stored: StoredTensor, name: str) -> None:
        """JobError where the files lack an expert's piece of this tensor."""
        count = self._module.state_dict()[name].shape[0]
        if absent := _missing_expert(stored, count):
            raise JobError(
                f"{self.files[stored.pieces[0][1]].parent}: no safetensors file has the weight {absent}"
            )

    def _converted(self, stored: StoredTensor, name: str, read: Any) -> dict[str, torch.Tensor]:
        """The tensors that transformers makes of the pieces, by their names in the module."""
        converter = copy.deepcopy(stored.converter)
        for pattern, piece in stored.pieces:
            converter.add_tensor(stored.first, piece, pattern, read(piece))
        try:
            converted = converter.convert(stored.first, model=self._module, config=self._module.config)
            tensors = {
                key: value[0] if isinstance(value, list) else value for key, value in converted.items()
            }
            if name not in tensors:
                raise ValueError(f"they make {', '.join(tensors)}")
            return tensors
        except (ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
            path, piece = self.files[stored.pieces[0][1]], stored.pieces[0][1]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise JobError(f"{path}: {piece} and others cannot be made into {name}: {reason}") from error


def _check_shape(
    shape: tuple[int, ...], variable: Variable, path: Path, piece: str, joined_name: str = ""
) -> None:
    """JobError for a shape other than the variable's. `joined_name`: the tensor that this piece and others make, if they do."""
    if shape == variable.type.shape:
        return
    has = f"and others make {shape} of {joined_name}, not" if joined_name else f"has shape {shape}, not"
    raise JobError(f"{path}: {piece} {has} {variable.type.shape}")


def stored_weights(
    files: Mapping[str, Path], module: Any, loading: LoadingRules, directory: Path, quantization: Any = None
) -> StoredWeights:
    """The weights of `module` in `files` (see `weights_files`). `quantization`: quantization_config of config.json. JobError for weights that are
    neither floating-point nor quantised by a known method."""
    codes = {} if quantization is None else _dtype_codes(files)
    packed = packed_weights(quantization, codes, str(directory))
    parts = {piece for each in packed.values() for piece in each.pieces.values()}
    weight_files = {name: path for name, path in files.items() if name not in parts}
    weight_files.update({name: files[next(iter(each.pieces.values()))] for name, each in packed.items()})
    stored = _stored_tensors(module, weight_files, loading)
    _check_floats(module, weight_files, stored, packed)
    return StoredWeights(module, {**files, **weight_files}, stored, packed)


def _dtype_codes(files: Mapping[str, Path]) -> dict[str, str]:
    """The dtype code of each tensor."""
    dtypes = {path: safetensors_dtypes(path) for path in set(files.values())}
    return {name: dtypes[path][name] for name, path in files.items() if name in dtypes[path]}


def _check_floats(
    module: Any,
    files: Mapping[str, Path],
    stored: Mapping[str, StoredTensor],
    packed: Mapping[str, PackedWeight],
) -> None:
    """JobError for integers and 8-bit floats without scales, which are quantised weights, whatever config.json says."""
    floating = {name for name, value in module.state_dict().items() if value.is_floating_point()}
    pieces = {piece for name in floating & stored.keys() for _, piece in stored[name].pieces} - packed.keys()
    for path in sorted(set(files.values())):
        for name, code in safetensors_dtypes(path).items():
            if name in pieces and files[name] == path and code not in _FLOATS:
                raise JobError(
                    f"{path}: {name:.100} is stored as {code:.20}, as quantised weights are, which are not read; serve the "
                    "model in full precision, with --quantization int8 or int4"
                )


def no_weights(module: Any) -> StoredWeights:
    """The weights of a module without files."""
    return StoredWeights(module, {}, {}, {})


def weights_files(directory: Path) -> dict[str, Path]:
    """Tensor -> its file, in the one weights file, or those that the index names; other files are ignored. As in transformers, the headers of the
    files decide which of them has a tensor. JobError for a file that is not safetensors."""
    indexed, single = indexed_files(directory), directory / WEIGHTS_FILE
    if indexed is not None:
        paths = sorted(set(indexed.values()))
    else:
        paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    files = dict(indexed or {})  # a tensor that is missing in its file is reported when it is read
    for path in paths:
        files.update(dict.fromkeys(safetensors_dtypes(path), path))
    return files


def _stored_tensors(module: Any, files: Iterable[str], loading: LoadingRules) -> dict[str, StoredTensor]:
    state = module.state_dict()
    stored: dict[str, StoredTensor] = {}
    for name in sorted(files, key=loading.order):
        own_name, pattern = loading.target(name)
        if pattern is None or own_name not in state:
            stored[own_name] = StoredTensor((("", name),))
            continue
        converter = loading.converters[pattern]
        previous = stored.get(own_name)
        pieces = previous.pieces if previous is not None and previous.converter is not None else ()
        joined = StoredTensor((*pieces, (pattern, name)), converter, own_name)
        targets = converter.target_patterns
        stored.update({own_name.replace(targets[0], target): joined for target in targets})
    return stored


def is_unsaved(module: Any, name: str) -> bool:
    """Whether the model's class lists this tensor as absent from files."""
    lists = ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
    patterns = [pattern for each in lists for pattern in getattr(module, each, None) or ()]
    return any(re.search(pattern, name) for pattern in patterns)


def computed_parameter(module: Any, name: str) -> torch.Tensor | None:
    """A parameter that files lack because the model's code computes it, such as Marian's table of positions; None if the model's class lists no
    such parameter, or if its code draws it at random."""
    if not is_unsaved(module, name) or not hasattr(module, "_init_weights"):
        return None
    one, other = (_initialised(module, name, seed) for seed in (0, 1))
    return one if torch.equal(one, other) else None  # values that were not set are NaN, and so not equal


def _initialised(module: Any, name: str, seed: int) -> torch.Tensor:
    """The parameter as transformers initialises it in a module that is loaded without it."""
    owner, _, attribute = name.rpartition(".")
    holder = copy.copy(module.get_submodule(owner))
    holder._parameters = {
        key: None if value is None else torch.nn.Parameter(torch.full_like(value, torch.nan, device="cpu"))
        for key, value in holder._parameters.items()
    }
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module._init_weights(holder)
    value: torch.Tensor = getattr(holder, attribute).detach()
    return value
