"""What an attention mask makes visible, found by evaluating the sub-graph that computes it.

Masks are written in many ways (comparisons of positions, packed-sequence detection, additive tables), so their
form says little; their values at the lengths that are tried decide. The lengths go beyond every number in the sub-graph
that could be a threshold; numbers too large for that are replaced by small ones (`_with_stand_in`). Where positions are
scaled, a threshold may also be a product of numbers (`_scales_positions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from fusion.dag.cutting.references import constants, needed
from fusion.dag.ir.dims import Poly, bind
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.dag.ir.opset import spec

Array = npt.NDArray[np.generic]
# evaluate(graph, inputs by name, sizes of the symbols) -> the graph's outputs
Evaluate = Callable[[Graph, Mapping[str, Array], Mapping[str, int]], Sequence[Array]]

POSITIONS = "position_ids"
HIDDEN = -1e9  # an additive mask hides a position with this or less
FAMILIES = frozenset({"pointwise", "reduction", "move", "view", "make"})
MAX_CHUNK = 1 << 16  # positions; models have 8192
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 11, 17, 33, 40)
_OTHER_SIZE = 5  # of the other symbol while one is tried
_DIRECT = 2048  # thresholds up to here are tried directly, with masks of at most about 4 million entries
_INFINITE = 1 << 31  # no position is as large
_ROWS = 1 << 21  # the longest row that is tried
_BIASES = 1 << 26  # elements of the largest bias that is tried
_STAND_INS = (9, 23)  # replace a larger threshold, one after the other
# Ops that shift a position or a distance by a number of the graph at most.
_UNSCALED = frozenset({
    "add", "sub", "rsub", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "clamp", "clamp_min",
    "clamp_max", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not",
    "bitwise_xor", "__and__", "__or__", "where", "masked_fill", "to", "any", "all", "max", "min", "amax", "amin",
    "arange", "zeros", "ones", "full", "index", "index_select", "gather", "cat", "stack", "diff", "tril", "triu", "flip",
    "roll", "constant_pad_nd", "scalar_tensor",
})  # fmt: skip
_EXACT = frozenset({"bool", "int32", "int64", "float32", "float64"})  # hold every position
_INTEGERS = frozenset({"bool", "int32", "int64"})
_FLOOR_DIVISIONS = frozenset({"aten.floor_divide", "fusion.div_floor"})
_MAX_SHIFT = 8  # numbers within this distance of a large threshold count as the same one, shifted


def visible_window(
    graph: Graph, mask: Ref, evaluate: Evaluate, max_length: int | None = None, *, inverted: bool = False
) -> int | None:
    """The sliding window of a causal `mask`: None for all earlier positions, w for the position itself and the w - 1 before it.
    The mask is boolean (True: visible, or hidden where `inverted`), or is added to the scores. Positions count from the start
    of one sequence, at most `max_length`. UnsupportedModel for a mask of another kind, or one that depends on more than
    positions."""
    part = mask_graph(graph, mask)
    if inverted:
        part = _negated(part)
    numbers = _numbers(part)
    large = sorted(n for n in numbers if n > _DIRECT)
    if any(_scales_positions(part, node) for node in part.nodes):
        numbers.add(_product_of_numbers(part))
        large = [n for n in numbers if n > _DIRECT]
        if large:
            raise _refusal(mask, "scales positions by large numbers")
    if not large:
        return _common_window(part, numbers, evaluate, mask, max_length)
    if large[-1] - large[0] > _MAX_SHIFT:
        raise _refusal(mask, "depends on several large numbers")
    windows = [
        _common_window(
            _with_stand_in(part, large[0], s), _shifted_numbers(numbers, large, s), evaluate, mask, max_length
        )
        for s in _STAND_INS
    ]
    if windows == [None, None]:
        return None
    offsets = {None if w is None else w - s for w, s in zip(windows, _STAND_INS, strict=True)}
    if len(offsets) > 1:
        raise _refusal(mask, f"is neither causal nor a window of about {large[0]}")
    return large[0] + (offsets.pop() or 0)


@dataclass(frozen=True)
class Span:
    """The earlier positions that a position sees: itself and the `window` - 1 before it, those in its own chunk of `chunk`
    positions, or all."""

    window: int | None = None
    chunk: int | None = None


def visible_span(
    graph: Graph, mask: Ref, evaluate: Evaluate, max_length: int | None = None, *, inverted: bool = False
) -> Span:
    """As `visible_window`, also for chunked masks."""
    try:
        return Span(window=visible_window(graph, mask, evaluate, max_length, inverted=inverted))
    except UnsupportedModel:
        chunk = _visible_chunk(graph, mask, evaluate, max_length, inverted)
        if chunk is None:
            raise
        return Span(chunk=chunk)


def _visible_chunk(
    graph: Graph, mask: Ref, evaluate: Evaluate, max_length: int | None, inverted: bool
) -> int | None:
    """The chunk size C if `mask` shows each position itself and the earlier ones with the same position // C, else None."""
    part = mask_graph(graph, mask)
    if inverted:
        part = _negated(part)
    divisors = {n for node in part.nodes if node.op in _FLOOR_DIVISIONS for n in _magnitudes(node.args[1])}
    if len(divisors) != 1 or (size := divisors.pop()) < 2:
        return None
    if 2 * _product_of_numbers(part) <= _DIRECT:
        return size if _is_chunked(part, size, evaluate, mask, max_length) else None
    if max(_numbers(part)) > size or not _scales_integers_only(part):
        return None
    small = (_is_chunked(_with_stand_in(part, size, s), s, evaluate, mask, max_length) for s in _STAND_INS)
    return size if all(small) else None


