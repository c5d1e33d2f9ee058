"""Recognising what an attention mask lets a position see, by evaluating the part of the graph that makes it.

Masks are written in many ways (comparisons of positions, packed-sequence detection, additive tables), so their form
says little; their values say all, for the lengths that are tried. The lengths go beyond every number in the sub-graph
that could be a threshold; numbers too large for that are replaced by small ones (`_stand_ins`). Where positions are
scaled, a threshold may also be a product of numbers (`_scales`).
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
MAX_CHUNK = 1 << 16  # of positions that see each other; models have 8192
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 11, 17, 33, 40)
_SOME = 5  # of one size while another is tried
_DIRECT = 2048  # thresholds up to here are tried as they are: a mask then has at most about 4 million entries
_ENDLESS = 1 << 31  # no position is ever as large as this
_ROWS = 1 << 21  # the longest row of numbers that is tried
_BIASES = 1 << 26  # elements of the largest bias that is tried
_SMALL = (9, 23)  # what stands for a larger threshold, one after the other
# Ops under which a distance or a position stays what it is, plus or minus a number of the graph.
_UNSCALED = frozenset({
    "add", "sub", "rsub", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "clamp", "clamp_min",
    "clamp_max", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not",
    "bitwise_xor", "__and__", "__or__", "where", "masked_fill", "to", "any", "all", "max", "min", "amax", "amin",
    "arange", "zeros", "ones", "full", "index", "index_select", "gather", "cat", "stack", "diff", "tril", "triu", "flip",
    "roll", "constant_pad_nd", "scalar_tensor",
})  # fmt: skip
_EXACT = frozenset({"bool", "int32", "int64", "float32", "float64"})  # hold every position
_WHOLE = frozenset({"bool", "int32", "int64"})
_WHOLE_PARTS = frozenset({"aten.floor_divide", "fusion.div_floor"})
_NEAR = 8  # numbers this near to a large threshold are taken to be the same one, shifted


def visible_window(
    graph: Graph, mask: Ref, evaluate: Evaluate, longest: int | None = None, *, hides: bool = False
) -> int | None:
    """None if `mask` lets each position see itself and all before it, w if itself and the w - 1 before it.
    The mask is of booleans (True: visible, or the other way round where it `hides`), or is added to the scores. Positions
    are those of one sequence from its start, at most `longest`. UnsupportedModel for a mask of another kind, or one that
    depends on more than positions."""
    part = mask_graph(graph, mask)
    if hides:
        part = _negated(part)
    numbers = _numbers(part)
    large = sorted(n for n in numbers if n > _DIRECT)
    if any(_scales(part, node) for node in part.nodes):
        numbers.add(_product(part))
        large = [n for n in numbers if n > _DIRECT]
        if large:
            raise _refusal(mask, "scales positions by large numbers")
    if not large:
        return _window(part, numbers, evaluate, mask, longest)
    if large[-1] - large[0] > _NEAR:
        raise _refusal(mask, "depends on several large numbers")
    found = [
        _window(_stand_ins(part, large[0], s), _small(numbers, large, s), evaluate, mask, longest)
        for s in _SMALL
    ]
    if found == [None, None]:
        return None
    beyond = {None if w is None else w - s for w, s in zip(found, _SMALL, strict=True)}
    if len(beyond) > 1:
        raise _refusal(mask, f"is neither causal nor a window of about {large[0]}")
    return large[0] + (beyond.pop() or 0)


@dataclass(frozen=True)
class Reach:
    """How far back a position sees, itself included: the last `window` positions, those of its own chunk where a sequence is in chunks
    of `chunk` positions, or all."""

    window: int | None = None
    chunk: int | None = None


def visible_reach(
    graph: Graph, mask: Ref, evaluate: Evaluate, longest: int | None = None, *, hides: bool = False
) -> Reach:
    """As `visible_window`, for masks that are cut into chunks as well."""
    try:
        return Reach(window=visible_window(graph, mask, evaluate, longest, hides=hides))
    except UnsupportedModel:
        chunk = _visible_chunk(graph, mask, evaluate, longest, hides)
        if chunk is None:
            raise
        return Reach(chunk=chunk)


def _visible_chunk(
    graph: Graph, mask: Ref, evaluate: Evaluate, longest: int | None, hides: bool
) -> int | None:
    """C if `mask` lets each position see itself and those before it whose place, divided by C, has the same whole part; None if
    it is of another kind."""
    part = mask_graph(graph, mask)
    if hides:
        part = _negated(part)
    divided = {n for node in part.nodes if node.op in _WHOLE_PARTS for n in _magnitudes(node.args[1])}
    if len(divided) != 1 or (size := divided.pop()) < 2:
        return None
    if 2 * _product(part) <= _DIRECT:
        return size if _in_chunks(part, size, evaluate, mask, longest) else None
    if max(_numbers(part)) > size or not _whole(part):
        return None
    small = (_in_chunks(_stand_ins(part, size, s), s, evaluate, mask, longest) for s in _SMALL)
    return size if all(small) else None


def _whole(part: Graph) -> bool:
    """Whether positions are scaled as whole numbers alone, which no size of them rounds."""
    scaled = (t for node in part.nodes if _scales(part, node) for t in node.results)
    return all(t.dtype in _WHOLE for t in scaled)


def _in_chunks(part: Graph, size: int, evaluate: Evaluate, mask: Ref, longest: int | None) -> bool:
    furthest = _product(part)  # that a threshold lies
    if 2 * furthest > _DIRECT:
        return False
    near = {n + d for n in (*_numbers(part), furthest) for d in (-1, 0, 1, 2)}
    lengths = {*_LENGTHS, *near, 2 * furthest + 1}
    for batch, length in ((2, 6), *((1, n) for n in sorted(lengths) if 0 < n <= (longest or n))):
        chunks = np.arange(length) // size
        wanted = _expected(length, None) & (chunks[:, None] == chunks[None, :])
        visible = _visible(part, batch, length, evaluate, mask)
        if not np.array_equal(visible, np.broadcast_to(wanted, visible.shape)):
            return False
    return True


def shows_all(
    graph: Graph, mask: Ref, evaluate: Evaluate, longest: Mapping[str, int], *, hides: bool = False
) -> bool:
    """Whether `mask`, of booleans (True: visible, or the other way round where it `hides`) or added to the scores, hides nothing
    and adds nothing, whatever the sizes, which are at most `longest` by symbol. UnsupportedModel for one that depends on more
    than positions."""
    part = mask_graph(graph, mask)
    if hides:
        part = _negated(part)
    numbers = _numbers(part)
    if any(n > _DIRECT for n in numbers) or any(_scales(part, node) for node in part.nodes):
        return False
    near = {*_LENGTHS, *(n + d for n in numbers for d in (-1, 0, 1, 2) if n + d > 0)}
    for first, others in ((n, m) for n in sorted(near) for m in {n, _SOME}):
        for name in longest:
            known = {each: min(first if each == name else others, most) for each, most in longest.items()}
            if not _shows_all(part, known | {"batch": 2}, evaluate):
                return False
    return True


def _shows_all(part: Graph, sizes: Mapping[str, int], evaluate: Evaluate) -> bool:
    positions = np.tile(np.arange(sizes["sequence"], dtype=np.int64), (sizes["batch"], 1))
    try:
        (values,) = evaluate(part, {i.name: positions for i in part.inputs}, sizes)
    except (RuntimeError, ValueError, IndexError):
        return False
    return bool(values.all() if values.dtype == np.bool_ else (values == 0).all())


@dataclass(frozen=True)
class Bias:
    """What is added to the score of key j as query i sees it: slope * (j - i) and a number a row, for each head."""

    slopes: tuple[float, ...]  # one for all heads, or one a head
    window: int | None  # of what is not hidden as well; see `visible_window`
    masks: bool  # whether later positions are hidden


def affine_bias(graph: Graph, bias: Ref, evaluate: Evaluate, longest: int | None) -> Bias:
    """Of `bias` (..., heads, sequence or 1, sequence), which is added to the scores and may hide positions. Tried for
    all lengths that it could depend on up to `longest`. UnsupportedModel for any other."""
    part = mask_graph(graph, bias)
    if longest is None:
        raise _refusal(bias, "adds to the scores, and nothing says how long a sequence can be")
    found: Bias | None = None
    for length in reversed(tried_lengths(part, longest)):
        values = _added(part, 1, length, evaluate, bias)
        heads = values.shape[-3] if values.ndim > 2 else 1
        rows = values.reshape(-1, heads, values.shape[-2] if values.ndim > 1 else 1, length)
        if not np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape)):
            raise _refusal(bias, "adds to the scores (a bias that differs within a batch)")
        here = _affine(rows[0].astype(np.float64), bias)
        if found is None:
            found = here
        if length > 1 and not np.allclose(here.slopes, found.slopes, rtol=1e-6, atol=0):
            raise _refusal(bias, "adds to the scores (a bias that depends on the length)")
        window = None if found.window is None or found.window >= length else found.window
        if (here.window, here.masks) != (window, found.masks and length > 1):
            raise _refusal(bias, "is neither causal nor a causal window")
    assert found is not None
    return found


def _affine(rows: npt.NDArray[np.float64], bias: Ref) -> Bias:
    """(heads, rows, length), where rows are 1, for all of them, or as many as the length."""
    heads, count, length = rows.shape
    shown = rows > HIDDEN
    masks, window = False, None
    if not shown.all():
        seen = int(shown[0, -1].sum())
        masks, window = True, None if seen == length else seen
        if not np.array_equal(shown, np.broadcast_to(_expected(length, window), shown.shape)):
            raise _refusal(bias, "is neither causal nor a causal window")
    if length == 1:
        return Bias((0.0,) * heads, window, masks)
    place = np.arange(length)
    far = length - 1 if window is None else min(length, window) - 1
    with np.errstate(invalid="ignore", over="ignore"):
        # Over the longest distance that is seen, where rounding matters least.
        slopes = (rows[:, -1, -1] - rows[:, -1, -1 - far]) / max(1, far)
        own = place[-count:]
        wanted = slopes[:, None, None] * (place[None, None, :] - own[None, :, None])
        base = rows[:, np.arange(count), own][:, :, None]
        off = np.abs(rows - base - wanted)
        limit = 1e-6 * np.maximum(1e-30, np.abs(np.where(shown, rows, 0)).max(axis=(1, 2), keepdims=True))
    if (off > limit)[shown].any() or not np.isfinite(slopes).all():
        raise _refusal(bias, "adds to the scores (a bias that is not a slope by distance)")
    return Bias(tuple(slopes.tolist()), window, masks)


def tried_lengths(part: Graph, longest: int | None) -> list[int]:
    """Lengths, ascending, at which a sub-graph of one value for each position, or pair of positions, could behave
    otherwise than at others, and `longest`; none where there are too many, or too large ones."""
    numbers = _numbers(part)
    last = max((n for n in numbers), default=0) * 2 + 1 if longest is None else longest
    if last > _ROWS:
        return []
    near = {n + d for n in numbers for d in (-1, 0, 1, 2)} | {2 * n + 1 for n in numbers}
    return sorted(n for n in {*_LENGTHS, *near, last} if 0 < n <= max(last, 1))


def _negated(part: Graph) -> Graph:
    """The sub-graph of booleans with its result the other way round."""
    (mask,) = part.outputs
    hidden = Node(f"{mask.name}:hidden", "aten.logical_not", (mask,), (part.types[mask],))
    return replace(part, nodes=(*part.nodes, hidden), outputs=(Ref(hidden.name),))


def mask_graph(graph: Graph, mask: Ref) -> Graph:
    nodes = needed(graph, [mask])
    names = {mask.name, *(ref.name for node in nodes for ref in node.refs())}
    foreign = sorted(names - {POSITIONS} - {node.name for node in nodes})
    if foreign:
        raise _refusal(mask, f"depends on {foreign[0]}, not on positions alone")
    for node in nodes:
        if spec(node.op).family not in FAMILIES:
            raise _refusal(mask, f"is computed with {node.op}")
    # Kept even where no node reads it: its shape tells the sizes.
    inputs = tuple(i for i in graph.inputs if i.name == POSITIONS)
    return Graph(inputs, (), nodes, (mask,), graph.symbols)


def _numbers(part: Graph) -> set[int]:
    """Magnitudes of the whole numbers among the arguments, which could be distances or positions."""
    numbers = {n for node in part.nodes for c in constants(node.args) for n in _magnitudes(c)}
    if len(numbers) > 24:
        raise _refusal(part.outputs[0], "depends on too many numbers")
    return numbers


def _magnitudes(arg: Arg) -> set[int]:
    if isinstance(arg, Poly):
        return {abs(coefficient) for _, coefficient in arg.terms}
    if isinstance(arg, bool) or not isinstance(arg, (int, float)) or not abs(arg) < _ENDLESS:
        return set()
    return {round(abs(arg))}


def _scales(part: Graph, node: Node) -> bool:
    """Whether a threshold on what the node makes may lie at a position that is no number of the graph."""
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
        return 1 != abs(node.args[1]) < _ENDLESS
    if node.op == "aten.to.dtype" and isinstance(node.args[0], Ref):
        return node.results[0].dtype not in _EXACT and part.types[node.args[0]].dtype != "bool"
    if node.op.startswith(("aten.add.", "aten.sub.", "aten.rsub.")) and node.args[2] not in (1, -1):
        return True
    return family != "view" and (
        node.op.split(".")[1] not in _UNSCALED or node.op == "aten.arange.start_step"
    )


def _product(part: Graph) -> int:
    """Of all numbers, fractions by their inverses: no threshold lies further than this."""
    found = set(constants(c for node in part.nodes for c in node.args))
    sizes = {n for c in found for n in _magnitudes(c)}
    sizes |= {round(1 / abs(c)) for c in found if isinstance(c, float) and 0 < abs(c) < 1}
    return prod(n for n in sizes if n > 1)


def _window(part: Graph, numbers: set[int], evaluate: Evaluate, mask: Ref, most: int | None) -> int | None:
    near = {n + d for n in numbers for d in (-1, 0, 1, 2) if n > 2}
    lengths = {*_LENGTHS, *near, *(2 * n + 1 for n in numbers if 2 * n <= _DIRECT)} - {0, -1}
    lengths = {n for n in lengths if most is None or n <= most}
    longest = max(lengths)
    last_row = _visible(part, 1, longest, evaluate, mask)[..., -1, :].reshape(-1, longest)[0]
    seen = int(last_row.sum())
    window = None if seen == longest else seen
    for batch, length in ((2, 6), *((1, n) for n in sorted(lengths))):
        visible = _visible(part, batch, length, evaluate, mask)
        if not np.array_equal(visible, np.broadcast_to(_expected(length, window), visible.shape)):
            raise _refusal(mask, "is neither causal nor a causal window")
    return window


def _expected(length: int, window: int | None) -> npt.NDArray[np.bool_]:
    place = np.arange(length)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < (length if window is None else window))


def _visible(part: Graph, batch: int, length: int, evaluate: Evaluate, mask: Ref) -> npt.NDArray[np.bool_]:
    """The mask as booleans (..., length, length), for sequences that start at position 0."""
    values = _added(part, batch, length, evaluate, mask)
    if values.dtype != np.bool_:
        added = values.astype(np.float64)
        shown, hidden = added == 0, added <= HIDDEN
        if not np.all(shown | hidden):
            raise _refusal(mask, "adds to the scores (a bias by position, such as ALiBi)")
        values = shown
    lead = values.shape[:-2] if values.ndim > 2 else ()
    return np.broadcast_to(values, (*lead, length, length)).astype(np.bool_)


def _added(part: Graph, batch: int, length: int, evaluate: Evaluate, mask: Ref) -> Array:
    """What the sub-graph gives for sequences that start at position 0."""
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


def _small(numbers: set[int], large: Sequence[int], stand_in: int) -> set[int]:
    return {n for n in numbers if n <= _DIRECT} | {stand_in + n - large[0] for n in large}


def _stand_ins(part: Graph, threshold: int, stand_in: int) -> Graph:
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
            # Only in sums and comparisons is it plain that a threshold may be moved; a size would change shapes.
            raise _refusal(part.outputs[0], f"gives {node.op} a number as large as {threshold}")
        nodes.append(replace(node, args=args))
    return replace(part, nodes=tuple(nodes))


def _refusal(mask: Ref, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"no KV cache for this model: the attention mask {mask} {why}")
