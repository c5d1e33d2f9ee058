"""Rows that a boolean mask selects, `loss[mask]`, whose number depends on data: kept as all rows together with the mask.

What is computed row by row is computed for all rows; a sum or a mean counts only the selected ones. A row that is not selected is replaced by
the first selected one, so that no value comes up that the model would not compute, and gets a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves

from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.capture.exporting.size_masks import selected_indices
from fusion.runtime.capture.exporting.state import node_of
from fusion.runtime.job.errors import CaptureError

OF_DATA = "the size of a value follows from what is in a tensor: use torch.where or a mask"


class MaskedRows:
    """`rows` (count, ..), of which the booleans `mask` (count,) select some."""

    def __init__(self, rows: Tensor, mask: Tensor) -> None:
        self.rows, self.mask, self.line = rows, mask, line_of_caller()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func.__name__, func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if name in ("dtype", "device", "requires_grad"):
            return getattr(self.rows, name)
        if name == "shape":
            return (self.mask.sum(), *self.rows.shape[1:])
        return lambda *args, **named: _call(name, getattr(Tensor, name), (self, *args), named)

    def __len__(self) -> int:
        raise CaptureError(f"{OF_DATA}{line_of_caller()}")

    def __getitem__(self, key: Any) -> MaskedRows:
        """A part of every selected row."""
        keys = key if isinstance(key, tuple) else (key,)
        plain = all(each is None or each is ... or isinstance(each, (int, slice)) for each in keys)
        named = sum(each is not None and each is not ... for each in keys)
        rest = keys[0] is ... and named < self.rows.dim() and (len(keys) < 2 or keys[1] is not None)
        if not plain or not (rest or (isinstance(keys[0], slice) and keys[0] == slice(None))):
            raise CaptureError(f"the model takes some of what a mask chooses: {OF_DATA}{line_of_caller()}")
        return MaskedRows(self.rows[key], self.mask)

    def __iter__(self) -> Any:
        raise CaptureError(f"{OF_DATA}{line_of_caller()}")

    def dim(self) -> int:
        return self.rows.dim()

    def numel(self) -> Tensor:
        return self.mask.sum() * prod(self.rows.shape[1:])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


class _LeadingOne:
    """MaskedRows behind a dimension of one, `x[None, indices]`, which code removes with its next reshape. CaptureError for anything else."""

    def __init__(self, masked: MaskedRows) -> None:
        self._masked = masked

    def reshape(self, *shape: Any) -> MaskedRows:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if tuple(sizes) != (-1, *self._masked.rows.shape[1:]):
            raise CaptureError(f"{OF_DATA}{line_of_caller()}")
        return self._masked

    view = reshape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CaptureError(f"{OF_DATA}{line_of_caller()}")

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"{OF_DATA}{line_of_caller()}")


def require_no_masked_rows(outputs: Any) -> Any:
    """The outputs of a model as they are. CaptureError where one is MaskedRows: its size depends on data."""
    for each in tree_leaves(outputs):
        if isinstance(each, MaskedRows):
            raise CaptureError(f"{OF_DATA}{each.line}")
    return outputs


def where(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(condition: Tensor, *values: Any, **named: Any) -> Any:
        return original(condition, *values, **named) if values or named else _true_indices(condition)

    return run


def nonzero(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: Tensor, *, out: Any = None, as_tuple: bool = False) -> Any:
        if out is not None or input.dim() == 0:
            return original(input, out=out, as_tuple=as_tuple)
        indices = _true_indices(input)
        return indices if as_tuple else torch.stack(indices, 1)

    return run


def _true_indices(tensor: Tensor) -> tuple[Any, ...]:
    """The indices of the elements that are not zero, for each dimension: tensors if their number follows from sizes, else MaskedRows."""
    mask = tensor if tensor.dtype == torch.bool else tensor != 0
    selected, flat = selected_indices(mask), mask.flatten()
    indices, rest = [], torch.arange(flat.shape[0]) if selected is None else selected
    for size in reversed(mask.shape):
        indices.append(rest % size)
        rest = rest // size
    return tuple(each if selected is not None else _select(each, flat) for each in reversed(indices))


def index_add(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adds zeros for rows that are not selected."""

    def run(self: Tensor, dim: int, index: Any, source: Any, **named: Any) -> Tensor:
        if not isinstance(index, MaskedRows):
            return original(self, dim, index, source, **named)
        if dim != 0 or not isinstance(source, MaskedRows) or not _same_mask(index.mask, source.mask):
            raise CaptureError(f"{OF_DATA}{line_of_caller()}")
        rows = source.rows
        summands = torch.where(_aligned_rows(source.mask, rows), rows, torch.zeros_like(rows))
        return original(self, 0, index.rows, summands, **named)

    return run


