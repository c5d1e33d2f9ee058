"""`fusion.recurrence`: a state that decays, is written to at every position, and is read there.

Position by position, so that a sequence in pieces has the bits of a whole one: each position is computed with tensors of the same
shapes whatever runs with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.runtime.job.worker import rest


def recurrence(
    query: torch.Tensor,  # (batch, key heads, length, width)
    key: torch.Tensor,
    value: torch.Tensor,  # (batch, heads, length, width')
    decay: torch.Tensor,  # (batch, heads, length, width or 1)
    beta: torch.Tensor | None,  # (batch, heads, length, 1)
    rates: torch.Tensor | None,  # (heads, width)
) -> torch.Tensor:
    """`fusion.recurrence`, of a whole sequence."""
    kept = (key, value, decay) if beta is None else (key, value, decay, beta)
    return read(query, kept, rates, first_state(kept))[0]


def first_state(kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a sequence begins with: zeros (batch, key heads, heads a key head, width, width')."""
    key, value = kept[:2]
    shared = key.shape[1]
    shape = (key.shape[0], shared, value.shape[1] // shared, key.shape[3], value.shape[3])
    return torch.zeros(shape, dtype=torch.float32, device=key.device)


def read(
    query: torch.Tensor | None,
    kept: Sequence[torch.Tensor],  # key, value, decay and perhaps beta
    rates: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the positions read (batch, heads, length, width'), nothing of them without a query, and the state after the last."""
    batch, shared, times, width, _ = state.shape
    split = (batch, shared, times)
    key, value, decay, *more = (tensor.float() for tensor in kept)
    beta = more[0] if more else None
    own = None if rates is None else rates.float().view(1, shared, times, width, 1)
    queries = None if query is None else query.float()
    state = state.clone()
    found = []
    for at in range(key.shape[2]):
        faster = decay[:, :, at].reshape(*split, -1, 1)
        state *= (faster if own is None else faster * own).exp()
        keys = key[:, :, at].reshape(batch, shared, 1, width, 1)
        new = value[:, :, at].reshape(*split, 1, -1)
        if beta is not None:
            new = (new - (state * keys).sum(-2, keepdim=True)) * beta[:, :, at].reshape(*split, 1, 1)
        state += keys * new
        if queries is not None:
            seen = (state * queries[:, :, at].reshape(batch, shared, 1, width, 1)).sum(-2)
            found.append(seen.reshape(batch, shared * times, -1))
        rest()  # a prompt may take long, and others wait
    if not found:
        return torch.zeros_like(value[:, :, :0]), state
    return torch.stack(found, 2), state
