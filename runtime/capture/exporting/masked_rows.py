"""The rows that a mask of booleans chooses, `loss[mask]`, of which there are as many as data says: all rows, and the mask beside them.

What is computed for each row by itself is computed for all; a sum or a mean counts those that are chosen. Where one is not, the first chosen row
stands in its place, so that no value comes up that the model would not compute, and its gradient is zero.
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
from fusion.runtime.capture.exporting.size_masks import places
from fusion.runtime.capture.exporting.state import node_of
from fusion.runtime.job.errors import CaptureError

OF_DATA = "the size of a value follows from what is in a tensor: use torch.where or a mask"


class Chosen:
    """`rows` (count of all, ..), of which `mask` (count of all) chooses."""

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

    def __getitem__(self, key: Any) -> Chosen:
        """Some of each row."""
        keys = key if isinstance(key, tuple) else (key,)
        plain = all(each is None or each is ... or isinstance(each, (int, slice)) for each in keys)
        named = sum(each is not None and each is not ... for each in keys)
        rest = keys[0] is ... and named < self.rows.dim() and (len(keys) < 2 or keys[1] is not None)
        if not plain or not (rest or (isinstance(keys[0], slice) and keys[0] == slice(None))):
            raise CaptureError(f"the model takes some of what a mask chooses: {OF_DATA}{line_of_caller()}")
        return Chosen(self.rows[key], self.mask)

    def __iter__(self) -> Any:
        raise CaptureError(f"{OF_DATA}{line_of_caller()}")

    def dim(self) -> int:
        return self.rows.dim()

    def numel(self) -> Tensor:
        return self.mask.sum() * prod(self.rows.shape[1:])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


def whole(made: Any) -> Any:
    """What a model returns. CaptureError where some of it is chosen: of a size that follows from data."""
    for each in tree_leaves(made):
        if isinstance(each, Chosen):
            raise CaptureError(f"{OF_DATA}{each.line}")
    return made


def getitem(plain: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Tensor, key: Any) -> Any:
        if _is_mask(self, key):
            return _chosen(self, key)
        before = _whole_before(self, key)
        where = places(key[-1]) if before else None
        if where is None:
            return plain(self, key)
        return self.flatten(before, before + key[-1].dim() - 1).index_select(before, where)

    return run


def _whole_before(of: Tensor, key: Any) -> int:
    """How many dimensions stand whole before a mask, as in `x[:, mask]`; 0 where it is none of those."""
    if not isinstance(key, tuple) or len(key) < 2 or not isinstance(key[-1], Tensor):
        return 0
    whole = all(isinstance(each, slice) and each == slice(None) for each in key[:-1])
    at = len(key) - 1
    return at if whole and key[-1].dtype == torch.bool and 0 < key[-1].dim() <= of.dim() - at else 0


def setitem(plain: Callable[..., None]) -> Callable[..., None]:
    """Rows that are chosen, written where they are chosen from."""

    def run(self: Tensor, key: Any, value: Any) -> None:
        if not isinstance(value, Chosen):
            where = places(key) if isinstance(value, Tensor) and _is_mask(self, key) else None
            if where is not None and value.dim() == self.dim() - key.dim() + 1:
                rows = self.flatten(0, key.dim() - 1).index_put((where,), value.to(self.dtype))
                self.copy_(rows.reshape(self.shape))
                return None
            if not _is_row(self, key, value):
                return plain(self, key, value)
            self.copy_(torch.where(_before(key, self), value.to(self.dtype), self))
            return None
        if not _is_mask(self, key) or not _same(key.flatten(), value.mask) or value.rows.shape[1:] != self.shape[key.dim() :]:  # fmt: skip
            raise CaptureError(f"{OF_DATA}{line_of_caller()}")
        self.copy_(torch.where(_before(key, self), value.rows.reshape(self.shape).to(self.dtype), self))
        return None

    return run


def masked_select(_: Any) -> Callable[..., Chosen | Tensor]:
    def run(input: Tensor, mask: Tensor) -> Chosen | Tensor:
        # Of two that are free, torch.export knows each by a name of its own until it is asked.
        same = input.dim() == mask.dim() and all(
            type(a) is type(b) and a == b for a, b in zip(input.shape, mask.shape, strict=True)
        )
        if not same:
            input, mask = torch.broadcast_tensors(input, mask)  # type: ignore[no-untyped-call]
        return _chosen(input, mask)

    return run


def _is_mask(of: Tensor, key: Any) -> bool:
    return isinstance(key, Tensor) and key.dtype == torch.bool and 0 < key.dim() <= of.dim()


def _is_row(of: Tensor, key: Any, value: Any) -> bool:
    """Whether the same row is written wherever a mask says."""
    if not isinstance(value, Tensor) or not _is_mask(of, key):
        return False
    return 0 < value.dim() <= of.dim() - key.dim() and value.device == of.device


def _before(mask: Tensor, of: Tensor) -> Tensor:
    """A mask of the first dimensions, beside the others."""
    return mask.reshape(*mask.shape, *(1 for _ in of.shape[mask.dim() :]))


def _chosen(of: Tensor, mask: Tensor) -> Chosen | Tensor:
    where = places(mask)
    if where is not None:
        return of.flatten(0, mask.dim() - 1).index_select(0, where)
    rows, flat = of.flatten(0, mask.dim() - 1), mask.flatten()
    first = flat.to(torch.int64).argmax(0, keepdim=True)
    instead = rows.detach().index_select(0, first)
    return Chosen(torch.where(_beside(flat, rows), rows, instead), flat)


def _beside(mask: Tensor, rows: Tensor) -> Tensor:
    return mask.reshape(-1, *(1 for _ in rows.shape[1:]))


def _call(name: str, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    given = [each for each in tree_leaves((args, named)) if isinstance(each, Chosen)]
    mask = given[0].mask
    found = None
    if not all(_same(each.mask, mask) for each in given[1:]):
        pass
    elif name in ("cross_entropy", "nll_loss"):
        found = _of_classes(func, mask, args, named)
    elif name in _LOSSES:
        how = named.get("reduction", "mean")
        each = _of_rows(func, mask, args, {**named, "reduction": "none"})
        found = each if how == "none" or each is None else _reduced(how, each)
    elif name in ("sum", "mean") and len(args) == 1 and not named:
        found = _reduced(name, args[0])
    elif name in _EACH or (name in _ALONG and _along(name, args, named)):
        found = _of_rows(func, mask, args, named)
    elif name in _OF_WEIGHTS and len(given) == 1 and args[0] is given[0]:
        wide = name == "embedding" or given[0].rows.dim() > 1
        matrix = name != "__matmul__" or args[1].dim() == 2
        found = Chosen(func(given[0].rows, *args[1:], **named), mask) if wide and matrix else None
    if found is None:
        raise CaptureError(
            f"the model calls {name.strip('_')} on what a mask chooses: {OF_DATA}{line_of_caller()}"
        )
    return found


def _of_rows(func: Callable[..., Any], mask: Tensor, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """For all rows; None where what goes with a row goes by another dimension, or another tensor may have one for each that is chosen."""
    values = (*args, *named.values())
    ranks = {each.rows.dim() for each in values if isinstance(each, Chosen)}
    if len(ranks) > 1 or any(isinstance(each, Tensor) and each.dim() >= min(ranks) for each in values):
        return None
    made = func(*map(_rows, args), **{name: _rows(each) for name, each in named.items()})
    if isinstance(made, tuple):
        return type(made)([Chosen(each, mask) for each in made])
    return Chosen(made, mask)


def _rows(value: Any) -> Any:
    return value.rows if isinstance(value, Chosen) else value


def _of_classes(func: Callable[..., Any], mask: Tensor, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:  # fmt: skip
    """With the labels that are not chosen as those that are ignored."""
    if len(args) != 2 or not all(isinstance(each, Chosen) for each in args):
        return None
    scores, target = (each.rows for each in args)
    if scores.dim() != 2 or target.dim() != 1 or named.get("reduction") == "none":
        return None
    return func(scores, torch.where(mask, target, named.get("ignore_index", -100)), **named)


def _reduced(how: str, value: Chosen) -> Any:
    rows = value.rows
    total = torch.where(_beside(value.mask, rows), rows, torch.zeros_like(rows)).sum()
    if how == "sum":
        return total
    if not rows.dtype.is_floating_point:
        return None
    return total / (value.mask.sum() if how == "batchmean" else value.numel())


def _along(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether the dimension that is named is not that of the rows."""
    place, plain = _PLACES.get(name, (1, None))
    if not isinstance(args[0], Chosen):
        return False
    dims = named.get("dim", args[place] if len(args) > place else plain)
    rank = args[0].rows.dim() + (name == "unsqueeze")
    said = dims if isinstance(dims, (tuple, list)) else (dims,)
    return bool(said) and all(type(d) is int and d % rank != 0 for d in said)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two masks are the same: one value, or made in the same way of the same."""
    mode = get_proxy_mode()
    if one is other or mode is None:  # nothing is exported now
        return True
    made = node_of(one, mode.tracer)
    return made is not None and _alike(made, node_of(other, mode.tracer))


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        pure = one.op == other.op == "call_function" and one.target == other.target
        drawn = "rand" in str(one.target) or "dropout" in str(one.target) or "bernoulli" in str(one.target)
        return pure and not drawn and _alike(one.args, other.args) and _alike(one.kwargs, other.kwargs)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and bool(one == other)


_OF_WEIGHTS = frozenset({"linear", "embedding", "layer_norm", "__matmul__"})
_EACH = frozenset({
    "__abs__", "__add__", "__and__", "__eq__", "__ge__", "__gt__", "__invert__", "__le__", "__lt__", "__mul__", "__ne__", "__neg__", "__or__", "__pow__",
    "__radd__", "__rmul__", "__rpow__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "abs", "acos", "add", "arccos", "asin", "atan", "bool",
    "ceil", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "cos", "detach", "div", "double", "dropout", "elu", "eq", "erf", "exp", "expm1",
    "float", "floor", "ge", "gelu", "gt", "half", "hardtanh", "int", "isfinite", "isinf", "isnan", "le", "leaky_relu", "log", "log10", "log1p", "log2",
    "logical_and", "logical_not", "logical_or", "logsigmoid", "long", "lt", "maximum", "minimum", "mish", "mul", "nan_to_num", "ne", "neg", "pow",
    "reciprocal", "relu", "relu6", "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square", "sub", "subtract",
    "tan", "tanh", "to", "true_divide", "where",
})  # fmt: skip
_ALONG = frozenset({
    "amax", "amin", "argmax", "argmin", "cumsum", "log_softmax", "logsumexp", "max", "mean", "min", "norm", "normalize", "prod", "softmax",
    "squeeze", "std", "sum", "unsqueeze", "var",
})  # fmt: skip
_PLACES: Mapping[str, tuple[int, int | None]] = {
    "norm": (2, None),
    "normalize": (2, 1),
}  # of the dimension, and that if none is named
_LOSSES = frozenset({
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss",
})  # fmt: skip


def _operator(name: str) -> Callable[..., Any]:
    def run(self: Chosen, *others: Any) -> Any:
        return _call(name, getattr(Tensor, name), (self, *others), {})

    return run


for _name in (*_EACH, *_OF_WEIGHTS):
    if _name.startswith("__") and hasattr(Tensor, _name):
        setattr(Chosen, _name, _operator(_name))
Chosen.__hash__ = object.__hash__  # type: ignore[method-assign]