def _is_lookup(key: Any) -> bool:
    """Whether a key begins with indices that a mask selects, so that it looks up one row for each."""
    first, *others = key if isinstance(key, tuple) else (key,)
    if not isinstance(first, MaskedRows) or first.rows.dtype != torch.int64:
        return False
    indices = [each for each in others if not (each is None or each is ... or type(each) in (int, slice))]
    return all(
        isinstance(each, MaskedRows) and each.rows.dim() == 1 and _same_mask(first.mask, each.mask)
        for each in (first, *indices)
    )


def _look_up(tensor: Tensor, key: Any) -> MaskedRows:
    keys = key if isinstance(key, tuple) else (key,)
    return MaskedRows(tensor[tuple(map(_all_rows, keys))], keys[0].mask)


def getitem(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Tensor, key: Any) -> Any:
        if _is_mask(self, key):
            return _select(self, key)
        if _is_lookup(key):
            return _look_up(self, key)
        if isinstance(key, tuple) and len(key) == 2 and key[0] is None and _is_lookup(key[1]):
            return _LeadingOne(_look_up(self, key[1]))
        lead = _leading_full_slices(self, key)
        indices = selected_indices(key[-1]) if lead else None
        if indices is None:
            return original(self, key)
        return self.flatten(lead, lead + key[-1].dim() - 1).index_select(lead, indices)

    return run


def _leading_full_slices(tensor: Tensor, key: Any) -> int:
    """How many full slices precede a mask at the end of the key, as in `x[:, mask]`; 0 for any other key."""
    if not isinstance(key, tuple) or len(key) < 2 or not isinstance(key[-1], Tensor):
        return 0
    full = all(isinstance(each, slice) and each == slice(None) for each in key[:-1])
    lead = len(key) - 1
    return lead if full and key[-1].dtype == torch.bool and 0 < key[-1].dim() <= tensor.dim() - lead else 0


def setitem(original: Callable[..., None]) -> Callable[..., None]:
    """Writes MaskedRows only with the mask that selected them, or with indices that it selected."""

    def run(self: Tensor, key: Any, value: Any) -> None:
        if (
            isinstance(value, MaskedRows)
            and isinstance(key, MaskedRows)
            and _is_lookup(key)
            and _same_mask(key.mask, value.mask)
        ):
            end: Any = self.shape[0]  # rows that are not selected go to one more row, which is then dropped
            targets = torch.where(key.mask, key.rows, end)
            extended = torch.cat([self, self[:1]])
            self.copy_(extended.index_put((targets,), value.rows.to(self.dtype))[:end])
            return None
        if not isinstance(value, MaskedRows):
            indices = selected_indices(key) if isinstance(value, Tensor) and _is_mask(self, key) else None
            if indices is not None and value.dim() == self.dim() - key.dim() + 1:
                rows = self.flatten(0, key.dim() - 1).index_put((indices,), value.to(self.dtype))
                self.copy_(rows.reshape(self.shape))
                return None
            if not _is_repeated_row(self, key, value):
                return original(self, key, value)
            self.copy_(torch.where(_aligned_left(key, self), value.to(self.dtype), self))
            return None
        if not _is_mask(self, key) or not _same_mask(key.flatten(), value.mask) or value.rows.shape[1:] != self.shape[key.dim() :]:  # fmt: skip
            raise CaptureError(f"{OF_DATA}{line_of_caller()}")
        self.copy_(torch.where(_aligned_left(key, self), value.rows.reshape(self.shape).to(self.dtype), self))
        return None

    return run


def masked_select(_: Any) -> Callable[..., MaskedRows | Tensor]:
    def run(input: Tensor, mask: Tensor) -> MaskedRows | Tensor:
        # Two equal free sizes have a symbol each in torch.export until they are compared.
        same = input.dim() == mask.dim() and all(
            type(a) is type(b) and a == b for a, b in zip(input.shape, mask.shape, strict=True)
        )
        if not same:
            input, mask = torch.broadcast_tensors(input, mask)  # type: ignore[no-untyped-call]
        return _select(input, mask)

    return run


