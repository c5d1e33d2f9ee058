"""Arithmetic of shapes: axes, broadcasting, dtype promotion, exact division of dimensions.

Symbols are integers of at least 1. Shapes may come from the wire, so every product is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusion.dag.ir.dims import Dim, Poly
from fusion.dag.ir.graph import DTYPE_BYTES, DType, TensorType
from fusion.dag.ir.opset_spec import MAX_LIST, MAX_RANK, Call

MAX_TERMS = 16  # of a polynomial
MAX_ELEMENTS = 2**40  # of a tensor, counting integer dimensions
Shape = tuple[Dim, ...]

FLOATS = tuple(d for d in DTYPE_BYTES if "float" in d)


def is_float(dtype: str) -> bool:
    return dtype in FLOATS


def terms(dim: Dim) -> int:
    return len(dim.terms) if isinstance(dim, Poly) else 1


def lower_bound(dim: Dim) -> int | None:
    """The minimum of a dimension, reached with symbols of 1; None if it has negative terms."""
    if isinstance(dim, int):
        return dim
    non_decreasing = all(c > 0 for monomial, c in dim.terms if monomial)
    return sum(c for _, c in dim.terms) if non_decreasing else None


def axis(call: Call, dim: int, rank: int) -> int:
    """A dimension number in [0, rank). A scalar counts as having one dimension."""
    span = max(rank, 1)
    if not -span <= dim < span:
        raise call.fail(f"dimension {dim} of a tensor of rank {rank}")
    return dim % span


def axes(call: Call, dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """Dimension numbers, distinct and ascending; None or () mean all of them."""
    if isinstance(dims, int):
        dims = (dims,)
    if not dims:
        return tuple(range(rank))
    numbers = sorted(axis(call, d, rank) for d in dims)
    if len(set(numbers)) != len(numbers):
        raise call.fail(f"dimension named twice in {tuple(dims)}")
    return tuple(a for a in numbers if a < rank)


def volume(call: Call, shape: Iterable[Dim]) -> Dim:
    """Number of elements."""
    total: Dim = 1
    for dim in shape:
        total = total * dim
        if (total > MAX_ELEMENTS) if isinstance(total, int) else (terms(total) > MAX_TERMS):
            raise call.fail("the size is too large or too intricate")
    return total


def add_up(call: Call, dims: Iterable[Dim]) -> Dim:
    """Sum of dimensions."""
    total: Dim = 0
    for dim in dims:
        total = total + dim
        if terms(total) > MAX_TERMS:
            raise call.fail("the size is too intricate")
    return total


def divide(call: Call, total: Dim, divisor: Dim) -> Dim:
    """total / divisor if that is exact for all values of the symbols, else GraphError.

    Polynomial long division by the divisor's leading term; each round removes the leading term of the remainder, and there
    are no more rounds than terms in an exact quotient.
    """
    quotient: Dim = 0
    rest = total
    for _ in range(MAX_TERMS + 1):
        if rest == 0:
            return quotient
        part = _divide_leading(rest, divisor)
        if part is None:
            break
        quotient, rest = quotient + part, rest - part * divisor
    raise call.fail(f"{total} is not a multiple of {divisor}")


def _divide_leading(total: Dim, divisor: Dim) -> Dim | None:
    (top, x), (bottom, y) = _leading(total), _leading(divisor)
    if y == 0 or x % y:
        return None
    symbols_left = list(top)
    for s in bottom:
        if s not in symbols_left:
            return None
        symbols_left.remove(s)
    return Poly(((tuple(symbols_left), x // y),)) if symbols_left else x // y


def _leading(dim: Dim) -> tuple[tuple[str, ...], int]:
    # Graded order: a total order of monomials, compatible with multiplication, as long division needs.
    if isinstance(dim, int):
        return (), dim
    names = sorted({s for m, _ in dim.terms for s in m})
    return max(dim.terms, key=lambda t: (len(t[0]), [t[0].count(n) for n in names]))


def same(call: Call, a: Dim, b: Dim, what: str) -> Dim:
    if a != b:
        raise call.fail(f"{what}: {a} is not {b}")
    return a


def broadcast(call: Call, *shapes: Shape) -> Shape:
    rank = max(map(len, shapes), default=0)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for i, dim in enumerate(shape, rank - len(shape)):
            if dim != result[i] and dim != 1:
                if result[i] != 1:
                    listed = " and ".join(str(TensorType(s, "")) for s in shapes)
                    raise call.fail(f"shapes {listed} do not broadcast")
                result[i] = dim
    return tuple(result)


def resolve_shape(call: Call, wanted: Shape, total: Dim) -> Shape:
    """`wanted` with its -1, if any, replaced so that there are `total` elements."""
    if len(wanted) > MAX_RANK:
        raise call.fail(f"rank {len(wanted)} is over {MAX_RANK}")
    unknown = [i for i, d in enumerate(wanted) if d == -1]
    known = volume(call, (d for d in wanted if d != -1))
    if len(unknown) > 1 or any(isinstance(d, int) and d < -1 for d in wanted):
        raise call.fail("more than one unknown or a negative dimension")
    if unknown:
        inferred = divide(call, total, known)
        return tuple(inferred if d == -1 else d for d in wanted)
    same(call, known, total, "number of elements")
    return wanted


def splice(shape: Shape, at: int, *dims: Dim) -> Shape:
    """`shape` with dimension `at` replaced by `dims`."""
    return (*shape[:at], *dims, *shape[at + 1 :])


def reduced(shape: Shape, over: Iterable[int], keepdim: bool) -> Shape:
    dropped = set(over)
    if keepdim:
        return tuple(1 if i in dropped else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in dropped)


def checked_count(call: Call, count: int) -> int:
    """`count`, checked against MAX_LIST before anything of that length is allocated."""
    if not 0 < count <= MAX_LIST:
        raise call.fail(f"{count} results")
    return count


def dtype_or(given: DType | None, otherwise: str) -> str:
    return given.name if given is not None else otherwise


def promote(operands: Iterable[object]) -> str:
    """The dtype of an operation on tensors and numbers: torch's rules, by which a tensor with dimensions outranks
    one without, which outranks a number, unless the other is of a higher category (bool < integer < float)."""
    ranked: list[str | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, TensorType):
            place, dtype = (0 if operand.shape else 1), operand.dtype
        else:
            place, dtype = 2, _dtype_of_number(operand)
        present = ranked[place]
        ranked[place] = dtype if present is None else _wider(present, dtype)
    result = ranked[0]
    for lower in ranked[1:]:
        if lower is None:
            continue
        if result is None:
            result = lower
        elif not is_float(result) and (result == "bool" or is_float(lower)):
            result = _wider(result, lower)
    assert result is not None
    return result


def _dtype_of_number(number: object) -> str:
    return "bool" if isinstance(number, bool) else "float32" if isinstance(number, float) else "int64"


def _wider(a: str, b: str) -> str:
    if a == b or b == "bool":
        return a
    if a == "bool":
        return b
    if is_float(a) != is_float(b):
        return a if is_float(a) else b
    if DTYPE_BYTES[a] != DTYPE_BYTES[b]:
        # uint8 and a wider signed type: the signed one holds both
        return a if DTYPE_BYTES[a] > DTYPE_BYTES[b] else b
    return "float32" if is_float(a) else "int16"  # float16 with bfloat16, int8 with uint8


def floating(dtype: str) -> str:
    """The result dtype of a function with real values, such as exp."""
    return dtype if is_float(dtype) else "float32"
