"""A small U-Net (Ronneberger et al. 2015) with two outputs and two losses. Run on the launching machine alone."""

import torch
from torch import nn
from torch.nn import functional as F


def double(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([double(1, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.up = nn.ModuleList([double(6 * width, 2 * width), double(3 * width, width)])
        self.mask, self.area = nn.Conv2d(width, 1, 1), nn.Linear(4 * width, 1)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.down[0](images)
        second = self.down[1](F.max_pool2d(first, 2))
        deepest = self.down[2](F.max_pool2d(second, 2))
        x = self.up[0](torch.cat([F.interpolate(deepest, scale_factor=2.0), second], 1))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
        x = self.up[1](torch.cat([x, first], 1))  # skips go straight to the stage that needs them
        return {"mask": self.mask(x), "area": self.area(deepest.mean((2, 3)))[:, 0]}


def model(width: int = 16) -> nn.Module:
    return UNet(width)


def loss(made: dict[str, torch.Tensor], masks: torch.Tensor, areas: torch.Tensor) -> dict[str, torch.Tensor]:
    """Both are trained on, as their sum."""
    return {
        "mask": F.binary_cross_entropy_with_logits(made["mask"], masks),
        "area": 10 * F.mse_loss(made["area"], areas),
    }
