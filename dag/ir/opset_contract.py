"""Ops that contract a dimension against weights or against each other: products, look-ups, norms, attention."""

from __future__ import annotations

from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_shapes import Shape, broadcast, is_float, promote, same
from fusion.dag.ir.opset_spec import Call, Flops, Infer, Mixed, Mixes, OpSpec, Types, elements, op, plain


def one_dtype(call: Call, *tensors: TensorType | None) -> str:
    dtypes = [t.dtype for t in tensors if t is not None]
    if len(set(dtypes)) != 1:
        raise call.fail(f"dtypes {', '.join(dtypes)} differ")
    return dtypes[0]


def linear(call: Call) -> Types:
    """input (..., in) @ weight (out, in).T + bias (out)."""
    x, w, b = call["input"], call["weight"], call["bias"]
    if not x.shape or len(w.shape) != 2:
        raise call.fail(f"input {x}, weight {w}")
    same(call, x.shape[-1], w.shape[1], "input features")
    if b is not None and b.shape != w.shape[:1]:
        raise call.fail(f"bias {b} does not fit weight {w}")
    return (TensorType((*x.shape[:-1], w.shape[0]), one_dtype(call, x, w, b)),)


def matmul(call: Call) -> Types:
    a, b = call["self"], call["other"]
    if not a.shape or not b.shape:
        raise call.fail("needs tensors with dimensions")
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    same(call, left[-1], right[-2], "inner dimension")
    rows = left[-2:-1] if len(a.shape) > 1 else ()
    columns = right[-1:] if len(b.shape) > 1 else ()
    return (TensorType((*broadcast(call, left[:-2], right[:-2]), *rows, *columns), one_dtype(call, a, b)),)


def plain_product(names: tuple[str, str], rank: int, added: str | None = None) -> Infer:
    """mm, bmm and the forms that add `added`, which broadcasts to the product."""

    def infer(call: Call) -> Types:
        a, b = (call[n] for n in names)
        if len(a.shape) != rank or len(b.shape) != rank or a.shape[:-2] != b.shape[:-2]:
            raise call.fail(f"{a} and {b} are not of rank {rank} and alike in batch")
        same(call, a.shape[-1], b.shape[-2], "inner dimension")
        shape = (*a.shape[:-1], b.shape[-1])
        more = None if added is None else call[added]
        if more is not None and broadcast(call, more.shape, shape) != shape:
            raise call.fail(f"{more} does not broadcast to the product")
        return (TensorType(shape, one_dtype(call, a, b, more)),)

    return infer


def embedding(call: Call) -> Types:
    w, i = call["weight"], call["indices"]
    if len(w.shape) != 2 or i.dtype not in ("int32", "int64"):
        raise call.fail(f"weight {w}, indices {i}")
    return (TensorType((*i.shape, w.shape[1]), w.dtype),)


def last_dims_norm(call: Call) -> Types:
    """layer_norm and rms_norm over the dimensions `normalized_shape`."""
    x, over = call["input"], call["normalized_shape"]
    if not over or x.shape[len(x.shape) - len(over) :] != over or len(over) > len(x.shape):
        raise call.fail(f"{x} does not end in {TensorType(over, x.dtype)}")
    if not is_float(x.dtype):
        raise call.fail(f"needs a floating dtype, not {x.dtype}")
    for name in ("weight", "bias"):
        t = call.values.get(name)
        if t is not None and t.shape != over:
            raise call.fail(f"{name} {t} does not fit")
    # the normalised values are multiplied by the weight: a wider weight widens the result of rms_norm
    dtype = (
        promote([x, *filter(None, (call.values.get("weight"),))]) if call.op == "aten.rms_norm" else x.dtype
    )
    return (TensorType(x.shape, dtype),)


def channel_norm(call: Call) -> Types:
    """batch_norm and group_norm: (batch, channels, ...)."""
    x = call["input"]
    if len(x.shape) < 2 or not is_float(x.dtype):
        raise call.fail(f"needs (batch, channels, ...) of a floating dtype, not {x}")
    for name in ("weight", "bias", "running_mean", "running_var"):
        t = call.values.get(name)
        if t is not None and t.shape != x.shape[1:2]:
            raise call.fail(f"{name} {t} does not fit the channels of {x}")
    groups = call.values.get("num_groups", 1)
    if groups <= 0 or not isinstance(x.shape[1], int) or x.shape[1] % groups:
        raise call.fail(f"{x.shape[1]} channels in {groups} groups")
    if (
        call.op == "aten.batch_norm"
        and not call["training"]
        and None in (call["running_mean"], call["running_var"])
    ):
        raise call.fail("needs running statistics when not training")
    return (x,)


