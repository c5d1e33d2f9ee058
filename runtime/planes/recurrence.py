"""`fusion.recurrence`: a state that decays, and is updated and read at every position (linear attention).

Positions run one by one, with tensors of the same shapes in any batch, so a sequence that is cut into chunks has the bits of a whole
one.
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
    """`fusion.recurrence` of a whole sequence."""
    inputs = (key, value, decay) if beta is None else (key, value, decay, beta)
    return scan(query, inputs, rates, initial_state(inputs))[0]


def initial_state(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The initial state: zeros (batch, key heads, heads per key head, width, width')."""
    key, value = inputs[:2]
    shared = key.shape[1]
    shape = (key.shape[0], shared, value.shape[1] // shared, key.shape[3], value.shape[3])
    return torch.zeros(shape, dtype=torch.float32, device=key.device)


def scan(
    query: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],  # key, value, decay and perhaps beta
    rates: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the positions from `state`. Returns their outputs (batch, heads, length, width'), of length 0 without a query, and the last
    state."""
    batch, shared, heads_per_key_head, width, _ = state.shape
    grouped = (batch, shared, heads_per_key_head)
    key, value, decay, *optional = (tensor.float() for tensor in inputs)
    beta = optional[0] if optional else None
    rate_factors = None if rates is None else rates.float().view(1, shared, heads_per_key_head, width, 1)
    queries = None if query is None else query.float()
    state = state.clone()
    outputs = []
    for position in range(key.shape[2]):
        log_decay = decay[:, :, position].reshape(*grouped, -1, 1)
        state *= (log_decay if rate_factors is None else log_decay * rate_factors).exp()
        keys = key[:, :, position].reshape(batch, shared, 1, width, 1)
        new = value[:, :, position].reshape(*grouped, 1, -1)
        if beta is not None:
            new = (new - (state * keys).sum(-2, keepdim=True)) * beta[:, :, position].reshape(*grouped, 1, 1)
        state += keys * new
        if queries is not None:
            output = (state * queries[:, :, position].reshape(batch, shared, 1, width, 1)).sum(-2)
            outputs.append(output.reshape(batch, shared * heads_per_key_head, -1))
        rest()  # a prompt may take long
    if not outputs:
        return torch.zeros_like(value[:, :, :0]), state
    return torch.stack(outputs, 2), state
