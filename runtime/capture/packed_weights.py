"""Quantised weights in the files of a Hugging Face directory: GPTQ, AWQ, compressed-tensors, 8-bit floats, and MXFP4.

Every setting in config.json has to be understood, or the directory is refused: a misread weight gives a model that answers nonsense. A matrix
is unpacked to numbers, scales and zero points; one of grouped 4- or 8-bit integers can be served as it is, without being rounded again
(`fusion.dag.ir.opset_quantised`). Activation quantisation (`input_activations`, `activation_scheme`), an optimisation for speed, is not
applied.
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
Read = Callable[[str], Tensor]  # a tensor of the files, by name

_WORD_BITS = 32  # of the integers into which numbers are packed
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of the eight numbers in a word, lowest bits first
_E2M1_GROUP, _E2M1_BIAS = 32, 128  # 127, and 1 as the table has twice the values


@dataclass(frozen=True)
class Grid:
    """A matrix (rows, columns) of integers with a scale and a zero point per group of columns: (number - zero) * scale."""

    numbers: Tensor  # uint8
    scales: Tensor  # (rows, groups), float32
    zeros: Tensor  # (rows, groups) or 0-dimensional, float32
    groups: Tensor | None = None  # the group of each column; None: consecutive runs of equal size

    def dense(self) -> Tensor:
        scales, zeros = self.scales, self.zeros.expand_as(self.scales)
        if self.groups is not None:
            group_of_column = self.groups.long()
            return (self.numbers - zeros[:, group_of_column]) * scales[:, group_of_column]
        rows, columns = self.numbers.shape
        grouped = self.numbers.view(rows, scales.shape[1], -1)
        return ((grouped - zeros[..., None]) * scales[..., None]).view(rows, columns)


class Packed(ABC):
    """A format of quantised weights. A weight is stored in several tensors, named by its module and a suffix."""

    suffixes: tuple[str, ...]  # of its tensors; the first one identifies a weight
    optional: tuple[str, ...] = ()  # of tensors that may be absent
    suffix = ".weight"  # of the weight itself

    def layout(self, columns: int) -> Layout | None:
        """The layout in which a matrix of `columns` columns can be served as it is; None if it cannot."""
        return None

    @abstractmethod
    def dense(self, read: Read, has: Callable[[str], bool]) -> Tensor:
        """The dequantised weight. `read`, `has`: its tensors, by suffix."""

    def parts(self, read: Read, has: Callable[[str], bool]) -> tuple[Tensor, ...]:
        """Numbers, scales and, if the layout has them, minimums."""
        raise NotImplementedError


class _Grouped(Packed):
    """Integers of 4 or 8 bits in groups of `group` columns; 0: one group per row. `ordered`: columns are permuted among groups."""

    def __init__(self, bits: int, group: int, *, ordered: bool) -> None:
        self._bits, self._group, self._ordered = bits, group, ordered

    def layout(self, columns: int) -> Layout | None:
        if self._ordered:  # columns of a group are not consecutive
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
        middle = 0 if self._bits == 4 else 128  # stored as 0
        minimums = ((middle - grid.zeros.expand_as(grid.scales)) * grid.scales).contiguous()
        if self._bits == 8:
            return (grid.numbers.to(torch.int16) - middle).to(torch.int8), grid.scales.contiguous(), minimums
        return grid.numbers[:, 0::2] | grid.numbers[:, 1::2] << 4, grid.scales.contiguous(), minimums


class _GPTQ(_Grouped):
    """AutoGPTQ and GPTQModel: packed along the inputs; version 1 stores zero points minus one (`zero_offset`)."""

    suffixes, optional = (".qweight", ".qzeros", ".scales"), (".g_idx",)

    def __init__(self, bits: int, group: int, *, ordered: bool, zero_offset: int) -> None:
        super().__init__(bits, group, ordered=ordered)
        self._zero_offset = zero_offset

    def grid(self, read: Read, has: Callable[[str], bool]) -> Grid:
        numbers = _unpacked(read(".qweight"), self._bits, 0).T.contiguous()
        zeros = _unpacked(read(".qzeros"), self._bits, 1).T.float() + self._zero_offset
        groups = read(".g_idx") if has(".g_idx") else None
        return Grid(numbers, read(".scales").T.float(), zeros, groups)


class _AWQ(_Grouped):
    """AutoAWQ's "gemm": packed along the outputs, in the order _AWQ_ORDER."""

    suffixes = (".qweight", ".qzeros", ".scales")

    def grid(self, read: Read, has: Callable[[str], bool]) -> Grid:
        numbers, zeros = (self._in_order(read(name)).T for name in (".qweight", ".qzeros"))
        return Grid(numbers.contiguous(), read(".scales").T.float(), zeros.float())

    def _in_order(self, words: Tensor) -> Tensor:
        numbers = _unpacked(words, self._bits, 1)
        inverse = torch.empty(len(_AWQ_ORDER), dtype=torch.long)
        inverse[list(_AWQ_ORDER)] = torch.arange(len(_AWQ_ORDER))
        return numbers.view(len(numbers), -1, len(_AWQ_ORDER))[..., inverse].flatten(1)


