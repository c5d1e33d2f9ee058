"""A builder of small graphs, and numpy to run them: what the rewrites claim is checked without any framework."""

from __future__ import annotations

import numpy as np
import pytest

from fusion.dag.ir.dims import Poly, bind, symbol, symbols_of
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.dag.ir.serialise import validate

B, S = symbol("batch"), symbol("sequence")


class Builder:
    """Writes a graph node by node: `b(op, *args)` returns the Ref; the op-set infers the types."""

    def __init__(self, **variables):
        self.inputs = tuple(Input(n, TensorType((B, S), "int64")) for n in ("input_ids", "position_ids"))
        self.variables = tuple(Variable(n, TensorType(shape, "float32")) for n, shape in variables.items())
        self.nodes = []
        self.types = {Ref(v.name): v.type for v in (*self.inputs, *self.variables)}

    def __call__(self, op, *args, name=None):
        name = name or f"n{len(self.nodes)}_{op.split('.')[1]}"
        results = infer(op, args, self.types)
        self.nodes.append(Node(name, op, args, results))
        self.types.update({Ref(name, i): t for i, t in enumerate(results)})
        return Ref(name)

    def graph(self, *outputs):
        own = {s for given in self.inputs for dim in given.type.shape for s in symbols_of(dim)}
        symbols = ("batch", "sequence", *sorted(own - {"batch", "sequence"}))
        graph = Graph(self.inputs, self.variables, tuple(self.nodes), outputs, symbols)
        validate(graph)
        return graph


