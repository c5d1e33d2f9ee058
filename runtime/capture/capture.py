"""A plain `nn.Module` as an operator DAG, through `torch.export`, without its weights ever being copied.

Parameters and buffers are replaced by fake tensors, so capture costs no memory; a tensor constant that the module's
code makes keeps its value and becomes a buffer. What `torch.export` leaves that is not in the op-set is either
decomposed or refused with a CaptureError that names it. `fusion.runtime.capture.lowering.lower` converts the exported graph to a Graph.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from fusion.dag.cutting.source import SOURCE, SOURCE_FEATURES, SOURCE_IDS
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.exporting.export import SizeFixedError, export
from fusion.runtime.capture.exporting.model_code import line_of_node
from fusion.runtime.capture.exporting.state import Calls, require_same_runs
from fusion.runtime.capture.exporting.tensors import (
    hollow_copy,
    names_of_loss,
    tensors_of,
    tensors_of_loss,
    tied_by_memory,
    unsaved_tensors,
    variable_names,
)
from fusion.runtime.capture.exporting.torch_calls import (
    SourceLength,
    begin_run,
    no_size_texts,
    patched_torch,
    require_no_masked_rows,
    require_plain_gradients,
    reuse_masks,
)
from fusion.runtime.capture.lowering.aten_names import (
    op_name,
    untracked_write,
    uses_vmap,
    writes_in_place,
)
from fusion.runtime.capture.lowering.decompose import decomposed, run_decompositions
from fusion.runtime.capture.lowering.lower import lower
from fusion.runtime.capture.lowering.triangles import is_count, triangle_window
from fusion.runtime.capture.rope import fix_frequencies
from fusion.runtime.capture.text_encoder import Embedding, Pooling
from fusion.runtime.job.errors import CaptureError

logger = logging.getLogger(__name__)

MAX_BATCH = 1 << 16
EXPERTS = "batched_mm"  # name of an implementation of experts in transformers
MORE = 5  # samples of an example, if two are too few
MAX_CONSTANT = 64  # elements of a constant that the code makes, which becomes nodes

Loss = Callable[..., Any]


def capture_language_model(module: nn.Module, *, training: bool, maximum_sequence: int) -> Graph:
    """The graph of a causal language model: inputs `input_ids`, `position_ids` (batch, sequence) int64.

    Serving: one output, the logits (batch, sequence, vocabulary). Training: also an input `targets`, int64 of the
    same shape, and one output, the mean cross entropy of the logits in float32. The module is called with
    (input_ids, position_ids), by keyword where it names them so, and may return logits or an object that has them.
    """
    example = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    if training:
        example["targets"] = torch.zeros(2, 8, dtype=torch.int64)
    if maximum_sequence < 8:
        raise CaptureError(f"maximum sequence: at least 8, not {maximum_sequence}")
    batch, sequence = Dim("batch", max=MAX_BATCH), Dim("sequence", max=maximum_sequence)
    hollow = _exportable(hollow_copy(module))
    fix_frequencies(hollow, maximum_sequence)
    wrapped = _LanguageModel(hollow, training)
    dims = tuple({0: batch, 1: sequence} for _ in example)
    return _capture(module, wrapped, example, dims, training)


def capture_encoder_decoder(
    module: nn.Module, *, maximum_sequence: int, maximum_source: int, features: int = 0
) -> Graph:
    """The graph of an encoder-decoder: inputs `source_ids` (batch, source) int64, or with `features` instead
    `source_features` (batch, features, maximum_source) float, and `input_ids`, `position_ids` (batch, sequence) int64 of
    the decoder; one output, the logits (batch, sequence, vocabulary). The module is called as transformers' are."""
    least = min(maximum_sequence, maximum_source)
    if least < 11:
        raise CaptureError(f"maximum sequence and maximum source: at least 11, not {least}")
    hollow = _exportable(hollow_copy(module))
    length = SourceLength()
    wrapped = _EncoderDecoder(hollow, SOURCE_FEATURES if features else SOURCE_IDS, length)
    batch, sequence = Dim("batch", max=MAX_BATCH), Dim("sequence", max=maximum_sequence)
    text = torch.zeros(2, 8, dtype=torch.int64)
    dims: tuple[dict[int, Any], ...] = ({0: batch, 1: sequence},) * 2
    if features:
        dtype = next((p.dtype for p in hollow.parameters() if p.is_floating_point()), torch.float32)
        source, first = torch.zeros(2, features, maximum_source, dtype=dtype), {0: batch}
    else:
        source, first = torch.zeros(2, 11, dtype=torch.int64), {0: batch, 1: Dim(SOURCE, max=maximum_source)}
    example = {wrapped.source: source, "input_ids": text, "position_ids": text.clone()}
    with length.answering_guards():
        try:
            graph = _capture(module, wrapped, example, (first, *dims), training=False)
        except CaptureError:
            if features or not wrapped.maskable:
                raise
            # Some models make an all-ones mask if they get none, but not during an export.
            wrapped.masked = True
            graph = _capture(module, wrapped, example, (first, *dims), training=False)
    return replace(graph, symbols=("batch", "sequence", SOURCE, *graph.symbols[2:]))