def _scales_integers_only(part: Graph) -> bool:
    """Whether only integers are scaled, which are exact at every size."""
    scaled = (t for node in part.nodes if _scales_positions(part, node) for t in node.results)
    return all(t.dtype in _INTEGERS for t in scaled)


def _is_chunked(part: Graph, size: int, evaluate: Evaluate, mask: Ref, max_length: int | None) -> bool:
    last_threshold = _product_of_numbers(part)  # no threshold lies further
    if 2 * last_threshold > _DIRECT:
        return False
    near = {n + d for n in (*_numbers(part), last_threshold) for d in (-1, 0, 1, 2)}
    lengths = {*_LENGTHS, *near, 2 * last_threshold + 1}
    for batch, length in ((2, 6), *((1, n) for n in sorted(lengths) if 0 < n <= (max_length or n))):
        chunks = np.arange(length) // size
        expected = _causal_window(length, None) & (chunks[:, None] == chunks[None, :])
        visible = _visible_matrix(part, batch, length, evaluate, mask)
        if not np.array_equal(visible, np.broadcast_to(expected, visible.shape)):
            return False
    return True


def hides_nothing(
    graph: Graph, mask: Ref, evaluate: Evaluate, max_length: Mapping[str, int], *, inverted: bool = False
) -> bool:
    """Whether `mask`, boolean (True: visible, or hidden where `inverted`) or added to the scores, hides nothing and adds nothing
    at any sizes up to `max_length`, by symbol. UnsupportedModel for one that depends on more than positions."""
    part = mask_graph(graph, mask)
    if inverted:
        part = _negated(part)
    numbers = _numbers(part)
    if any(n > _DIRECT for n in numbers) or any(_scales_positions(part, node) for node in part.nodes):
        return False
    lengths = {*_LENGTHS, *(n + d for n in numbers for d in (-1, 0, 1, 2) if n + d > 0)}
    for first, others in ((n, m) for n in sorted(lengths) for m in {n, _OTHER_SIZE}):
        for name in max_length:
            known = {
                each: min(first if each == name else others, max_length)
                for each, max_length in max_length.items()
            }
            if not _hides_nothing_at(part, known | {"batch": 2}, evaluate):
                return False
    return True


