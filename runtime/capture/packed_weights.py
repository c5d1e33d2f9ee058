"""Weights that the files of a Hugging Face directory hold quantised: GPTQ, AWQ, compressed-tensors, floats of 8 bits, and MXFP4.

What config.json says of them is understood, or the directory is refused: read in another way they make a model that answers, and answers
nonsense. A matrix is what its numbers, scales and zero points stand for; one in groups of whole numbers of 4 or 8 bits can be served as it
is, without being rounded again (`fusion.dag.ir.opset_quantised`). Some such models round what goes into a product as well
(`input_activations`, `activation_scheme`), to make it faster: that is not done here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusion.dag.rewrites.quantise import Kind, Layout
from fusion.runtime.capture.gguf.blocks import TWICE_MXFP4
from fusion.runtime.job.errors import JobError
from fusion.swarm.printable import one_line

Tensor = torch.Tensor
Read = Callable[[str], Tensor]  # a tensor of the files, by its name there

_WORD = 32  # bits of the whole numbers that others are packed in
_AWQ_ORDER = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # the columns that eight numbers in a word belong to, from the lowest bits on
_E2M1_GROUP, _E2M1_BIAS = 32, 128  # 127, and one more for the halves


@dataclass(frozen=True)
class Grid:
    """A matrix (rows, columns) of whole numbers, of which a group of columns has a scale and a zero point: (number - zero) * scale."""

    numbers: Tensor  # uint8
    scales: Tensor  # (rows, groups), float32
    zeros: Tensor  # (rows, groups) or 0-dimensional, float32
    groups: Tensor | None = None  # of each column; None: as many neighbours each

    def dense(self) -> Tensor:
        scales, zeros = self.scales, self.zeros.expand_as(self.scales)
        if self.groups is not None:
            at = self.groups.long()
            return (self.numbers - zeros[:, at]) * scales[:, at]
        rows, columns = self.numbers.shape
        grouped = self.numbers.view(rows, scales.shape[1], -1)
        return ((grouped - zeros[..., None]) * scales[..., None]).view(rows, columns)


class Packed(ABC):
    """How a method holds a weight, under the name of the module that it is of."""

    suffixes: tuple[str, ...]  # of the names of what the weight is made of; the first is there for every one
    optional: tuple[str, ...] = ()  # of others that may be
    suffix = ".weight"  # of the weight itself

    def layout(self, columns: int) -> Layout | None:
        """That one of so many columns can be served in as it is."""
        return None

    @abstractmethod
    def dense(self, read: Read, has: Callable[[str], bool]) -> Tensor:
        """The weight. `read`, `has`: what it is made of, by suffix."""

    def parts(self, read: Read, has: Callable[[str], bool]) -> tuple[Tensor, ...]:
        """Of one with a `layout`: numbers, scales and, if there are any, minimums."""
        raise NotImplementedError


class _Grouped(Packed):
    """Whole numbers of 4 or 8 bits in groups of so many columns; 0: all of them."""

    def __init__(self, bits: int, group: int, *, ordered: bool) -> None:
        self._bits, self._group, self._ordered = bits, group, ordered

    def layout(self, columns: int) -> Layout | None:
        if self._ordered:  # columns of a group are no neighbours
            return None
        kind: Kind = "int4" if self._bits == 4 else "int8"
        return Layout(kind, group=self._group or columns, scales="float32", minimums=True)

    @abstractmethod
    def grid(self, read: Read, has: Callable[[str], bool]) -> Grid: ...

    def dense(self, read: Read, has: Callable[[str], bool]) -> Tensor:
        return self.grid(read, has).dense()

    def parts(self, read: Read, has: Callable[[str], bool]) -> tuple[Tensor, ...]:
        grid = self.grid(read, has)
        columns = grid.numbers.shape[1]
        group = self._group or columns
        if grid.groups is not None and not torch.equal(grid.groups.long(), torch.arange(columns) // group):
            raise ValueError("its columns are not in the order of their groups")
        if grid.scales.shape[1] * group != columns:
            raise ValueError(f"{grid.scales.shape[1]} groups of {group} are not {columns} columns")
        middle = 0 if self._bits == 4 else 128  # which is stored as 0
        minimums = ((middle - grid.zeros.expand_as(grid.scales)) * grid.scales).contiguous()
        if self._bits == 8:
            return (grid.numbers.to(torch.int16) - middle).to(torch.int8), grid.scales.contiguous(), minimums
        return grid.numbers[:, 0::2] | grid.numbers[:, 1::2] << 4, grid.scales.contiguous(), minimums


class _GPTQ(_Grouped):
    """As AutoGPTQ and GPTQModel write it: what is packed runs along the inputs, and zero points are one less than they are."""

    suffixes, optional = (".qweight", ".qzeros", ".scales"), (".g_idx",)

    def __init__(self, bits: int, group: int, *, ordered: bool, less: int) -> None:
        super().__init__(bits, group, ordered=ordered)
        self._less = less

    def grid(self, read: Read, has: Callable[[str], bool]) -> Grid:
        numbers = _unpacked(read(".qweight"), self._bits, 0).T.contiguous()
        zeros = _unpacked(read(".qzeros"), self._bits, 1).T.float() + self._less
        groups = read(".g_idx") if has(".g_idx") else None
        return Grid(numbers, read(".scales").T.float(), zeros, groups)


class _AWQ(_Grouped):
    """As AutoAWQ's "gemm" writes it: what is packed runs along the outputs, in an order of its own."""

    suffixes = (".qweight", ".qzeros", ".scales")

    def grid(self, read: Read, has: Callable[[str], bool]) -> Grid:
        numbers, zeros = (self._in_order(read(name)).T for name in (".qweight", ".qzeros"))
        return Grid(numbers.contiguous(), read(".scales").T.float(), zeros.float())

    def _in_order(self, words: Tensor) -> Tensor:
        found = _unpacked(words, self._bits, 1)
        back = torch.empty(len(_AWQ_ORDER), dtype=torch.long)
        back[list(_AWQ_ORDER)] = torch.arange(len(_AWQ_ORDER))
        return found.view(len(found), -1, len(_AWQ_ORDER))[..., back].flatten(1)


