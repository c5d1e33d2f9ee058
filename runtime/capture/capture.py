"""A plain `nn.Module` as an operator DAG, through `torch.export`, without its weights ever being copied.

Parameters and buffers are replaced by fake tensors, so capture costs no memory; a tensor constant that the module's
code makes keeps its value and becomes a buffer. What `torch.export` leaves that is not in the op-set is either
decomposed or refused with a CaptureError that names it. `fusion.runtime.capture.lowering` converts the exported program to a Graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from fusion.dag.cutting.source import SOURCE, SOURCE_FEATURES, SOURCE_IDS
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.exported_modules import (
    AnyModule,
    CausalModule,
    EncoderDecoderModule,
    Loss,
    exportable_copy,
)
from fusion.runtime.capture.exporting.export import SizeFixedError
from fusion.runtime.capture.exporting.size_masks import reuse_masks
from fusion.runtime.capture.exporting.size_texts import no_size_texts
from fusion.runtime.capture.exporting.state import require_same_runs
from fusion.runtime.capture.exporting.tensors import (
    hollow_copy,
    names_of_loss,
    tensors_of,
    tensors_of_loss,
    variable_names,
)
from fusion.runtime.capture.exporting.torch_calls import patched_torch
from fusion.runtime.capture.lowering.module_graph import module_graph
from fusion.runtime.capture.rope import fix_frequencies
from fusion.runtime.capture.text_encoder import Embedding, Pooling
from fusion.runtime.job.errors import CaptureError

MAX_BATCH = 1 << 16
MORE = 5  # samples of an example, if two are too few


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
    hollow = exportable_copy(module)
    fix_frequencies(hollow, maximum_sequence)
    wrapped = CausalModule(hollow, training)
    dims = tuple({0: batch, 1: sequence} for _ in example)
    return module_graph(module, wrapped, example, dims, training)


def capture_encoder_decoder(
    module: nn.Module, *, maximum_sequence: int, maximum_source: int, features: int = 0
) -> Graph:
    """The graph of an encoder-decoder: inputs `source_ids` (batch, source) int64, or with `features` instead
    `source_features` (batch, features, maximum_source) float, and `input_ids`, `position_ids` (batch, sequence) int64 of
    the decoder; one output, the logits (batch, sequence, vocabulary). The module is called as transformers' are."""
    least = min(maximum_sequence, maximum_source)
    if least < 11:
        raise CaptureError(f"maximum sequence and maximum source: at least 11, not {least}")
    hollow = exportable_copy(module)
    wrapped = EncoderDecoderModule(hollow, SOURCE_FEATURES if features else SOURCE_IDS)
    batch, sequence = Dim("batch", max=MAX_BATCH), Dim("sequence", max=maximum_sequence)
    text = torch.zeros(2, 8, dtype=torch.int64)
    dims: tuple[dict[int, Any], ...] = ({0: batch, 1: sequence},) * 2
    if features:
        dtype = next((p.dtype for p in hollow.parameters() if p.is_floating_point()), torch.float32)
        source, first = torch.zeros(2, features, maximum_source, dtype=dtype), {0: batch}
    else:
        source, first = torch.zeros(2, 11, dtype=torch.int64), {0: batch, 1: Dim(SOURCE, max=maximum_source)}
    example = {wrapped.source: source, "input_ids": text, "position_ids": text.clone()}
    with wrapped.length.answering_guards():
        try:
            graph = module_graph(module, wrapped, example, (first, *dims), training=False)
        except CaptureError:
            if features or not wrapped.maskable:
                raise
            # Some models make an all-ones mask if they get none, but not during an export.
            wrapped.masked = True
            graph = module_graph(module, wrapped, example, (first, *dims), training=False)
    return replace(graph, symbols=("batch", "sequence", SOURCE, *graph.symbols[2:]))


def capture_text_encoder(module: nn.Module, pooling: Pooling, *, maximum_sequence: int) -> Graph:
    """The graph of an embedding model: input `input_ids` (batch, sequence) int64, texts of one length; one output, (batch, hidden). The module
    is called as transformers' are."""
    if maximum_sequence < 8:
        raise CaptureError(f"maximum sequence: at least 8, not {maximum_sequence}")
    hollow = exportable_copy(module)
    fix_frequencies(hollow, maximum_sequence)
    dims = {0: Dim("batch", max=MAX_BATCH), 1: Dim("sequence", max=maximum_sequence)}
    example = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    graph = clean(module_graph(module, Embedding(hollow, pooling), example, (dims,), training=False))
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

    def hollow() -> AnyModule:
        hollow_loss = hollow_copy(loss) if isinstance(loss, nn.Module) else loss
        return AnyModule(
            hollow_copy(module), tuple(example), hollow_loss, tuple(module_arguments), tuple(loss_arguments)
        )

    loss_names = names_of_loss(module, loss)
    dims = tuple({0: batch} for _ in example)
    exported, eager = hollow(), hollow().train(mode)
    exported.record_calls()
    with reuse_masks():
        with no_size_texts():
            try:
                with exported.samples.answering_model(exported):
                    graph = module_graph(module, exported, example, dims, mode, loss_names, keeps=mode)
            except SizeFixedError as error:
                # One less than two samples is a single one, which torch treats otherwise.
                larger = {name: value[torch.arange(MORE) % value.shape[0]] for name, value in example.items()}
                exported = hollow()
                exported.record_calls()
                try:
                    with exported.samples.answering_model(exported):
                        graph = module_graph(module, exported, larger, dims, mode, loss_names, keeps=mode)
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