def _hides_nothing_at(part: Graph, sizes: Mapping[str, int], evaluate: Evaluate) -> bool:
    positions = np.tile(np.arange(sizes["sequence"], dtype=np.int64), (sizes["batch"], 1))
    try:
        (values,) = evaluate(part, {i.name: positions for i in part.inputs}, sizes)
    except (RuntimeError, ValueError, IndexError):
        return False
    return bool(values.all() if values.dtype == np.bool_ else (values == 0).all())


@dataclass(frozen=True)
class AffineBias:
    """A bias of slope * (j - i) for key j and query i, as ALiBi has it, plus a number for each row, for each head."""

    slopes: tuple[float, ...]  # one for all heads, or one a head
    window: int | None  # sliding window of a mask in it; see `visible_window`
    masks: bool  # whether later positions are hidden


def affine_bias(graph: Graph, bias: Ref, evaluate: Evaluate, max_length: int | None) -> AffineBias:
    """The slopes and the mask of `bias` (..., heads, sequence or 1, sequence), which is added to the scores. Evaluated at all
    lengths up to `max_length` that it could depend on. UnsupportedModel for any other bias."""
    part = mask_graph(graph, bias)
    if max_length is None:
        raise _refusal(bias, "adds to the scores, and nothing says how long a sequence can be")
    result: AffineBias | None = None
    for length in reversed(tried_lengths(part, max_length)):
        values = _evaluate_mask(part, 1, length, evaluate, bias)
        heads = values.shape[-3] if values.ndim > 2 else 1
        rows = values.reshape(-1, heads, values.shape[-2] if values.ndim > 1 else 1, length)
        if not np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape)):
            raise _refusal(bias, "adds to the scores (a bias that differs within a batch)")
        at_length = _affine(rows[0].astype(np.float64), bias)
        if result is None:
            result = at_length
        if length > 1 and not np.allclose(at_length.slopes, result.slopes, rtol=1e-6, atol=0):
            raise _refusal(bias, "adds to the scores (a bias that depends on the length)")
        window = None if result.window is None or result.window >= length else result.window
        if (at_length.window, at_length.masks) != (window, result.masks and length > 1):
            raise _refusal(bias, "is neither causal nor a causal window")
    assert result is not None
    return result


def _affine(rows: npt.NDArray[np.float64], bias: Ref) -> AffineBias:
    """The same of values (heads, rows, length); rows are 1, for all queries, or `length`."""
    heads, count, length = rows.shape
    visible = rows > HIDDEN
    masks, window = False, None
    if not visible.all():
        row_sum = int(visible[0, -1].sum())
        masks, window = True, None if row_sum == length else row_sum
        if not np.array_equal(visible, np.broadcast_to(_causal_window(length, window), visible.shape)):
            raise _refusal(bias, "is neither causal nor a causal window")
    if length == 1:
        return AffineBias((0.0,) * heads, window, masks)
    positions = np.arange(length)
    distance = length - 1 if window is None else min(length, window) - 1
    with np.errstate(invalid="ignore", over="ignore"):
        # Over the longest visible distance, where rounding matters least.
        slopes = (rows[:, -1, -1] - rows[:, -1, -1 - distance]) / max(1, distance)
        query_positions = positions[-count:]
        expected = slopes[:, None, None] * (positions[None, None, :] - query_positions[None, :, None])
        base = rows[:, np.arange(count), query_positions][:, :, None]
        error = np.abs(rows - base - expected)
        tolerance = 1e-6 * np.maximum(
            1e-30, np.abs(np.where(visible, rows, 0)).max(axis=(1, 2), keepdims=True)
        )
    if (error > tolerance)[visible].any() or not np.isfinite(slopes).all():
        raise _refusal(bias, "adds to the scores (a bias that is not a slope by distance)")
    return AffineBias(tuple(slopes.tolist()), window, masks)