class _CompressedWords(_Grouped):
    """compressed-tensors' "pack-quantized": signed numbers with half of their range added, packed along the inputs."""

    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")
    optional = (".weight_zero_point", ".weight_g_idx")

    def grid(self, read: Read, has: Callable[[str], bool]) -> Grid:
        rows, columns = read(".weight_shape").tolist()
        half = 1 << self._bits - 1
        numbers = _unpacked(read(".weight_packed"), self._bits, 1)[:, :columns]
        if len(numbers) != rows:
            raise ValueError(f"{len(numbers)} rows in the place of {rows}")
        zeros = torch.tensor(float(half))
        if has(".weight_zero_point"):
            zeros = _unpacked(read(".weight_zero_point"), self._bits, 0)[:rows].float()
        groups = read(".weight_g_idx") if has(".weight_g_idx") else None
        return Grid(numbers, read(".weight_scale").float(), zeros, groups)


class _CompressedBytes(_Grouped):
    """compressed-tensors' "int-quantized": int8, a number each, and a scale for each row."""

    suffixes, optional = (".weight", ".weight_scale"), (".weight_zero_point",)

    def grid(self, read: Read, has: Callable[[str], bool]) -> Grid:
        numbers = (_of_kind(read(".weight"), torch.int8).to(torch.int16) + 128).to(torch.uint8)
        scales = read(".weight_scale").float().reshape(-1, 1)
        zeros = torch.tensor(128.0)
        if has(".weight_zero_point"):
            zeros = read(".weight_zero_point").float().view_as(scales) + 128
        return Grid(numbers, scales.expand(len(numbers), -1), zeros)


