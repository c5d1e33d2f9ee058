"""Variants of cached attention: softcap, bias by key or by distance, ALiBi slopes, sinks; sparse attention to selected keys; and
cross-attention to the source of a session."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from fusion.dag.ir.graph import TensorType
from fusion.dag.ir.opset_contract import attention_flops, cached_attention, leads
from fusion.dag.ir.opset_shapes import is_float, same
from fusion.dag.ir.opset_spec import Call, Mixed, OpSpec, Types, elements, op, plain

MAX_SELECTED = 1 << 16  # keys for each query; models have 2048


def cached_attention_scored(call: Call) -> Types:
    """query (batch, heads, length, width), key and value (batch, key heads, length, width[']) of the new positions, as for
    `fusion.cached_attention`; the result has the dtype of value. For query i and key j of head h

        score = query_i . key_j * scale, then softcap * tanh(score / softcap), + bias_hj, + slopes[h] * (j - i)

    `bias` (batch or 1, heads or 1, length, 1) is cached for each position like its key; `slopes` has a number for each head,
    and may count from any position instead of i, as a softmax ignores a constant in a row; `sinks` (heads), not beside slopes,
    are scores of one more key for each head, without a value. Weights are a softmax over the visible positions: the query's
    own and all before it, or the last `window` of these."""
    q, k, v, bias, sinks = (call[n] for n in ("query", "key", "value", "bias", "sinks"))
    if any(len(t.shape) != 4 for t in (q, k, v)) or call["slot"] < 0 or (call["window"] or 1) < 1:
        raise call.fail(
            "needs (batch, heads, length, width), a slot of at least 0 and a window of at least 1"
        )
    same(call, q.shape[-1], k.shape[-1], "width of query and key")
    same(call, k.shape[-2], v.shape[-2], "length of key and value")
    same(call, q.shape[-2], k.shape[-2], "length of query and key")
    scores = [t for t in (q, k, bias, sinks) if t is not None]
    if any(t.dtype != q.dtype for t in scores) or not is_float(q.dtype) or not is_float(v.dtype):
        raise call.fail(f"dtypes {', '.join(t.dtype for t in (*scores, v))}")
    lead = leads(call, grouped=True)
    if any(part != lead[0] for part in lead):
        raise call.fail(f"batch of {q}, {k} and {v}")
    heads = q.shape[1]
    if bias is not None and not (
        len(bias.shape) == 4
        and bias.shape[0] in (1, q.shape[0])
        and bias.shape[1] in (1, heads)
        and bias.shape[2:] == (q.shape[2], 1)
    ):
        raise call.fail(f"bias {bias} does not fit query {q}")
    if sinks is not None and sinks.shape != (heads,):
        raise call.fail(f"sinks {sinks} are not one for each of {heads} heads")
    slopes, cap = call["slopes"], call["softcap"]
    if slopes is not None and not (len(slopes) == heads and all(map(isfinite, slopes))):
        raise call.fail(f"slopes: {len(slopes)} numbers for {heads} heads, or not finite")
    if slopes is not None and sinks is not None:
        raise call.fail("slopes leave a number a row open, which sinks would see")
    if not isfinite(call["scale"]) or (cap is not None and not (isfinite(cap) and cap > 0)):
        raise call.fail("scale must be finite, softcap finite and above 0")
    return (TensorType((*q.shape[:-1], v.shape[-1]), v.dtype),)


def cached_attention_relative(call: Call) -> Types:
    """As `fusion.cached_attention` without a window; the score of query i and key j of head h is

        query_i . key_j * scale + table[buckets[min(i - j, len(buckets) - 1)], h]

    as in T5 (arXiv 1910.10683, section 2.1). `table` (rows, heads), of any floating dtype, is cast to that of the scores;
    the result has the dtype of value."""
    q, k, v, table, buckets = (call[n] for n in ("query", "key", "value", "table", "buckets"))
    scores = replace(v, dtype=q.dtype)
    cached_attention(Call(call.op, {**call.values, "value": scores, "window": None}))
    if k.dtype != q.dtype or not is_float(v.dtype):
        raise call.fail(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}")
    if len(table.shape) != 2 or table.shape[1] != q.shape[1] or not is_float(table.dtype):
        raise call.fail(f"table {table} has no number for each of {q.shape[1]} heads")
    rows = table.shape[0]
    if not buckets or not isinstance(rows, int) or not all(0 <= bucket < rows for bucket in buckets):
        raise call.fail(f"buckets are rows of the table, 0 to {rows} without it")
    if not isfinite(call["scale"]):
        raise call.fail("scale must be finite")
    return (TensorType((*q.shape[:-1], v.shape[-1]), v.dtype),)


def cached_selection(call: Call) -> Types:
    """query (batch, heads, length, width), key (batch, 1, length, width), weights (batch, heads, length, 1) of the new positions.
    The result, int64 (batch, 1, length, count), has the positions of the `count` keys with the highest scores for query i,

        score_ij = sum over heads h of weights_ih * max(0, query_ih . key_j * scale), in float32

    among the positions up to its own; -1 where there are fewer. As in DeepSeek-V3.2 (arXiv 2512.02556, section 2.1)."""
    q, k, weights = (call[n] for n in ("query", "key", "weights"))
    if any(len(t.shape) != 4 for t in (q, k, weights)) or call["slot"] < 0:
        raise call.fail("needs (batch, heads, length, width) and a slot of at least 0")
    if not 1 <= call["count"] <= MAX_SELECTED:
        raise call.fail(f"count: 1 to {MAX_SELECTED} keys for each query")
    if k.dtype != q.dtype or not is_float(q.dtype) or not is_float(weights.dtype):
        raise call.fail(f"dtypes {q.dtype}, {k.dtype}, {weights.dtype}")
    if k.shape != (q.shape[0], 1, *q.shape[2:]):
        raise call.fail(f"key {k} does not fit query {q}")
    if weights.shape != (*q.shape[:3], 1):
        raise call.fail(f"weights {weights} do not fit query {q}")
    if not isfinite(call["scale"]):
        raise call.fail("scale must be finite")
    return (TensorType((q.shape[0], 1, q.shape[2], call["count"]), "int64"),)


def cached_attention_selected(call: Call) -> Types:
    """As `fusion.cached_attention` without a window, but each query sees only the positions in `selected`, int64
    (batch, 1, length, count), that are not after its own; other entries are ignored."""
    results = cached_attention(Call(call.op, {**call.values, "window": None}))
    q, selected = call["query"], call["selected"]
    if selected.dtype != "int64" or selected.shape[:-1] != (q.shape[0], 1, q.shape[2]):
        raise call.fail(f"selected {selected} does not fit query {q}")
    if call["scale"] is not None and not isfinite(call["scale"]):
        raise call.fail("scale must be finite")
    return results


def source_attention(call: Call) -> Types:
    """query (batch, heads, length, width), key and value (batch, key heads, source, width[']): every query attends
    to all keys, which come from the source of the session (an encoder's output) and are the same for all its positions. When
    a sequence runs in pieces they are cached in `slot`."""
    q, k, v = (call[n] for n in ("query", "key", "value"))
    if any(len(t.shape) != 4 for t in (q, k, v)) or call["slot"] < 0:
        raise call.fail("needs (batch, heads, length, width) and a slot of at least 0")
    same(call, q.shape[-1], k.shape[-1], "width of query and key")
    same(call, k.shape[-2], v.shape[-2], "length of key and value")
    if any(t.dtype != q.dtype for t in (k, v)) or not is_float(q.dtype):
        raise call.fail(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}")
    lead = leads(call, grouped=True)
    if any(part != lead[0] for part in lead):
        raise call.fail(f"batch of {q}, {k} and {v}")
    if call["scale"] is not None and not isfinite(call["scale"]):
        raise call.fail("scale must be finite")
    return (TensorType((*q.shape[:-1], v.shape[-1]), q.dtype),)


def source_attention_scored(call: Call) -> Types:
    """As `fusion.source_attention`, with the score query . key * scale, then softcap * tanh(score / softcap), computed step by step,
    each in the dtype of query."""
    if call["softcap"] is not None and not (isfinite(call["softcap"]) and call["softcap"] > 0):
        raise call.fail("softcap must be finite and above 0")
    return source_attention(call)


def _source_mixes(_: Call) -> Mixed:
    return {"query": {3}, "key": {2, 3}, "value": {2}}


def _source_flops(call: Call, results: Types) -> int:
    """FLOPs of plain attention and of the softcap."""
    rows = elements(results[0]) // max(1, plain(results[0].shape[-1]))
    return attention_flops(call, results) + (
        3 * rows * plain(call["key"].shape[-2]) if call["softcap"] else 0
    )


def _relative_mixes(_: Call) -> Mixed:
    return {"query": {3}, "key": {3}, "table": {0}}


def _relative_flops(call: Call, results: Types) -> int:
    rows = elements(results[0]) // max(1, plain(results[0].shape[-1]))
    return attention_flops(call, results) + rows * plain(call["key"].shape[-2])


def _selection_mixes(_: Call) -> Mixed:
    return {"query": {1, 3}, "key": {1, 3}, "weights": {1}}


def _selected_mixes(_: Call) -> Mixed:
    return {"query": {3}, "key": {3}, "selected": {3}}


def _selection_flops(call: Call, _: Types) -> int:
    """A product, a scale, a threshold and a weighted sum for each query, head and key."""
    query = call["query"]
    return elements(query) * plain(query.shape[2]) * 2 + 4 * elements(call["weights"]) * plain(query.shape[2])


def _mixes(_: Call) -> Mixed:
    # Not along the length: the cache has the earlier positions.
    return {"query": {3}, "key": {3}}


def _flops(call: Call, results: Types) -> int:
    """FLOPs of plain attention, and of cap, bias and slopes."""
    rows = elements(results[0]) // max(1, plain(results[0].shape[-1]))
    more = sum((3 if name == "softcap" else 1) for name in ("softcap", "bias", "slopes") if call[name])
    return attention_flops(call, results) + more * rows * plain(call["key"].shape[-2])


SPECS: list[OpSpec] = [
    op("fusion.cached_attention_scored",
       "query: tensor, key: tensor, value: tensor, bias: tensor?, sinks: tensor?, slot: int, scale: float, window: int?, softcap: float?, slopes: floats?",
       cached_attention_scored, "attention",
       mixes=_mixes, flops=_flops, differentiable=False, keeps=("key", "value", "bias"), since=2),
    op("fusion.cached_attention_relative",
       "query: tensor, key: tensor, value: tensor, table: tensor, slot: int, scale: float, buckets: ints",
       cached_attention_relative, "attention",
       mixes=_relative_mixes, flops=_relative_flops, differentiable=False, keeps=("key", "value"), since=2),
    op("fusion.cached_selection", "query: tensor, key: tensor, weights: tensor, slot: int, scale: float, count: int",
       cached_selection, "attention",
       mixes=_selection_mixes, flops=_selection_flops, differentiable=False, keeps=("key",), since=2),
    op("fusion.cached_attention_selected",
       "query: tensor, key: tensor, value: tensor, selected: tensor, slot: int, scale: float?",
       cached_attention_selected, "attention",
       mixes=_selected_mixes, flops=attention_flops, differentiable=False, keeps=("key", "value"), since=2),
    op("fusion.source_attention", "query: tensor, key: tensor, value: tensor, slot: int, scale: float?", source_attention, "attention",
       mixes=_source_mixes, flops=attention_flops, differentiable=False, keeps=("key", "value"), since=2),
    op("fusion.source_attention_scored",
       "query: tensor, key: tensor, value: tensor, slot: int, scale: float, softcap: float?", source_attention_scored, "attention",
       mixes=_source_mixes, flops=_source_flops, differentiable=False, keeps=("key", "value"), since=2),
]  # fmt: skip
