"""Linear attention and state-space models: a state that decays, and is updated and read at every position."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.dag.ir.graph import DTYPE_BYTES, Node, Ref, TensorType
from fusion.dag.ir.opset_shapes import is_float
from fusion.dag.ir.opset_spec import Call, Mixed, OpSpec, Types, elements, op, plain

MAX_STATE = 1 << 24  # elements of the state of one sequence; large models have a million
_TENSORS = "query: tensor, key: tensor, value: tensor, decay: tensor, beta: tensor?, rates: tensor?"


def recurrence(call: Call) -> Types:
    """query and key (batch, key heads, length, width), value (batch, heads, length, width'), decay (batch, heads, length,
    width or 1), beta (batch, heads, length, 1), rates (heads, width), rates only with a decay of width 1 -> as value,
    float32. Each head has a state (width, width'), zeros before the first position; head h reads the key head
    h // (heads / key heads). At every position, in float32:

        state = exp(decay * rates)[:, None] * state
        new   = value, or beta * (value - key @ state) where there is a beta
        state = state + key[:, None] * new[None, :]
        result = query @ state

    Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (2510.26692) have a beta, Mamba (2312.00752) rates, Mamba-2
    (2405.21060) neither. `fusion.cached_recurrence` takes the new positions only; the state after the earlier ones is in the cache
    of `slot`."""
    names = ("query", "key", "value", "decay")
    q, k, v, decay = (call[name] for name in names)
    beta, rates = call["beta"], call["rates"]
    tensors = [t for t in (q, k, v, decay, beta) if t is not None]
    if any(len(t.shape) != 4 or not is_float(t.dtype) for t in tensors) or call.values.get("slot", 0) < 0:
        raise call.fail("needs (batch, heads, length, width) of floats, and a slot of at least 0")
    heads, key_heads, width = v.shape[1], k.shape[1], k.shape[3]
    if not (
        isinstance(heads, int) and isinstance(key_heads, int) and key_heads > 0 and heads % key_heads == 0
    ):
        raise call.fail(f"{heads} heads over {key_heads} key heads")
    if not isinstance(width, int) or not isinstance(v.shape[3], int):
        raise call.fail(f"key {k} and value {v} have no fixed width")
    if heads * width * v.shape[3] > MAX_STATE:
        raise call.fail(f"a state of {heads} x {width} x {v.shape[3]} elements: more than {MAX_STATE}")
    if q.shape != k.shape or any((t.shape[0], t.shape[2]) != (v.shape[0], v.shape[2]) for t in tensors):
        raise call.fail(f"query {q}, key {k} and value {v} do not fit each other")
    if decay.shape[1] != heads or decay.shape[3] not in (1, width):
        raise call.fail(f"decay {decay} does not fit key {k} and value {v}")
    if beta is not None and (beta.shape[1], beta.shape[3]) != (heads, 1):
        raise call.fail(f"beta {beta} does not fit value {v}")
    if rates is not None and (
        rates.shape != (heads, width) or not is_float(rates.dtype) or decay.shape[3] != 1
    ):
        raise call.fail(f"rates {rates} do not fit decay {decay} and key {k}")
    return (TensorType(v.shape, "float32"),)


def state_bytes(types: Mapping[Ref, TensorType], node: Node) -> int:
    """Bytes of the states that the node caches for a session: the current one and the one before."""
    if node.op != "fusion.cached_recurrence":
        return 0
    _, key, value, *_ = node.args
    assert isinstance(key, Ref) and isinstance(value, Ref)
    state = (types[value].shape[1], types[key].shape[3], types[value].shape[3])
    return 2 * elements(TensorType(state, "float32")) * DTYPE_BYTES["float32"]


def _mixes(call: Call) -> Mixed:
    # Not along the length: the cache has the earlier positions.
    along = set() if "slot" in call.values else {2}
    with_width = {name: {*along, 3} for name in ("query", "key", "decay", "beta")}
    return {**with_width, "value": along, "rates": {1}}


def _flops(call: Call, results: Types) -> int:
    """One product to decay, two to write, two to read; with a beta two more for key @ state."""
    each = 5 if call["beta"] is None else 7
    return elements(results[0]) * plain(call["key"].shape[3]) * each


SPECS: list[OpSpec] = [
    op("fusion.recurrence", _TENSORS, recurrence, "attention", mixes=_mixes, flops=_flops, differentiable=False, since=2),
    op("fusion.cached_recurrence", f"{_TENSORS}, slot: int", recurrence, "attention",
       mixes=_mixes, flops=_flops, differentiable=False, keeps=("key", "value", "decay", "beta"), since=2),
]  # fmt: skip