def tried_lengths(part: Graph, max_length: int | None) -> list[int]:
    """Lengths, ascending, at which a sub-graph over positions, or pairs of them, could change its behaviour, and `max_length`;
    empty where it is too large."""
    numbers = _numbers(part)
    last = max((n for n in numbers), default=0) * 2 + 1 if max_length is None else max_length
    if last > _ROWS:
        return []
    near = {n + d for n in numbers for d in (-1, 0, 1, 2)} | {2 * n + 1 for n in numbers}
    return sorted(n for n in {*_LENGTHS, *near, last} if 0 < n <= max(last, 1))


def _negated(part: Graph) -> Graph:
    """The sub-graph of booleans with its result negated."""
    (mask,) = part.outputs
    hidden = Node(f"{mask.name}:hidden", "aten.logical_not", (mask,), (part.types[mask],))
    return replace(part, nodes=(*part.nodes, hidden), outputs=(Ref(hidden.name),))


def mask_graph(graph: Graph, mask: Ref) -> Graph:
    """The sub-graph that computes `mask`. UnsupportedModel if it depends on more than positions."""
    nodes = needed(graph, [mask])
    names = {mask.name, *(ref.name for node in nodes for ref in node.refs())}
    foreign = sorted(names - {POSITIONS} - {node.name for node in nodes})
    if foreign:
        raise _refusal(mask, f"depends on {foreign[0]}, not on positions alone")
    for node in nodes:
        if spec(node.op).family not in FAMILIES:
            raise _refusal(mask, f"is computed with {node.op}")
    # Kept even where no node reads it: its shape gives the sizes.
    inputs = tuple(i for i in graph.inputs if i.name == POSITIONS)
    return Graph(inputs, (), nodes, (mask,), graph.symbols)


def _numbers(part: Graph) -> set[int]:
    """Magnitudes of the numbers among the arguments, rounded, which could be distances or positions."""
    numbers = {n for node in part.nodes for c in constants(node.args) for n in _magnitudes(c)}
    if len(numbers) > 24:
        raise _refusal(part.outputs[0], "depends on too many numbers")
    return numbers


def _magnitudes(arg: Arg) -> set[int]:
    if isinstance(arg, Poly):
        return {abs(coefficient) for _, coefficient in arg.terms}
    if isinstance(arg, bool) or not isinstance(arg, (int, float)) or not abs(arg) < _INFINITE:
        return set()
    return {round(abs(arg))}


def _scales_positions(part: Graph, node: Node) -> bool:
    """Whether a threshold on the node's result may lie at a position that is no number of the graph."""
    family = spec(node.op).family
    dims = (d for t in node.results for d in t.shape if isinstance(d, Poly))
    if any(abs(coefficient) != 1 for d in dims for monomial, coefficient in d.terms if monomial):
        return True
    if node.op == "aten.slice.Tensor":
        return node.args[4] != 1
    if node.op == "aten.cumsum":
        source = node.args[0]
        # A running count never outgrows the positions; a running sum of fractions crosses a number later than that.
        return not isinstance(source, Ref) or "float" in part.types[source].dtype
    if node.op in ("aten.mul.Tensor", "aten.mul.Scalar") and isinstance(node.args[1], (int, float)):
        return 1 != abs(node.args[1]) < _INFINITE
    if node.op == "aten.to.dtype" and isinstance(node.args[0], Ref):
        return node.results[0].dtype not in _EXACT and part.types[node.args[0]].dtype != "bool"
    if node.op.startswith(("aten.add.", "aten.sub.", "aten.rsub.")) and node.args[2] not in (1, -1):
        return True
    return family != "view" and (
        node.op.split(".")[1] not in _UNSCALED or node.op == "aten.arange.start_step"
    )


def _product_of_numbers(part: Graph) -> int:
    """The product of all numbers, and of the inverses of fractions: no threshold lies beyond it."""
    numbers = set(constants(c for node in part.nodes for c in node.args))
    magnitudes = {n for c in numbers for n in _magnitudes(c)}
    magnitudes |= {round(1 / abs(c)) for c in numbers if isinstance(c, float) and 0 < abs(c) < 1}
    return prod(n for n in magnitudes if n > 1)


