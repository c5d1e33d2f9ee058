"""Modules that differ as much as those that people train: each with two or more samples of its inputs, and its loss."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

EXAMPLES = Path(__file__).parents[2] / "examples"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class AnyModule:
    """A module with its samples and its loss. `loss` takes the result of forward, and the last arrays, which forward does not get."""

    module: nn.Module
    arrays: Tensors
    loss: Callable[..., Any]
    of_loss: int = 1

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        return tuple(self.arrays)[len(self.arrays) - self.of_loss :]

    @property
    def module_inputs(self) -> tuple[str, ...]:
        return tuple(self.arrays)[: len(self.arrays) - self.of_loss]

    def own_loss(self, batch: Tensors) -> torch.Tensor:
        """The loss, computed by the module itself."""
        made = self.module(**{name: batch[name] for name in self.module_inputs})
        return total(self.loss(made, *(batch[name] for name in self.loss_inputs)))


def total(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor):
        return loss
    first, *rest = loss.values()
    for part in rest:
        first = first + part
    return first  # type: ignore[no-any-return]


def example(name: str) -> ModuleType:
    """The module of an example's model.py."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Made(nn.Module):
    """A module whose forward is the function `run` of its `parts`, passed by name."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, **arrays: torch.Tensor) -> Any:
        return self.run(self, **arrays)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(*shape))


def mlp() -> AnyModule:
    net = nn.Sequential(
        nn.Linear(5, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8), nn.ELU(), nn.Linear(8, 3)
    )
    return AnyModule(Made(lambda m, x: m.net(x), net=net), {"x": r(4, 5), "y": ids(3, 4)}, F.cross_entropy)


def resnet() -> AnyModule:
    of = example("digits-resnet")
    return AnyModule(of.ResNet((1, 1, 2, 1), 4, 10), {"images": r(4, 1, 8, 8), "labels": ids(10, 4)}, of.loss)


def unet() -> AnyModule:
    of = example("unet")
    arrays = {"images": r(4, 1, 16, 16), "masks": torch.rand(4, 1, 16, 16), "areas": torch.rand(4)}
    return AnyModule(of.model(4), arrays, of.loss, of_loss=2)


def encoder() -> AnyModule:
    of = example("encoder")
    module = of.model(16, 2, 3, 6)
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.MultiheadAttention):
            setattr(part, "p" if isinstance(part, nn.Dropout) else "dropout", 0.0)
    mask = torch.arange(6) < torch.tensor([[6], [3], [5], [1]])
    return AnyModule(module, {"text": ids(200, 4, 6), "text_mask": mask, "topic": ids(3, 4)}, of.loss)


def encoder_decoder() -> AnyModule:
    def run(m: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ahead = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return m.head(m.core(m.source(source), m.target(target), tgt_mask=ahead, tgt_is_causal=True))  # type: ignore[no-any-return]

    core = nn.Transformer(8, 2, 1, 2, 16, dropout=0.0, batch_first=True)
    module = Made(run, core=core, source=nn.Embedding(9, 8), target=nn.Embedding(9, 8), head=nn.Linear(8, 9))
    arrays = {"source": ids(9, 3, 7), "target": ids(9, 3, 5), "next": ids(9, 3, 5)}
    return AnyModule(module, arrays, lambda made, y: F.cross_entropy(made.flatten(0, 1), y.flatten()))


def experts() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        scores = m.gate(x).softmax(-1)
        best = scores.topk(2).values[:, -1:]
        share = torch.where(scores >= best, scores, 0.0)
        share = share / share.sum(-1, keepdim=True)
        made = torch.einsum("bi,eio->beo", x, m.up).relu()
        return m.head((torch.einsum("beo,eoi->bei", made, m.down) * share[..., None]).sum(1))  # type: ignore[no-any-return]

    module = Made(run, gate=nn.Linear(6, 4), up=weight(4, 6, 8), down=weight(4, 8, 6), head=nn.Linear(6, 1))
    return AnyModule(module, {"x": r(5, 6), "y": r(5, 1)}, F.mse_loss)


def gru_cell() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[0], 6)
        for t in range(4):
            h = m.cell(x[:, t], h)
        return m.head(h)  # type: ignore[no-any-return]

    module = Made(run, cell=nn.GRUCell(3, 6), head=nn.Linear(6, 2))
    return AnyModule(module, {"x": r(3, 4, 3), "y": r(3, 2)}, F.smooth_l1_loss)


def lstm_cell() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 6), torch.zeros(x.shape[0], 6)
        seen = []
        for t in range(4):
            state = m.cell(x[:, t], state)
            seen.append(state[0])
        return m.head(torch.stack(seen, 1))  # type: ignore[no-any-return]

    module = Made(run, cell=nn.LSTMCell(3, 6), head=nn.Linear(6, 2))
    return AnyModule(module, {"x": r(3, 4, 3), "y": r(3, 4, 2)}, F.l1_loss)


def tied_autoencoder() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, m.matrix, m.there)), m.matrix.t(), m.back)

    module = Made(run, matrix=weight(3, 7), there=weight(3), back=weight(7))
    # What it reads is what it is to give back.
    return AnyModule(module, {"x": (x := r(6, 7)), "y": x.clone()}, F.mse_loss)


def variational() -> AnyModule:
    def run(m: Any, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, log_var = m.encode(x).chunk(2, 1)
        return m.decode(mean + noise * (0.5 * log_var).exp()), mean, log_var

    def loss(made: Any, x: torch.Tensor) -> Tensors:
        out, mean, log_var = made
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        return {"reconstruction": F.binary_cross_entropy_with_logits(out, x), "kl": 0.1 * kl}

    module = Made(
        run, encode=nn.Linear(6, 6), decode=nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
    )
    return AnyModule(module, {"x": r(4, 6), "noise": r(4, 3), "seen": torch.rand(4, 6)}, loss)


def two_towers() -> AnyModule:
    def run(m: Any, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(m.image(image), dim=-1), F.normalize(m.text(text).mean(1), dim=-1)
        return m.scale.exp() * a @ b.t()  # type: ignore[no-any-return]

    def loss(made: torch.Tensor, weights: torch.Tensor) -> Tensors:
        place = torch.arange(made.shape[0])
        return {
            "rows": (F.cross_entropy(made, place, reduction="none") * weights).mean(),
            "columns": (F.cross_entropy(made.t(), place, reduction="none") * weights).mean(),
        }

    image = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))
    module = Made(run, image=image, text=nn.Embedding(11, 5), scale=nn.Parameter(torch.tensor(0.5)))
    return AnyModule(module, {"image": r(4, 3, 8, 8), "text": ids(11, 4, 6), "weights": torch.rand(4)}, loss)


def wavenet() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        skips = 0.0
        for gate, back, d in zip(m.gates, m.backs, (1, 2, 4), strict=True):
            a, b = gate(F.pad(x, (d, 0))).chunk(2, 1)
            x = back(torch.tanh(a) * torch.sigmoid(b)) + x
            skips = skips + x
        return m.head(F.relu(skips))  # type: ignore[no-any-return]

    gates = nn.ModuleList(nn.Conv1d(3, 6, 2, dilation=d) for d in (1, 2, 4))
    backs = nn.ModuleList(nn.Conv1d(3, 3, 1) for _ in range(3))
    module = Made(run, gates=gates, backs=backs, head=nn.Conv1d(3, 5, 1))
    return AnyModule(module, {"x": r(2, 3, 12), "y": ids(5, 2, 12)}, F.cross_entropy)


def video() -> AnyModule:
    net = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.GELU(), nn.Conv3d(4, 4, 2, 2), nn.Flatten(), nn.Linear(32, 2)
    )  # fmt: skip
    return AnyModule(
        Made(lambda m, x: m.net(x), net=net), {"x": r(3, 2, 4, 4, 4), "y": ids(2, 3)}, F.cross_entropy
    )


def generator() -> AnyModule:
    net = nn.Sequential(
        nn.Linear(5, 32), nn.Unflatten(1, (8, 2, 2)), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, 2), nn.LeakyReLU(0.2), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    return AnyModule(Made(lambda m, z: m.net(z), net=net), {"z": r(4, 5), "y": r(4, 1, 8, 8)}, F.mse_loss)


def mobile() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.hardswish(m.n1(m.depth(x)))
        y = y * F.hardsigmoid(m.excite(F.relu(m.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return m.head((m.n2(m.point(y)) + x).mean((2, 3)))  # type: ignore[no-any-return]

    module = Made(
        run, depth=nn.Conv2d(6, 6, 3, padding="same", groups=6), n1=nn.BatchNorm2d(6), squeeze=nn.Conv2d(6, 2, 1),
        excite=nn.Conv2d(2, 6, 1), point=nn.Conv2d(6, 6, 1), n2=nn.BatchNorm2d(6), head=nn.Linear(6, 3),
    )  # fmt: skip
    return AnyModule(module, {"x": r(4, 6, 5, 5), "y": ids(3, 4)}, F.cross_entropy)


def densenet() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for norm, conv in zip(m.norms, m.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return m.head(F.avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]

    norms = nn.ModuleList(nn.BatchNorm2d(2 + 3 * i) for i in range(3))
    convs = nn.ModuleList(nn.Conv2d(2 + 3 * i, 3, 3, padding=1) for i in range(3))
    module = Made(run, norms=norms, convs=convs, head=nn.Linear(44, 2))
    return AnyModule(module, {"x": r(4, 2, 4, 4), "y": ids(2, 4)}, F.cross_entropy)


def vision_transformer() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        patches = m.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([m.first.expand(x.shape[0], 1, 8), patches], 1) + m.places
        return m.head(m.core(x)[:, 0])  # type: ignore[no-any-return]

    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True, norm_first=True)
    core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    module = Made(
        run, patch=nn.Conv2d(3, 8, 4, 4), first=weight(1, 1, 8), places=weight(5, 8), core=core, head=nn.Linear(8, 4)
    )  # fmt: skip
    return AnyModule(module, {"x": r(3, 3, 8, 8), "y": ids(4, 3)}, F.cross_entropy)


def mixer() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for norm, along, norm_2, across in zip(m.n1, m.along, m.n2, m.across, strict=True):
            x = x + F.gelu(along(norm(x).transpose(1, 2))).transpose(1, 2)
            x = x + F.gelu(across(norm_2(x)))
        return x.mean(1)

    def several(make: Callable[[], nn.Module]) -> nn.ModuleList:
        return nn.ModuleList(make() for _ in range(2))

    module = Made(
        run, n1=several(lambda: nn.LayerNorm(6)), n2=several(lambda: nn.LayerNorm(6)),
        along=several(lambda: nn.Linear(5, 5)), across=several(lambda: nn.Linear(6, 6)),
    )  # fmt: skip
    return AnyModule(module, {"x": r(3, 5, 6), "y": ids(6, 3)}, F.cross_entropy)


def graph_network() -> AnyModule:
    def run(m: Any, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        degrees = edges.sum(-1, keepdim=True).clamp(min=1.0)
        for part in m.parts:
            nodes = F.relu(part(torch.cat([nodes, (edges @ nodes) / degrees], -1)))
        return m.head(nodes.amax(1))  # type: ignore[no-any-return]

    module = Made(run, parts=nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]), head=nn.Linear(4, 1))
    arrays = {"nodes": r(3, 6, 4), "edges": (torch.rand(3, 6, 6) > 0.5).float(), "y": torch.rand(3, 1)}
    return AnyModule(module, arrays, F.binary_cross_entropy_with_logits)


def recommender() -> AnyModule:
    def run(m: Any, user: torch.Tensor, items: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        u, i, n = m.users(user), m.items(items).mean(1), m.bottom(numbers)
        parts = torch.stack([u, i, n], 1)
        crossed = (parts @ parts.transpose(1, 2)).flatten(1)
        return m.top(torch.cat([n, crossed], 1))[:, 0]  # type: ignore[no-any-return]

    module = Made(
        run, users=nn.Embedding(7, 4), items=nn.Embedding(9, 4), bottom=nn.Linear(3, 4), top=nn.Linear(13, 1)
    )
    arrays = {"user": ids(7, 5), "items": ids(9, 5, 3), "numbers": r(5, 3), "clicked": torch.rand(5)}
    return AnyModule(module, arrays, F.binary_cross_entropy_with_logits)


def conformer() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * m.first(x)
        y = m.norm(x)
        x = x + m.attention(y, y, y, need_weights=False)[0]
        y = F.glu(m.point(x.transpose(1, 2)), 1)
        x = x + m.out(F.silu(m.batch(m.depth(y)))).transpose(1, 2)
        return m.head(x)  # type: ignore[no-any-return]

    first = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    module = Made(
        run, first=first, norm=nn.LayerNorm(8), attention=nn.MultiheadAttention(8, 2, batch_first=True),
        point=nn.Conv1d(8, 16, 1), depth=nn.Conv1d(8, 8, 3, padding=1, groups=8), batch=nn.BatchNorm1d(8),
        out=nn.Conv1d(8, 8, 1), head=nn.Linear(8, 5),
    )  # fmt: skip
    return AnyModule(
        module, {"x": r(3, 6, 8), "y": ids(5, 3, 6)}, lambda made, y: F.cross_entropy(made.transpose(1, 2), y)
    )


def siamese() -> AnyModule:
    def run(m: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (m.net(left) - m.net(right)).square().sum(1)  # type: ignore[no-any-return]

    net = nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 3))
    arrays = {"left": r(5, 4), "right": r(5, 4), "same": ids(2, 5).float()}

    def loss(distance: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        return (same * distance + (1 - same) * F.relu(1 - distance)).mean()

    return AnyModule(Made(run, net=net), arrays, loss)


def perceiver() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        latents = m.latents.expand(x.shape[0], 3, 8)
        for cross, own in zip(m.cross, m.own, strict=True):
            latents = latents + cross(latents, x, x, need_weights=False)[0]
            latents = latents + own(latents, latents, latents, need_weights=False)[0]
        return m.head(latents.mean(1))  # type: ignore[no-any-return]

    def several() -> nn.ModuleList:
        return nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    module = Made(run, latents=weight(1, 3, 8), cross=several(), own=several(), head=nn.Linear(8, 2))
    return AnyModule(module, {"x": r(3, 9, 8), "y": r(3, 2)}, F.huber_loss)


def inception() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        pooled = F.max_pool2d(x, 3, 1, 1)
        x = torch.cat([m.one(x), m.three(F.relu(m.before(x))), m.pooled(pooled), F.avg_pool2d(x, 3, 1, 1)], 1)
        return m.head(m.norm(x).amax((2, 3)))  # type: ignore[no-any-return]

    module = Made(
        run, one=nn.Conv2d(3, 2, 1), before=nn.Conv2d(3, 2, 1), three=nn.Conv2d(2, 4, 3, padding=1),
        pooled=nn.Conv2d(3, 3, 1), norm=nn.GroupNorm(3, 12), head=nn.Linear(12, 2),
    )  # fmt: skip
    return AnyModule(module, {"x": r(3, 3, 6, 6), "y": ids(2, 3)}, F.cross_entropy)


def sines() -> AnyModule:
    def run(m: Any, place: torch.Tensor) -> torch.Tensor:
        x = torch.sin(30 * m.a(place))
        return m.c(torch.sin(m.b(x)) * torch.cos(x))  # type: ignore[no-any-return]

    module = Made(run, a=nn.Linear(2, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 3))
    return AnyModule(module, {"place": r(6, 2), "colour": torch.rand(6, 3)}, F.mse_loss)


def super_resolution() -> AnyModule:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        fine = F.pixel_shuffle(m.out(F.relu(m.norm(m.into(x)))), 2)
        return fine + F.interpolate(x, size=(12, 12), mode="bilinear", align_corners=False)

    module = Made(
        run, into=nn.Conv2d(2, 8, 3, padding=1), norm=nn.GroupNorm(2, 8), out=nn.Conv2d(8, 8, 3, padding=1)
    )
    return AnyModule(module, {"x": r(2, 2, 6, 6), "y": r(2, 2, 12, 12)}, F.l1_loss)


def every_second() -> AnyModule:
    """Pairs that follow each other in the batch, as some contrastive losses have them."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.normalize(m.net(x), dim=1)
        return h[::2].mean(0) @ h[1::2].mean(0) + (h[::3, ::2] ** 2).sum()  # type: ignore[no-any-return]

    module = Made(run, net=nn.Linear(4, 6))
    return AnyModule(module, {"x": r(7, 4), "w": r(7)}, lambda made, w: made * w[1::2].square().sum())


