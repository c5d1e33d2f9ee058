"""The modules that torch.export runs: a user's module behind the inputs of its graph, in their order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fusion.runtime.capture.exporting.blocks import BatchSize, SourceLength
from fusion.runtime.capture.exporting.masked_rows import require_no_masked_rows
from fusion.runtime.capture.exporting.one_sample import Calls
from fusion.runtime.capture.exporting.size_masks import begin_run
from fusion.runtime.capture.exporting.tensors import hollow_copy
from fusion.runtime.job.errors import CaptureError

EXPERTS = "batched_mm"  # name of an implementation of experts in transformers

Loss = Callable[..., Any]


def exportable_copy(module: nn.Module) -> nn.Module:
    """A hollow copy of the module, set up for capture if it is of transformers: experts as batched products, without data-dependent control flow
    (`fusion.dag.rewrites.experts` makes one op of them), and no cache."""
    module = hollow_copy(module)
    set_experts = getattr(module, "set_experts_implementation", None)
    if set_experts is not None:
        set_experts(EXPERTS)
    config = getattr(module, "config", None)
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    for each in (config, *parts):
        if each is not None and getattr(each, "use_cache", False) is True:
            each.use_cache = False  # not every forward has a use_cache argument
    return module


class CausalModule(nn.Module):
    """A causal language model called with (input_ids, position_ids[, targets]): its logits or, with targets, their mean cross entropy."""

    def __init__(self, module: nn.Module, training: bool) -> None:
        super().__init__()
        self.module = module
        self.with_loss = training
        names = _parameter_names(module)
        self.keywords = (
            names & {"input_ids", "position_ids", "use_cache"} if "input_ids" in names else frozenset()
        )

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        inputs = dict(zip(("input_ids", "position_ids"), values, strict=False))
        named = {k: inputs[k] for k in self.keywords if k in inputs}
        if not named:
            out = self.module(*inputs.values())
        elif "use_cache" in self.keywords:
            out = self.module(**named, use_cache=False)
        else:
            out = self.module(**named)
        logits: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
        if not self.with_loss:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), values[2].flatten())


class EncoderDecoderModule(nn.Module):
    """An encoder-decoder of transformers called with (source, input_ids, position_ids): its logits."""

    def __init__(self, module: nn.Module, source: str) -> None:
        super().__init__()
        self.module = module
        self.source = source
        self.length = SourceLength()
        self.masked = False  # whether to pass an all-ones mask of the source
        names = _parameter_names(module)
        self.positions = "decoder_position_ids" in names
        self.mask = "decoder_attention_mask" in names
        self.maskable = "attention_mask" in names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        source, ids, positions = values
        self.length.set_from(source.shape[-1])
        arguments = {self.source.replace("source", "input"): source, "decoder_input_ids": ids}
        if self.masked:
            arguments["attention_mask"] = torch.ones_like(source)
        if self.positions:
            arguments["decoder_position_ids"] = positions
        if self.mask:  # as in `generate()`; without a mask and a cache, some models mask the padding token
            arguments["decoder_attention_mask"] = torch.ones_like(ids)
        logits: torch.Tensor = self.module(**arguments, use_cache=False).logits
        return logits


def _parameter_names(module: nn.Module) -> frozenset[str]:
    """The parameters of the module's forward."""
    code = inspect.unwrap(type(module).forward).__code__
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


class AnyModule(nn.Module):
    """A module called with the inputs called `names`, and perhaps a loss of its result: what either returns."""

    def __init__(
        self,
        module: nn.Module,
        names: tuple[str, ...],
        loss: Loss | None,
        module_inputs: tuple[str, ...],
        loss_inputs: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.module = module
        self.names = names
        self.loss = loss
        self.module_inputs, self.loss_inputs = module_inputs, loss_inputs
        self.calls: Calls | None = None  # of the last run, if they are recorded
        self.samples = BatchSize()

    def record_calls(self) -> None:
        self.calls = Calls()

    def forward(self, *values: torch.Tensor) -> Any:
        if self.calls is None:
            return self._run(values)
        self.calls.clear()
        with self.calls:
            return self._run(values)

    def _run(self, values: Sequence[torch.Tensor]) -> Any:
        begin_run()
        self.samples.set_from(values[0].shape[0])
        # torch has a symbol for the batch of each input until they are compared.
        if any(each.shape[0] != values[0].shape[0] for each in values[1:]):
            raise CaptureError("the inputs are of several numbers of samples")
        inputs = dict(zip(self.names, values, strict=True))
        result = self.module(**{name: inputs[name] for name in self.module_inputs})
        return require_no_masked_rows(
            result if self.loss is None else self.loss(result, *(inputs[name] for name in self.loss_inputs))
        )