def _common_window(
    part: Graph, numbers: set[int], evaluate: Evaluate, mask: Ref, max_length: int | None
) -> int | None:
    near = {n + d for n in numbers for d in (-1, 0, 1, 2) if n > 2}
    lengths = {*_LENGTHS, *near, *(2 * n + 1 for n in numbers if 2 * n <= _DIRECT)} - {0, -1}
    lengths = {n for n in lengths if max_length is None or n <= max_length}
    last_length = max(lengths)
    last_row = _visible_matrix(part, 1, last_length, evaluate, mask)[..., -1, :].reshape(-1, last_length)[0]
    row_sum = int(last_row.sum())
    window = None if row_sum == last_length else row_sum
    for batch, length in ((2, 6), *((1, n) for n in sorted(lengths))):
        visible = _visible_matrix(part, batch, length, evaluate, mask)
        if not np.array_equal(visible, np.broadcast_to(_causal_window(length, window), visible.shape)):
            raise _refusal(mask, "is neither causal nor a causal window")
    return window


def _causal_window(length: int, window: int | None) -> npt.NDArray[np.bool_]:
    positions = np.arange(length)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < (length if window is None else window))


def _visible_matrix(
    part: Graph, batch: int, length: int, evaluate: Evaluate, mask: Ref
) -> npt.NDArray[np.bool_]:
    """The mask as booleans (..., length, length), for sequences that start at position 0."""
    values = _evaluate_mask(part, batch, length, evaluate, mask)
    if values.dtype != np.bool_:
        added = values.astype(np.float64)
        visible, hidden = added == 0, added <= HIDDEN
        if not np.all(visible | hidden):
            raise _refusal(mask, "adds to the scores (a bias by position, such as ALiBi)")
        values = visible
    lead = values.shape[:-2] if values.ndim > 2 else ()
    return np.broadcast_to(values, (*lead, length, length)).astype(np.bool_)


def _evaluate_mask(part: Graph, batch: int, length: int, evaluate: Evaluate, mask: Ref) -> Array:
    """The values of the sub-graph for sequences that start at position 0."""
    positions = np.tile(np.arange(length, dtype=np.int64), (batch, 1))
    inputs = {i.name: positions for i in part.inputs}
    sizes = {"batch": batch, "sequence": length}
    if prod(bind(d, sizes) for d in part.types[part.outputs[0]].shape) > _BIASES:
        raise _refusal(mask, f"is too large to be tried for {length} positions")
    try:
        (values,) = evaluate(part, inputs, sizes)
    except (RuntimeError, ValueError, IndexError):
        raise _refusal(mask, f"cannot be computed for {length} positions") from None
    return values


def _shifted_numbers(numbers: set[int], large: Sequence[int], stand_in: int) -> set[int]:
    return {n for n in numbers if n <= _DIRECT} | {stand_in + n - large[0] for n in large}


def _with_stand_in(part: Graph, threshold: int, stand_in: int) -> Graph:
    """The sub-graph with `threshold`, and the numbers just above it, shifted down to `stand_in`."""

    def small(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(small, arg))
        if not any(m >= threshold for m in _magnitudes(arg)):
            return arg
        if not isinstance(arg, (int, float)):
            raise _refusal(part.outputs[0], f"has a size as large as {threshold}")
        return arg - (threshold - stand_in) if arg > 0 else arg + (threshold - stand_in)

    nodes = []
    for node in part.nodes:
        args = tuple(map(small, node.args))
        if args != node.args and spec(node.op).family != "pointwise":
            # A threshold may be shifted in sums and comparisons; a size would change shapes.
            raise _refusal(part.outputs[0], f"gives {node.op} a number as large as {threshold}")
        nodes.append(replace(node, args=args))
    return replace(part, nodes=tuple(nodes))


def _refusal(mask: Ref, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"no KV cache for this model: the attention mask {mask} {why}")