def modulated() -> AnyModule:
    """StyleGAN's convolution: filters of each sample's own, demodulated."""

    def run(m: Any, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        filters = m.filters * (m.style(style) + 1).view(b, 1, c, 1, 1)
        filters = filters * torch.rsqrt(filters.square().sum([2, 3, 4], keepdim=True) + 1e-8)
        made = F.conv2d(x.view(1, b * c, h, w), filters.view(b * 4, c, 3, 3), padding=1, groups=b)
        return m.bias + made.view(b, 4, h, w)  # type: ignore[no-any-return]

    module = Made(run, filters=weight(1, 4, 2, 3, 3), style=nn.Linear(5, 2), bias=weight(4, 1, 1))
    return AnyModule(module, {"x": r(3, 2, 5, 6), "style": r(3, 5), "y": r(3, 4, 5, 6)}, F.mse_loss)


def selective_scan() -> AnyModule:
    """Mamba's scan as a loop over time."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        b, length, d = x.shape
        x = F.silu(m.conv(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        step, into, out = m.parts(x).split([d, 3, 3], -1)
        step = F.softplus(step)
        decay = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(m.log_a)))
        driven = torch.einsum("bld,bln,bld->bldn", step, into, x)
        state, seen = torch.zeros(b, d, 3), []
        for t in range(length):
            state = decay[:, t] * state + driven[:, t]
            seen.append(torch.einsum("bdn,bn->bd", state, out[:, t]))
        return torch.stack(seen, 1) + x * m.skip  # type: ignore[no-any-return]

    conv = nn.Conv1d(4, 4, 3, groups=4, padding=2)
    module = Made(run, conv=conv, parts=nn.Linear(4, 10), log_a=weight(4, 3), skip=weight(4))
    return AnyModule(module, {"x": r(3, 5, 4), "y": r(3, 5, 4)}, F.mse_loss)


def quantised() -> AnyModule:
    """VQ-VAE, with a straight-through estimate."""

    def run(m: Any, x: torch.Tensor) -> Tensors:
        z = m.encode(x).permute(0, 2, 3, 1).contiguous()
        flat, codes = z.view(-1, 4), m.codes.weight
        apart = flat.square().sum(1, keepdim=True) + codes.square().sum(1) - 2 * flat @ codes.t()
        chosen = torch.zeros(flat.shape[0], 8).scatter_(1, apart.argmin(1).unsqueeze(1), 1)
        found = (chosen @ codes).view(z.shape)
        near = F.mse_loss(found, z.detach()) + 0.25 * F.mse_loss(found.detach(), z)
        return {"near": near, "made": m.decode((z + (found - z).detach()).permute(0, 3, 1, 2))}

    module = Made(
        run,
        encode=nn.Conv2d(1, 4, 4, 2, 1),
        codes=nn.Embedding(8, 4),
        decode=nn.ConvTranspose2d(4, 1, 4, 2, 1),
    )
    arrays = {"x": (x := r(3, 1, 8, 8)), "y": x.clone()}
    return AnyModule(
        module, arrays, lambda made, y: {"made": F.mse_loss(made["made"], y), "near": made["near"]}
    )


def sparse_experts() -> AnyModule:
    """Two of four experts in a loop, and a loss that balances their loads."""

    def run(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.view(-1, 6)
        shares = m.gate(flat).softmax(-1)
        weights, chosen = shares.topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(m.experts):
            rows, nth = torch.where(chosen == number)
            out[rows] += weights[rows, nth, None] * expert(flat[rows])
        load = F.one_hot(chosen, 4).float().sum(1).mean(0)
        return out.view(x.shape), 4 * (load * shares.mean(0)).sum()

    each = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(4))
    module = Made(run, gate=nn.Linear(6, 4, bias=False), experts=each)
    return AnyModule(
        module, {"x": r(3, 4, 6), "y": r(3, 4, 6)}, lambda made, y: F.mse_loss(made[0], y) + 0.01 * made[1]
    )


def random_field() -> AnyModule:
    """A linear-chain CRF over texts of several lengths."""

    def run(m: Any, x: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores, pairs = m.scores(x), m.pairs
        path = scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        all_paths = scores[:, 0]
        for t in range(1, 5):
            step = pairs[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            path = path + step * mask[:, t]
            after = torch.logsumexp(all_paths[:, :, None] + pairs + scores[:, t, None], 1)
            all_paths = torch.where(mask[:, t, None], after, all_paths)
        return torch.logsumexp(all_paths, 1) - path

    mask = torch.arange(5) < torch.tensor([[5], [3], [4]])
    arrays = {"x": r(3, 5, 4), "tags": ids(4, 3, 5), "mask": mask, "weights": torch.rand(3)}
    module = Made(run, scores=nn.Linear(4, 4), pairs=weight(4, 4))
    return AnyModule(module, arrays, lambda made, weights: (made * weights).mean())


class MomentumPair(nn.Module):
    """MoCo: a second encoder that follows the first, and a queue of its results."""

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.follower = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query = F.normalize(self.trained(one), dim=1)
        with torch.no_grad():
            for source, copy in zip(self.trained.parameters(), self.follower.parameters(), strict=True):
                copy.mul_(0.9).add_(source, alpha=0.1)
            key = F.normalize(self.follower(other), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.1
        self.queue = torch.cat([self.queue, key.t()], 1)[:, -12:]
        return logits


def momentum_pair() -> AnyModule:
    def loss(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        first = torch.zeros(logits.shape[0], dtype=torch.int64)
        return (F.cross_entropy(logits, first, reduction="none") * weights).mean()

    return AnyModule(MomentumPair(), {"one": r(4, 3), "other": r(4, 3), "weights": torch.rand(4)}, loss)


def rays() -> AnyModule:
    """NeRF: sines of places on a ray, and what the ray sees of their colours."""

    def run(m: Any, start: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        t = torch.linspace(0.1, 1, 6)
        places = start[:, None] + way[:, None] * t[:, None]
        waves = [f(places * 2.0**k) for k in range(2) for f in (torch.sin, torch.cos)]
        made = m.net(torch.cat([places, *waves], -1))
        lengths = torch.cat([t[1:] - t[:-1], torch.tensor([1e10])]) * way.norm(dim=-1, keepdim=True)
        opaque = 1 - torch.exp(-F.relu(made[..., 3]) * lengths)
        left = torch.cumprod(torch.cat([torch.ones(opaque.shape[0], 1), 1 - opaque + 1e-10], -1), -1)[:, :-1]
        return ((opaque * left)[..., None] * made[..., :3].sigmoid()).sum(-2)  # type: ignore[no-any-return]

    net = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 4))
    arrays = {"start": r(4, 3), "way": r(4, 3), "colour": torch.rand(4, 3)}
    return AnyModule(Made(run, net=net), arrays, F.mse_loss)


MAKERS = (
    mlp, resnet, unet, encoder, encoder_decoder, experts, gru_cell, lstm_cell, tied_autoencoder, variational, two_towers,
    wavenet, video, generator, mobile, densenet, vision_transformer, mixer, graph_network, recommender, conformer, siamese,
    perceiver, inception, sines, super_resolution, every_second, modulated, selective_scan, quantised, sparse_experts,
    random_field, momentum_pair, rays,
)  # fmt: skip