def attend(q, k, v, visible, scale, bias=0, cap=None, sinks=None):
    k, v = (np.repeat(t, q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) * (scale or q.shape[-1] ** -0.5)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    scores = scores + bias + np.where(visible, 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    more = 0 if sinks is None else np.exp(sinks[:, None, None] - scores.max(-1, keepdims=True))
    return (weights / (weights.sum(-1, keepdims=True) + more)) @ v


def causal(rows, columns, window=None):
    """The last `rows` positions of `columns`, looking back."""
    distance = np.arange(columns - rows, columns)[:, None] - np.arange(columns)[None, :]
    return (distance >= 0) & (distance < (window or columns))


def attention(q, k, v, mask, dropout, is_causal, scale, grouped):
    visible = causal(q.shape[2], k.shape[2]) if is_causal else True if mask is None else mask
    if mask is not None and mask.dtype != bool:
        return attend(q, k, v, mask > -1e9, scale, np.where(mask > -1e9, mask, 0))
    return attend(q, k, v, visible, scale)


def expert_linear(x, ids, w, b, first, of, transposed):
    out = np.zeros((len(x), w.shape[2 if transposed else 1]), x.dtype)
    for row, chosen in enumerate(ids - first):
        if 0 <= chosen < len(w):
            matrix = w[chosen].T if transposed else w[chosen]
            out[row] = matrix @ x[row] + (0 if b is None else b[chosen])
    return out


def topk(x, k, dim, largest, ordered):
    order = np.argsort(-x, dim)[..., :k]
    return [np.take_along_axis(x, order, dim), order]


def select(q, k, w, scale, count):
    """(batch, 1, rows, count): where the best keys lie of those that each query sees; -1 where there are fewer."""
    scores = (np.maximum(q @ np.swapaxes(k, -1, -2) * scale, 0) * w).sum(1)
    seen = causal(q.shape[2], k.shape[2])
    order = np.argsort(-np.where(seen, scores, -np.inf), -1, kind="stable")
    order = np.where(np.arange(k.shape[2]) < seen.sum(-1)[:, None], order, -1)[:, None, :, :count]
    return np.pad(order, ((0, 0), (0, 0), (0, 0), (0, count - order.shape[3])), constant_values=-1)


def scatter(x, dim, index, value):
    x = x.copy()
    np.put_along_axis(x, index, value, dim)
    return x


def softmax(x, dim, dtype):
    weights = np.exp(x - x.max(dim, keepdims=True))
    return weights / weights.sum(dim, keepdims=True)


def convolve(x, kernel, bias):
    """(batch, length, channels), each channel over the last positions."""
    window = kernel.shape[2]
    padded = np.pad(x, ((0, 0), (window - 1, 0), (0, 0)))
    total = sum(padded[:, i : i + x.shape[1]] * kernel[:, 0, i] for i in range(window))
    return total if bias is None else total + bias


def conv1d(x, kernel, bias, _stride, padding, _dilation, groups):
    """As exports spell a short causal convolution: the zeros behind make positions that are cut away."""
    assert tuple(padding) == (kernel.shape[2] - 1,) and groups == x.shape[1]
    behind = np.pad(np.swapaxes(x, 1, 2), ((0, 0), (0, padding[0]), (0, 0)))
    return np.swapaxes(convolve(behind, kernel, bias), 1, 2)


def recurrence(q, k, v, decay, beta, rates):
    """Every position anew from the first one."""
    q, k = (np.repeat(t, v.shape[1] // t.shape[1], 1) for t in (q, k))
    state = np.zeros((*v.shape[:2], k.shape[3], v.shape[3]))
    found = np.zeros(v.shape)
    for t in range(v.shape[2]):
        state = state * np.exp(decay[:, :, t] * (1 if rates is None else rates))[..., None]
        new = v[:, :, t]
        if beta is not None:
            new = (new - np.einsum("bhk,bhkv->bhv", k[:, :, t], state)) * beta[:, :, t]
        state = state + k[:, :, t, :, None] * new[:, :, None]
        found[:, :, t] = np.einsum("bhk,bhkv->bhv", q[:, :, t], state)
    return found


OPS = {
    "aten.conv1d": conv1d,
    "fusion.recurrence": recurrence,
    "aten.logsumexp": lambda x, dims, keepdim: np.log(np.exp(x).sum(tuple(dims), keepdims=keepdim)),
    "aten.sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "aten.squeeze.dim": np.squeeze,
    "aten.add.Tensor": lambda a, b, alpha: a + alpha * b,
    "aten.sub.Tensor": lambda a, b, alpha: a - alpha * b,
    "aten.mul.Tensor": lambda a, b: a * b,
    "aten.pow.Tensor_Scalar": lambda a, e: a**e,
    "aten.rsqrt": lambda a: 1 / np.sqrt(a),
    "aten.tanh": np.tanh,
    "aten.mean.dim": lambda a, dims, keepdim, dtype: a.mean(tuple(dims), keepdims=keepdim),
    "aten.rms_norm": lambda x, shape, w, eps: x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w,
    "aten.linear": lambda x, w, b: x @ w.T,
    "aten.bmm": lambda a, b: a @ b,
    "aten.baddbmm": lambda c, a, b, beta, alpha: beta * c + alpha * (a @ b),
    "aten.cat": lambda parts, dim: np.concatenate(parts, dim),
    "aten.amax": lambda x, dims, keepdim: x.max(tuple(dims), keepdims=keepdim),
    "aten.maximum": np.maximum,
    "aten.div.Tensor": lambda a, b: a / b,
    "aten.alias": lambda x: x,
    "aten.index_select": lambda x, dim, i: x.take(i, dim),
    "aten.permute": lambda x, dims: x.transpose(dims),
    "aten.logical_not": lambda x: ~x,
    "aten.neg": lambda x: -x,
    "aten.arange.start": lambda start, end, dtype: np.arange(start, end, dtype=dtype.name if dtype else np.int64),
    "aten.matmul": lambda a, b: a @ b,
    "aten.softmax.int": softmax,
    "aten.embedding": lambda w, i, *_: w[i],
    "aten.to.dtype": lambda x, dtype: x.astype(dtype.name),
    "aten.unsqueeze": lambda x, dim: np.expand_dims(x, dim),
    "aten.transpose.int": lambda x, a, b: np.swapaxes(x, a, b),
    "aten.reshape": lambda x, shape: x.reshape(shape),
    "aten.view": lambda x, shape: x.reshape(shape),
    "aten.contiguous": lambda x: x,
    "aten.expand": lambda x, shape: np.broadcast_to(x, [d if n == -1 else n for n, d in zip(shape, (1,) * (len(shape) - x.ndim) + x.shape, strict=True)]),
    "aten.arange": lambda end, dtype: np.arange(end, dtype=np.int64),
    "aten.cumsum": lambda x, dim, dtype: x.cumsum(dim),
    "aten.clamp_max": np.minimum,
    "aten.select.int": lambda x, dim, at: np.take(x, at, dim),
    "aten.ones": lambda shape, dtype: np.ones(shape, dtype.name),
    "aten.full": lambda shape, value, dtype: np.full(shape, value, dtype.name if dtype else np.float32),
    "aten.slice.Tensor": lambda x, dim, start, end, step: x[(slice(None),) * dim + (slice(start, end, step),)],
    "aten.le.Tensor": lambda a, b: a <= b,
    "aten.lt.Tensor": lambda a, b: a < b,
    "aten.mul.Scalar": lambda a, b: a * b,
    "aten.lt.Scalar": lambda a, b: a < b,
    "aten.gt.Scalar": lambda a, b: a > b,
    "aten.gt.Tensor": lambda a, b: a > b,
    "aten.ge.Tensor": lambda a, b: a >= b,
    "aten.ge.Scalar": lambda a, b: a >= b,
    "aten.eq.Tensor": lambda a, b: a == b,
    "aten.__and__.Tensor": lambda a, b: a & b,
    "aten.__or__.Tensor": lambda a, b: a | b,
    "fusion.div_floor": lambda a, b: a // b,
    "aten.where.ScalarSelf": lambda c, a, b: np.where(c, np.float32(a), b),
    "aten.where.ScalarOther": lambda c, a, b: np.where(c, a, np.float32(b)),
    "aten.arange.start_step": lambda start, end, step, dtype: np.arange(start, end, step),
    "aten.where.Scalar": lambda c, a, b: np.where(c, np.float32(a), np.float32(b)),
    "aten.masked_fill.Scalar": lambda x, m, value: np.where(m, np.float32(value), x),
    "aten.scaled_dot_product_attention": attention,
    "fusion.expert_linear": expert_linear,
    "aten.topk": topk,
    "aten.relu": lambda x: np.maximum(x, 0),
    "aten.where.self": np.where,
    "aten.scatter.value": scatter,
    "aten.zeros": lambda shape, dtype: np.zeros(shape, dtype.name),
    "aten.bitwise_not": lambda x: ~x,
    "aten.index.Tensor": lambda x, indices: x[tuple(indices)],
    "aten.repeat_interleave.self_int": lambda x, times, dim: np.repeat(x, times, dim),
    "aten.sum.dim_IntList": lambda x, dims, keepdim, dtype: x.sum(tuple(dims), keepdims=keepdim),
    "aten.chunk": lambda x, chunks, dim: np.split(x, chunks, dim),
}  # fmt: skip


def run(graph, values, sizes, cache=None):
    """The outputs. `cache` is a dictionary of what cached attention has seen; it must be of the same session."""
    known = {Ref(name): value for name, value in values.items()}

    def value(arg):
        if isinstance(arg, tuple):
            return [value(a) for a in arg]
        return known[arg] if isinstance(arg, Ref) else bind(arg, sizes) if isinstance(arg, Poly) else arg

    for node in graph.nodes:
        args = [value(a) for a in node.args]
        if node.op == "fusion.cached_attention":
            q, *new, slot, scale, window = args
            old = cache.get(slot, [t[:, :, :0] for t in new])
            k, v = cache[slot] = [np.concatenate(pair, 2) for pair in zip(old, new, strict=True)]
            out = attend(q, k, v, causal(q.shape[2], k.shape[2], window), scale)
        elif node.op == "fusion.cached_attention_scored":
            q, k, v, key_bias, sinks, slot, scale, window, cap, slopes = args
            new = [k, v] if key_bias is None else [k, v, key_bias]
            old = cache.get(slot, [t[:, :, :0] for t in new])
            k, v, *biases = cache[slot] = [np.concatenate(pair, 2) for pair in zip(old, new, strict=True)]
            distance = np.arange(k.shape[2]) - np.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
            bias = 0 if slopes is None else np.array(slopes)[:, None, None] * distance
            bias = bias + (np.swapaxes(biases[0], 2, 3) if biases else 0)
            out = attend(q, k, v, causal(q.shape[2], k.shape[2], window), scale, bias, cap, sinks)
        elif node.op == "fusion.cached_selection":
            q, k, w, slot, scale, count = args
            (k,) = cache[slot] = [np.concatenate([*cache.get(slot, [k[:, :, :0]]), k], 2)]
            out = select(q, k, w, scale, count)
        elif node.op == "fusion.cached_attention_selected":
            q, *new, chosen, slot, scale = args
            old = cache.get(slot, [t[:, :, :0] for t in new])
            k, v = cache[slot] = [np.concatenate(pair, 2) for pair in zip(old, new, strict=True)]
            shown = (chosen[..., None] == np.arange(k.shape[2])).any(3)
            out = attend(q, k, v, shown & causal(q.shape[2], k.shape[2]), scale)
        elif node.op == "fusion.source_attention_scored":
            q, k, v, _, scale, cap = args
            out = attend(q, k, v, True, scale, cap=cap)
        elif node.op == "fusion.cached_convolution":
            new, kernel, bias, slot = args
            cache[slot] = [np.concatenate([*cache.get(slot, [new[:, :, :0]]), new], 2)]
            out = convolve(cache[slot][0][:, 0], kernel, bias)[:, None, -new.shape[2] :]
        elif node.op == "fusion.cached_recurrence":
            *new, rates, slot = args
            length = new[0].shape[2]
            old = cache.get(slot, [None if t is None else t[:, :, :0] for t in new])
            cache[slot] = [
                None if b is None else np.concatenate([a, b], 2) for a, b in zip(old, new, strict=True)
            ]
            out = recurrence(*cache[slot], rates)[:, :, -length:]
        else:
            out = OPS[node.op](*args)
        for i, result in enumerate(out if isinstance(out, list) else [out]):
            type_ = node.results[i]
            assert result.shape == tuple(bind(d, sizes) for d in type_.shape), node
            assert (result.dtype == bool) == (type_.dtype == "bool"), node
            known[Ref(node.name, i)] = result
    return [known[ref] for ref in graph.outputs]


@pytest.fixture
def build():
    return Builder


@pytest.fixture
def evaluate():
    """What `cache_attention` wants to be given."""
    return run


@pytest.fixture
def execute():
    """Run a language model: execute(graph, weights, tokens (batch, length), start, cache)."""

    def execute(graph, weights, tokens, start=0, cache=None):
        positions = np.tile(np.arange(start, start + tokens.shape[1]), (len(tokens), 1))
        sizes = {"batch": len(tokens), "sequence": tokens.shape[1]}
        (out,) = run(graph, {**weights, "input_ids": tokens, "position_ids": positions}, sizes, cache)
        return out

    return execute
