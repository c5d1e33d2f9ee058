"""ResNet-101 (He et al. 2015, table 1) with a stem for small images, and its loss. Run on the launching machine alone."""

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )
        nn.init.zeros_(self.bn3.weight)  # a block begins as the identity, so that a hundred layers train

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += skip
        return self.relu(x)


class ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        layers, inside = [], width
        for i, count in enumerate(blocks):
            for j in range(count):
                layers.append(Bottleneck(inside, width << i, 2 if j == 0 and i > 0 else 1))
                inside = 4 * (width << i)
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inside, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.stem(images))
        return self.fc(x.mean((2, 3)))


def model(width: int = 64) -> nn.Module:
    """101 layers: a stem, 33 blocks of three convolutions, and the classifier."""
    return ResNet((3, 4, 23, 3), width, classes=10)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels)