def _is_mask(tensor: Tensor, key: Any) -> bool:
    return isinstance(key, Tensor) and key.dtype == torch.bool and 0 < key.dim() <= tensor.dim()


def _is_repeated_row(tensor: Tensor, key: Any, value: Any) -> bool:
    """Whether `value` is one row (or a part of one), to be written wherever the mask is set."""
    if not isinstance(value, Tensor) or not _is_mask(tensor, key):
        return False
    return 0 < value.dim() <= tensor.dim() - key.dim() and value.device == tensor.device


def _aligned_left(mask: Tensor, tensor: Tensor) -> Tensor:
    """The mask of the leading dimensions, in a shape that broadcasts with the tensor."""
    return mask.reshape(*mask.shape, *(1 for _ in tensor.shape[mask.dim() :]))


def _select(tensor: Tensor, mask: Tensor) -> MaskedRows | Tensor:
    indices = selected_indices(mask)
    if indices is not None:
        return tensor.flatten(0, mask.dim() - 1).index_select(0, indices)
    rows, flat = tensor.flatten(0, mask.dim() - 1), mask.flatten()
    first = flat.to(torch.int64).argmax(0, keepdim=True)
    filler = rows.detach().index_select(0, first)
    return MaskedRows(torch.where(_aligned_rows(flat, rows), rows, filler), flat)


def _aligned_rows(mask: Tensor, rows: Tensor) -> Tensor:
    return mask.reshape(-1, *(1 for _ in rows.shape[1:]))