def capture_text_encoder(module: nn.Module, pooling: Pooling, *, maximum_sequence: int) -> Graph:
    """The graph of an embedding model: input `input_ids` (batch, sequence) int64, texts of one length; one output, (batch, hidden). The module
    is called as transformers' are."""
    if maximum_sequence < 8:
        raise CaptureError(f"maximum sequence: at least 8, not {maximum_sequence}")
    hollow = _exportable(hollow_copy(module))
    fix_frequencies(hollow, maximum_sequence)
    dims = {0: Dim("batch", max=MAX_BATCH), 1: Dim("sequence", max=maximum_sequence)}
    example = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    graph = clean(_capture(module, Embedding(hollow, pooling), example, (dims,), training=False))
    read = {ref.name for node in graph.nodes for ref in node.refs()}
    # Without parameters of an unused head, which files of an embedding model lack.
    return replace(graph, variables=tuple(each for each in graph.variables if each.name in read))


def capture_module(
    module: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    loss: Loss | None = None,
    *,
    training: bool | None = None,
    module_inputs: Sequence[str] | None = None,
    loss_inputs: Sequence[str] = ("targets",),
) -> Graph:
    """The graph of any module, called with keyword arguments named as in `example_inputs`; the first dimension of each is the batch (at
    least 2 in the example). With a `loss`, that is called with the module's result and the inputs `loss_inputs`, and its scalar is the only
    output; without, the module's tensors are. `module_inputs`: the inputs of the module (default: all that are not the loss's). `training`: the
    mode of dropout and batch normalisation (default: whether there is a loss)."""
    loss_arguments = loss_inputs if loss is not None else ()
    for name in loss_arguments:
        if name not in example_inputs:
            raise CaptureError(f'a loss needs an example input "{name}"')
    for name, value in example_inputs.items():
        if value.dim() == 0 or value.shape[0] < 2:
            raise CaptureError(f"example input {name}: its first dimension is the batch, at least 2")
    example = {name: value.detach().to("cpu", copy=True) for name, value in example_inputs.items()}
    mode = loss is not None if training is None else training
    batch = Dim("batch", max=MAX_BATCH)
    module_arguments = (
        [name for name in example if name not in loss_arguments] if module_inputs is None else module_inputs
    )

    def hollow() -> _AnyModule:
        hollow_loss = hollow_copy(loss) if isinstance(loss, nn.Module) else loss
        return _AnyModule(
            hollow_copy(module), tuple(example), hollow_loss, tuple(module_arguments), tuple(loss_arguments)
        )

    loss_names = names_of_loss(module, loss)
    dims = tuple({0: batch} for _ in example)
    exported, eager = hollow(), hollow().train(mode)
    exported.calls = Calls()
    with reuse_masks():
        with no_size_texts():
            try:
                graph = _capture(module, exported, example, dims, mode, loss_names, keeps=mode)
            except SizeFixedError as error:
                # One less than two samples is a single one, which torch treats otherwise.
                larger = {name: value[torch.arange(MORE) % value.shape[0]] for name, value in example.items()}
                exported = hollow()
                exported.calls = Calls()
                try:
                    graph = _capture(module, exported, larger, dims, mode, loss_names, keeps=mode)
                except CaptureError:
                    raise error from None
        with warnings.catch_warnings(), patched_torch(eager):
            warnings.simplefilter("ignore")
            require_same_runs(eager, tuple(example.values()), exported.calls)
    return graph if mode else _by_batches(graph)


