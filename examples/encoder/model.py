"""A transformer encoder that says what a sentence is about. Run on the launching machine alone."""

import torch
from torch import nn
from torch.nn import functional as F


class Encoder(nn.Module):
    def __init__(self, width: int, layers: int, classes: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, text: torch.Tensor, text_mask: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight  # (batch, length, width)
        x = self.encoder(x, src_key_padding_mask=~text_mask)
        there = text_mask[..., None].to(x.dtype)
        return self.head((x * there).sum(1) / there.sum(1))


def model(width: int = 64, layers: int = 4, classes: int = 3, length: int = 48) -> nn.Module:
    return Encoder(width, layers, classes, length)


def loss(logits: torch.Tensor, topic: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, topic)