def _call(name: str, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    masked = [each for each in tree_leaves((args, named)) if isinstance(each, MaskedRows)]
    mask = masked[0].mask
    result = None
    if not all(_same_mask(each.mask, mask) for each in masked[1:]):
        pass
    elif name in ("cross_entropy", "nll_loss"):
        result = _classification_loss(func, mask, args, named)
    elif name in _LOSSES:
        reduction = named.get("reduction", "mean")
        each = _row_by_row(func, mask, args, {**named, "reduction": "none"})
        result = each if reduction == "none" or each is None else _reduced(reduction, each)
    elif name in ("sum", "mean") and len(args) == 1 and not named:
        result = _reduced(name, args[0])
    elif name == "stack" and len(args) == 2 and args[1] == 1 and not named:
        result = MaskedRows(torch.stack([_all_rows(each) for each in args[0]], 1), mask)
    elif (
        name in ("flatten", "view", "reshape")
        and args[1:] in ((), (-1,))
        and _all_rows(args[0]).shape[1:] == (1,)
    ):
        result = MaskedRows(_all_rows(args[0]).squeeze(1), mask)
    elif name in _ELEMENTWISE or (name in _ALONG_DIM and _keeps_rows(name, args, named)):
        result = _row_by_row(func, mask, args, named)
    elif name in _LAYER_CALLS and len(masked) == 1 and args[0] is masked[0]:
        has_features = name == "embedding" or masked[0].rows.dim() > 1
        is_matrix = name != "__matmul__" or args[1].dim() == 2
        result = (
            MaskedRows(func(masked[0].rows, *args[1:], **named), mask) if has_features and is_matrix else None
        )
    if result is None:
        raise CaptureError(
            f"the model calls {name.strip('_')} on what a mask chooses: {OF_DATA}{line_of_caller()}"
        )
    return result


def _row_by_row(
    func: Callable[..., Any], mask: Tensor, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    """The call for all rows. None where the arguments have
    different ranks, so that rows would be broadcast against another dimension, or where a plain tensor may have an entry for each selected row."""
    values = (*args, *named.values())
    ranks = {each.rows.dim() for each in values if isinstance(each, MaskedRows)}
    if len(ranks) > 1 or any(isinstance(each, Tensor) and each.dim() >= min(ranks) for each in values):
        return None
    result = func(*map(_all_rows, args), **{name: _all_rows(each) for name, each in named.items()})
    if isinstance(result, tuple):
        return type(result)([MaskedRows(each, mask) for each in result])
    return MaskedRows(result, mask)


def _all_rows(value: Any) -> Any:
    return value.rows if isinstance(value, MaskedRows) else value


def _classification_loss(func: Callable[..., Any], mask: Tensor, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:  # fmt: skip
    """cross_entropy or nll_loss with `ignore_index` as the label of every row that is not selected."""
    if len(args) != 2 or not all(isinstance(each, MaskedRows) for each in args):
        return None
    scores, target = (each.rows for each in args)
    if scores.dim() != 2 or target.dim() != 1 or named.get("reduction") == "none":
        return None
    return func(scores, torch.where(mask, target, named.get("ignore_index", -100)), **named)


def _reduced(reduction: str, value: MaskedRows) -> Any:
    rows = value.rows
    total = torch.where(_aligned_rows(value.mask, rows), rows, torch.zeros_like(rows)).sum()
    if reduction == "sum":
        return total
    if not rows.dtype.is_floating_point:
        return None
    return total / (value.mask.sum() if reduction == "batchmean" else value.numel())


def _keeps_rows(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether the call names its dimension, and that is not the one of the rows."""
    index, default = _DIM_ARGUMENT.get(name, (1, None))
    if not isinstance(args[0], MaskedRows):
        return False
    dims = named.get("dim", args[index] if len(args) > index else default)
    rank = args[0].rows.dim() + (name == "unsqueeze")
    dim_list = dims if isinstance(dims, (tuple, list)) else (dims,)
    return bool(dim_list) and all(type(d) is int and d % rank != 0 for d in dim_list)


def _same_mask(one: Tensor, other: Tensor) -> bool:
    """Whether two masks are the same: one tensor, or computed by the same pure operators from the same values."""
    mode = get_proxy_mode()
    if one is other or mode is None:  # nothing is exported now
        return True
    node = node_of(one, mode.tracer)
    return node is not None and _same_value(node, node_of(other, mode.tracer))


def _same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        pure = one.op == other.op == "call_function" and one.target == other.target
        random = "rand" in str(one.target) or "dropout" in str(one.target) or "bernoulli" in str(one.target)
        return (
            pure
            and not random
            and _same_value(one.args, other.args)
            and _same_value(one.kwargs, other.kwargs)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_value(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return type(one) is type(other) and bool(one == other)


_LAYER_CALLS = frozenset({"linear", "embedding", "layer_norm", "__matmul__"})
_ELEMENTWISE = frozenset({
    "__abs__", "__add__", "__and__", "__eq__", "__ge__", "__gt__", "__invert__", "__le__", "__lt__", "__mul__", "__ne__", "__neg__", "__or__", "__pow__",
    "__radd__", "__rmul__", "__rpow__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "abs", "acos", "add", "arccos", "asin", "atan", "bool",
    "ceil", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "cos", "detach", "div", "double", "dropout", "elu", "eq", "erf", "exp", "expm1",
    "float", "floor", "ge", "gelu", "gt", "half", "hardtanh", "int", "isfinite", "isinf", "isnan", "le", "leaky_relu", "log", "log10", "log1p", "log2",
    "logical_and", "logical_not", "logical_or", "logsigmoid", "long", "lt", "maximum", "minimum", "mish", "mul", "nan_to_num", "ne", "neg", "pow",
    "reciprocal", "relu", "relu6", "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square", "sub", "subtract",
    "tan", "tanh", "to", "true_divide", "where",
})  # fmt: skip
_ALONG_DIM = frozenset({
    "amax", "amin", "argmax", "argmin", "cumsum", "log_softmax", "logsumexp", "max", "mean", "min", "norm", "normalize", "prod", "softmax",
    "squeeze", "std", "sum", "unsqueeze", "var",
})  # fmt: skip
# The position of the argument that names the dimension, and its default.
_DIM_ARGUMENT: Mapping[str, tuple[int, int | None]] = {"norm": (2, None), "normalize": (2, 1)}
_LOSSES = frozenset({
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss",
})  # fmt: skip


def _operator(name: str) -> Callable[..., Any]:
    def run(self: MaskedRows, *others: Any) -> Any:
        return _call(name, getattr(Tensor, name), (self, *others), {})

    return run


for _name in (*_ELEMENTWISE, *_LAYER_CALLS):
    if _name.startswith("__") and hasattr(Tensor, _name):
        setattr(MaskedRows, _name, _operator(_name))
        setattr(_LeadingOne, _name, lambda self, *_, called=_name: self.__getattr__(called))
MaskedRows.__hash__ = object.__hash__  # type: ignore[method-assign]