def _by_batches(graph: Graph) -> Graph:
    """The graph of an evaluated model with batch normalisations in training mode by the statistics of the batch: without the running ones, which
    a plane would use in evaluation."""
    nodes = (
        replace(node, args=(*node.args[:3], None, None, *node.args[5:]))
        if node.op == "aten.batch_norm" and node.args[5]
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def variables_from_module(module: nn.Module, loss: Loss | None = None) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and tensor attribute under its captured name, tied tensors once, and those of a `loss` that is a module; not copied.
    A superset of what a captured graph reads."""
    names = variable_names(module)
    variables: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(module):
        variables.setdefault(names[name], tensor.detach())
    loss_names = names_of_loss(module, loss)
    return {**variables, **{loss_names[name]: tensor.detach() for name, tensor in tensors_of_loss(loss)}}


class _LanguageModel(nn.Module):
    def __init__(self, module: nn.Module, training: bool) -> None:
        super().__init__()
        self.module = module
        self.with_loss = training
        self.keywords = _language_model_keywords(module)

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


class _EncoderDecoder(nn.Module):
    def __init__(self, module: nn.Module, source: str, length: SourceLength) -> None:
        super().__init__()
        self.module = module
        self.source = source
        self.length = length
        self.masked = False  # whether to pass an all-ones mask of the source
        code = inspect.unwrap(type(module).forward).__code__
        parameter_names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.positions = "decoder_position_ids" in parameter_names
        self.mask = "decoder_attention_mask" in parameter_names
        self.maskable = "attention_mask" in parameter_names

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


def _language_model_keywords(module: nn.Module) -> frozenset[str]:
    code = inspect.unwrap(type(module).forward).__code__
    parameter_names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if "input_ids" not in parameter_names:
        return frozenset()
    return frozenset(parameter_names) & {"input_ids", "position_ids", "use_cache"}


class _AnyModule(nn.Module):
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

    def forward(self, *values: torch.Tensor) -> Any:
        if self.calls is None:
            return self._run(values)
        self.calls.clear()
        with self.calls:
            return self._run(values)

    def _run(self, values: Sequence[torch.Tensor]) -> Any:
        begin_run()
        # torch has a symbol for the batch of each input until they are compared.
        if any(each.shape[0] != values[0].shape[0] for each in values[1:]):
            raise CaptureError("the inputs are of several numbers of samples")
        inputs = dict(zip(self.names, values, strict=True))
        result = self.module(**{name: inputs[name] for name in self.module_inputs})
        return require_no_masked_rows(
            result if self.loss is None else self.loss(result, *(inputs[name] for name in self.loss_inputs))
        )


def _exportable(module: nn.Module) -> nn.Module:
    """Set up a copy of a module of transformers for capture: experts as batched products, without data-dependent control flow
    (`fusion.dag.rewrites.experts` makes one op of them), and no cache."""
    set_experts = getattr(module, "set_experts_implementation", None)
    if set_experts is not None:
        set_experts(EXPERTS)
    config = getattr(module, "config", None)
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    for each in (config, *parts):
        if each is not None and getattr(each, "use_cache", False) is True:
            each.use_cache = False  # not every forward has a use_cache argument
    return module


def _tables(module: nn.Module) -> dict[str, torch.Tensor]:
    """The causal masks and position counts among tensors that no file can override, by export name."""
    return {
        f"module.{name}": tensor
        for name, tensor in unsaved_tensors(module)
        if triangle_window(tensor) is not None or is_count(tensor)
    }


def _capture(
    module: nn.Module,
    wrapped: nn.Module,
    example: Mapping[str, torch.Tensor],
    dims: tuple[dict[int, Any], ...],
    training: bool,
    loss_names: Mapping[str, str] = MappingProxyType({}),
    keeps: bool = False,
) -> Graph:
    names = {f"module.{original}": name for original, name in variable_names(module).items()}
    names |= {f"loss.{original}": name for original, name in loss_names.items()}
    if training:
        require_plain_gradients(module)
    wrapped.train(training)
    tables = _tables(module)
    exported = export(wrapped, tuple(example.values()), dims)
    if uses_vmap(exported):
        exported = run_decompositions(exported, {})
    if training and (write := untracked_write(exported)) is not None:
        circumstance = "to what is detached" if write.graph is exported.graph else "under torch.no_grad"
        raise CaptureError(
            f"the model writes {circumstance}, with {op_name(write.target)}, to a value that has a gradient"
            f"{line_of_node(write)}: write to a copy of it"
        )
    try:
        graph = _lowered(exported, tuple(example), dims, names, tables, keeps)
    except CaptureError:
        if not writes_in_place(exported):
            raise
        # Only as a last resort: it also decomposes operators that training needs whole (dropout, batch normalisation), and changes views.
        graph = _lowered(run_decompositions(exported, {}), tuple(example), dims, names, tables, keeps)
    if training and (tied := tied_by_memory(module, graph.variable_names)) is not None:
        raise CaptureError(
            f"{tied[0]} and {tied[1]} are two tensors in the same memory, which are trained as one only if they are one: "
            f"make them the same nn.Parameter, or copy one"
        )
    return graph


def _lowered(
    exported: ExportedProgram,
    inputs: tuple[str, ...],
    dims: tuple[dict[int, Any], ...],
    names: Mapping[str, str],
    tables: Mapping[str, torch.Tensor],
    keeps: bool,
) -> Graph:
    exported = decomposed(exported)
    symbols = {
        str(node.meta["val"].shape[at].node.expr): dim.__name__
        for node, where in zip(_user_inputs(exported), dims, strict=True)
        for at, dim in where.items()
        if isinstance(node.meta["val"].shape[at], torch.SymInt)
    }
    for node, where in zip(_user_inputs(exported), dims, strict=True):
        for at, dim in where.items():
            if not isinstance(node.meta["val"].shape[at], torch.SymInt):
                raise CaptureError(f"the model does not leave the size of {dim.__name__} free")
    constants = dict(tables)
    for name, value in exported.constants.items():
        if name in names:
            continue
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            raise CaptureError(f"the model's code makes a constant ({name}) that is not a plain tensor")
        if value.numel() > MAX_CONSTANT:
            raise CaptureError(
                f"the model's code makes a constant of {value.numel()} elements: register it as a buffer of the model, or of a loss that is a module"
            )
        constants[name] = value
    return lower(exported, inputs, names, constants, symbols, keeps)


def _user_inputs(exported: ExportedProgram) -> list[torch.fx.Node]:
    names = set(exported.graph_signature.user_inputs)
    return [n for n in exported.graph.nodes if n.op == "placeholder" and n.name in names]
