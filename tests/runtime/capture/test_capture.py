"""What capture makes of a module computes what the module computes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion.dag.ir import serialise
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import capture_language_model, capture_module, variables_from_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.job.model_files import is_exported
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.planes.codegen import compile_graph

BATCH, SEQUENCE = symbol("batch"), symbol("sequence")


class Applied(nn.Module):
    """A function of x as a module."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def execute(graph: Graph, module: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    program = compile_graph(serialise.decode(serialise.encode(graph)), torch.device("cpu"), training=False)
    values = variables_from_module(module)
    return program.run([inputs[n] for n in program.inputs], [values[n] for n in program.variables], None)


def agree(module: nn.Module, x: torch.Tensor, other: torch.Tensor) -> Graph:
    """Capture with `x`; the graph gives what the module gives for `x` and for `other`, of another batch size."""
    graph = capture_module(module.eval(), {"x": x})
    for value in (x, other):
        wanted = module(value)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for found, right in zip(execute(graph, module, {"x": value}), wanted, strict=True):
            torch.testing.assert_close(found, right)
    return graph


def arithmetic(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        x + 1, 2 - x, x - 2 * x, -x, x * 0.5, x / 3, x // 0.3, torch.div(x, 0.3, rounding_mode="trunc"), x % 0.7,
        x**2, 2**x, torch.add(x, x, alpha=3), torch.sub(x, x.exp(), alpha=2), torch.rsub(x, 1.0, alpha=2),
        (x > 0) & (x < 1) | (x == 2), torch.where(x > 0, x, 0.0), torch.where(x > 0, 1.0, x), x.clamp(-0.5, 0.5),
        x.masked_fill(x < 0, -torch.inf), x.to(torch.float64), x.long(), x.bool(), x.type_as(x), torch.maximum(x, -x),
    )  # fmt: skip


def shapes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # (batch, 4, 6)
    batch = x.shape[0]
    a, b = x.split(3, dim=2)
    c, d, e = x.split([1, 2, 3], dim=2)
    f, g = x.chunk(2, dim=1)
    h, *_ = x.unbind(1)
    return (
        x.view(batch, 24), x.reshape(-1, 6), x.flatten(1), x.transpose(1, 2).contiguous().view(batch, 24), x.permute(2, 0, 1),
        x[:, 1], x[:, 1:3, ::2], x[..., -2:], x[:, :, None], x.unsqueeze(-1).expand(batch, 4, 6, 2), x[:, [0, 2]], x.mT,
        torch.cat([a, b, c], 2), torch.cat([torch.tensor([]), x, b], -1), torch.stack([f, g]), d, e, h, x.repeat(1, 2, 1), x.repeat_interleave(2, 1), x.flip(1),
        x.roll(1, 2), x.tril(), functional.pad(x, (1, 2), value=3.0), x.unflatten(2, (2, 3)), x.squeeze(1),
        torch.zeros(batch, 3) + torch.arange(3) + torch.full((3,), 2.0), torch.ones_like(x), x.new_ones(batch, 2),
        x.gather(1, (x[:, :2] > 0).long()), x.narrow(2, 1, 3), torch.arange(batch) * 2, x * batch, x.diff(dim=-1),
        x.transpose(1, 2).reshape_as(x),
    )  # fmt: skip


def reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    top, at = x.topk(2, dim=-1)
    most, where = x.max(dim=1)
    return (
        x.sum(), x.sum(1), x.mean(-1, keepdim=True), x.var(-1), x.std(1, unbiased=False), x.amax((1, 2)), x.argmax(-1), x.cumsum(1),
        x.softmax(-1), functional.log_softmax(x, 1), x.logsumexp(-1), x.norm(dim=-1), most, where, top, at, x.prod(1),
        x.softmax(-1, dtype=torch.float64), x.any(-1), x.sort(-1).values,
    )  # fmt: skip