class _Floats(Packed):
    """Floats of 8 bits with a scale for all, for each row, or for each block of rows and columns."""

    def __init__(self, scale: str, block: tuple[int, int] | None) -> None:
        self.suffixes = (".weight", scale)
        self._block = block

    def dense(self, read: Read, has: Callable[[str], bool]) -> Tensor:
        values, scales = read(self.suffixes[0]), read(self.suffixes[1]).float()
        numbers = _of_kind(values, torch.float8_e4m3fn).float()
        if self._block is not None:
            rows, columns = numbers.shape
            if scales.shape != tuple(
                -(-size // step) for size, step in zip(numbers.shape, self._block, strict=True)
            ):
                raise ValueError(f"scales {tuple(scales.shape)} for {rows} rows and {columns} columns")
            for axis, step in enumerate(self._block):
                scales = scales.repeat_interleave(step, axis)
            return numbers * scales[:rows, :columns]
        if scales.numel() not in (1, len(numbers)):
            raise ValueError(f"{scales.numel()} scales for {len(numbers)} rows")
        return numbers * scales.reshape(-1, 1)


class _MXFP4(Packed):
    """GPT-OSS's experts: 32 floats of 4 bits share a power of two."""

    suffixes, suffix = ("_blocks", "_scales"), ""

    def layout(self, columns: int) -> Layout | None:
        return Layout("int8", group=_E2M1_GROUP, scales="float32")

    def parts(self, read: Read, has: Callable[[str], bool]) -> tuple[Tensor, ...]:
        """(experts, rows, columns) numbers, and scales."""
        blocks = _of_kind(read("_blocks"), torch.uint8)
        table = torch.from_numpy(TWICE_MXFP4)
        numbers = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1)
        scales = torch.ldexp(torch.ones(()), _of_kind(read("_scales"), torch.uint8).int() - _E2M1_BIAS)
        experts, rows = blocks.shape[:2]
        return numbers.view(experts, rows, -1), scales.view(experts, rows, -1)

    def dense(self, read: Read, has: Callable[[str], bool]) -> Tensor:
        numbers, scales = self.parts(read, has)
        grouped = numbers.view(*scales.shape, _E2M1_GROUP) * scales[..., None]
        return grouped.view(numbers.shape).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class PackedWeight:
    """One weight of the files. `pieces`: the names of what it is made of, by suffix."""

    method: Packed
    pieces: Mapping[str, str]

    def dense(self, read: Read) -> Tensor:
        return self.method.dense(lambda suffix: read(self.pieces[suffix]), self.pieces.__contains__)

    def parts(self, read: Read) -> tuple[Tensor, ...]:
        return self.method.parts(lambda suffix: read(self.pieces[suffix]), self.pieces.__contains__)


def packed_weights(said: Any, names: Mapping[str, str], where: str) -> dict[str, PackedWeight]:
    """The weights that a model's files hold quantised, by the name that each has. `said`: config.json's quantization_config, None for none;
    `names`: the dtype of each tensor of the files, as the format spells it. JobError, in one line, for a method or a setting that is not
    known."""
    if said is None:
        return {}
    method = _method(said if isinstance(said, Mapping) else getattr(said, "to_dict", dict)(), where)
    first, *others = method.suffixes
    found = {}
    for name, spelled in names.items():
        owner = name.removesuffix(first)
        if not name.endswith(first) or (first == ".weight" and spelled not in ("I8", "F8_E4M3")):
            continue
        missing = [owner + suffix for suffix in others if owner + suffix not in names]
        if missing:
            raise JobError(f"{where}: no safetensors file has {missing[0]}, beside {name}")
        suffixes = (*method.suffixes, *(each for each in method.optional if owner + each in names))
        found[owner + method.suffix] = PackedWeight(method, {each: owner + each for each in suffixes})
    return found


