"""Every operator that the JAX plane runs, forward and backward, against torch's: float32, relative error at most 1e-4."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_opset_types import SAMPLES, B, S, T, complete, in_framework, typed

from fusion.dag.ir.graph import Graph, Input, Node, Ref
from fusion.dag.ir.opset import OPSET, infer, spec
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.jax_plane.lacking import LACKING
from fusion.runtime.planes.jax_plane.library import load
from fusion.runtime.planes.plane import RngKey
from fusion.runtime.planes.torch_ops import torch_call

pytest.importorskip("jax", reason="the extra jax is not installed")
DEVICE = load("cpu", 1)

import jax  # noqa: E402

from fusion.runtime.planes.dropout import Masks  # noqa: E402
from fusion.runtime.planes.jax_plane.arrays import array, tensor  # noqa: E402
from fusion.runtime.planes.jax_plane.dropped import Dropped  # noqa: E402
from fusion.runtime.planes.jax_plane.program import STATEFUL, TABLE, Program  # noqa: E402

KEY = RngKey(7, 3, 1)
# Of the time of a sample, compiling is nearly all.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CACHED = {f"fusion.cached_attention{kind}" for kind in ("", "_scored", "_selected")}  # test_jax_decoding
# Which of several values that go to one place stays is nobody's promise: here every place gets one.
INTO_PLACES = {"aten.scatter.src", "aten.index_put"}
# Statistics, and the target of a loss, have no gradient in torch.
WITHOUT = {"running_mean", "running_var", "target", "pos_weight", "weight of a loss"}


def full(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample with floats of full length."""

    def one(arg: Any) -> Any:
        if isinstance(arg, T) and arg.dtype in ("float16", "bfloat16", "float64"):
            return replace(arg, dtype="float32")
        return tuple(map(one, arg)) if isinstance(arg, tuple) else arg

    return tuple(map(one, sample))


def at_sizes(sample: tuple[Any, ...], batch: int, sequence: int) -> tuple[Any, ...]:
    sizes = {B: batch, S: sequence, B * S: batch * sequence, S * 8: sequence * 8, 4 * S: sequence * 4}

    def one(arg: Any) -> Any:
        if isinstance(arg, T):
            return replace(arg, shape=tuple(sizes.get(n, n) for n in arg.shape))
        if isinstance(arg, tuple):
            return tuple(map(one, arg))
        return sizes.get(arg, arg) if type(arg) is int else arg

    return (sample[0], *map(one, sample[1:]))


def tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from tensors(arg)
        elif isinstance(arg, torch.Tensor):
            yield arg