def attention(call: Call) -> Types:
    """query (..., heads, length, width), key and value (..., heads, length', width[']) -> (..., heads, length, width').
    With grouped queries key and value have fewer heads, a divisor of the query's."""
    q, k, v, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    if min(len(t.shape) for t in (q, k, v)) < 3:
        raise call.fail("needs (..., heads, length, width)")
    if not 0 <= call["dropout_p"] <= 1:
        raise call.fail(f"dropout_p = {call['dropout_p']} is not a probability")
    if call["dropout_p"] and call.op.startswith("aten."):
        raise call.fail("draws from a global generator: use fusion.dropout_attention")
    if mask is not None and call["is_causal"]:
        raise call.fail("has a mask and is_causal")
    dtype = _check_query_key_value(call, q, k, v)
    lead = broadcast(call, *leads(call, call["enable_gqa"]))
    if mask is not None:
        scores = (*lead, q.shape[-2], k.shape[-2])
        if mask.dtype not in ("bool", dtype) or broadcast(call, mask.shape, scores) != scores:
            raise call.fail(f"mask {mask} does not fit scores {TensorType(scores, dtype)}")
    return (TensorType((*lead, q.shape[-2], v.shape[-1]), dtype),)


def _check_query_key_value(call: Call, q: TensorType, k: TensorType, v: TensorType) -> str:
    same(call, q.shape[-1], k.shape[-1], "width of query and key")
    same(call, k.shape[-2], v.shape[-2], "length of key and value")
    dtype = one_dtype(call, q, k, v)
    if not is_float(dtype):
        raise call.fail(f"needs a floating dtype, not {dtype}")
    return dtype


def leads(call: Call, grouped: bool) -> list[Shape]:
    """The dimensions before the length of query, key and value; with `grouped`, key and value have the query's heads."""
    q, k, v = (call[n].shape for n in ("query", "key", "value"))
    if not grouped:
        return [q[:-2], k[:-2], v[:-2]]
    heads, key_heads = q[-3], k[-3]
    if not (
        isinstance(heads, int)
        and isinstance(key_heads, int)
        and key_heads > 0
        and heads % key_heads == 0
        and v[-3] == key_heads
    ):
        raise call.fail(f"{heads} query heads over {key_heads} key heads and {v[-3]} value heads")
    return [q[:-2], (*k[:-3], heads), (*v[:-3], heads)]


def cached_attention(call: Call) -> Types:
    """query (batch, heads, length, width), key and value (batch, key heads, length, width[']) of the new positions.
    Causal over all positions in the cache of `slot`, or over the last `window` of them."""
    q, k, v = call["query"], call["key"], call["value"]
    if any(len(t.shape) != 4 for t in (q, k, v)) or call["slot"] < 0 or (call["window"] or 1) < 1:
        raise call.fail(
            "needs (batch, heads, length, width), a slot of at least 0 and a window of at least 1"
        )
    dtype = _check_query_key_value(call, q, k, v)
    same(call, q.shape[-2], k.shape[-2], "length of query and key")
    lead = leads(call, grouped=True)
    if any(part != lead[0] for part in lead):
        raise call.fail(f"batch of {q}, {k} and {v}")
    return (TensorType((*q.shape[:-1], v.shape[-1]), dtype),)


def _product_mixes(a: str, b: str) -> Mixes:
    def mixes(call: Call) -> Mixed:
        x, y = len(call[a].shape), len(call[b].shape)
        return {a: {x - 1}, b: {max(y - 2, 0)}}

    return mixes


def _linear_mixes(call: Call) -> Mixed:
    return {"input": {len(call["input"].shape) - 1}, "weight": {1}}


def _last_dims_mixes(call: Call) -> Mixed:
    rank = len(call["input"].shape)
    return {"input": set(range(rank - len(call["normalized_shape"]), rank))}


def _channel_norm_mixes(call: Call) -> Mixed:
    rank = len(call["input"].shape)
    if call.op == "aten.group_norm":
        return {"input": set(range(1, rank))}
    return {"input": set(range(rank)) - {1}} if call["training"] else {}


def _attention_mixes(call: Call) -> Mixed:
    q, k, v = (len(call[n].shape) for n in ("query", "key", "value"))
    mixed = {"query": {q - 1}, "key": {k - 2, k - 1}, "value": {v - 2}}
    mask = call["attn_mask"]
    if mask is not None and mask.shape:
        mixed["attn_mask"] = {len(mask.shape) - 1}
    if call["is_causal"]:
        mixed["query"].add(q - 2)  # the visible keys of a query depend on its position
    return mixed


def _cached_mixes(_: Call) -> Mixed:
    # Not along the length: the cache has the earlier positions.
    return {"query": {3}, "key": {3}}


def _linear_flops(call: Call, results: Types) -> int:
    inner = plain(call["weight"].shape[1])
    return elements(results[0]) * (2 * inner + (call["bias"] is not None))


