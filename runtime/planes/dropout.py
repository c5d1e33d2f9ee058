"""Dropout whose masks are a function of (seed, step, microbatch, node name) and nothing else.

The bits come from Philox, a counter-based generator (Salmon et al., SC 2011) whose output is fixed by definition: the same mask on
every device, in every execution plane and however the model is cut.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from fusion.runtime.planes.plane import RngKey


class Masks:
    """The masks of one run of a stage. `names[i]`: the node with index i."""

    def __init__(self, key: RngKey, names: Sequence[str]) -> None:
        self._prefix = struct.pack("<qqq", key.seed, key.step, key.microbatch)
        self._names = names

    def draw(self, index: int, like: torch.Tensor, p: float) -> torch.Tensor:
        """The mask of a node in the shape, dtype and device of `like`: 0 with probability p, else 1 / (1 - p)."""
        return keep_mask(self._prefix, self._names[index], like, p)

    def kept(self, name: str, count: int, p: float) -> np.ndarray:
        """Whether each element of the node is kept, in order."""
        return _kept(self._prefix, name, count, p)


def keep_mask(prefix: bytes, name: str, like: torch.Tensor, p: float) -> torch.Tensor:
    if p >= 1.0:
        return torch.zeros_like(like)
    keep = torch.from_numpy(_kept(prefix, name, like.numel(), p))
    return keep.to(like.device).view(like.shape).to(like.dtype).mul_(1.0 / (1.0 - p))


def _kept(prefix: bytes, name: str, count: int, p: float) -> np.ndarray:
    """`count` booleans, False with probability p."""
    if p >= 1.0:
        return np.zeros(count, np.bool_)
    digest = hashlib.blake2b(prefix + name.encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw((count + 1) // 2)
    bits = raw.astype("<u8", copy=False).view("<u4")[:count]
    kept: np.ndarray = bits >= np.uint32(min(round(p * 2**32), 2**32 - 1))
    return kept


def dropout(x: torch.Tensor, p: float, masks: Masks, index: int) -> torch.Tensor:
    """`fusion.dropout` in training."""
    return x * masks.draw(index, x.detach(), p)


def dropout_attention(
    query: torch.Tensor,  # (batch, heads, length, width)
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    masks: Masks,
    index: int,
) -> torch.Tensor:
    """`fusion.dropout_attention` in training: scaled_dot_product_attention with dropout on the probabilities."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    blind = None  # queries that see no key give zeros, as in the library, not NaN
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        hidden = ~attn_mask if boolean else attn_mask == -torch.inf
        scores = scores.masked_fill(hidden, -torch.inf) if boolean else scores + attn_mask
        blind = hidden.all(-1, keepdim=True)
    if blind is not None and bool(blind.any()):
        probabilities = functional.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    else:
        probabilities = functional.softmax(scores, -1)
    return dropout(probabilities, dropout_p, masks, index) @ value