def once(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Whole numbers are places, and each is named once."""
    return [
        torch.arange(value.shape[-1]).expand(value.shape).clone() if value.dtype == torch.int64 else value
        for value in values
    ]


def names_of(op: str, args: tuple[Any, ...]) -> Iterator[str]:
    for parameter, arg in zip(spec(op).parameters, args, strict=True):
        for each in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(each, Ref):
                loss = spec(op).loss and parameter.name == "weight"
                yield "weight of a loss" if loss else parameter.name


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    far = torch.where(same, 0, found - wanted)
    some = torch.where(wanted.isfinite(), wanted, 0)
    return float(far.norm() / some.norm().clamp_min(1e-6))


@dataclass(frozen=True)
class Compared:
    """An operator forward and backward: what torch makes, and how JAX makes the same."""

    both: Callable[
        [list[Any], list[Any], Any], tuple[Any, Any]
    ]  # arrays, seeds and draws -> results, gradients
    given: tuple[list[Any], list[Any], Any]
    wanted: Sequence[torch.Tensor]
    wanted_gradients: Sequence[torch.Tensor]

    def check(self, found: Sequence[Any], gradients: Sequence[Any]) -> None:
        for value, want in zip(map(tensor, found), self.wanted, strict=True):
            assert (value.shape, value.dtype) == (want.shape, want.dtype)
            assert relative(value, want.detach()) <= 1e-4
        if not self.wanted_gradients:  # nothing of it has a gradient in torch
            return
        for value, want in zip(map(tensor, gradients), self.wanted_gradients, strict=True):
            assert relative(value, want) <= 1e-4


def compared(sample: tuple[Any, ...]) -> Compared:
    op, *given = full(sample)
    torch.manual_seed(0)
    args, types = typed(op, tuple(given))
    node = Node("node", op, args, infer(op, args, types))
    outputs = tuple(Ref("node", i) for i in range(len(node.results)))
    graph = Graph(tuple(Input(r.name, t) for r, t in types.items()), (), (node,), outputs)
    values = list(tensors(in_framework(op, tuple(given), "cpu")))
    if op in INTO_PLACES and not any(v.dtype == torch.bool for v in values):
        values = once(values)
    smooth = [
        i
        for i, (value, name) in enumerate(zip(values, names_of(op, args), strict=True))
        if value.is_floating_point() and spec(op).differentiable and name not in WITHOUT
        if node.results[0].dtype.startswith("float")
    ]
    ours = [value.clone().requires_grad_(i in smooth) for i, value in enumerate(values)]
    compiled = compile_graph(graph, torch.device("cpu"), training=True)
    wanted = compiled.run(ours, (), Masks(KEY, compiled.stateful))[
        : len(outputs)
    ]  # what is kept stands behind
    seeds = [torch.rand_like(each) if each.requires_grad else None for each in wanted]
    program = Program(graph, training=True)
    dimensions = program.sizes.dimensions(values)
    kept = {name: Masks(KEY, ()).kept(name, n, p) for name, n, p in program.dropout_masks(dimensions)}

    def both(given: list[Any], seeds: list[Any], kept: Any) -> tuple[Any, Any]:
        def forward(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
            whole = list(given)
            for at, leaf in zip(smooth, leaves, strict=True):
                whole[at] = leaf
            made, _ = program.run(whole, {}, dimensions, Dropped(kept))
            return [each for each, seed in zip(made, seeds, strict=True) if seed is not None], made

        _, back, made = jax.vjp(forward, [given[at] for at in smooth], has_aux=True)
        return made, back([seed for seed in seeds if seed is not None])[0]

    roots = [each for each in wanted if each.requires_grad]
    leaves = [ours[at] for at in smooth] if roots else []
    outside = [s for s in seeds if s is not None]
    found = torch.autograd.grad(roots, leaves, outside, allow_unused=True) if roots else ()
    return Compared(
        both,
        (
            [array(value, DEVICE) for value in values],
            [None if s is None else array(s, DEVICE) for s in seeds],
            kept,
        ),
        wanted,
        [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)],
    )


def compare(sample: tuple[Any, ...]) -> None:
    one = compared(sample)
    one.check(*jax.jit(one.both)(*one.given))


RUN = [sample for sample in SAMPLES if sample[0] not in LACKING | CACHED]
FIRST = list({sample[0]: sample for sample in reversed(RUN)}.values())


def test_each_operator_is_run_or_known_not_to_be() -> None:
    assert TABLE.keys() | STATEFUL | LACKING == OPSET.keys()
    assert not LACKING & (TABLE.keys() | STATEFUL)


@pytest.mark.parametrize(
    "op, given, rest",
    [
        ("aten.abs", [-1.5, -0.0, 0.0, 2.0], ()),
        ("aten.hardswish", [-4.0, -3.0, 0.0, 3.0, 4.0], ()),
        ("aten.atan2", [0.0, -0.0, 1.0], (torch.tensor([0.0, 0.0, 2.0]),)),
        ("aten.std.correction", [3.0, 3.0, 3.0], (None, 1, False)),
        ("aten.std.dim", [3.0, 4.0, 3.0], ((0,), False, False)),
        ("aten.linalg_vector_norm", [0.0, 0.0, 1.0], (1, None, False, None)),
        ("aten.l1_loss", [1.0, 2.0, 3.0], (torch.tensor([1.0, 0.0, 4.0]), 2)),
        ("aten.binary_cross_entropy", [0.0, 1.0, 1.0, 0.3], (torch.tensor([0.0, 1.0, 0.0, 1.0]), None, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_corner_has_torchs_gradient(op: str, given: list[float], rest: tuple[Any, ...]) -> None:
    own = torch.tensor(given, requires_grad=True)
    function, args, named = torch_call(op, (own, *rest), torch.device("cpu"))
    wanted = function(*args, **named).sum()
    wanted.backward()
    more = [array(each, DEVICE) if isinstance(each, torch.Tensor) else each for each in rest]
    found, gradient = jax.value_and_grad(lambda x: TABLE[op](x, *more).sum())(array(own.detach(), DEVICE))
    torch.testing.assert_close(tensor(found), wanted.detach())
    torch.testing.assert_close(tensor(gradient), own.grad)


def made_in_both(op: str, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch makes, and what JAX makes."""
    args = tuple(complete(op, given))
    function, own, named = torch_call(op, args, torch.device("cpu"))
    wanted = function(*own, **named)
    arrays = [array(each, DEVICE) if isinstance(each, torch.Tensor) else each for each in args]
    return wanted, tensor(TABLE[op](*arrays).astype(str(wanted.dtype).removeprefix("torch.")))


@pytest.mark.parametrize("op", ["relu", "relu6", "hardtanh", "hardsigmoid", "hardswish", "elu", "softplus"])
def test_what_is_not_a_number_stays_so(op: str) -> None:
    """A stage whose numbers are none any more would go on with zeros."""
    wanted, found = made_in_both(f"aten.{op}", torch.tensor([math.nan, -2.0, math.inf]))
    assert found[0].isnan()
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_logarithms_and_powers_of_two_are_exact() -> None:
    """Models round them: one that is a bit less than a whole number is the number below."""
    powers = torch.tensor([2.0**n for n in range(-30, 31)])
    wanted, found = made_in_both("aten.log2", torch.cat([powers, torch.tensor([3.0, 0.0, -1.0, math.inf])]))
    assert torch.equal(found[: len(powers)], wanted[: len(powers)])
    torch.testing.assert_close(found, wanted, equal_nan=True)
    wanted, found = made_in_both("aten.exp2", torch.arange(-30.0, 31.0))
    assert torch.equal(found, wanted)
    gradient = jax.grad(lambda x: TABLE["aten.log2"](x).sum())(array(powers, DEVICE))
    torch.testing.assert_close(tensor(gradient), 1 / (powers * math.log(2)))


def test_what_is_multiplied_by_zero_is_left_out_of_a_sum_with_a_product() -> None:
    """A model may give memory that nobody has written to."""
    for op, lead in (("aten.addmm", ()), ("aten.baddbmm", (2,))):
        factors = torch.rand(*lead, 3, 4), torch.rand(*lead, 4, 2)
        wanted, found = made_in_both(op, torch.full((*lead, 3, 2), math.nan), *factors, 0, 2)
        torch.testing.assert_close(found, wanted)


def test_a_target_below_zero_is_no_probability() -> None:
    """Such as a logarithm of one, of which nothing says that it is."""
    scores, target = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0.5, 0.0, -0.7])
    for reduction in (0, 1):
        wanted, found = made_in_both("aten.kl_div", scores, target, reduction)
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_place_that_a_dimension_does_not_have_is_an_error() -> None:
    """Its size may be that of somebody's sequence."""
    x = array(torch.rand(2, 3), DEVICE)
    for at in (3, -4):
        with pytest.raises(IndexError, match="of a dimension of 3"):
            TABLE["aten.select.int"](x, 1, at)
        with pytest.raises(IndexError, match="of a dimension of 3"):
            TABLE["aten.select_scatter"](x, x[:, 0], 1, at)


