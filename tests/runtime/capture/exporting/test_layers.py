"""Layers that the op-set has no operator for give what torch's give, and their gradients, at another size of the batch too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from fusion.dag.ir import serialise
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph


class Layers(nn.Module):
    """A function of an image and of the module's own layers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.padded = nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")
        self.deep = nn.ConvTranspose3d(4, 2, 2, 2)
        self.normed = parametrizations.weight_norm(nn.Linear(7, 5))
        self.pairs = nn.Bilinear(7, 7, 3)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.table = nn.EmbeddingBag(6, 7, mode="mean")
        with torch.random.fork_rng(
            devices=[]
        ):  # as if it were not there: some functions are badly conditioned at other numbers
            self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(7, 6, [2, 4], div_value=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


def words(x: Tensor) -> Tensor:
    return (x.detach()[:, 0, :3, 0].abs() * 3).long().clamp(max=5)


def turned(m: Any, x: Tensor) -> Tensor:
    where = functional.affine_grid(
        torch.eye(2, 3).expand(x.shape[0], 2, 3) + 0.1, list(x.shape), align_corners=False
    )
    return functional.grid_sample(x, where, align_corners=False)


def written(x: Tensor) -> Tensor:
    torch.diagonal(x, 1, 2, 3).add_(2)
    return x * x


def mapped(x: Tensor) -> Tensor:
    """With a mask as transformers makes some: of a function of two places."""
    places = torch.arange(x.shape[0])
    sees = torch.vmap(torch.vmap(lambda i, j: i >= j, in_dims=(None, 0)), in_dims=(0, None))(places, places)
    rows = x.flatten(1)
    return torch.where(sees, rows @ rows.T, 0.0).sum(1)[:, None, None, None]


def views(x: Tensor) -> Tensor:
    """Of a batch and of another of as many, which went through the model as one."""
    both = torch.cat([x, x.flip(2)])
    a, b = both.chunk(2)
    c, d = both.split(x.shape[0])
    e, f = torch.split(both, split_size_or_sections=x.shape[0])
    g, _, h = torch.chunk(torch.cat([both, a], 0), 3, dim=-4)
    return a * b + c.sin() * d + e * f.cos() + g * h.tanh()


def of_numbers(x: Tensor) -> Tensor:
    steps = (x.detach() * 3).long().abs() + 1
    return x * (7 // steps) + x * (-7 % steps) + (2.5 // steps) + x * (7.5 % (x.detach().abs() + 0.3))  # type: ignore[operator]


def in_groups(x: Tensor) -> Tensor:
    """Convolutions with filters that the samples make, each for itself: dense and of one channel, over images and rows."""
    n, two = x.shape[0], (x.shape[0] * 4, -1)
    image, row = x.reshape(1, n * 4, 7, 7), x.reshape(2, n * 2, 49)
    dense = x[:, :3, :4, :6].reshape(n * 3, 4, 2, 3)
    a = functional.conv2d(image, dense, x[:, :3, 0, 0].flatten(), stride=(2, 1), padding=(1, 2), groups=n)
    b = torch.conv2d(image, x[:, :, :3, :3].reshape(n * 4, 1, 3, 3), dilation=2, groups=n * 4)
    c = functional.conv1d(row, x[:, :2, 0, :5].reshape(n * 2, 1, 5), padding=2, stride=3, groups=n * 2)
    return (
        a.reshape(n, -1).mean(1)
        + b.reshape(two).mean(1).reshape(n, 4).sum(1)
        + c.sum((0, 2)).reshape(n, 2).sum(1)
    )


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "two views": lambda m, x: views(x),
    "mapped": lambda m, x: torch.vmap(lambda image: image * image.sum() + functional.dropout(image, 0.0))(x) + mapped(x),
    "numbers divided": lambda m, x: of_numbers(x),
    "reflect": lambda m, x: m.padded(x),
    "replicate": lambda m, x: functional.pad(x, (1, 2, 0, 1), mode="replicate"),
    "circular": lambda m, x: functional.pad(x, (1, 2, 0, 1), mode="circular"),
    "adaptive maximum": lambda m, x: functional.adaptive_max_pool2d(x, (3, None)),
    "adaptive maximum of a row": lambda m, x: functional.adaptive_max_pool1d(x.flatten(2), 4),
    "three dimensions": lambda m, x: functional.avg_pool3d(functional.max_pool3d(m.deep(x[:, :, None]), 2), (1, 2, 3)),
    "adaptive mean of three": lambda m, x: functional.adaptive_avg_pool3d(x[:, :, None].expand(-1, -1, 4, -1, -1), 2),
    "local response": lambda m, x: functional.local_response_norm(x, 3),
    "instance norm": lambda m, x: m.instance(x),
    "weight norm": lambda m, x: m.normed(x),
    "bilinear": lambda m, x: m.pairs(x, x.flip(2)),
    "bag": lambda m, x: m.table(words(x)) * x.mean((1, 2)),
    "weighed bag": lambda m, x: functional.embedding_bag(words(x), m.table.weight, mode="sum", per_sample_weights=x[:, 0, :3, 0]),
    "largest of a bag": lambda m, x: functional.embedding_bag(words(x), m.table.weight, mode="max") * x.mean((1, 2)),
    "padded bags": lambda m, x: sum(functional.embedding_bag(words(x) * words(x).flip(0), m.table.weight, mode=mode, padding_idx=at) for mode in ("sum", "mean", "max") for at in (0, -6)) * x.mean((1, 2)),  # type: ignore[misc]
    "covariances": lambda m, x: torch.cov(x[:, 0, 0].T) + x[0, 0].cov(fweights=torch.arange(1, 8), aweights=torch.arange(2.0, 9.0)) + x[0, 1].corrcoef() + torch.cov(x[0, 0, 0], correction=0),
    "filled diagonal": lambda m, x: x @ (m.normed.weight.T @ m.normed.weight).fill_diagonal_(2.0),
    "searched": lambda m, x: x * torch.searchsorted(torch.arange(-1.0, 2.0), x, right=True) + torch.searchsorted(x.detach().sort(-1)[0], x),
    "counted": lambda m, x: x.mean((1, 2, 3)) * (torch.bincount(words(x)[:, 0], minlength=6) * torch.arange(6)).sum() + words(x).flatten().bincount(torch.ones(x.shape[0] * 3), 6).std(),
    "histogram": lambda m, x: x.mean((1, 2)) * (torch.histc(x, 7, -1, 1) + (x.detach() * 4).round().histc(7, min=-3.0, max=4.0)),
    "rounded": lambda m, x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -4, 5) + torch.fake_quantize_per_channel_affine(m.first.weight, torch.linspace(0.02, 0.1, 4), torch.arange(4).int(), 0, -4, 4).sum(),
    "margins": lambda m, x: functional.multilabel_margin_loss(x[:, 0, 0], torch.tensor([3, 0, -1, 1, 1, 1, 2]).expand(x.shape[0], 7), reduction="none"),
    "xlogy": lambda m, x: torch.xlogy(x.relu(), x.detach().relu()) + torch.xlogy(x.relu(), 2.0) + torch.xlogy(3.0, x.exp()),
    "of others": lambda m, x: x.ravel() + torch.atleast_3d(+x).ravel() + torch.cartesian_prod(x[0, 0, 0], x[0, 1, 1]).mean(),
    "slopes": lambda m, x: functional.rrelu(x, 0.25, 0.25, True) + functional.rrelu(x, training=False),
    "alignments": lambda m, x: functional.ctc_loss(x[:, :, 0].permute(2, 0, 1).log_softmax(-1), words(x) % 3 + 1, torch.full((x.shape[0],), 7), torch.arange(x.shape[0]) % 3 + 1, reduction="none"),
    "distances": lambda m, x: torch.cdist(x[:, 0], x[:, 1]) + torch.cdist(x[:, 0], x[:, 1, :7], p=1.0),
    "outer": lambda m, x: torch.outer(x.mean((0, 1, 2)), m.normed.bias) + x.mean((0, 1, 2)).outer(m.normed.bias),
    "gaussian": lambda m, x: functional.gaussian_nll_loss(x[:, 0], x[:, 1], x[:, 2].relu(), full=True),
    "windows": lambda m, x: x.unfold(2, 3, 2) * 2,
    "image to columns": lambda m, x: functional.fold(functional.unfold(x, 2, stride=1), (7, 7), 2, stride=1),
    "classes": lambda m, x: functional.one_hot((torch.arange(x.shape[0]) + 1) % x.shape[0], x.shape[0]).to(x.dtype) @ x.flatten(1),
    "grid": turned,
    "bicubic": lambda m, x: functional.interpolate(x, scale_factor=2, mode="bicubic"),
    "nearest of a row": lambda m, x: functional.interpolate(x.flatten(2), scale_factor=2),
    "trilinear": lambda m, x: functional.interpolate(x[:, :, None], scale_factor=2, mode="trilinear"),
    "scatter_add": lambda m, x: torch.zeros_like(x).scatter_add(2, words(x)[:, None, :, None].expand(-1, 4, 3, 7), x[:, :, :3]),
    "filters of each sample": lambda m, x: in_groups(x),
    "adaptive softmax": lambda m, x: m.adaptive(x.flatten(1)[:, :7], words(x)[:, 0]).loss + m.adaptive(x[:, 0, 0], words(x)[:, 1]).output,
    "axes": lambda m, x: x.movedim(1, -1).swapaxes(0, 1).movedim((0, 1), (2, 0)).swapdims(0, 2),
    "angles": lambda m, x: torch.tan(x.sin()) + torch.atan(x) + torch.asinh(x) + torch.sinh(x) + torch.exp2(x) + torch.erfc(x),
    "angles within": lambda m, x: torch.asin(x.tanh() / 2) + torch.acos(x.tanh() / 2) + torch.atanh(x.tanh() / 2) + torch.acosh(2 + x.cosh()) + torch.log10(1 + x.square()),
    "diagonals": lambda m, x: torch.diagonal(x, 1, 2, 3) + torch.diagonal(x[:, :, 1:], 0, -1, -2) + torch.einsum("bcii->bci", x)[..., 1:] * torch.trace(m.normed.bias.diag(1)[:, :5]),
    "a diagonal written to": lambda m, x: written(x * 1) + torch.diagonal_scatter(x, x[:, :, :6, 0], -1, 2, 3),
    "standardised": lambda m, x: sum(torch.var_mean(x, (2, 3), keepdim=True, correction=0)) + sum(torch.std_mean(x, 1, True, keepdim=True)) + sum(torch.var_mean(x)),
    "along": lambda m, x: torch.take_along_dim(x, x.argsort(3), 3) + x.take_along_dim(words(x)[:, None, :, None], 2)[:, :, :1],
    "logit": lambda m, x: torch.logit(x.sigmoid()),
    "frac": lambda m, x: torch.frac(x) + torch.logaddexp(x, 2 * x) + torch.sinc(x),
}  # fmt: skip

