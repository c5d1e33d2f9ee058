"""Operators taken apart by us give what torch's give, and their gradients, also where values are equal, zero or not numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion.dag.ir import serialise
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

PLACES = torch.tensor([0, 1, 2, 0, 1, 1])


class Table(nn.Module):
    """A function of a row of six for each sample, which the module's parameters make."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor([1.0, -1.0, 2.0, 0.5, 1.0, 3.0]))
        self.shift = nn.Parameter(torch.tensor([0.0, 1.0, 0.0, 0.5, -1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale + self.shift)


# Halves, so that some are equal: where torch leaves open which of them it takes, it is not asked.
EQUAL = torch.tensor([[1, 2, 0.5, 2, -1, 0], [0, 1, 0.5, -1, 2, -1], [-2, 1.5, 1, 0, 0, 1]])
UNEQUAL = torch.tensor([[0.3, 2.1, 0.7, 2.2, -1.1, 0.1], [0.6, 1.3, 0.9, -1.7, 2.4, -1.2]])


def spread(x: Tensor) -> Tensor:
    """With values that are not numbers: the square roots of those below zero."""
    return x + (x.detach() + 2).sqrt().detach()


def reduced(x: Tensor, include_self: bool) -> Tensor:
    given = x[:, :5] * torch.tensor([1.0, 1.0, 0.5, 2.0, 1.0])
    made = given.index_reduce(1, PLACES, x, "prod", include_self=include_self)
    for i, kind in enumerate(("sum", "mean", "amax", "amin", "prod")):
        one = given.scatter_reduce(-1, PLACES.expand(x.shape), x, kind, include_self=include_self)
        made = made + (i + 2) * one
    return made


def written(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 4).scatter_reduce_(1, PLACES.expand(x.shape), x, "amax", include_self=False)  # fmt: skip


def pieces(x: Tensor) -> Tensor:
    found = [*x.tensor_split(4, 1), *x.tensor_split((1, -2), -1), *x.hsplit(3), *x[0].hsplit([2, 9])]
    found += [*x.T.vsplit([1, 4]), *x.view(-1, 2, 3).dsplit([1])]
    total = torch.zeros(())
    for i, piece in enumerate(found):
        total = total + (i + 1) * piece.square().sum()
    return total


def convolved(x: Tensor) -> Tensor:
    window = torch.tensor([[[1.0, 2.0, -1.0, 0.5]]])
    return functional.conv1d(x[:, None], window, padding="same") + functional.conv1d(
        x[:, None], window, None, 1, "same", 3
    )


def by_row(x: Tensor) -> Tensor:
    return x.square() @ x.adjoint() @ x.mH.mH + x.H.mT


def parts(z: Tensor) -> Tensor:
    return z.real + 2 * z.imag


def transformed(x: Tensor) -> Tensor:
    z = torch.fft.fft(x, norm="ortho")
    back = torch.fft.ifft(z * z.conj(), norm="forward") - torch.fft.ifft(z / 2, 9, norm="ortho")[:, 2:8]
    return (
        parts(back)
        + parts(torch.fft.fft(back.view(-1, 2, 3), 4, 1).mean(1)).sum(1, keepdim=True)
        + torch.fft.ifft(x).imag
    )


def halved(x: Tensor) -> Tensor:
    made = [torch.fft.irfft(torch.fft.rfft(x[:, :n], norm=norm) * torch.fft.rfft(x[:, -n:]), n) for n, norm in ((5, "ortho"), (6, "forward"))]  # fmt: skip
    shorter = torch.fft.irfft(torch.fft.rfft(x, 9), 6, norm="ortho") + torch.fft.irfft(x.view(-1, 2, 3), dim=1)[:, 0].repeat(1, 2)  # fmt: skip
    return functional.pad(made[0], (0, 1)) + made[1] + shorter


def over_both(x: Tensor) -> Tensor:
    table = x.view(-1, 2, 3)
    z = torch.fft.rfft2(table, s=(4, 5), norm="ortho")
    there = torch.fft.irfft2(z, s=(4, 5), norm="ortho")[:, :2, :3] * torch.fft.irfftn(torch.fft.rfftn(table, dim=(1, 2)), s=(2, 3), dim=(1, 2))  # fmt: skip
    return there.sin() + torch.fft.fftn(table, dim=(2, 1)).imag + torch.fft.ifft2(torch.fft.fft2(table)).real


def spectrogram(x: Tensor) -> Tensor:
    sound, window = x.repeat(1, 4), torch.hann_window(6)
    z = torch.stft(sound, 8, 3, 6, window, normalized=True, return_complex=True)
    plain = torch.stft(sound[0], 8, center=False, return_complex=False, onesided=False)
    return z.abs().square().sum((1, 2)) + plain.sin().sum() + z.angle().cos().sum()


def rotated(x: Tensor) -> Tensor:
    """By complex numbers that the code makes of real ones, by a constant, and on both sides of each operator."""
    z = x + 1j * x.flip(1)[:1] + (2 - 0.5j)
    power = torch.exp(-0.1 * x.square() + 1j * torch.arange(6)[:, None, None])
    made = (
        (z * power - 1) / (1j - z)
        + (3 - z) / (2 + 1j)
        + 1 / (z + 4)
        + x / (1 + 1j * x)
        - power.cumsum(1) * 1j
    )
    return parts(made).sum(0) + z.to(torch.cfloat).real + x.to(torch.cfloat).imag


def filled(x: Tensor) -> Tensor:
    z, spectrum = torch.zeros(x.shape[0], 2, 4, dtype=torch.cfloat), torch.fft.rfft(x)
    z[:, 0, :3] = spectrum[:, 1:] * spectrum[:, :1]
    z[:, 1, 1:] += spectrum[:, :3]
    later = spectrum.clone()
    later[:, 1] *= 2
    later[:, 2:] = 0
    z[:, 1] -= later * torch.tensor([1j, 2.0, 1.0, 1 + 1j])
    return parts(z.masked_fill(torch.arange(4) == 2, 0.5)).flatten(1)


def resynthesised(x: Tensor) -> Tensor:
    sound, window = x.repeat(1, 4), torch.hann_window(6) + 0.1
    z = torch.stft(sound, 8, 2, 6, window, normalized=True, return_complex=True)
    z = z * torch.arange(1.0, 6.0)[:, None]
    made = torch.istft(z, 8, 2, 6, window, normalized=True, length=26) + functional.pad(
        torch.istft(z[0], 8, 2, 6, window), (0, 2)
    )
    framed = torch.stft(sound, 8, 4, center=False, return_complex=True)
    return made + functional.pad(torch.istft(framed, 8, 4, window=torch.ones(8), center=False), (0, 2))


def matrices(x: Tensor, n: int = 3) -> Tensor:
    """Positive definite, of which the pivots are not on the diagonal: (batch, n, n)."""
    rows = x.repeat(1, n)[:, : n * n].view(-1, n, n) * torch.arange(1.0, n * n + 1).view(n, n).sin()
    return rows @ rows.mT + torch.eye(n) / 2


def determined(x: Tensor) -> Tensor:
    made = x.sum() * 0
    for n in (1, 3, 5):  # along the first row, and by elimination
        a = matrices(x, n).flip(-1)  # no longer symmetric
        made = made + torch.linalg.det(a).sum()
    sign, size = torch.linalg.slogdet(matrices(x, 3).flip(-1))
    two = matrices(x, 2).flip(-1)
    made = made + (sign * size).sum() + torch.logdet(two @ two).sum()
    return made + torch.linalg.det(x[:, None, :1] * torch.ones(3, 3)).sum()


def solved(x: Tensor) -> Tensor:
    a, several = matrices(x).flip(-1), x.view(-1, 2, 3).mT
    made = torch.linalg.inv(a) + torch.inverse(matrices(x[0:1], 3)[0])
    made = (
        made
        + torch.linalg.solve(a, several).sum((1, 2))[:, None, None]
        + torch.linalg.solve(a, x[:, :3])[:, None]
    )
    return made + torch.linalg.solve(a, several.mT, left=False).sum(1)[:, None]


def factored(x: Tensor) -> Tensor:
    a, several = matrices(x), x.view(-1, 2, 3).mT
    lower, upper = torch.linalg.cholesky(a), torch.linalg.cholesky(a + several @ several.mT, upper=True)
    made = lower * upper + torch.cholesky_inverse(lower) + torch.linalg.cholesky(a + torch.ones(3, 3).triu(1))
    one = torch.linalg.solve_triangular(lower, several, upper=False) + torch.linalg.solve_triangular(
        upper + 1, several, upper=True, unitriangular=True
    )
    other = torch.linalg.solve_triangular(upper, several.mT, upper=True, left=False)
    return (
        made + (one * other.mT + torch.cholesky_solve(several, upper, upper=True)).sum((1, 2))[:, None, None]
    )


def written_as_pairs(x: Tensor) -> Tensor:
    z = torch.fft.rfft(x)
    torch.view_as_real(z).mul_(0.5)
    return parts(z)


def written_by_part(x: Tensor) -> Tensor:
    z = torch.fft.rfft(x)
    z.real.add_(1)
    return parts(z)


def written_below(x: Tensor) -> Tensor:
    pairs = x.view(-1, 3, 2) * 2
    z = torch.view_as_complex(pairs)
    pairs.mul_(3)
    return parts(z)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fft": transformed,
    "sinc": torch.sinc,
    "of real numbers": halved,
    "over two dimensions": over_both,
    "spectrogram": spectrogram,
    "complex constants": rotated,
    "complex numbers written": filled,
    "complex numbers written as pairs": written_as_pairs,
    "a part of complex numbers written": written_by_part,
    "what complex numbers are made of written": written_below,
    "sound of a spectrogram": resynthesised,
    "gamma functions": lambda x: torch.lgamma(x.square() + 0.01) + torch.lgamma(30 * x.abs() + 1) / 30 + torch.digamma(x.square() + 0.3) + torch.special.gammaln(2 + x.square()).cos(),
    "gamma functions below zero": lambda x: torch.lgamma(x.tanh() / 3 - 1.5) + torch.digamma(x.tanh() / 3 - 2.5) * torch.special.psi(x.tanh() / 3 - 0.5),
    "determinants": determined,
    "inverses": solved,
    "triangular factors": factored,
    "complex matrices": lambda x: parts(torch.einsum("bi,bj->ij", torch.fft.rfft(x), torch.fft.rfft(x.flip(1)))) + parts(torch.fft.rfft(x) @ torch.complex(torch.ones(4, 3), x[0, :3].expand(4, 3))).sum(),
    "complex numbers joined": lambda x: (torch.cat([torch.fft.rfft(x), torch.fft.rfft(x.flip(1)) / 2], 1) - torch.stack([torch.fft.fft(x), -torch.fft.fft(x)])[1].sum(1, True)).abs().sum()
    + torch.where(x[:, :1] > 0, torch.fft.fft(x), torch.fft.fft(2 * x)).imag.mean(),
    "angle of what is real": lambda x: torch.fft.rfft(x * x + 1).angle() + torch.fft.fft(-x * x - 1)[:, :4].angle(),
    "length of zero": lambda x: torch.complex(x - x, x - x.detach()).abs() + torch.complex(x, x).abs(),
    "hypot": lambda x: torch.hypot(x, x.flip(1) + 4) + torch.hypot(1e25 * x, 2e25 * (1 + x.square())) * 1e-25,
    "hypot of what is tiny": lambda x: torch.hypot(1e-25 * x, 2e-25 * (1 + x.square())) * 1e25,
    "sign of another": lambda x: torch.copysign(x, -x.flip(1)) + 2 * torch.copysign(x.flip(1), -1.5) + 3 * x.copysign(0.0),
    "sign of a zero": lambda x: torch.copysign(x, torch.tensor([0.0, -0.0, 1.0, -1.0, -0.0, 0.0])),
    "pieces": pieces,
    "conjugated": by_row,
    "same, more on one side": convolved,
    "median of all": lambda x: torch.median(x) + 2 * torch.nanmedian(x),
    "median": lambda x: torch.median(x[:, :5], 1).values + x.median(-1, keepdim=True)[0],
    "median of what is no number": lambda x: torch.where(spread(x).median(1, True).values.isnan(), x, 2 * x) + spread(x).nanmedian(1, True).values,
    "third": lambda x: torch.kthvalue(x, 3).values + x.kthvalue(2, 1, True).values,
    "cummax": lambda x: torch.cummax(x, 1).values,
    "cummin": lambda x: x.cummin(-1).values * (1 + x.cummin(1).indices),
    "cummax of what is no number": lambda x: torch.where(spread(x).cummax(1).values.isnan(), x, 2 * x),
    "logcumsumexp": lambda x: torch.logcumsumexp(40 * x, 1),
    "at places, with what was there": lambda x: reduced(x, True),
    "at places, without": lambda x: reduced(x, False),
    "written to": written,
    "written where a mask is": lambda x: x.masked_scatter(x > 0.5, 2 * x.flip(1)) + torch.ones(6).masked_scatter(x < 1, x.square()),
    "the larger number": lambda x: torch.fmax(spread(x), x.flip(1)) + 2 * torch.fmax(x, spread(x.flip(1))),
    "the smaller number": lambda x: torch.fmin(spread(x), x.flip(1)) + 2 * torch.fmin(x, spread(x.flip(1))),
    "rounded": lambda x: x * (torch.round(1.234 * x, decimals=1) + torch.round(123.4 * x, decimals=-2) + x.round(decimals=0)),
    "products that are summed": lambda x: torch.addbmm(x[:1, :2], x.view(-1, 2, 3), x.view(-1, 3, 2), beta=0.5, alpha=2)
    + torch.addbmm(x[:1, :2], x.view(-1, 2, 3), x.view(-1, 3, 2)),
}  # fmt: skip
# Of equal values torch looks none of these up at a place that it promises.
# As long as ten of the others.
SLOW = ("sound of a spectrogram", "over two dimensions", "inverses", "triangular factors", "complex matrices")
OPEN = ("median", "median of what is no number", "third", "spectrogram", "complex numbers joined")


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FUNCTIONS]
)
def test_operators_and_their_gradients_are_torch_s(name: str) -> None:
    torch.manual_seed(1)
    module = Table(FUNCTIONS[name])
    graph = capture_module(module, {"x": torch.zeros(4, 6)}, training=True)
    program = compile_graph(serialise.decode(serialise.encode(graph)), torch.device("cpu"), training=True)
    for x in [UNEQUAL] if name in OPEN else [EQUAL, UNEQUAL]:
        values = variables_from_module(module)
        leaves = {each: values[each].clone().requires_grad_() for each in program.variables}
        (found,) = program.run([x], [leaves[each] for each in program.variables], None)
        wanted = module(x)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        module.zero_grad()
        pull = torch.randn(wanted.shape)
        (found * pull).sum().backward()
        (wanted * pull).sum().backward()
        for each in ("scale", "shift"):
            parameter = module.get_parameter(each)
            assert parameter.grad is not None
            torch.testing.assert_close(leaves[each].grad, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "called", "remedy"),
    [
        (lambda x: x.cummax(0).values, "aten.cummax", ""),
        (lambda x: x.scatter_reduce(0, PLACES[:1].expand(x.shape), x, "amax"), "aten.scatter_reduce.two", ": for amax, amin and prod, into at most 256 places .*"),
        (lambda x: torch.zeros(x.shape[0], 300).scatter_reduce(1, PLACES.expand(x.shape), x, "amin"), "aten.scatter_reduce.two", ": for amax, amin and prod, into at most 256 places .*"),
    ],
)  # fmt: skip
def test_what_has_no_bound_on_its_size_is_named_as_the_model_calls_it(
    function: Callable[[Tensor], Tensor], called: str, remedy: str
) -> None:
    where = r"at \S*test_decompositions\.py:\d+"
    with pytest.raises(CaptureError, match=rf"no operator {called}, .*, {where}{remedy}$"):
        capture_module(Table(function), {"x": torch.zeros(2, 6)}, training=True)