@pytest.mark.heavy
@pytest.mark.parametrize("family", sorted({spec(sample[0]).family for sample in FIRST}))
def test_an_operator_gives_what_torch_gives_forward_and_backward(family: str) -> None:
    """Those of a family are compiled as one program: a hundred small ones take longer."""
    ops = {sample[0]: compared(sample) for sample in FIRST if spec(sample[0]).family == family}

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def all_of_them(given: dict[str, Any]) -> dict[str, Any]:
        return {op: ops[op].both(*each) for op, each in given.items()}

    failed = {}
    for op, (found, gradients) in all_of_them({op: each.given for op, each in ops.items()}).items():
        try:
            ops[op].check(found, gradients)
        except AssertionError as error:
            failed[op] = str(error)
    assert not failed


def over_sizes() -> dict[tuple[str, int, int], list[tuple[Any, ...]]]:
    """The samples of an operator at some sizes, each once: the first is run above, and some have no size that varies."""
    seen, found = {repr(full(sample)) for sample in FIRST}, defaultdict(list)  # as text: 1 equals True
    for batch, sequence in ((B, S), (3, 7), (16, 9)):
        for sample in RUN:
            one = full(at_sizes(sample, batch, sequence))
            if repr(one) not in seen:
                seen.add(repr(one))
                found[sample[0], batch, sequence].append(one)
    return found


OVER_SIZES = over_sizes()


@pytest.mark.slow
@pytest.mark.parametrize("of", OVER_SIZES, ids=lambda of: "-".join(map(str, of)))
def test_operators_agree_over_shapes(of: tuple[str, int, int]) -> None:
    for sample in OVER_SIZES[of]:
        compare(sample)