SLOW = ("bicubic", "alignments")  # as long as ten of the others


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FUNCTIONS]
)
def test_layers_and_their_gradients_are_torch_s(name: str) -> None:
    torch.manual_seed(1)
    module, x = Layers(FUNCTIONS[name]), torch.randn(3, 3, 7, 7)
    graph = capture_module(module, {"x": torch.zeros(2, 3, 7, 7)}, training=True)
    program = compile_graph(serialise.decode(serialise.encode(graph)), torch.device("cpu"), training=True)
    values = variables_from_module(module)
    leaves = {
        name: values[name].clone().requires_grad_(values[name].is_floating_point())
        for name in program.variables
    }
    (found,) = program.run([x], [leaves[name] for name in program.variables], None)
    wanted = module(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    pull = torch.randn(wanted.shape)
    (found * pull).sum().backward()
    (wanted * pull).sum().backward()
    for each, parameter in module.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(leaves[each].grad, parameter.grad, rtol=1e-4, atol=1e-4)


def test_what_runs_on_several_devices_is_captured_as_its_module() -> None:
    parallel = nn.DataParallel(nn.Linear(6, 3))
    parallel.device_ids, parallel.src_device_obj = [0], torch.device("cuda:0")  # as where there is one
    graph = capture_module(parallel, {"input": torch.zeros(2, 6)}, training=True)
    assert [node.op for node in graph.nodes] == ["aten.linear"]


class Bounded(nn.Module):
    """By tensors that it equals where it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.least, self.own, self.most = (nn.Parameter(torch.tensor([0.0, 1.0])) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp_min(self.own, self.least) * x + torch.clamp_max(self.own, self.most) * x.square()


def test_at_a_bound_the_gradient_is_torch_s() -> None:
    module, x = Bounded(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    program = compile_graph(
        capture_module(module, {"x": x}, training=True), torch.device("cpu"), training=True
    )
    values = variables_from_module(module)
    leaves = {name: values[name].clone().requires_grad_() for name in program.variables}
    (found,) = program.run([x], [leaves[name] for name in program.variables], None)
    for made in (found, module(x)):
        made.sum().backward()
    assert {n: leaf.grad.tolist() for n, leaf in leaves.items() if leaf.grad is not None} == {
        n: parameter.grad.tolist() for n, parameter in module.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(
    ("function", "called"),
    [
        (lambda m, x: torch.nextafter(x, x), "aten.nextafter"),
        (lambda m, x: torch.mode(x, 1).values, "aten.mode"),
        (
            lambda m, x: torch.linalg.eigvalsh(m.pairs.weight[0] + torch.eye(7)) + torch.isfinite(x),
            "aten.linalg_eigvalsh",
        ),
        (lambda m, x: torch.vmap(lambda image: torch.nextafter(image, image))(x), "aten.nextafter"),
        (
            lambda m, x: functional.embedding_bag(words(x).flatten(), m.table.weight, words(x)[:, 0]),
            "aten.embedding_bag",
        ),
    ],
)
def test_what_is_lacking_is_named_as_the_model_calls_it(function: Callable[..., Any], called: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            CaptureError, match=rf"no operator {called}[^:]*, at \S*test_layers\.py:\d+(: give bags.*)?$"
        ):
            capture_module(Layers(function), {"x": torch.zeros(2, 3, 7, 7)}, training=True)


def test_a_transposed_convolution_in_groups_of_the_batch_is_refused() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        n = x.shape[0]
        return functional.conv_transpose2d(x.reshape(1, n * 4, 7, 7), x.reshape(n * 4, 1, 7, 7), groups=n * 4)

    with pytest.raises(
        CaptureError, match=r"number of groups that is free, at \S*test_layers\.py:\d+: .*conv2d"
    ):
        capture_module(Layers(function), {"x": torch.zeros(2, 3, 7, 7)}, training=True)


class ByBatch(nn.Module):
    """A batch normalisation that is in training mode at all times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        own = self.norm
        return functional.batch_norm(
            x, own.running_mean, own.running_var, own.weight, own.bias, training=True
        )


def test_a_normalisation_by_the_batch_in_evaluation_too_has_no_running_statistics() -> None:
    module, x = ByBatch().eval(), torch.randn(4, 3)
    graph = serialise.decode(
        serialise.encode(capture_module(module, {"x": torch.zeros(2, 3)}, training=False))
    )
    program = compile_graph(graph, torch.device("cpu"), training=False)
    values = variables_from_module(module)
    (found,) = program.run([x], [values[name] for name in program.variables], None)
    torch.testing.assert_close(found, module(x))