class _CompressedPacked(_Grouped):
    """compressed-tensors' "pack-quantized": signed numbers offset by half of their range, packed along the inputs."""

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
    """compressed-tensors' "int-quantized": int8 with a scale per row."""

    suffixes, optional = (".weight", ".weight_scale"), (".weight_zero_point",)

    def grid(self, read: Read, has: Callable[[str], bool]) -> Grid:
        numbers = (_checked(read(".weight"), torch.int8).to(torch.int16) + 128).to(torch.uint8)
        scales = read(".weight_scale").float().reshape(-1, 1)
        zeros = torch.tensor(128.0)
        if has(".weight_zero_point"):
            zeros = read(".weight_zero_point").float().view_as(scales) + 128
        return Grid(numbers, scales.expand(len(numbers), -1), zeros)


class _Floats(Packed):
    """8-bit floats with one scale, one per row, or one per block of rows and columns."""

    def __init__(self, scale: str, block: tuple[int, int] | None) -> None:
        self.suffixes = (".weight", scale)
        self._block = block

    def dense(self, read: Read, has: Callable[[str], bool]) -> Tensor:
        values, scales = read(self.suffixes[0]), read(self.suffixes[1]).float()
        numbers = _checked(values, torch.float8_e4m3fn).float()
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
    """GPT-OSS's experts: groups of 32 4-bit floats with a power of two as scale."""

    suffixes, suffix = ("_blocks", "_scales"), ""

    def layout(self, columns: int) -> Layout | None:
        return Layout("int8", group=_E2M1_GROUP, scales="float32")

    def parts(self, read: Read, has: Callable[[str], bool]) -> tuple[Tensor, ...]:
        """(experts, rows, columns) numbers, and scales."""
        blocks = _checked(read("_blocks"), torch.uint8)
        table = torch.from_numpy(TWICE_MXFP4)
        numbers = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1)
        scales = torch.ldexp(torch.ones(()), _checked(read("_scales"), torch.uint8).int() - _E2M1_BIAS)
        experts, rows = blocks.shape[:2]
        return numbers.view(experts, rows, -1), scales.view(experts, rows, -1)

    def dense(self, read: Read, has: Callable[[str], bool]) -> Tensor:
        numbers, scales = self.parts(read, has)
        grouped = numbers.view(*scales.shape, _E2M1_GROUP) * scales[..., None]
        return grouped.view(numbers.shape).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class PackedWeight:
    """One weight of the files. `pieces`: suffix -> name of its tensor."""

    method: Packed
    pieces: Mapping[str, str]

    def dense(self, read: Read) -> Tensor:
        return self.method.dense(lambda suffix: read(self.pieces[suffix]), self.pieces.__contains__)

    def parts(self, read: Read) -> tuple[Tensor, ...]:
        return self.method.parts(lambda suffix: read(self.pieces[suffix]), self.pieces.__contains__)


def packed_weights(quantization: Any, names: Mapping[str, str], where: str) -> dict[str, PackedWeight]:
    """The quantised weights of a model's files, by name. `quantization`: config.json's quantization_config, or None; `names`: tensor -> dtype code
    of safetensors. JobError for an unknown method or setting."""
    if quantization is None:
        return {}
    settings = quantization if isinstance(quantization, Mapping) else getattr(quantization, "to_dict", dict)()
    method = _method(settings, where)
    first, *others = method.suffixes
    weights = {}
    for name, code in names.items():
        owner = name.removesuffix(first)
        if not name.endswith(first) or (first == ".weight" and code not in ("I8", "F8_E4M3")):
            continue
        missing = [owner + suffix for suffix in others if owner + suffix not in names]
        if missing:
            raise JobError(f"{where}: no safetensors file has {missing[0]}, beside {name}")
        suffixes = (*method.suffixes, *(each for each in method.optional if owner + each in names))
        weights[owner + method.suffix] = PackedWeight(method, {each: owner + each for each in suffixes})
    return weights