def products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        x @ x.mT, torch.bmm(x, x.transpose(1, 2)), torch.einsum("bij,bkj->bik", x, x), torch.matmul(x[:, 0], x[0].T),
        functional.scaled_dot_product_attention(x, x, x, is_causal=True), functional.scaled_dot_product_attention(x, x, x, x @ x.mT),
        functional.one_hot(x.long().clamp(0, 2), 3), torch.outer(x[:, 0, 0], x[0, 0]), functional.cosine_similarity(x, x.exp(), -1),
    )  # fmt: skip


def activations(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    names = "relu gelu silu sigmoid tanh mish softplus elu leaky_relu hardswish relu6 selu logsigmoid"
    found = [getattr(functional, name)(x) for name in names.split()]
    fresh = (x + 1).relu_().mul_(2.0)
    return (
        *found,
        functional.gelu(x, approximate="tanh"),
        x.abs().rsqrt(),
        x.sin() + x.cos(),
        x.erf(),
        fresh,
    )


def rotations(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In complex numbers, as rotary positions are written."""
    turn = torch.polar(torch.ones_like(x[:, 0, :3]), x[:, 1, :3]) * 0.5
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * turn[:, None, :].to(x.device)
    doubled = torch.complex(x, x.exp()).transpose(1, 2)[:, 1:]
    return torch.view_as_real(turned).flatten(2), torch.view_as_real(doubled * doubled * x.mT[:, 1:])


@pytest.mark.heavy
@pytest.mark.parametrize("function", [arithmetic, shapes, reductions, products, activations, rotations])
def test_functions(function: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    agree(Applied(function), torch.randn(3, 4, 6), torch.randn(5, 4, 6))


def in_place(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    copied = x.clone()
    copied.relu_()
    fresh = x * 2
    fresh.add_(1)
    doubled = (x - 1).to(torch.float32)
    doubled.mul_(2).neg_()
    return x + copied, fresh, doubled


def in_part(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    copied = x.clone()
    copied[:, 0] = 0
    copied[:, 1:3] += 1
    copied[..., 2].mul_(2)
    filled = torch.zeros(x.shape[0], 4)
    filled[:, 1:] = x[:, 1:]
    filled[torch.arange(x.shape[0]), 0] = x[:, 3]
    masked = x * 2
    masked[masked > 1] = 1.0
    turned = (x + 1).transpose(0, 1).relu_()
    empty = torch.empty(x.shape[0], 2)
    empty[:, :1] = x[:, 1:2]
    empty[:, 1:] = x[:, :1]
    return copied, filled, masked, turned, empty, x + 1


def test_writes_in_place_change_what_shares_the_memory_and_nothing_else() -> None:
    agree(Applied(in_place), torch.randn(3, 4), torch.randn(2, 4))
    agree(Applied(in_part), torch.randn(3, 4), torch.randn(2, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.dropout(x * 3, 0.5, training=False, inplace=True) + 1,
        lambda x: (x - 2).pow_(2),
        lambda x: ((x * 4).bfloat16().mul_(torch.full((4,), 1.1)), (x + 0.5).gt_(0)),
    ],
    ids=["dropout", "power", "dtypes"],
)
def test_writes_in_place_that_torch_spells_in_another_way(function: Callable[..., Any]) -> None:
    agree(Applied(function), torch.randn(3, 4), torch.randn(2, 4))


def test_gradients_go_through_writes_to_a_part() -> None:
    torch.manual_seed(0)
    module = Applied(in_part)
    graph = capture_module(module, {"x": torch.randn(3, 4)}, training=True)
    assert {"aten.slice_scatter", "aten.select_scatter", "aten.index_put", "aten.copy"} <= {
        n.op for n in graph.nodes
    }
    program = compile_graph(graph, torch.device("cpu"), training=True)
    x = torch.randn(5, 4, requires_grad=True)
    gradients = [
        torch.autograd.grad(sum((out * (i + 1) * out.detach().cos()).sum() for i, out in enumerate(outs)), x)[
            0
        ]
        for outs in (program.run([x], [], None), module(x))
    ]
    torch.testing.assert_close(*gradients)


def test_a_model_that_remembers_from_run_to_run_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x * self.seen

    with pytest.raises(
        CaptureError,
        match=r"writes to seen each time it runs.*, at \S*test_capture\.py:\d+: leave the write out",
    ):
        capture_module(Counter(), {"x": torch.zeros(2, 3)})


def loops(x: torch.Tensor) -> torch.Tensor:
    for i in range(x.shape[0]):
        x = x + i
    return x


@pytest.mark.parametrize(
    ("function", "marker", "advice"),
    [
        (loops, "for i in range", "no loop over it"),
        (lambda x: x if x.sum() > 0 else -x, "lambda x: x if", "use torch.where"),
        (
            lambda x: torch.complex(x, x).log().abs(),
            "torch.complex(x, x).log()",
            r"no complex numbers, .* to aten\.log",
        ),
    ],
)
def test_a_refusal_names_the_line_of_the_model(
    function: Callable[..., Any], marker: str, advice: str
) -> None:
    with pytest.raises(CaptureError, match=advice) as refusal:
        capture_module(Applied(function), {"x": torch.randn(2, 3)})
    lines = Path(__file__).read_text().splitlines()
    named = re.search(r", at \S*test_capture.py:(\d+)", str(refusal.value))
    assert named and marker in lines[int(named[1]) - 1]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.batch = nn.BatchNorm2d(8)
        self.group = nn.GroupNorm(2, 8)
        self.activation = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(0.5)
        self.layer = nn.LayerNorm(32)
        self.rms = nn.RMSNorm(32)
        self.head = nn.Linear(32, 10)
        self.plain = torch.arange(10.0)  # an attribute that is not a buffer
        self.register_buffer("table", torch.arange(10.0) / 3, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.batch(self.convolution(x)))
        x = functional.avg_pool2d(functional.max_pool2d(self.group(x), 2), 2)
        x = self.rms(self.layer(self.pool(x).flatten(1)))
        scale = torch.tensor([1.0, 2.0]).sum() * torch.tensor(0.5)  # constants that the code makes
        return self.head(self.dropout(x)) * scale + self.plain + self.table


def test_layers_constants_and_buffers() -> None:
    torch.manual_seed(0)
    module = Layers()
    graph = agree(module, torch.randn(2, 3, 16, 16), torch.randn(4, 3, 16, 16))
    exported = {v.name for v in graph.variables if is_exported(v.name)}
    assert exported == set(module.state_dict())
    assert {v.name for v in graph.variables} - exported == {"constant:plain", "constant:table"}


def test_a_language_model_has_two_symbols_and_tied_weights_once() -> None:
    module = GPT(GPTConfig(vocabulary=32, blocks=1, width=16, heads=2, sequence=24))
    serving = capture_language_model(module, training=False, maximum_sequence=24)
    assert serving.types[serving.outputs[0]].shape == (BATCH, SEQUENCE, 32)
    tied = [v for v in serving.variables if v.aliases]
    assert [(v.name, v.aliases) for v in tied] == [("tokens.weight", ("head.weight",))]
    names = {v.name for v in serving.variables} | {a for v in serving.variables for a in v.aliases}
    assert names == set(module.state_dict())
    training = capture_language_model(module, training=True, maximum_sequence=24)
    assert [i.name for i in training.inputs] == ["input_ids", "position_ids", "targets"]
    assert training.types[training.outputs[0]].shape == ()
    serialise.validate(training)
    for batch, length in ((1, 1), (1, 7), (3, 24)):
        ids = torch.randint(0, 32, (batch, length))
        positions = torch.arange(length).repeat(batch, 1)
        (found,) = execute(serving, module, {"input_ids": ids, "position_ids": positions})
        torch.testing.assert_close(found, module(ids, positions))


class Folded(nn.Module):
    """Every position by itself in between, as experts are given them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        rows = x.view(-1, 8)
        twice = rows.repeat_interleave(2, dim=0).view(*x.shape[:2], 16)
        return torch.cat([rows.view(x.shape), twice], -1)


def test_batch_and_sequence_may_be_folded_into_one_and_back() -> None:
    module = Folded()
    graph = capture_language_model(module, training=False, maximum_sequence=24)
    for batch, length in ((1, 1), (3, 7)):
        ids = torch.randint(0, 16, (batch, length))
        (found,) = execute(graph, module, {"input_ids": ids, "position_ids": ids})
        torch.testing.assert_close(found, module(ids, ids))


def test_arguments_are_named_however_often_forward_is_wrapped() -> None:
    """Given by place, positions would be the attention mask of many a model."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return function(*args, **named)

        return call

    class Model(nn.Module):
        @wrapped
        @wrapped
        def forward(
            self, input_ids: torch.Tensor, mask: Any = None, position_ids: Any = None
        ) -> torch.Tensor:
            assert mask is None
            return (input_ids + 2 * position_ids)[..., None].float()

    graph = capture_language_model(Model(), training=False, maximum_sequence=16)
    ids, positions = torch.randint(0, 9, (1, 5)), torch.arange(5)[None]
    (found,) = execute(graph, Model(), {"input_ids": ids, "position_ids": positions})
    assert torch.equal(found, (ids + 2 * positions)[..., None].float())


def test_capture_is_of_shapes_only() -> None:
    with torch.device("meta"):
        module = GPT(GPTConfig(vocabulary=50_000, blocks=2, width=4096, heads=32, sequence=512, tied=False))
    graph = capture_language_model(module, training=True, maximum_sequence=512)
    assert sum(v.name.startswith("blocks.1.") for v in graph.variables) == 12


def test_dropout_is_ours_in_training_and_gone_in_serving() -> None:
    module = GPT(GPTConfig(vocabulary=32, blocks=1, width=16, heads=2, sequence=24, dropout=0.1))
    training = capture_language_model(module, training=True, maximum_sequence=24)
    ops = [n.op for n in training.nodes]
    assert ops.count("fusion.dropout") == 3 and ops.count("fusion.dropout_attention") == 1
    serving = capture_language_model(module, training=False, maximum_sequence=24)
    assert not any("dropout" in n.op for n in serving.nodes)
    assert module.training


class Named(nn.Module):
    """A module that is called with x by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_dropout_in_place_is_ours_too() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.Linear(3, 2))
    x = torch.randn(2, 3)
    training = capture_module(Named(module), {"x": x}, training=True)
    assert [n.op for n in training.nodes] == ["aten.linear", "aten.relu", "fusion.dropout", "aten.linear"]
    serving = agree(Named(module), x, torch.randn(5, 3))
    assert not any("dropout" in n.op for n in serving.nodes)


def test_what_runs_without_gradients_stays_without() -> None:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                goal = self.inner(x)
            return self.inner(x) - goal

    graph = capture_module(Target(), {"x": torch.zeros(2, 3)}, training=True)
    assert [n.op for n in graph.nodes].count("aten.detach") == 1


def test_a_write_that_its_gradient_does_not_see_is_refused_for_training() -> None:
    class Written(nn.Module):
        def __init__(self, copies: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.copies = copies

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            with torch.no_grad():
                z = y * 1 if self.copies else y
                z[:, 0].mul_(2) if self.copies else z.mul_(2)
            return y * y + z

    with pytest.raises(CaptureError, match=r"no_grad, with aten.mul_.Tensor, .* has a gradient, at \S*:\d+"):
        capture_module(Written(False), {"x": torch.zeros(2, 3)}, training=True)
    assert capture_module(Written(True), {"x": torch.zeros(2, 3)}, training=True).nodes
    agree(Written(False), torch.randn(2, 3), torch.randn(4, 3))


@pytest.mark.parametrize("tie", ["parameter", "data", "buffer"])
def test_weights_that_only_share_their_memory_are_refused_for_training(tie: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    if tie == "parameter":
        module[1].weight = nn.Parameter(module[0].weight)
    elif tie == "data":
        module[1].weight.data = module[0].weight.data.t()
    else:
        module[1].register_buffer("seen", module[0].weight.detach())
    with pytest.raises(CaptureError, match="are two tensors in the same memory"):
        capture_module(Named(module), {"x": torch.zeros(2, 4)}, training=True)
    assert capture_module(Named(module).eval(), {"x": torch.zeros(2, 4)}).nodes
    module[1] = module[0]
    assert capture_module(Named(module), {"x": torch.zeros(2, 4)}, training=True).nodes


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (branches, "decides by values"),
        (lambda x: torch.complex(x, x).log().real, "no complex numbers"),
        (
            lambda x: x[:2].reshape(2, 3) * x.shape[0] if x.shape[0] == 2 else x,
            "does not leave the size of batch free",
        ),
        (lambda x: x + torch.tensor([float(i) for i in range(300)])[: x.shape[1]], "register it as a buffer"),
        (lambda x: "text", "not a tensor"),
        (
            lambda x: x[:2] * 2,
            r"cannot tell whether 2 is within batch, at \S*test_capture\.py:\d+: it has to hold for every size",
        ),
        (lambda x: x * x.sum().item(), r"keep the tensor, at \S*test_capture\.py:\d+$"),
    ],
)
def test_what_has_no_place_in_a_graph_is_refused_in_one_line(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(CaptureError, match=why) as refusal:
        capture_module(Applied(function), {"x": torch.randn(2, 3)})
    assert "\n" not in str(refusal.value)


def test_a_slice_up_to_a_remainder_is_refused_with_its_line() -> None:
    def parts(x: torch.Tensor) -> torch.Tensor:
        whole = x.shape[0] - x.shape[0] % 3
        return torch.cat([x[:whole], x[whole:]])

    with pytest.raises(
        CaptureError, match=r"a remainder of a size, .*use torch.where or a mask, at \S*:\d+$"
    ):
        capture_module(Applied(parts), {"x": torch.randn(6, 3)})


class Shifted(nn.Module):
    """Logits (batch, sequence, 5) of a token and, by what `before` takes of them, earlier ones."""

    def __init__(self, before: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.before = nn.Embedding(16, 5), before

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids) * (position_ids.unsqueeze(-1) + 1)
        return x + self.before(x)


def one_later(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_ones(x.shape[0], 1, x.shape[2]), x[:, :-1]], 1)


def of_fours(x: torch.Tensor) -> torch.Tensor:
    fours = x.shape[1] // 4
    return x[:, : fours * 4].reshape(x.shape[0], fours, 4, -1).sum((1, 2)).unsqueeze(1)


def test_what_is_left_of_a_sequence_may_be_one_position_or_none() -> None:
    module = Shifted(one_later).eval()
    graph = capture_language_model(module, training=False, maximum_sequence=32)
    for length in (1, 2, 3, 9):
        given = {"input_ids": torch.randint(0, 16, (1, length)), "position_ids": torch.arange(length)[None]}
        (found,) = execute(graph, module, given)
        torch.testing.assert_close(found, module(**given))


def test_a_number_that_is_made_of_a_size_is_refused_with_its_line() -> None:
    line = of_fours.__code__.co_firstlineno + 2
    with pytest.raises(
        CaptureError, match=rf"does not leave .* free, at \S*test_capture\.py:{line}: no loop"
    ):
        capture_language_model(Shifted(of_fours).eval(), training=False, maximum_sequence=32)


def test_a_name_that_cannot_travel_is_refused() -> None:
    module = nn.Module()
    module.register_parameter("x\nimport os", nn.Parameter(torch.zeros(1)))
    with pytest.raises(CaptureError, match="characters other than"):
        capture_module(module, {"x": torch.zeros(2, 1)})


def test_a_loss_needs_targets_and_a_batch_of_two() -> None:
    with pytest.raises(CaptureError, match="targets"):
        capture_module(nn.Linear(2, 2), {"input": torch.zeros(2, 2)}, nn.MSELoss())
    with pytest.raises(CaptureError, match="at least 2"):
        capture_module(nn.Linear(2, 2), {"input": torch.zeros(1, 2)})