def _product_flops(name: str, extra: int = 0) -> Flops:
    return lambda call, results: elements(results[0]) * (2 * plain(call[name].shape[-1]) + extra)


def attention_flops(call: Call, results: Types) -> int:
    """FLOPs of two products and a softmax over full scores; kernels that skip masked blocks need fewer."""
    width = plain(call["query"].shape[-1])
    rows = elements(results[0]) // max(1, plain(results[0].shape[-1]))
    return rows * plain(call["key"].shape[-2]) * (2 * width + 2 * plain(results[0].shape[-1]) + 5)


def _norm_flops(call: Call, _: Types) -> int:
    return 8 * elements(call["input"])


def _n(name: str, parameters: str, infer: Infer, mixes: Mixes) -> OpSpec:
    return op(
        name, parameters, infer, "norm",
        mixes=mixes, flops=_norm_flops, saves=("input", "copy") if name == "aten.rms_norm" else ("input",), backward={"input": 2.0},
    )  # fmt: skip


def _product(name: str, parameters: str, infer: Infer, a: str, b: str, extra: int = 0) -> OpSpec:
    return op(
        name, parameters, infer, "contraction",
        mixes=_product_mixes(a, b), flops=_product_flops(a, extra), saves=(a, b), bilinear=True, backward={a: 1.0, b: 1.0},
    )  # fmt: skip


_ATTENTION = (
    "query: tensor, key: tensor, value: tensor, attn_mask: tensor? = None, dropout_p: float = 0.0, "
    "is_causal: bool = False, scale: float? = None, enable_gqa: bool = False"
)
# Backward of attention: four products where forward has two, and recomputed scores (FlashAttention-2, section 3.1).
_ATTENTION_BACKWARD = {"query": 2.5 / 3, "key": 2.5 / 3, "value": 2.5 / 3}

SPECS: list[OpSpec] = [
    op("aten.linear", "input: tensor, weight: tensor, bias: tensor? = None", linear, "contraction",
       mixes=_linear_mixes, flops=_linear_flops, saves=("input", "weight"), bilinear=True, backward={"input": 1.0, "weight": 1.0}),
    _product("aten.matmul", "self: tensor, other: tensor", matmul, "self", "other"),
    _product("aten.mm", "self: tensor, mat2: tensor", plain_product(("self", "mat2"), 2), "self", "mat2"),
    _product("aten.bmm", "self: tensor, mat2: tensor", plain_product(("self", "mat2"), 3), "self", "mat2"),
    _product("aten.addmm", "self: tensor, mat1: tensor, mat2: tensor, beta: number = 1, alpha: number = 1",
             plain_product(("mat1", "mat2"), 2, "self"), "mat1", "mat2", 1),
    _product("aten.baddbmm", "self: tensor, batch1: tensor, batch2: tensor, beta: number = 1, alpha: number = 1",
             plain_product(("batch1", "batch2"), 3, "self"), "batch1", "batch2", 1),
    op("aten.embedding", "weight: tensor, indices: tensor, padding_idx: dim = -1, scale_grad_by_freq: bool = False", embedding, "move",
       mixes=lambda c: {"weight": {0}}, saves=("indices",)),
    _n("aten.layer_norm", "input: tensor, normalized_shape: dims, weight: tensor? = None, bias: tensor? = None, eps: float = 1e-05", last_dims_norm, _last_dims_mixes),
    _n("aten.rms_norm", "input: tensor, normalized_shape: dims, weight: tensor? = None, eps: float? = None", last_dims_norm, _last_dims_mixes),
    _n("aten.group_norm", "input: tensor, num_groups: int, weight: tensor? = None, bias: tensor? = None, eps: float = 1e-05", channel_norm, _channel_norm_mixes),
    _n("aten.batch_norm", "input: tensor, weight: tensor?, bias: tensor?, running_mean: tensor?, running_var: tensor?, training: bool, momentum: float, eps: float", channel_norm, _channel_norm_mixes),
    op("aten.scaled_dot_product_attention", _ATTENTION, attention, "attention",
       mixes=_attention_mixes, flops=attention_flops, saves=("query", "key", "value", "result"), backward=_ATTENTION_BACKWARD),
    op("fusion.dropout_attention", _ATTENTION.replace("dropout_p: float = 0.0", "dropout_p: float").replace("attn_mask: tensor? = None", "attn_mask: tensor?")
       .replace(" = False", "").replace(" = None", ""), attention, "attention",
       mixes=_attention_mixes, flops=attention_flops, saves=("query", "key", "value", "scores"), backward=_ATTENTION_BACKWARD),
    op("fusion.cached_attention", "query: tensor, key: tensor, value: tensor, slot: int, scale: float?, window: int?", cached_attention, "attention",
       mixes=_cached_mixes, flops=attention_flops, differentiable=False, keeps=("key", "value")),
]  # fmt: skip