def _method(settings: Mapping[str, Any], where: str) -> Packed:
    name = settings.get("quant_method")

    def unsupported(key: str, supported: str) -> JobError:
        return JobError(
            f"{where} holds weights that are quantised by {name} with {key} {settings.get(key)!r:.60}; {supported} is read"
        )

    match name:
        case "gptq":
            if settings.get("bits") not in (4, 8):
                raise unsupported("bits", "4 or 8")
            version = settings.get("checkpoint_format", "gptq")
            if version not in ("gptq", "gptq_v2"):
                raise unsupported("checkpoint_format", "gptq or gptq_v2")
            if settings.get("dynamic"):
                raise unsupported("dynamic", "one setting for all layers")
            ordered, zero_offset = bool(settings.get("desc_act")), int(version == "gptq")
            return _GPTQ(
                settings["bits"],
                _group(settings.get("group_size"), unsupported),
                ordered=ordered,
                zero_offset=zero_offset,
            )
        case "awq":
            if settings.get("bits") != 4:
                raise unsupported("bits", "4")
            if settings.get("version", "gemm") != "gemm":
                raise unsupported("version", "gemm")
            if settings.get("zero_point", True) is not True:
                raise unsupported("zero_point", "True")
            return _AWQ(4, _group(settings.get("group_size"), unsupported), ordered=False)
        case "fp8":
            block = _block(settings.get("weight_block_size"))
            if block is None:
                raise unsupported("weight_block_size", "a block of rows and columns")
            return _Floats(".weight_scale_inv", block)
        case "mxfp4":
            return _MXFP4()
        case "compressed-tensors":
            return _compressed(settings, where)
    # Read as plain numbers, they would make a model that answers nonsense.
    raise JobError(
        f"{where} holds weights that are quantised already ({one_line(str(name or 'no method named'), 40)}), which are not "
        "read; serve the model in full precision, with --quantization int8 or int4"
    )


def _compressed(settings: Mapping[str, Any], where: str) -> Packed:
    groups = settings.get("config_groups")
    schemes = (
        [each for each in (groups or {}).values() if isinstance(each, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    weights = schemes[0].get("weights") if len(schemes) == 1 else None

    def unsupported(what: str) -> JobError:
        return JobError(
            f"{where} holds weights that are quantised by compressed-tensors with {what}, which is not read"
        )

    if not isinstance(weights, Mapping):
        raise unsupported("other than one scheme for all layers")
    for key in ("transform_config", "sparsity_config"):
        extra = settings.get(key)
        if extra and not (isinstance(extra, Mapping) and extra.get("format") == "dense"):
            raise unsupported(f"a {key}")
    form = settings.get("format")
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    group = weights.get("group_size") if strategy == "group" else 0
    if strategy in ("group", "channel") and kind == "int" and type(group) is int and group >= 0:
        ordered = weights.get("actorder") not in (None, "weight", "static")
        if form == "pack-quantized" and bits in (4, 8):
            return _CompressedPacked(bits, group, ordered=ordered)
        if form == "int-quantized" and bits == 8 and strategy == "channel":
            return _CompressedBytes(bits, 0, ordered=False)
    if form in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8):
        block = _block(weights.get("block_structure"))
        if strategy == "block" and block is not None:
            return _Floats(".weight_scale", block)
        if strategy in ("tensor", "channel"):
            return _Floats(".weight_scale", None)
    raise unsupported(f"format {form!r:.40}, {_short(kind)} of {_short(bits)} bits by {_short(strategy)}")


def _short(value: Any) -> str:
    return one_line(str(value), 20)


def _group(size: Any, unsupported: Callable[[str, str], JobError]) -> int:
    if type(size) is not int or not (size == -1 or size > 0):
        raise unsupported("group_size", "-1 or a number of columns")
    return max(0, size)


def _block(size: Any) -> tuple[int, int] | None:
    """Rows and columns."""
    if (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(type(each) is int and each > 0 for each in size)
    ):
        return size[0], size[1]
    return None


def _checked(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype != dtype:
        raise ValueError(f"{values.dtype} in the place of {dtype}")
    return values


def _unpacked(words: Tensor, bits: int, axis: int) -> Tensor:
    """The numbers packed in words along an axis of a matrix, lowest bits first."""
    mask = (1 << bits) - 1
    # One shift at a time: all at once would take eight times the memory.
    parts = [
        (_checked(words, torch.int32) >> shift & mask).to(torch.uint8) for shift in range(0, _WORD_BITS, bits)
    ]
    return torch.stack(parts, axis + 1).flatten(axis, axis + 1)