def _method(said: Mapping[str, Any], where: str) -> Packed:
    name = said.get("quant_method")

    def bad(key: str, wanted: str) -> JobError:
        return JobError(
            f"{where} holds weights that are quantised by {name} with {key} {said.get(key)!r:.60}; {wanted} is read"
        )

    match name:
        case "gptq":
            if said.get("bits") not in (4, 8):
                raise bad("bits", "4 or 8")
            version = said.get("checkpoint_format", "gptq")
            if version not in ("gptq", "gptq_v2"):
                raise bad("checkpoint_format", "gptq or gptq_v2")
            if said.get("dynamic"):
                raise bad("dynamic", "one setting for all layers")
            ordered, less = bool(said.get("desc_act")), int(version == "gptq")
            return _GPTQ(said["bits"], _group(said.get("group_size"), bad), ordered=ordered, less=less)
        case "awq":
            if said.get("bits") != 4:
                raise bad("bits", "4")
            if said.get("version", "gemm") != "gemm":
                raise bad("version", "gemm")
            if said.get("zero_point", True) is not True:
                raise bad("zero_point", "True")
            return _AWQ(4, _group(said.get("group_size"), bad), ordered=False)
        case "fp8":
            block = _block(said.get("weight_block_size"))
            if block is None:
                raise bad("weight_block_size", "a block of rows and columns")
            return _Floats(".weight_scale_inv", block)
        case "mxfp4":
            return _MXFP4()
        case "compressed-tensors":
            return _compressed(said, where)
    # Read as plain numbers, they would make a model that answers, and answers nonsense.
    raise JobError(
        f"{where} holds weights that are quantised already ({one_line(str(name or 'no method named'), 40)}), which are not "
        "read; serve the model in full precision, with --quantization int8 or int4"
    )


def _compressed(said: Mapping[str, Any], where: str) -> Packed:
    groups = said.get("config_groups")
    schemes = (
        [each for each in (groups or {}).values() if isinstance(each, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    weights = schemes[0].get("weights") if len(schemes) == 1 else None

    def bad(what: str) -> JobError:
        return JobError(
            f"{where} holds weights that are quantised by compressed-tensors with {what}, which is not read"
        )

    if not isinstance(weights, Mapping):
        raise bad("other than one scheme for all layers")
    for key in ("transform_config", "sparsity_config"):
        extra = said.get(key)
        if extra and not (isinstance(extra, Mapping) and extra.get("format") == "dense"):
            raise bad(f"a {key}")
    form = said.get("format")
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    group = weights.get("group_size") if strategy == "group" else 0
    if strategy in ("group", "channel") and kind == "int" and type(group) is int and group >= 0:
        ordered = weights.get("actorder") not in (None, "weight", "static")
        if form == "pack-quantized" and bits in (4, 8):
            return _CompressedWords(bits, group, ordered=ordered)
        if form == "int-quantized" and bits == 8 and strategy == "channel":
            return _CompressedBytes(bits, 0, ordered=False)
    if form in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8):
        block = _block(weights.get("block_structure"))
        if strategy == "block" and block is not None:
            return _Floats(".weight_scale", block)
        if strategy in ("tensor", "channel"):
            return _Floats(".weight_scale", None)
    raise bad(f"format {form!r:.40}, {_short(kind)} of {_short(bits)} bits by {_short(strategy)}")


def _short(said: Any) -> str:
    return one_line(str(said), 20)


def _group(said: Any, bad: Callable[[str, str], JobError]) -> int:
    if type(said) is not int or not (said == -1 or said > 0):
        raise bad("group_size", "-1 or a number of columns")
    return max(0, said)


def _block(said: Any) -> tuple[int, int] | None:
    """Rows and columns."""
    if (
        isinstance(said, list | tuple)
        and len(said) == 2
        and all(type(each) is int and each > 0 for each in said)
    ):
        return said[0], said[1]
    return None


def _of_kind(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype != dtype:
        raise ValueError(f"{values.dtype} in the place of {dtype}")
    return values


def _unpacked(words: Tensor, bits: int, axis: int) -> Tensor:
    """The numbers that lie in words along an axis of a matrix, the first in the lowest bits."""
    mask = (1 << bits) - 1
    # One after the other: together they are eight times as large as what they are read from.
    parts = [(_of_kind(words, torch.int32) >> at & mask).to(torch.uint8) for at in range(0, _WORD, bits)]
    return torch.stack(parts, axis + 1).flatten(axis, axis + 1)
