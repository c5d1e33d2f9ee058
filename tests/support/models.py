"""Small models that the tests train, and dropout in the original module with the graph's masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.models import GPT
from fusion.runtime.planes import dropout
from fusion.runtime.planes.plane import RngKey


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Diamond(nn.Module):
    """a feeds b and c, which meet in d; a also feeds the last node, past all stages between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(self.a(x))
        b = functional.gelu(self.b(a))
        c = torch.sigmoid(self.c(a)) * b
        return functional.relu(self.d(b + c)) + a


def mixtral(vocabulary: int = 32, positions: int = 16) -> nn.Module:
    """A tiny Mixtral: two layers of four experts, two of them for each position."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=positions,
        initializer_range=0.2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return,no-untyped-call]


def gpt2(vocabulary: int = 32, positions: int = 16) -> nn.Module:
    """A tiny GPT-2 with tied embeddings and its usual dropout of 0.1, attention included."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=vocabulary,
        n_positions=positions,
        bos_token_id=0,
        eos_token_id=0,
    )
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return module


def greedy(module: GPT, prompt: bytes, new: int) -> list[int]:
    """The `new` greedy tokens after a prompt of bytes, each computed from the whole sequence before it."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            given = torch.tensor([ids])
            ids.append(int(module(given, torch.arange(len(ids))[None])[0, -1].argmax()))
    return ids[len(prompt) :]


class SameMasks(TorchFunctionMode):
    """The module's own dropout, with the masks that the graph's dropout nodes draw, in order."""

    def __init__(self, graph: Graph, key: RngKey) -> None:
        names = [n.name for n in graph.nodes if n.op.startswith("fusion.dropout")]
        self.masks = dropout.Masks(key, names)
        self.numbers = iter(range(len(names)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.dropout:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            if kwargs.get("training", True) and p:
                return dropout.dropout(args[0], p, self.masks, next(self.numbers))
        if func is functional.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return dropout.dropout_attention(
                *args[:3],
                kwargs.get("attn_mask"),
                kwargs["dropout_p"],
                kwargs.get("is_causal", False),
                kwargs.get("scale"),
                kwargs.get("enable_gqa", False),
                self.masks,
                next(self.numbers),
            )
        return func(*args, **kwargs)
